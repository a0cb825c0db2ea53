"""vLLM loads a scale for each head of the cache (`--kv-scale head`), and on a CPU attends by the largest of a layer, as
by one scale.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_jobs import ask, job

from fp8q import api
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.corpus import load_tokens

from ..architectures import Architecture

#: Two query heads read a key head; the demo's tokenizer.
CASE = Architecture("llama", "two key heads", "fp8", config="LlamaConfig", fields={"num_key_value_heads": 2})


@pytest.fixture(scope="module")
def runs(quantized: Callable[..., Run], without_graphs: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A run with one scale a layer, and the same with a scale for each head; both with scales of queries."""
    tensor = quantized(CASE)
    with without_graphs():
        api.scales(tensor.root, api.RescaleOptions(q_scale=True))
        copied = Path(shutil.copytree(tensor.root, tmp_path_factory.mktemp("heads") / "run"))
        return [tensor, api.scales(copied, api.RescaleOptions(kv_scale="head"))]


@pytest.fixture(scope="module")
def answers(vllm_python: Path, runs: list[Run]) -> list[dict[str, Any]]:
    """What vLLM says to both."""
    ids = load_tokens(runs[0], runs[0].evaluation)[:128].reshape(2, 64)
    found = ask(vllm_python, [job(run.model, ids) for run in runs])
    if "requires x86 with AVX-512 or AMX" in found[0].get("error", ""):
        pytest.skip(found[0]["error"])
    assert "error" not in found[0] | found[1]
    return found


def test_it_loads_the_scale_of_every_head_and_of_queries_the_largest_in_each_group(
    runs: list[Run], answers: list[dict[str, Any]]
) -> None:
    scales = load_scales(runs[1])
    for attention, parts in answers[1]["scales"].items():
        for part in "kv":
            assert parts[part] == scales.kv_cache[f"{attention}.{part}"].heads
        queries = np.array(scales.queries[f"{attention}.q"].heads)
        assert parts["q"] == queries.reshape(2, 2).max(1).tolist()
    assert len(answers[1]["scales"]) == CASE.fields.get("num_hidden_layers", 2)
    assert any(len(set(parts["k"])) == 2 for parts in answers[1]["scales"].values())


def test_on_a_cpu_it_attends_by_the_largest_as_by_one_scale_a_layer(answers: list[dict[str, Any]]) -> None:
    """What docs/kv-cache.md and C127 say."""
    assert [max(parts["k"]) for parts in answers[1]["scales"].values()] == [
        *(parts["k"][0] for parts in answers[0]["scales"].values())
    ]
    assert answers[0]["nll_nats"] == answers[1]["nll_nats"]
    assert answers[0]["answers"] == answers[1]["answers"]
