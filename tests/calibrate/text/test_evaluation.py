"""Windows of the evaluation text: what is scored, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8q.calibrate.text.evaluation import cut, evenly_spaced
from fp8q.core.errors import InputError

IDS = np.arange(10, dtype=np.int64)


def test_windows_without_overlap_score_all_but_their_first_token() -> None:
    evaluation = cut(IDS, "text", 4, 4)
    assert evaluation.ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]  # 8 and 9 fill no window
    assert evaluation.scored.tolist() == [[False, True, True, True]] * 2
    assert evaluation.protocol.tokens == 6


def test_a_stride_scores_each_token_once_with_more_context() -> None:
    evaluation = cut(IDS, "text", 4, 2)
    assert evaluation.ids.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert sorted(evaluation.ids[evaluation.scored].tolist()) == list(range(1, 10))
    assert evaluation.protocol.stride == 2


def test_with_a_prefix_every_token_of_the_text_is_scored_the_first_too() -> None:
    evaluation = cut(np.array([99, *IDS]), "text", 4, 3, (99,))
    assert evaluation.ids.tolist() == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]  # 9 fills no window
    assert evaluation.scored.tolist() == [[False, True, True, True]] * 3
    assert (evaluation.protocol.tokens, evaluation.protocol.prefix, evaluation.protocol.bos) == (9, [99], "auto")
    assert cut(IDS, "text", 4, 3, (99,)).ids.tolist() == evaluation.ids.tolist()  # held out of the middle of a text


def test_with_a_prefix_a_stride_counts_the_text_and_scores_each_token_once() -> None:
    evaluation = cut(np.array([99, *IDS]), "text", 4, 2, (99,))
    assert evaluation.ids.tolist() == [[99, 0, 1, 2], [99, 2, 3, 4], [99, 4, 5, 6], [99, 6, 7, 8]]
    assert evaluation.scored.tolist() == [[False, True, True, True], *[[False, False, True, True]] * 3]
    assert sorted(evaluation.ids[evaluation.scored].tolist()) == list(range(9))


def test_a_prefix_of_two_tokens_leaves_two_less_for_the_text() -> None:
    evaluation = cut(IDS, "text", 4, 1, (99, 98))
    assert evaluation.ids[:2].tolist() == [[99, 98, 0, 1], [99, 98, 1, 2]]
    assert evaluation.scored[:2].tolist() == [[False, False, True, True], [False, False, False, True]]


def test_where_a_document_begins_inside_a_window_the_prefix_is_not_scored() -> None:
    evaluation = cut(np.array([99, 0, 1, 99, 2, 3, 4]), "text", 4, 3, (99,))
    assert evaluation.ids.tolist() == [[99, 0, 1, 99], [99, 2, 3, 4]]
    assert evaluation.scored.tolist() == [[False, True, True, False], [False, True, True, True]]


@given(tokens=st.integers(1, 60), context=st.integers(2, 12), prefix=st.integers(0, 2), data=st.data())
def test_no_token_is_scored_twice_and_none_is_left_out(
    tokens: int, context: int, prefix: int, data: st.DataObject
) -> None:
    front = tuple(range(1000, 1000 + min(prefix, context - 1)))
    tokens += context
    evaluation = cut(np.arange(tokens), "text", context, data.draw(st.integers(1, context - len(front))), front)
    scored = evaluation.ids[evaluation.scored].tolist()
    last = int(evaluation.ids[-1, -1])
    if front or evaluation.protocol.stride < context:
        assert scored == list(range(0 if front else 1, last + 1))
    else:  # the first of each window has no past
        assert scored == [token for token in range(last + 1) if token % context]


@pytest.mark.parametrize(
    ("context", "stride", "message"),
    [
        (4, 4, "--stride 4: must lie between 1 and 3, the context 4 less the 1 that each window begins with"),
        (
            1,
            1,
            "--context 1: a window needs at least 2 tokens, one to read and one to score",
        ),
        (12, 11, "text: has 10 tokens, less than one window of 12; give more text or a smaller --context"),
    ],
)
def test_windows_that_cannot_begin_with_the_prefix_are_refused(context: int, stride: int, message: str) -> None:
    with pytest.raises(InputError) as error:
        cut(IDS, "text", context, stride, (99,))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("context", "stride", "message"),
    [
        (4, 5, "--stride 5: must lie between 1 and the context, 4"),
        (1, 1, "--context 1: a window needs at least 2 tokens, one to read and one to score"),
        (11, 11, "text: has 10 tokens, less than one window of 11; give more text or a smaller --context"),
    ],
)
def test_windows_that_cannot_be_are_refused(context: int, stride: int, message: str) -> None:
    with pytest.raises(InputError) as error:
        cut(IDS, "text", context, stride)
    assert str(error.value) == message


def test_a_long_text_is_scored_in_evenly_spaced_windows() -> None:
    whole = cut(np.arange(100), "text", 10, 10)
    assert whole.protocol.tokens == 90
    some = evenly_spaced(whole, 40)
    assert some.ids[:, 0].tolist() == [0, 30, 60, 90]
    assert (some.protocol.tokens, some.protocol.of_tokens) == (36, 90)
    assert some.protocol.description == (
        "36 of the 90 tokens of text, each scored once, in windows of 10 tokens every 10, evenly spaced"
    )
    assert some.protocol.sha256 == whole.protocol.sha256
    assert evenly_spaced(whole, 90) is whole
    assert evenly_spaced(whole, 1).protocol.tokens == 9  # one window at least


def test_windows_that_overlap_stay_below_the_limit() -> None:
    whole = cut(np.arange(100), "text", 10, 5)
    some = evenly_spaced(whole, 40)
    assert some.protocol.tokens == int(some.scored.sum()) <= 40
    assert np.isin(some.ids[:, 0], whole.ids[:, 0]).all()
