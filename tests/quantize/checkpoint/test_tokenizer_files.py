"""The tokenizer that was calibrated with is the one beside the weights, and the one that a run opens again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from fp8q.calibrate.model.source import Source
from fp8q.calibrate.model.tokenizer import auto_of
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.quantize.checkpoint.tokenizer_files import _end_as
from fp8q.stages.corpus import load_tokens
from fp8q.stages.pipeline.stages import CORPUS, QUANTIZE
from fp8q.stages.shared.sources import source_of
from tests.two_tokenizers import numbers, two_tokenizers

Calibrated = Callable[[Run, Source, Path, CalibrateOptions], None]


def test_another_choice_of_tokenizer_is_another_text_and_another_checkpoint(
    tmp_path: Path, calibrated: Calibrated
) -> None:
    source, run, text = (
        two_tokenizers(tmp_path / "model", "Qwen2Config", "Qwen2Tokenizer"),
        Run(tmp_path / "run"),
        tmp_path / "text.txt",
    )
    text.write_text("\n".join(numbers()))
    digits = {}
    for choice in ("file", "auto"):
        calibrated(run, replace(source, tokenizer=choice), text, CalibrateOptions(samples=4, seq_len=32))
        assert run.facts(CORPUS).tokenizer == run.facts(QUANTIZE).tokenizer == source_of(run).tokenizer == choice
        plain = Tokenizer.from_file(str(run.model / "tokenizer.json"))
        windows = load_tokens(run, run.calibration).tolist()
        texts = [plain.decode(window) for window in windows]
        # cut windows may begin within what a tokenizer takes together
        assert [plain.encode(each).ids[-8:] for each in texts] == [window[-8:] for window in windows]
        digits[choice] = plain.encode("1969 twelve").tokens[:2]
    assert digits == {"file": ["196", "9"], "auto": ["1", "9"]}
    assert (
        auto_of(run.model)("1969")["input_ids"]
        == Tokenizer.from_file(str(run.model / "tokenizer.json")).encode("1969").ids
    )


def test_an_end_beside_a_configuration_that_leaves_the_text_out(tmp_path: Path) -> None:
    config = {"eos_token_id": 1, "text_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _end_as(tmp_path, 7)
    assert json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8")) == {"eos_token_id": [1, 7]}
