"""`--kv-cache fp8 --q-scale`: scales of queries beside those of the cache, for vLLM's attention on FP8 codes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.measure.observe import Observer
from fp8q.calibrate.measure.statistics import load_arrays
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import Clipping
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reading.dequantized import fp8_source
from fp8q.quantize.scales.cache_scales import query_scales
from fp8q.quantize.scales.clip import scale_of
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.shared.sources import opened

LAYERS = range(4)


@pytest.fixture(scope="module")
def run(rescaled: Callable[..., Run]) -> Run:
    """The demo with an FP8 cache and scales of queries."""
    return rescaled(q_scale=True)


def test_scales_are_of_the_largest_query_and_nothing_else_changes(run: Run, demo_run: Run) -> None:
    scales, before = load_scales(run), load_scales(demo_run)
    measured, _ = load_arrays(run.queries)
    assert {name: scale.scale for name, scale in scales.queries.items()} == {
        f"model.layers.{layer}.self_attn.q": float(
            scale_of(measured[f"model.layers.{layer}.self_attn.q"].histogram.amax, E4M3)
        )
        for layer in LAYERS
    }
    assert scales.model_copy(update={"queries": {}}) == before
    stored = load_file(next(run.model.glob("model-*.safetensors")))
    found = {name: tensor for name, tensor in stored.items() if name.endswith("q_scale")}
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        f"{name}_scale": (torch.float32, [scale.scale]) for name, scale in scales.queries.items()
    }


def test_transformers_loads_it_and_reports_these_keys_alone(run: Run) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)
    report = loaded[1]
    names = {f"model.layers.{layer}.self_attn.q_scale" for layer in LAYERS}
    assert (set(report["missing_keys"]), set(report["unexpected_keys"])) == (set(), names)
    card = " ".join((run.model / "README.md").read_text().split())
    assert "transformers reports them as unexpected keys, and computes without them." in card


def test_the_reference_computes_what_it_did(
    run: Run, demo_run: Run, exact_logits: Callable[[Run, np.ndarray], np.ndarray]
) -> None:
    ids = np.arange(1, 25).reshape(2, 12)
    assert np.array_equal(exact_logits(run, ids), exact_logits(demo_run, ids))


def test_as_a_source_the_checkpoint_has_no_such_tensor(run: Run) -> None:
    source = opened(str(run.model))
    assert fp8_source(source) is not None
    assert not [name for name in source.weights().names() if name.endswith("_scale")]


def test_they_go_with_the_cache(run: Run, without_graphs: Any, tmp_path: Path) -> None:
    with without_graphs():
        values = api.scales(Path(shutil.copytree(run.root, tmp_path / "run")), api.RescaleOptions(kv_cache="v"))
    assert load_scales(values).queries == {}
    assert not [
        name
        for name in json.loads((values.model / "model.safetensors.index.json").read_text())["weight_map"]
        if name.endswith("q_scale")
    ]


def test_a_query_that_was_never_measured_has_no_scale() -> None:
    observer = Observer(1)
    observer.update(torch.tensor([[[float("nan")], [1.0]]], dtype=torch.bfloat16), 0)
    tensor = observer.statistics()
    assert tensor is not None
    with pytest.raises(InputError, match=r"^0\.q: NaN in 1 of 2 input values; leave out --q-scale$"):
        query_scales({"0.q": tensor}, Clipping())


def test_without_an_fp8_cache_nobody_reads_them() -> None:
    for cache in ("off", "v"):
        with pytest.raises(InputError) as raised:
            api.CalibrateOptions(kv_cache=cache, q_scale=True)
        assert str(raised.value) == (
            f"--q-scale: is read with an FP8 cache alone, and --kv-cache is {cache}; give --kv-cache fp8, or leave it "
            "out"
        )
    with pytest.raises(InputError, match="^--q-scale: is read with an FP8 cache alone, and --kv-cache is v;"):
        replace(api.CalibrateOptions(kv_cache="fp8", q_scale=True), kv_cache="v")
