"""ONNX Runtime on the exported graph against the exact reference, with the very measurement of `benchmarks/two_implementations.py`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from fp8q.run import Run
from fp8q.stages.corpora import load_tokens


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "two_implementations.py"
    spec = importlib.util.spec_from_file_location("two_implementations", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def windows(demo_run: Run) -> np.ndarray:
    return load_tokens(demo_run, demo_run.evaluation)[: 8 * 256].reshape(8, 256)


def test_they_agree_before_the_first_differing_code_and_stay_near_after_it(benchmark: ModuleType, demo_run: Run, windows: np.ndarray) -> None:
    result = benchmark.compare(demo_run, windows)
    assert result["tokens_before_first_difference"] > 0
    assert result["logit_difference"] <= benchmark.LIMITS["logit_difference"]
    assert result["perplexity_difference"] <= 2 * benchmark.LIMITS["perplexity_difference"]  # the limit is for 10,000 tokens, here are 2,048
    assert result["kl_share"] <= 2 * benchmark.LIMITS["kl_share"]


def test_greedy_continuations_part_only_where_two_tokens_are_as_good(benchmark: ModuleType, demo_run: Run, windows: np.ndarray) -> None:
    result = benchmark.continuations(demo_run, windows[:4, :32], 16)
    assert result["continuations"] == 4
    assert result["continuations_unexplained"] == 0
