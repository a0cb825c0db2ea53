"""`--weigh-outputs` through the stages of calibration, on the demo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8q import api
from fp8q.calibrate.checkpoint.weights import Weights
from fp8q.core.errors import InputError
from fp8q.core.reporter import Silent
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, RescaleOptions
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.sensitivity.output_gradients import LayerGradients, OutputMoments, output_gradients
from fp8q.quantize.weights.output_side import OutputSide, load_output_side
from fp8q.stages import gradients as stage

from ..mixtures import random_mixture

SMALL: dict[str, Any] = {"samples": 12, "seq_len": 64, "batch_size": 4, "weight_rounding": "gptq"}


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Any) -> Callable[..., Run]:
    """`calibrated(**options)`: a run of the demo, or another `model`, without graphs."""

    def calibrate(model: Path = demo_checkpoint, **options: Any) -> Run:
        return api.calibrate(
            str(model), str(demo_texts.calibration), tmp_path_factory.mktemp("outputs") / "run",
            str(demo_texts.evaluation), CalibrateOptions(**SMALL | options), api.ExportOptions(graph=False),
        )  # fmt: skip

    return calibrate


class Lines(Silent):
    """Remembers the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


def codes(run: Run) -> dict[str, torch.Tensor]:
    """Module -> its codes."""
    stored = Weights(tuple(run.model.glob("*.safetensors")))
    return {module: stored.tensor(f"{module}.weight").view(torch.uint8) for module in load_scales(run).weights}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> set[str]:
    return {module for module, tensor in one.items() if not torch.equal(tensor, other[module])}


def check_revised_but(run: Run, module: str, **options: Any) -> None:
    """Revise the codes of the run by outputs, with `options`: those of `module` stay."""
    before = codes(run)
    api.scales(run.root, RescaleOptions(weigh_outputs=6, **options))
    revised = differing(before, codes(run))
    assert module not in revised
    assert len(revised) > 10


def checkpoint_digests(run: Run) -> dict[str, str]:
    outputs = run.record().stages["quantize"].outputs
    return {name: digest for name, digest in outputs.items() if name.endswith(".safetensors")}


