"""What is measured of a mixture of experts: one tensor for what the experts of a layer read, one for each one's last
GEMM, with the tokens that were routed to it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics, coverage, load_arrays, save_statistics
from fp8q.calibrate.measure.stream import measure_streamed
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run

from ...mixtures import MIXTURES, random_mixture, starve
from ..model.damage import rewrite

IDENTITY = ModelIdentity(name="model", architecture="any", fingerprint="0")
#: The last batch is smaller than the others: a shape of its own.
CORPUS = Corpus(name="random tokens", fingerprint="0", windows=5, seq_len=24, batch_size=2)
WINDOWS = np.random.default_rng(0).integers(3, 2000, (5, 24))
BLOCK = "model.layers.0.mlp"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    made: dict[str, Source] = {}

    def open_mixture(name: str) -> Source:
        if name not in made:
            made[name] = open_source(str(random_mixture(tmp_path_factory.mktemp("mixtures") / name, name)))
        return made[name]

    return open_mixture


@pytest.fixture(scope="module")
def starving(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """A Qwen3-MoE whose first layer never chooses expert 2: its row of the router is against all tokens."""
    path = random_mixture(tmp_path_factory.mktemp("starving") / "qwen3_moe", "qwen3_moe")
    rewrite(path, starve)
    return open_source(str(path))


def measured(source: Source, batches: list[int] | None = None, **more: Any) -> Statistics:
    return measure_in_memory(
        load_model(source, torch.bfloat16), Measurement(WINDOWS, IDENTITY, CORPUS, batches, **more), SILENT
    )


def written(statistics: Statistics, folder: Path) -> list[bytes]:
    folder.mkdir()
    return [path.read_bytes() for path in save_statistics(Run(folder), statistics)]


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_share_what_they_read_and_nothing_else(name: str, mixture: Callable[[str], Source]) -> None:
    groups = measured(mixture(name)).record.groups
    experts = [f"{BLOCK}.experts.{expert}.{part}_proj" for expert in range(4) for part in ("gate", "up")]
    assert groups[experts[0]] == experts
    for expert in range(4):
        assert groups[f"{BLOCK}.experts.{expert}.down_proj"] == [f"{BLOCK}.experts.{expert}.down_proj"]
    if name == "qwen2_moe":
        shared = f"{BLOCK}.shared_expert"
        assert groups[f"{shared}.gate_proj"] == [
            f"{shared}.gate_proj", f"{shared}.up_proj", f"{BLOCK}.shared_expert_gate",
        ]  # fmt: skip


def test_the_shared_input_is_that_of_all_tokens_and_each_expert_counts_its_own(
    mixture: Callable[[str], Source],
) -> None:
    source = mixture("mixtral")
    found = measured(source)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        source.path, dtype=torch.bfloat16, experts_implementation="eager", output_router_logits=True
    )
    routed = np.zeros((2, 4), np.int64)
    for start in range(0, 5, 2):
        with torch.inference_mode():
            logits = theirs(torch.from_numpy(WINDOWS[start : start + 2])).router_logits
        for layer, each in enumerate(logits):
            routed[layer] += np.bincount(each.topk(2).indices.flatten().numpy(), minlength=4)
    assert [row.tokens for row in coverage(found)] == [tuple(row) for row in routed.tolist()]
    assert routed.sum() == 2 * 2 * WINDOWS.size
    shared = found.tensors[f"{BLOCK}.experts.0.gate_proj.input"].histogram
    assert shared.samples == WINDOWS.size * 64


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("all_experts", [False, True])
def test_streamed_is_in_memory_bit_for_bit(
    name: str, all_experts: bool, mixture: Callable[[str], Source], tmp_path: Path
) -> None:
    source, folder = mixture(name), tmp_path / "work"
    folder.mkdir()
    what = Measurement(WINDOWS, IDENTITY, CORPUS, all_experts=all_experts)
    streamed = measure_streamed(source, what, SILENT, folder)
    in_memory = measured(source, all_experts=all_experts)
    assert written(streamed, tmp_path / "a") == written(in_memory, tmp_path / "b")


def test_an_expert_without_tokens_is_there_with_none_and_parts_add_to_the_whole(
    starving: Source, tmp_path: Path
) -> None:
    whole = measured(starving)
    assert coverage(whole)[0].tokens[2] == 0
    name = f"{BLOCK}.experts.2.down_proj.input"
    assert whole.tensors[name].histogram.samples == 0
    assert np.isnan(whole.tensors[name].amax_batches).all()
    assert not whole.tensors[name].amax_channels.any()
    assert whole.batches_measured == {0, 1, 2}
    parts = [measured(starving, [batch]) for batch in range(3)]
    added = written(parts[2].merge(parts[0]).merge(parts[1]), tmp_path / "a")
    assert added == written(whole, tmp_path / "b")
    assert load_arrays(tmp_path / "b" / "statistics.safetensors")[0][name].histogram.samples == 0
    folder = tmp_path / "work"
    folder.mkdir()
    streamed = measure_streamed(starving, Measurement(WINDOWS, IDENTITY, CORPUS), SILENT, folder)
    assert written(streamed, tmp_path / "c") == added


def test_all_experts_see_all_tokens_and_later_layers_see_what_they_saw(starving: Source) -> None:
    routed, shown = measured(starving), measured(starving, all_experts=True)
    assert [row.tokens for row in coverage(shown)] == [(WINDOWS.size,) * 4] * 2
    assert (routed.record.all_experts, shown.record.all_experts) == (None, True)
    for name, tensor in routed.tensors.items():
        if ".down_proj" not in name:
            assert tensor.histogram == shown.tensors[name].histogram
    with pytest.raises(InputError) as refused:
        routed.merge(shown)
    assert str(refused.value) == (
        "statistics cannot be added: their all_experts (--all-experts) differs (False and True); measure both with the "
        "same model and options"
    )
