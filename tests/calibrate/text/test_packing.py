"""Windows that begin with the tokenizer's own, worked out by hand: 9 is BOS, 8 the second token of a longer prefix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fp8q.calibrate.text.packing import Packing, prefix_of
from fp8q.core.errors import InputError


def packed(ids: list[int], size: int, prefix: tuple[int, ...], stride: int | None = None) -> list[list[int]]:
    packing, tokens = Packing(size, prefix), np.array(ids, np.int64)
    found: list[list[int]] = packing.windows(tokens, packing.starts(tokens, stride)).tolist()
    return found


@pytest.mark.parametrize(
    ("ids", "prefix", "windows"),
    [
        ([9, 1, 2, 3, 4, 5, 6, 7], (), [[9, 1, 2, 3], [4, 5, 6, 7]]),  # as the text is
        ([9, 1, 2, 3, 4, 5, 6, 7], (9,), [[9, 1, 2, 3], [9, 4, 5, 6]]),  # 7 fills no window
        ([1, 2, 3, 4, 5, 6], (9,), [[9, 1, 2, 3], [9, 4, 5, 6]]),  # held out of the middle of a text
        ([9, 1, 2, 3, 9, 4, 5, 6], (9,), [[9, 1, 2, 3], [9, 4, 5, 6]]),  # a document where a window begins
        ([9, 1, 2, 9, 3, 4, 5], (9,), [[9, 1, 2, 9], [9, 3, 4, 5]]),  # a document inside a window
        ([9, 8, 1, 2, 9, 8, 3, 4], (9, 8), [[9, 8, 1, 2], [9, 8, 3, 4]]),
        ([9, 1, 2], (9, 8), [[9, 8, 9, 1]]),  # half a prefix is text
        ([9, 9, 1, 2, 3], (9,), [[9, 9, 1, 2]]),  # of two in a row one is text
        ([], (9,), []),
        ([9], (9,), []),
    ],
)
def test_a_window_is_the_prefix_and_the_text_that_follows(
    ids: list[int], prefix: tuple[int, ...], windows: list[list[int]]
) -> None:
    assert packed(ids, 4, prefix) == windows


def test_a_stride_counts_tokens_of_the_text() -> None:
    assert packed([9, 1, 2, 3, 4, 5, 6, 7], 4, (9,), 2) == [[9, 1, 2, 3], [9, 3, 4, 5], [9, 5, 6, 7]]


@given(tokens=st.integers(0, 200), size=st.integers(2, 20), prefix=st.integers(0, 3))
def test_windows_hold_the_text_without_gaps(tokens: int, size: int, prefix: int) -> None:
    front = tuple(range(1000, 1000 + min(prefix, size - 1)))
    windows = np.array(packed(list(range(tokens)), size, front), np.int64).reshape(-1, size)
    assert (windows[:, : len(front)] == front).all()
    whole = tokens // (size - len(front)) * (size - len(front))
    assert windows[:, len(front) :].ravel().tolist() == list(range(whole))


def test_a_window_of_nothing_but_the_prefix_is_refused() -> None:
    Packing(3, (9, 8)).check("--seq-len")
    with pytest.raises(InputError) as refused:
        Packing(2, (9, 8)).check("--seq-len")
    assert str(refused.value) == (
        "--seq-len 2: leaves no token of the text in a window, which begins with the tokenizer's 2; give at least 3, "
        "or calibrate with --bos never"
    )


def test_what_a_tokenizer_puts_in_front_is_found_by_encoding(
    demo_checkpoint: Path, opening_demo: Path, shared_checkpoint: Callable[[str], Path]
) -> None:
    assert prefix_of(AutoTokenizer.from_pretrained(demo_checkpoint)) == ()
    assert prefix_of(AutoTokenizer.from_pretrained(opening_demo)) == (0,)
    for name in ("gemma", "gpt2", "llama", "mixtral", "opt", "qwen2"):
        assert prefix_of(AutoTokenizer.from_pretrained(shared_checkpoint(name))) == ()
    assert prefix_of(AutoTokenizer.from_pretrained(shared_checkpoint("stories260k"))) == (1,)


@pytest.mark.parametrize(
    ("template", "prefix"), [("$A", ()), ("a b $A c", (1, 2)), ("$A c", ()), ("a $A a", (1,)), ("a a $A", (1, 1))]
)
def test_of_what_stands_around_a_text_the_front_is_taken(template: str, prefix: tuple[int, ...]) -> None:
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("a", 1), ("b", 2), ("c", 3)])
    assert prefix_of(PreTrainedTokenizerFast(tokenizer_object=tokenizer)) == prefix


def words_alone(*words: str, opening: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of these words and no others, which puts a BOS in front."""
    tokenizer = Tokenizer(WordLevel({"<s>": 0, **{word: index + 1 for index, word in enumerate(words)}}))
    tokenizer.pre_tokenizer = Whitespace()
    if opening:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_of_a_tokenizer_that_cannot_spell_our_samples_the_users_text_tells() -> None:
    texts = ["", "known words", "words"]
    assert prefix_of(words_alone("known", "words"), texts) == (0,)
    assert prefix_of(words_alone("known", "words", opening=False), texts) == ()


def test_where_no_text_tells_what_is_put_in_front_nothing_is_calibrated_without_it() -> None:
    asked = "; give --bos never, which adds nothing to the text as it is tokenized"
    for texts in ([], ["unknown"]):
        with pytest.raises(InputError) as refused:
            prefix_of(words_alone("known"), texts)
        sample = (texts or ["The quick brown fox"])[0]
        assert str(refused.value) == (
            "--bos auto: what the tokenizer puts in front of a text cannot be told, since it cannot encode "
            f"{sample!r}: WordLevel error: Missing [UNK] token from the vocabulary{asked}"
        )


def test_tokens_in_front_of_some_texts_alone_are_refused() -> None:
    """Of a text that begins with a zero this tokenizer lacks a rule; encoded as a special token it is another."""
    opening, plain = words_alone("known"), words_alone("known", opening=False)

    class OfSome:
        def __call__(self, text: str, **options: Any) -> Any:
            return (opening if text == "known" else plain)(text, **options)

    class OfOthers:
        def __call__(self, text: str, add_special_tokens: bool, **options: Any) -> Any:
            return {"input_ids": [7, 8] if add_special_tokens else [1]}

    with pytest.raises(InputError, match="since it is not the same for 'known' and 'known known'; give --bos never, "):
        prefix_of(OfSome(), ["known", "known known"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="since special tokens change those of 'The quick brown fox'; give --bos"):
        prefix_of(OfOthers())  # type: ignore[arg-type]
