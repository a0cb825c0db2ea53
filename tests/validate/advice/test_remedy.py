"""The remedy of a loss: its effect by sums that can be added by hand, and a command that is there and works."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.calibrate.measure.statistics import Corpus, TextSource, load_record
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import tails_of
from fp8q.quantize.sensitivity.document import KlAfter, Loss, Sensitivity
from fp8q.validate.advice import remedy as remedy_module
from fp8q.validate.advice.remedy import LossSums, command_for, evaluation_text, remedy_of, texts_of


def of(*losses: tuple[str, float, dict[str, float]]) -> Sensitivity:
    return Sensitivity(
        windows=1,
        tokens=8,
        modules=[
            Loss(module="a", kind=kind, kl_nats=kl, measured=False, kl_after=KlAfter(**after))  # type: ignore[arg-type]
            for kind, kl, after in losses
        ],
    )


WEIGHTS, INPUTS = ("weight", 0.0112, {"gptq": 0.0028}), ("activation", 0.0176, {"two_terms": 0.00001})


def test_losses_are_added_by_kind() -> None:
    sums = LossSums.of(of(WEIGHTS, INPUTS, INPUTS, ("kv_cache", 0.001, {})))
    assert str(sums) == (
        "KL in nats a token, each tensor alone, summed: weights 0.0112, inputs 0.0352, the cache 0.001; together "
        "about 0.0474."
    )
    assert sums.inputs_in_two == pytest.approx(0.00002)


def test_the_remedy_says_effect_time_and_need_and_begins_with_the_run_s_own_command(
    calibrated_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedy_module, "_minutes", lambda run: 2)
    remedy = remedy_of(calibrated_run, of(WEIGHTS, INPUTS))
    assert remedy is not None
    assert remedy.why == (
        "inputs 0.0176 -> 1e-05 in two codes, weights 0.0112 -> 0.0028 by GPTQ, about 2 minutes; needs the plugin "
        "fp8q-vllm in vLLM"
    )
    # it was measured without second moments
    assert remedy.command.startswith("fp8q calibrate ")
    assert remedy.command.split(" --samples ")[1].split()[-4:] == ["--form", "tail:64", "--weight-rounding", "gptq"]
    inputs = remedy_of(calibrated_run, of(INPUTS))
    assert inputs is not None
    assert inputs.command == f"fp8q scales {calibrated_run.root} --form tail:64"


def test_a_run_without_a_graph_is_advised_the_form_that_a_stock_server_computes(
    calibrated_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "without_graph", lambda run: "--no-graph")
    monkeypatch.setattr(remedy_module, "_minutes", lambda run: 2)
    remedy = remedy_of(calibrated_run, of(INPUTS))
    assert remedy is not None
    assert (remedy.why, remedy.command) == (
        "inputs 0.0176 -> 0 in BF16, about 1 minute", f"fp8q scales {calibrated_run.root} --form bf16"
    )  # fmt: skip
    monkeypatch.setattr(remedy_module, "in_two_codes", lambda forms: ["q"])
    second = remedy_of(calibrated_run, of(INPUTS))
    assert second is not None
    assert second.why == "inputs 0.0176 -> 1e-05 in two codes, about 1 minute; needs the plugin fp8q-vllm in vLLM"


def test_a_change_that_gains_little_is_not_advised(calibrated_run: Run) -> None:
    exact = ("activation", 0.0002, {"two_terms": 0.0})
    assert remedy_of(calibrated_run, of(("weight", 0.01, {}), exact)) is None


def test_what_is_advised_can_be_done(demo_run: Run, tmp_path: Path, fp8q: Any, without_graphs: Any) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "again")))
    remedy = remedy_of(run, of(WEIGHTS, INPUTS))
    assert remedy is not None
    assert remedy.command == f"fp8q scales {run.root} --form tail:64 --weight-rounding gptq"
    with without_graphs():
        fp8q(*remedy.command.split()[1:])
    scales = load_scales(run)
    assert tails_of(scales.forms)
    assert {weight.rounding for weight in scales.weights.values()} == {"gptq"}


def test_gptq_without_second_moments_is_refused_by_its_reason(calibrated_run: Run) -> None:
    said = (
        f"--weight-rounding gptq: needs the second moments of inputs, which {calibrated_run.root} has not, since it "
        "was measured without them; use `fp8q calibrate` with the options of the run and --weight-rounding gptq"
    )
    with pytest.raises(InputError) as error:
        api.scales(calibrated_run.root, api.RescaleOptions(weight_rounding="gptq"))
    assert str(error.value) == said


def corpus(*texts: tuple[str, float, int], name: str = "a display name") -> Corpus:
    """One that was cut from `texts`: name, weight, windows."""
    sources = [
        TextSource(name=text, weight=weight, windows=windows, tokens=8 * windows, fingerprint="f", chat=False)
        for text, weight, windows in texts
    ]
    windows = sum(source.windows for source in sources)
    return Corpus(name=name, fingerprint=name, windows=windows, seq_len=8, batch_size=1, sources=sources)


def test_the_texts_of_a_mixture_are_those_that_were_given_with_their_weights() -> None:
    """None is taken out of a name that is shown, which joins names with words that a name may have too."""
    assert texts_of(corpus(("salt and pepper.txt", 1.0, 4))) == ["salt and pepper.txt"]
    mixture = corpus(("a + b.txt", 2.0, 4), ("c.txt", 0.5, 1), ("owner/name:config", 1.0, 2))
    assert texts_of(mixture) == ["a + b.txt=2", "c.txt=0.5", "owner/name:config"]
    assert texts_of(corpus(("ratio=2", 1.0, 4), ("x", 1e-7, 4))) == ["ratio=2=1", "x=0.0000001"]


def test_the_texts_of_a_merged_corpus_weigh_their_windows() -> None:
    merged = corpus(("a.txt", 3.0, 3), ("b.txt", 1.0, 1), name="1").merge(corpus(("b.txt", 1.0, 4), name="2"))
    assert merged.name == "1 + 2"
    assert sorted(texts_of(merged)) == ["a.txt=3", "b.txt=5"]
    old = Corpus(name="t.txt", fingerprint="f", windows=4, seq_len=8, batch_size=1)
    assert texts_of(old) == ["t.txt"]


def test_the_evaluation_text_is_none_where_its_end_was_held_out(tmp_path: Path) -> None:
    two = corpus(("a", 1.0, 1), ("b", 1.0, 1))
    assert evaluation_text(two, {"data": "a and b", "eval_data": "a and b"}) is None
    assert evaluation_text(two, {"data": "a and b", "eval_data": "owner/name:test"}) == "owner/name:test"
    merged = two.merge(corpus(("c", 1.0, 1), name="2"))
    assert evaluation_text(merged, {"data": "a and b + c", "eval_data": "c + a and b"}) is None
    (tmp_path / "held.txt").touch()
    held = str(tmp_path / "held.txt")
    assert evaluation_text(merged, {"data": "a and b + c", "eval_data": held}) == held


@pytest.mark.slow
def test_the_command_measures_the_same_texts_with_the_options_of_the_run(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, fp8q: Any
) -> None:
    texts = []
    for number, text in enumerate((demo_texts.calibration, demo_texts.evaluation)):
        texts.append(tmp_path / f"text {number} and more.txt")
        texts[-1].write_text(text.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    settings: dict[str, Any] = {
        "samples": 6,
        "seq_len": 48,
        "batch_size": 2,
        "graph": False,
        "bos": "never",
        "progress": SILENT,
    }
    scales: dict[str, Any] = {
        "method": "percentile",
        "percentile": 99.9,
        "skip": ("*.down_proj", "*layers.0*"),
        "kv_cache": "v",
    }
    run = api.calibrate(demo_checkpoint, [f"{texts[0]}=2", str(texts[1])], tmp_path / "a run", **settings, **scales)
    command = command_for(run, ["--form", "tail:16", "--weight-rounding", "gptq"])
    assert command == (
        f"fp8q calibrate {demo_checkpoint} --tokenizer auto --data '{texts[0]}=2' --data '{texts[1]}' --bos never "
        f"--out '{run.root}' "
        "--samples 6 --seq-len 48 --batch-size 2 --method percentile --percentile 99.9 --kv-cache v "
        "--skip '*.down_proj' --skip '*layers.0*' --form tail:16 --weight-rounding gptq --no-graph"
    )
    before, windows = load_record(run).corpus, run.calibration.read_bytes()
    assert fp8q(*shlex.split(command)[1:]).code == 0
    assert (load_record(run).corpus, run.calibration.read_bytes()) == (before, windows)
    chosen = load_scales(run)
    assert {weight.rounding for weight in chosen.weights.values()} == {"gptq"}
    assert {scale.method for scale in chosen.activations.values()} == {"percentile"}
    assert not any(name.endswith("down_proj") for name in chosen.weights)
    assert chosen.cache_parts == "v"
