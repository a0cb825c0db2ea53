"""ONNX Runtime on the exported graph against the exact reference, with the very measurement of
`benchmarks/two_implementations.py`.
"""

from types import ModuleType

import numpy as np
import pytest

from fp8q.core.run import Run
from fp8q.stages.corpus import load_tokens


@pytest.fixture(scope="module")
def windows(demo_run: Run) -> np.ndarray:
    return load_tokens(demo_run, demo_run.evaluation)[: 8 * 256].reshape(8, 256)


def test_they_agree_before_the_first_differing_code_and_stay_near_after_it(
    two_implementations: ModuleType, demo_run: Run, windows: np.ndarray
) -> None:
    result = two_implementations.compare(demo_run, windows)
    assert result["tokens_before_first_difference"] > 0
    assert result["logit_difference"] <= two_implementations.LIMITS["logit_difference"]
    # the limit is for 10,000 tokens, here are 2,048
    assert result["perplexity_difference"] <= 2 * two_implementations.LIMITS["perplexity_difference"]
    assert result["kl_share"] <= 2 * two_implementations.LIMITS["kl_share"]


def test_greedy_continuations_part_only_where_two_tokens_are_as_good(
    two_implementations: ModuleType, demo_run: Run, windows: np.ndarray
) -> None:
    result = two_implementations.continuations(demo_run, windows[:4, :32], 16)
    assert result["continuations"] == 4
    assert result["continuations_unexplained"] == 0
