"""`--weigh-first-token` through the stages of calibration, on the demo."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fp8q import api
from fp8q.calibrate.checkpoint.weights import Weights
from fp8q.calibrate.measure.moments import load_moments
from fp8q.calibrate.measure.statistics import load_record
from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import PRESETS, CalibrateOptions, DistillOptions, RescaleOptions
from fp8q.quantize.scales.activation_scales import group_of
from fp8q.quantize.scales.clip import lost_share
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.sensitivity import backward
from fp8q.quantize.weights.gptq import compensation, gptq_codes
from fp8q.stages import gradients as stage
from fp8q.stages import measure
from fp8q.stages.gradients import FIRST_TOKENS_PASS, load_first_tokens

SMALL: dict[str, Any] = {"samples": 12, "seq_len": 64, "batch_size": 4}
INPUT = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Any) -> Callable[..., Run]:
    """`calibrated(**options)`: a run of the demo without graphs, in a directory of its own unless `out` names one."""

    def calibrate(out: Path | None = None, **options: Any) -> Run:
        return api.calibrate(
            str(demo_checkpoint), str(demo_texts.calibration), out or tmp_path_factory.mktemp("weighed") / "run",
            str(demo_texts.evaluation), CalibrateOptions(**SMALL | {"weight_rounding": "gptq"} | options),
            api.ExportOptions(graph=False),
        )  # fmt: skip

    return calibrate


@pytest.fixture(scope="module")
def weighed(calibrated: Callable[..., Run]) -> Run:
    return calibrated(weigh_first_token=True)


def stored(run: Run, name: str) -> torch.Tensor:
    return Weights(tuple(run.model.glob("*.safetensors"))).tensor(name)


def checkpoint_digests(run: Run) -> dict[str, str]:
    outputs = run.record().stages["quantize"].outputs
    return {name: digest for name, digest in outputs.items() if name.endswith(".safetensors")}


@pytest.mark.slow
def test_first_tokens_enter_moments_as_often_as_their_weight(
    weighed: Run, calibrated: Callable[..., Run], demo_checkpoint: Path
) -> None:
    weights, equal = load_first_tokens(weighed), calibrated()
    assert not equal.first_tokens.exists()
    assert weighed.record().stages["measure"].outputs == equal.record().stages["measure"].outputs
    assert min(abs(weight - 1) for weight in weights.values()) > 0.001
    moments = load_moments(equal.moments, INPUT)
    first = moments - load_moments(equal.moments, INPUT, first=0.0)  # of twelve windows: a matrix of that rank
    values = torch.linalg.eigvalsh(first.double()).flip(0)
    assert values[0] > 0
    assert values[12:].abs().max() < 1e-3 * values[0]
    assert float(first.trace()) < 0.5 * float(moments.trace())
    window = load_record(equal).corpus.seq_len
    originals, groups = Weights(open_source(str(demo_checkpoint)).weight_files), group_of(load_record(equal).groups)
    for module in (INPUT, *(f"model.layers.1.self_attn.{part}_proj" for part in "qkv")):
        weight = originals.tensor(f"{module}.weight").to(torch.bfloat16)
        lost = lost_share(load_scales(weighed).activations[module].sqnr_db)
        for run, first_weight in ((weighed, weights[module]), (equal, 1.0)):
            codes, scale = (stored(run, f"{module}.{part}") for part in ("weight", "weight_scale"))
            by_moments = compensation(load_moments(equal.moments, groups[module], first_weight, window), lost)
            assert torch.equal(codes.view(torch.uint8), gptq_codes(weight, scale[:, 0], by_moments).view(torch.uint8))
    assert checkpoint_digests(weighed) != checkpoint_digests(equal)


@pytest.mark.slow
def test_scales_weighs_first_tokens_of_a_run_that_was_calibrated_without(
    weighed: Run, calibrated: Callable[..., Run]
) -> None:
    run = calibrated()
    api.scales(run.root, RescaleOptions(weigh_first_token=True))
    assert any("768 calibration tokens are few" in note for note in run.record().stages["first-tokens"].notes)
    assert checkpoint_digests(run) == checkpoint_digests(weighed)
    api.scales(run.root, RescaleOptions(weigh_first_token=False))
    assert checkpoint_digests(run) == checkpoint_digests(calibrated())


@pytest.mark.slow
def test_codes_are_learned_of_all_that_the_preset_exact_chooses(calibrated: Callable[..., Run]) -> None:
    run = calibrated(**PRESETS["exact"])
    api.distill(run.root, options=DistillOptions(epochs=1))
    inputs = run.record().stages["distill"].inputs
    assert {"costliest.json", "first_tokens.json"} <= inputs.keys()


def test_moments_of_older_versions_are_refused_by_name(calibrated: Callable[..., Run]) -> None:
    run = calibrated()
    for path in run.moments.glob("*.first.npy"):
        path.unlink()
    record = json.loads(run.record_file.read_text())
    outputs = record["stages"]["measure"]["outputs"]
    record["stages"]["measure"]["outputs"] = {name: sha for name, sha in outputs.items() if ".first." not in name}
    run.record_file.write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"--weigh-first-token: needs the first tokens of windows apart .* older"):
        api.scales(run.root, RescaleOptions(weigh_first_token=True))


@pytest.mark.slow
def test_streamed_or_not_the_weights_are_the_same(weighed: Run, calibrated: Callable[..., Run]) -> None:
    streamed = calibrated(weigh_first_token=True, stream=True)
    assert load_first_tokens(streamed) == pytest.approx(load_first_tokens(weighed), rel=1e-3)


@pytest.mark.slow
def test_what_is_known_is_not_measured_again(
    weighed: Run, calibrated: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = weighed.record().stages["measure"].outputs
    monkeypatch.setattr(stage, "batch_squares", lambda *_: pytest.fail("first tokens are weighed"))
    calibrated(weighed.root, weigh_first_token=True)
    calibrated(weighed.root, weigh_first_token=True, weight_rounding="nearest")  # needs no moments, and leaves them
    assert weighed.record().stages["measure"].outputs == written


@pytest.mark.slow
def test_rounding_to_nearest_weighs_nothing(calibrated: Callable[..., Run]) -> None:
    assert not calibrated(weigh_first_token=True, weight_rounding="nearest").first_tokens.exists()


def test_a_model_without_a_chain_of_layers_is_refused_first_where_memory_does_not_hold_it(
    calibrated: Callable[..., Run], demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = transformers.LlamaModel.__init__

    def nameless(self: Any, config: Any) -> None:
        made(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    monkeypatch.setattr(transformers.LlamaModel, "__init__", nameless)
    monkeypatch.setattr(stage.WholePass, "goes_by_layer", lambda *_: True)
    with pytest.raises(InputError) as refused:
        calibrated(tmp_path / "run", weigh_first_token=True)
    assert str(refused.value) == (
        f"{open_source(str(demo_checkpoint)).name}: LlamaForCausalLM has no list of 4 decoder layers, so it cannot be "
        "streamed layer by layer; give it memory for the whole in FP32, or leave --weigh-first-token out, which needs "
        "gradients"
    )
    assert not (tmp_path / "run").exists()


def test_the_option_decides_if_gradients_go_layer_by_layer_and_memory_and_size_else(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(demo_checkpoint))
    assert not FIRST_TOKENS_PASS.goes_by_layer(source, None)
    assert FIRST_TOKENS_PASS.goes_by_layer(source, True)
    with monkeypatch.context() as large:
        large.setattr(backward, "WHOLE_BYTES", 0)
        assert FIRST_TOKENS_PASS.goes_by_layer(source, None)
        assert not FIRST_TOKENS_PASS.goes_by_layer(source, False)
    monkeypatch.setattr(measure, "beyond", lambda *_: "and 80% of the memory available is 0 GB")
    assert FIRST_TOKENS_PASS.goes_by_layer(source, None)
    assert not FIRST_TOKENS_PASS.goes_by_layer(source, False)
