"""Which verdicts of `fp8q compare` let a server pass."""

import pytest

from fp8q.core.errors import GateError
from fp8q.stages.compare import check_validated
from fp8q.validate.endpoint.document import ModelComparison, Verdict


def comparison(verdict: Verdict, *arithmetics: str) -> ModelComparison:
    return ModelComparison(
        answered="http://127.0.0.1:8000", model="m", form="text", requests=1, prompts=1, sent=1, positions=1,
        runtimes=[], verdict=verdict, arithmetics=[*arithmetics], sentence="what it is",
    )  # fmt: skip


@pytest.mark.parametrize(
    "found",
    [comparison("validated", "as validated"), comparison("undecided", "as validated", "BF16")],
    ids=lambda found: found.verdict,
)
def test_what_loses_no_more_than_was_validated_passes(found: ModelComparison) -> None:
    assert found.passes
    check_validated(found)


@pytest.mark.parametrize(
    "found",
    [
        comparison("undecided", "as validated", "one term where two were validated"),
        comparison("undecided", "as validated", "BF16", "INT8"),
        comparison("other-arithmetic", "BF16"),
        comparison("other-model"),
        comparison("other-prompt", "as validated"),
    ],
    ids=lambda found: f"{found.verdict}-{len(found.arithmetics)}",
)
def test_all_else_ends_with_a_gate(found: ModelComparison) -> None:
    assert not found.passes
    with pytest.raises(GateError, match=r"^http://127.0.0.1:8000: what it is$"):
        check_validated(found)