@pytest.mark.slow
def test_codes_are_revised_and_the_run_says_by_how_many_windows(
    calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = calibrated()
    before = checkpoint_digests(run)
    assert not run.output_moments.exists()
    api.scales(run.root, RescaleOptions(weigh_outputs=6))
    revised = checkpoint_digests(run)
    assert revised != before
    recorded = run.record().stages["outputs"]
    assert recorded.options["windows"] == 6
    assert len(recorded.outputs) == 3 * len(load_scales(run).weights)
    monkeypatch.setattr(OutputMoments, "run", lambda *_: pytest.fail("outputs are weighed again"))
    api.scales(run.root, RescaleOptions(weigh_outputs=6, weight_method="mse"))
    assert checkpoint_digests(run) == revised
    api.scales(run.root, RescaleOptions(weigh_outputs=0))
    assert checkpoint_digests(run) == before


@pytest.mark.slow
def test_a_killed_call_goes_on_at_its_layer_and_gives_the_codes_of_one(
    calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = calibrated(weigh_outputs=6)
    run = calibrated()
    save = LayerGradients.save
    layers = list[LayerGradients]()

    def killed(sums: LayerGradients, folder: Path) -> None:
        save(sums, folder)
        layers.append(sums)
        if len(layers) == 3:  # the head, and two of four layers
            raise KeyboardInterrupt

    monkeypatch.setattr(LayerGradients, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        api.scales(run.root, RescaleOptions(weigh_outputs=6))
    assert not run.output_moments.exists()
    assert "outputs" not in run.record().stages
    reporter = Lines()
    api.scales(run.root, RescaleOptions(weigh_outputs=6), reporter)
    assert "going on at decoder layer 3 of 4, where an earlier call stopped" in reporter.lines
    assert len(layers) == 3 + 3
    assert run.record().stages["outputs"].outputs == at_once.record().stages["outputs"].outputs
    assert checkpoint_digests(run) == checkpoint_digests(at_once)
    assert not list(run.root.glob(".*.work"))


@pytest.mark.slow
def test_a_gemm_without_finite_gradients_has_the_codes_of_gptq_and_is_named(
    calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "model.layers.1.self_attn.k_proj"

    def broken(*arguments: Any) -> Any:
        of_names, back = output_gradients(*arguments)
        return {name: gradient * (torch.nan if name == module else 1) for name, gradient in of_names.items()}, back

    run = calibrated()
    monkeypatch.setattr("fp8q.quantize.sensitivity.output_gradients.output_gradients", broken)
    check_revised_but(run, module)
    recorded = run.record().stages["outputs"]
    assert recorded.notes[-1] == (
        f"--weigh-outputs: GPTQ rounds 1 GEMM ({module}) without its outputs, which have no finite gradient for "
        "each token of a window, as those of experts, or moments that memory does not hold"
    )
    assert len(recorded.outputs) == 3 * (len(codes(run)) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("share", ["0", "0.001%"])
def test_a_gemm_whose_revision_memory_does_not_hold_has_the_codes_of_gptq_and_is_named(
    calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, share: str
) -> None:
    """Where weights are to stay in BF16 the codes come from a folder, by which it is named."""
    module = "model.layers.1.self_attn.k_proj"

    def loaded(folder: Path, name: str) -> OutputSide | None:
        if name == module:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return load_output_side(folder, name)

    run = calibrated()
    monkeypatch.setattr("fp8q.quantize.weights.code_sources.load_output_side", loaded)
    check_revised_but(run, module, bf16_weights=share)
    said = f"--weigh-outputs: GPTQ rounds 1 GEMM ({module}) without its outputs, whose revision memory does not hold"
    assert said in run.record().stages["quantize"].notes


@pytest.mark.slow
def test_experts_are_rounded_as_without_and_are_named_once(calibrated: Callable[..., Run], tmp_path: Path) -> None:
    run = calibrated(random_mixture(tmp_path / "mixture", "qwen3_moe"), min_expert_tokens=1)
    before = codes(run)
    experts = {module for module in before if ".experts." in module}
    assert len(experts) == 2 * 4 * 3
    reporter = Lines()
    api.scales(run.root, RescaleOptions(weigh_outputs=6), reporter)
    revised = differing(before, codes(run))
    assert revised
    assert not revised & experts
    (said,) = (line for line in reporter.lines if "GEMMs" in line)
    assert said == (
        f"--weigh-outputs: GPTQ rounds 24 GEMMs ({next(module for module in before if module in experts)} …) without "
        "their outputs, which have no finite gradient for each token of a window, as those of experts, or moments that "
        "memory does not hold"
    )
    again = Lines()
    api.scales(run.root, RescaleOptions(weigh_outputs=6, weight_method="amax"), again)
    assert not [line for line in again.lines if "GEMMs" in line]


def test_fewer_windows_than_were_asked_for_are_all_taken_once(calibrated: Callable[..., Run]) -> None:
    run = calibrated(samples=3, only=("*.layers.0.mlp.up_proj",), weigh_outputs=1000)
    recorded = run.record().stages["outputs"]
    assert recorded.options["windows"] == 3
    assert recorded.notes == ["--weigh-outputs 1,000: the run has 3 calibration windows, and all are taken"]
    before = run.record().stages["outputs"]
    api.scales(run.root, RescaleOptions(weigh_outputs=3))
    assert run.record().stages["outputs"] == before


def test_weights_in_blocks_are_rounded_as_without_and_are_named(calibrated: Callable[..., Run]) -> None:
    only = ("*.layers.0.mlp.*",)
    run = calibrated(samples=3, only=only, form=("block", "*.down_proj=one"))
    before = codes(run)
    reporter = Lines()
    api.scales(run.root, RescaleOptions(weigh_outputs=3), reporter)
    assert differing(before, codes(run)) <= {"model.layers.0.mlp.down_proj"}
    (said,) = (line for line in reporter.lines if "outputs" in line and "first layer" not in line)
    assert said == (
        "--weigh-outputs: GPTQ rounds 2 weights in blocks (model.layers.0.mlp.gate_proj …) without their outputs"
    )


def test_where_nothing_can_be_revised_no_gradients_are_gathered_and_a_line_says_so(
    calibrated: Callable[..., Run],
) -> None:
    run = calibrated(samples=3, only=("*.layers.0.mlp.up_proj",))
    for options, reason in (
        ({"form": ("block",)}, "GPTQ rounds weights in blocks without it"),
        (
            {"form": ("one",), "weight_rounding": "nearest"},
            "revises codes of --weight-rounding gptq, and weights are rounded by nearest",
        ),
    ):
        reporter = Lines()
        api.scales(run.root, RescaleOptions(weigh_outputs=6, **options), reporter)
        assert [line for line in reporter.lines if "outputs" in line] == [
            f"--weigh-outputs 6: {reason}; it is left out"
        ]
        assert "outputs" not in run.record().stages


def test_first_tokens_that_nothing_weighs_are_told_once() -> None:
    weighed = CalibrateOptions(weight_rounding="gptq", weigh_outputs=6, weigh_first_token=True)
    assert stage.idle_notes(CalibrateOptions()) == stage.idle_notes(weighed) == []
    rounded = "of --weight-rounding gptq, and weights are rounded by nearest; it is left out"
    assert stage.idle_notes(CalibrateOptions(weigh_first_token=True, weigh_outputs=6)) == [
        f"--weigh-first-token: is {rounded}",
        f"--weigh-outputs 6: revises codes {rounded}",
    ]


def test_one_window_is_refused_since_none_is_left_to_judge() -> None:
    fault = "one window gives gradients, and none is left to judge the codes by"
    for asked, windows, remedy in ((1, 8, "--weigh-outputs 20"), (8, 1, "more --samples")):
        with pytest.raises(InputError) as refused:
            stage.check_outputs(CalibrateOptions(weight_rounding="gptq", weigh_outputs=asked), windows)
        assert str(refused.value) == f"--weigh-outputs {asked}: {fault}; give {remedy}, or leave it out"
    stage.check_outputs(CalibrateOptions(weight_rounding="gptq", weigh_outputs=2), 2)
    stage.check_outputs(CalibrateOptions(weigh_outputs=1), 1)
