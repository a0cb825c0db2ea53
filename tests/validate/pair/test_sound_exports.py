"""What fp8q, llm-compressor, ModelOpt and transformers write beside the weights is no difference to what is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.calibrate.model.architecture import load_config, read_config
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import ConvertOptions, PairOptions
from fp8q.stages.compare_pair import differences_beside, evaluation_of, unseen
from fp8q.validate.pair.document import Cause
from fp8q.validate.pair.served_fields import ConfigFile
from tests.quantize.reading.fp8_checkpoints import compressed, fine_grained
from tests.validate.pair import damaged
from tests.validate.pair.damaged import edit_json, quantized


def read(path: Path) -> ConfigFile:
    """Read the configuration of a checkpoint."""
    raw = read_config(path, str(path))
    return ConfigFile("config.json", raw, load_config(path, str(path), raw)[0])


def causes(original: Path, candidate: Path, text: Path) -> list[Cause]:
    """Compare the files beside the weights."""
    files = read(original), read(candidate)
    options = PairOptions(data=str(text), out=candidate / "out", context=64, max_tokens=800)
    evaluation = evaluation_of(original, files[0].text, options, SILENT)
    return differences_beside((original, candidate), files, evaluation)


def saved_by_transformers(original: Path, out: Path) -> None:
    """Write the model, and the tokenizer with another side and token for padding, as ModelOpt's example does."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(original, dtype="auto").save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(original)
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    tokenizer([["a", "b"]], is_split_into_words=True, padding=True)
    tokenizer.save_pretrained(out)


@pytest.mark.parametrize(
    "make",
    [
        quantized,
        lambda original, out: quantized(original, out, cache=True),
        lambda original, out: quantized(original, out, damaged.as_modelopt),
        compressed,
        fine_grained,
        saved_by_transformers,
        *(
            lambda original, out, form=form: api.convert(str(original), out, ConvertOptions(form=form), SILENT)
            for form in ("block", "dynamic")
        ),
    ],
)
def test_an_export_of_others_has_no_cause(
    make: Callable[[Path, Path], object], demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    make(demo_checkpoint, tmp_path / "candidate")
    assert causes(demo_checkpoint, tmp_path / "candidate", demo_texts.evaluation) == []


def test_an_export_of_fp8q_has_no_cause(demo_run: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path) -> None:
    options = PairOptions(
        data=str(demo_texts.evaluation), out=tmp_path / "out", context=64, max_tokens=700, max_ppl_increase=0.05
    )
    comparison = api.compare_checkpoints(demo_checkpoint, demo_run.model, options, SILENT)
    assert [cause for cause in comparison.causes if cause.severity == "error"] == []
    assert comparison.passes


def test_a_candidate_that_is_served_otherwise_is_different(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, fp8q: Callable[..., Any]
) -> None:
    candidate = quantized(demo_checkpoint, tmp_path / "candidate")
    edit_json(candidate / "config.json", lambda fields: fields.update(sliding_window=128))
    words = ("--data", demo_texts.evaluation, "--context", "64", "--max-tokens", "700", "--max-ppl-increase", "5%")
    done = fp8q("compare", demo_checkpoint, "--model", candidate, *words, "--out", tmp_path / "out")
    assert done.code == 3
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    verdict = stored["verdict"]
    assert verdict["kind"] == "different"
    assert verdict["sentence"].startswith("Different: these windows are within the limits (")
    assert verdict["sentence"].endswith("), and what is served is not the same")
    assert [cause["subject"] for cause in stored["causes"]] == ["config.json: sliding_window"]
    assert "Acceptable" not in done.out


def test_too_few_windows_are_refused_before_a_model_is_loaded(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8q.stages.compare_pair._compared", None)
    candidate = Path(shutil.copytree(demo_checkpoint, tmp_path / "candidate"))

    def refused(data: Path, context: int, max_tokens: int | None = None) -> str:
        options = PairOptions(data=str(data), out=tmp_path / "out", context=context, max_tokens=max_tokens)
        with pytest.raises(InputError) as error:
            api.compare_checkpoints(demo_checkpoint, candidate, options, SILENT)
        return str(error.value)

    assert refused(demo_texts.evaluation, context=64, max_tokens=200) == (
        "--max-tokens 200: leaves 3 windows of 64 tokens, and a verdict needs 10; give --max-tokens 640, or a smaller "
        "--context"
    )
    (short := tmp_path / "short.txt").write_text("Once upon a time there was a girl. " * 10, encoding="utf-8")
    assert refused(short, context=64).startswith(
        f"--data {short}: has 2 windows of 64 tokens, and a verdict needs 10; "
    )
    assert not (tmp_path / "out").exists()


def test_a_window_has_512_tokens_unless_another_context_is_asked_for(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    original = Path(shutil.copytree(demo_checkpoint, tmp_path / "original"))
    edit_json(original / "config.json", lambda fields: fields.update(max_position_embeddings=4096))
    options = PairOptions(data=str(demo_texts.evaluation), out=tmp_path / "out")
    assert evaluation_of(original, read(original).text, options, SILENT).protocol.context == 512


def test_positions_behind_the_windows_are_counted() -> None:
    assert unseen(128, 512) == [
        (
            "positions from 128 on were not run, of the model's 512: there only configurations and embeddings are "
            "compared (--context 512 runs all)"
        )
    ]
    assert unseen(512, 512) == []
    assert unseen(512, None) == []
