"""`--bf16-weights` through the stages: which weights stay in BF16, and what keeps or changes the choice."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fp8q import api
from fp8q.calibrate.checkpoint.weights import Weights
from fp8q.calibrate.measure.moments import SecondMoments
from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError
from fp8q.core.record import StageRecord
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import CalibrateOptions
from fp8q.quantize.scales.costliest import Costliest, load_costliest
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.sensitivity import backward
from fp8q.quantize.weights import code_sources
from fp8q.quantize.weights.channels import quantize_scaled
from fp8q.stages import costliest as stage
from fp8q.stages import measure, sensitivity
from fp8q.stages.costliest import check_costliest

SHARE = 0.1
SMALL: dict[str, Any] = {"samples": 12, "seq_len": 64, "batch_size": 4}
REASON = "its loss in FP8 is among the largest a byte (--bf16-weights 10%)"


def calibrated(checkpoint: Path, texts: Any, folder: Path, **options: Any) -> Run:
    asked = CalibrateOptions(**SMALL, bf16_weights=SHARE, **options)
    no_graph = api.ExportOptions(graph=False)
    return api.calibrate(
        str(checkpoint), str(texts.calibration), folder / "run", str(texts.evaluation), asked, no_graph
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Any) -> Run:
    return calibrated(demo_checkpoint, demo_texts, tmp_path_factory.mktemp("costliest"), weight_rounding="gptq")


@pytest.fixture
def run(made: Run, tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(made.root, tmp_path / "run")))


def codes_of(run: Run) -> dict[str, torch.Tensor]:
    stored = Weights(tuple(run.model.glob("*.safetensors")))
    return {module: stored.tensor(f"{module}.weight").view(torch.uint8) for module in load_scales(run).weights}


def in_bf16(run: Run) -> set[str]:
    return {module for module, decision in load_scales(run).skipped.items() if decision.reason == REASON}


def check_choice(made: Run, rounding: str, every: Run) -> None:
    """`fp8q sensitivity` of a run with `every` weight rounded so predicts what each loses."""
    losses = {
        loss.module: loss.kl_nats
        for loss in api.sensitivity(every.root, windows=8, measure=0).modules
        if loss.kind == "weight"
    }
    costliest = load_costliest(made)
    assert in_bf16(made) == set(costliest.modules)
    assert costliest.weights
    assert {scales.rounding for scales in load_scales(made).weights.values()} == {rounding}
    assert costliest.kl_nats == pytest.approx(sum(losses.values()), rel=1e-5)
    for weights in costliest.weights:
        assert weights.kl_nats == pytest.approx(sum(losses[module] for module in weights.modules), rel=1e-5)
    assert sum(weights.bytes_share for weights in costliest.weights) <= SHARE
    stored = [name for name in losses if name not in costliest.modules]
    attention = {name.rpartition(".")[0] for name in stored if name.endswith((".q_proj", ".k_proj", ".v_proj"))}
    assert not any(f"{name}.{part}_proj" in costliest.modules for name in attention for part in "qkv")  # joined


def test_the_weights_whose_codes_by_gptq_lose_most_a_byte_stay_in_bf16(made: Run, tmp_path: Path) -> None:
    every = Run(Path(shutil.copytree(made.root, tmp_path / "every")))
    api.scales(every.root, bf16_weights=0)
    check_choice(made, "gptq", every)
    kept = codes_of(made)
    assert kept.keys() < (others := codes_of(every)).keys()
    assert all(torch.equal(codes, others[module]) for module, codes in kept.items())


@pytest.mark.slow
def test_where_weights_are_rounded_to_nearest_their_nearest_codes_decide(run: Run, tmp_path: Path) -> None:
    by_gptq = load_costliest(run)
    api.scales(run.root, weight_rounding="nearest")
    assert load_costliest(run).kl_nats > 1.2 * by_gptq.kl_nats
    every = Run(Path(shutil.copytree(run.root, tmp_path / "every")))
    api.scales(every.root, bf16_weights=0)
    check_choice(run, "nearest", every)


@pytest.mark.slow
def test_codes_that_decide_are_rounded_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = Counter[tuple[int, ...]]()

    def counted(rows: torch.Tensor, *arguments: Any) -> Any:
        rounded[tuple(rows.shape)] += 1
        return quantize_scaled(rows, *arguments)

    monkeypatch.setattr(code_sources, "quantize_scaled", counted)
    api.scales(run.root, weigh_first_token=True)
    assert sum(rounded.values()) == len(load_scales(run).weights) + len(load_costliest(run).modules)
    assert not list(run.root.glob(".*.work"))


@pytest.mark.slow
def test_the_choice_outlives_what_codes_do_not_depend_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run.costliest.read_bytes()
    monkeypatch.setattr(stage, "predicted_losses", lambda *_: pytest.fail("losses are known"))
    api.scales(run.root, kv_cache="fp8")
    assert run.costliest.read_bytes() == before
    assert in_bf16(run) == set(load_costliest(run).modules)
    api.scales(run.root, bf16_weights=0)
    assert in_bf16(run) == set()


@pytest.mark.slow
def test_a_smaller_share_is_chosen_anew(run: Run) -> None:
    before = load_costliest(run)
    api.scales(run.root, bf16_weights="0.001%")
    assert load_costliest(run) == Costliest(windows=8, kl_nats=before.kl_nats, weights=[])
    assert in_bf16(run) == set()
    assert run.record().stages["costliest"].notes[-1] == (
        "--bf16-weights 0.001%: no weights fit into so few bytes, and all are FP8"
    )


def test_what_a_run_says_of_it(made: Run, fp8q: Callable[..., Any]) -> None:
    costliest = load_costliest(made)
    shown = fp8q("inspect", made.root).out
    assert "--bf16-weights 10%" in shown
    assert costliest.modules[0] in shown


@pytest.mark.slow
def test_no_moments_are_gathered_and_layer_by_layer_the_choice_is_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.scales(run.root, weight_rounding="nearest")
    before = load_costliest(run)
    run.costliest.unlink()
    monkeypatch.setattr(SecondMoments, "add", lambda *_: pytest.fail("only GPTQ's share needs them"))
    monkeypatch.setattr(backward, "WHOLE_BYTES", 0)
    monkeypatch.setattr(sensitivity, "_locate", lambda *_: pytest.fail("the model is larger than that"))
    api.scales(run.root, weight_rounding="nearest")
    again = load_costliest(run)
    assert again.modules == before.modules
    assert again.kl_nats == pytest.approx(before.kl_nats, rel=1e-5)


@pytest.mark.parametrize("share", ["3", "-1%", "x"])
def test_what_is_no_share_is_refused(share: str) -> None:
    with pytest.raises(InputError) as refused:
        CalibrateOptions(bf16_weights=share)  # type: ignore[arg-type]  # text, as on the command line
    assert str(refused.value) == (
        f"--bf16-weights {share}: is no share of the bytes of weights; give one from 0 to 1, or in percent, such as 3%"
    )


@pytest.mark.parametrize("share", ["100%", "1"])
def test_a_share_that_leaves_no_weights_to_quantize_is_refused(share: str) -> None:
    with pytest.raises(InputError) as refused:
        CalibrateOptions(bf16_weights=share)  # type: ignore[arg-type]  # text, as on the command line
    assert str(refused.value) == (
        f"--bf16-weights {share}: is all of the bytes of weights; give a smaller share, such as 3%"
    )


def test_codes_as_they_were_given_exclude_it() -> None:
    with pytest.raises(InputError, match="^--inherit: takes codes and scales as they were given, and --bf16-weights"):
        CalibrateOptions(bf16_weights=0.03, inherit=True)


def test_a_model_that_can_be_predicted_in_no_way_is_refused_first(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = transformers.LlamaModel.__init__

    def nameless(self: Any, config: Any) -> None:
        made(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    source = open_source(str(demo_checkpoint))
    monkeypatch.setattr(transformers.LlamaModel, "__init__", nameless)
    check_costliest(source, CalibrateOptions(bf16_weights=0.03))
    monkeypatch.setattr(measure, "beyond", lambda *_: "and 80% of the memory available is 0 GB")
    check_costliest(source, CalibrateOptions())
    with pytest.raises(InputError) as refused:
        check_costliest(source, CalibrateOptions(bf16_weights=0.03))
    assert str(refused.value) == (
        f"{source.name}: LlamaForCausalLM has no list of 4 decoder layers, so it cannot be streamed layer by layer; "
        "give it memory for the whole in FP32, or --bf16-weights 0, which needs no losses"
    )


def test_a_call_that_ends_before_the_choice_leaves_the_run_as_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command goes on with the run's own options, and codes for the choice are not made again."""
    RunWriter(run).forget("costliest")
    before = {path: path.read_bytes() for path in (run.scales, *run.model.glob("*.safetensors"))}
    quantized = run.record().stages["quantize"]
    predicted = sensitivity.predicted_losses
    monkeypatch.setattr(stage, "predicted_losses", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        api.scales(run.root, bf16_weights=0.15)
    assert run.record().stages["quantize"] == quantized
    assert {path: path.read_bytes() for path in before} == before
    inner = Run(run.root / ".costliest.work" / "rounded")
    made = inner.record().stages["quantize"]
    seen = list[StageRecord]()

    def goes_on(measured: Run, *arguments: Any) -> Any:
        seen.append(measured.record().stages["quantize"])
        return predicted(measured, *arguments)

    monkeypatch.setattr(stage, "predicted_losses", goes_on)
    api.scales(run.root, bf16_weights=0.15)
    assert seen == [made]
    assert run.record().stages["quantize"].options["weight_rounding"] == "gptq"
    assert not inner.root.exists()
