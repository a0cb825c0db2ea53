"""Ways to count patterns, each against `torch.bincount`; the kernel in Triton's interpreter where there is no GPU."""

import pytest
import torch

from fp8q.calibrate.measure import counting
from fp8q.calibrate.measure.counting import count_by_sorting, count_in_threads, count_patterns, largest_finite
from fp8q.calibrate.measure.histogram import INFINITY, PATTERNS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(values: int) -> torch.Tensor:
    """Patterns of normal numbers of which a third is zero, a NaN first."""
    x = torch.randn(values, generator=torch.Generator().manual_seed(0)) * torch.arange(values).remainder(3)
    patterns = x.to(torch.bfloat16).abs().view(torch.int16)
    patterns[:1] = PATTERNS - 1
    return patterns


@pytest.mark.parametrize("values", [0, 1, 5000])
@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")
def test_the_kernel_counts_what_bincount_counts(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In launches of 2,048 values, each by three programs, of which two find nothing."""
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
    from fp8q.calibrate.measure import counting_kernel

    monkeypatch.setattr(counting_kernel, "LAUNCHED_AT_A_TIME", 2048)
    patterns = drawn(values)
    found = counting_kernel.triton_count(patterns.to(DEVICE), 3).cpu()
    assert found.dtype == torch.int64
    assert torch.equal(found, torch.bincount(patterns, minlength=PATTERNS))


@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")
def test_the_kernel_takes_every_other_value_as_it_lies_and_blocks_by_turns() -> None:
    pytest.importorskip("triton", reason="Triton is not installed (it comes with PyTorch for NVIDIA GPUs)")
    from fp8q.calibrate.measure.counting_kernel import BLOCK, triton_count

    patterns = drawn(5 * BLOCK)[::2]
    assert torch.equal(triton_count(patterns.to(DEVICE), 2).cpu(), torch.bincount(patterns, minlength=PATTERNS))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("values", [0, 1, 5000])
def test_sorting_and_threads_count_what_bincount_counts(
    values: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(counting, "SORTED_AT_A_TIME", 512)
    monkeypatch.setattr(counting, "WORTH_SHARING", 2)
    patterns = drawn(values)
    expected = torch.bincount(patterns, minlength=PATTERNS)
    for count in (count_by_sorting, count_in_threads, count_patterns):
        found = count(patterns)
        assert found.dtype == torch.int64
        assert torch.equal(found, expected)


def test_the_largest_finite_pattern_is_found_below_infinity() -> None:
    for patterns, expected in (([3, 0, 3, INFINITY, PATTERNS - 1], 3), ([INFINITY], 0), ([INFINITY - 1], INFINITY - 1)):
        counts = torch.bincount(torch.tensor(patterns), minlength=PATTERNS)
        assert int(largest_finite(counts)) == expected
