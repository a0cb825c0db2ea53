"""`--activation-terms 2` and `--two-terms` through the stages of calibration, on the demo's first layer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fp8q import api
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.calibrate.model.source import Source
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import CalibrateOptions, Clipping, RescaleOptions, ScaleOptions
from fp8q.quantize.checkpoint.baselines import write_int8
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes, tails_of
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources

TWO = CalibrateOptions(
    samples=6, seq_len=64, batch_size=2, skip=("model.layers.[!0].*",), kv_cache="fp8", activation_terms=2
)
#: Every GEMM of the layer, by what it reads: each tensor has one scale.
GROUPS = [
    [f"model.layers.0.{name}" for name in group]
    for group in (
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        ["self_attn.o_proj"],
        ["mlp.gate_proj", "mlp.up_proj"],
        ["mlp.down_proj"],
    )
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, source: Source, data: Path, calibrated: Callable[..., None]) -> Run:
    made = Run(tmp_path_factory.mktemp("terms") / "run")
    calibrated(made, source, data, replace(TWO, stream=False))
    return made


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(run.root, tmp_path / "run")))


def chosen(run: Run, source: Source, options: ScaleOptions) -> dict[str, int]:
    """Scales chosen again; the terms of each GEMM's input."""
    quantize_stage.quantize(run, source, sources.gemms_of(source), options, Notes(SILENT))
    return {name: scale.terms for name, scale in load_scales(run).activations.items()}


def test_streamed_it_has_the_scales_and_codes_of_the_model_in_memory(
    run: Run, source: Source, data: Path, calibrated: Callable[..., None], tmp_path: Path
) -> None:
    streamed = Run(tmp_path / "run")
    calibrated(streamed, source, data, replace(TWO, stream=True))
    first, second = (each.record().stages["quantize"] for each in (run, streamed))
    assert first.options["activation_terms"] == 2
    assert first.outputs == second.outputs
    assert {name for name in first.outputs if name.endswith((".safetensors", "scales.json"))} == {
        "scales.json",
        "model/model-00001-of-00001.safetensors",
    }


def test_every_product_takes_two_and_the_cache_keeps_its_own(run: Run, copied: Run, source: Source) -> None:
    measured = copied.record().stages["measure"]
    assert set(chosen(copied, source, quantize_stage.rescaled(run, RescaleOptions(activation_terms=1)))) == {
        name for group in GROUPS for name in group
    }
    assert copied.record().stages["measure"] == measured
    two, one = load_scales(run), load_scales(copied)
    assert in_two_codes(two.forms) == [name for group in GROUPS for name in group]
    assert in_two_codes(one.forms) == []
    for name, scale in two.activations.items():
        assert np.frexp(scale.scale)[0] == 0.5
        assert one.activations[name].scale <= scale.scale < 2 * one.activations[name].scale
    assert two.kv_cache == one.kv_cache
    assert two.weights == one.weights


def test_a_run_of_before_there_were_terms_has_one(copied: Run) -> None:
    stored = json.loads(copied.scales.read_text(encoding="utf-8"))
    for scale in stored["activations"].values():
        assert scale.pop("terms") == 2
    with RunWriter(copied).stage("quantize", {}, {}) as log:
        copied.scales.write_text(json.dumps(stored), encoding="utf-8")
        log.outputs += [copied.scales]
    assert {scale.terms for scale in load_scales(copied).activations.values()} == {1}


def test_one_member_takes_its_group_which_is_said_and_an_empty_pattern_takes_it_back(
    copied: Run, source: Source
) -> None:
    some = quantize_stage.rescaled(copied, RescaleOptions(activation_terms=1, two_terms=("*.v_proj", "*.o_*")))
    two = {name for group in GROUPS[:2] for name in group}
    assert {name for name, terms in chosen(copied, source, some).items() if terms == 2} == two
    assert copied.record().stages["quantize"].notes[-1] == (
        "--two-terms: model.layers.0.self_attn.q_proj and 1 more read the same tensor as a module that it names, and "
        "take two terms with it"
    )
    assert quantize_stage.rescaled(copied, RescaleOptions(weight_method="amax")).two_terms == ("*.v_proj", "*.o_*")
    assert set(chosen(copied, source, quantize_stage.rescaled(copied, RescaleOptions(two_terms=("",)))).values()) == {1}


def test_inspecting_shows_them_and_the_card_says_who_runs_one(run: Run) -> None:
    shown = {row.module: row.terms for row in api.inspect(run.root).modules}
    assert {name for name, terms in shown.items() if terms == 2} == {name for group in GROUPS for name in group}
    card = (run.model / "README.md").read_text(encoding="utf-8")
    assert (
        "**In two terms**: where fp8q's graphs and engines read the input of every FP8 GEMM, a value is two E4M3 "
        "codes,\nscale × (a + b/16), which is exact for a BF16 number between a 64th of the scale and 476 times it. "
        "transformers\nmultiplies both with `fp8q.api.load`; vLLM with the plugin fp8q-vllm multiplies in 16 bits "
        "instead, by the same\nweights, and loses no more. Without these one term runs here, with the loss of ordinary "
        "FP8 activations.\n"
    ) in card


def test_a_tail_has_the_weights_and_scales_of_two_terms(copied: Run, source: Source) -> None:
    two = load_scales(copied)
    (weights,) = copied.model.glob("*.safetensors")
    before = weights.read_bytes()
    chosen(copied, source, quantize_stage.rescaled(copied, RescaleOptions(activation_terms="tail", exact_tail=16)))
    tail = load_scales(copied)
    assert weights.read_bytes() == before
    assert tails_of(tail.forms) == {name: 16 for group in GROUPS for name in group}
    assert {name: scale.model_copy(update={"tail": None}) for name, scale in tail.activations.items()} == (
        two.activations
    )
    assert in_two_codes(tail.forms) == in_two_codes(two.forms)


def test_one_member_s_tail_is_its_group_s_which_is_said(copied: Run, source: Source) -> None:
    some = RescaleOptions(activation_terms=1, tail=("*.up_proj",), two_terms=("*.o_proj",))
    chosen(copied, source, quantize_stage.rescaled(copied, some))
    scales = load_scales(copied)
    assert tails_of(scales.forms) == dict.fromkeys(GROUPS[2], 64)
    assert in_two_codes(scales.forms) == [*GROUPS[1], *GROUPS[2]]
    assert copied.record().stages["quantize"].notes[-1] == (
        "--tail: model.layers.0.mlp.gate_proj read the same tensor as a module that it names, and take a tail with it"
    )


def test_int8_keeps_its_own_scales(run: Run, source: Source, tmp_path: Path) -> None:
    two, statistics = load_scales(run), load_statistics(run)
    one = two.model_copy(
        update={"activations": {name: scale.model_copy(update={"terms": 1}) for name, scale in two.activations.items()}}
    )
    written = []
    for name, scales in (("one", one), ("two", two)):
        write_int8(source, tmp_path / name, statistics, scales, Clipping(), SILENT)
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")})
    assert written[0] == written[1] != {}
