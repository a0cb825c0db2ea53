"""Errors of fields in plain words, of what pydantic really raises."""

from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core.core_schema import ErrorType

from fp8q.core.files import TEXTS, plain_text


def odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("is even")
    return value


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (Annotated[int, Field(ge=1)], 0, "must be at least 1"),
        (Annotated[float, Field(le=2)], 9.0, "must be at most 2"),
        (Annotated[float, Field(gt=0)], 0.0, "must be more than 0"),
        (Annotated[float, Field(lt=1)], 1.0, "must be less than 1"),
        (int, "5", "must be a whole number"),
        (int, 1.5, "must be a whole number"),
        (float, "5", "must be a number"),
        (bool, 1, "must be true or false"),
        (str, 5, "must be text"),
        (Annotated[str, Field(min_length=1)], "", "must have at least 1 characters"),
        (Annotated[str, Field(max_length=3)], "abcd", "must have at most 3 characters"),
        (Literal["a", "b"], "c", "must be 'a' or 'b'"),
        (Literal[False], True, "must be false"),
        (None, 1, "must be null"),
        (list[int], 5, "must be a list"),
        (dict[str, int], 5, "must be an object"),
        (Annotated[list[int], Field(max_length=0)], [1], "must have at most 0 items"),
        (Annotated[list[int], Field(min_length=1)], [], "must have at least 1 items"),
        (Annotated[int, AfterValidator(odd)], 2, "is refused: value error, is even"),
    ],
)
def test_the_text_says_what_the_field_must_be(kind: Any, value: Any, text: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    assert plain_text(refused.value.errors()[0]) == text


def test_the_types_of_errors_are_pydantic_s() -> None:
    assert set(TEXTS) <= set(get_args(ErrorType))
