"""From documents to windows of tokens: values that can be worked out by hand, and the rule for defaults."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fp8q.calibrate.text.corpus import encode_texts, fingerprint, hold_out_tail, lower_default, windows
from fp8q.core.errors import InputError

if TYPE_CHECKING:
    from tests.calibrate.conftest import Notebook
    from tests.conftest import Texts


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> PreTrainedTokenizerBase:
    """The demo's: byte-level BPE, no special tokens around a text."""
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_checkpoint)
    return loaded


def test_the_fingerprint_is_that_of_the_bytes_and_their_numbers() -> None:
    assert fingerprint(["ab", "ü"]) == hashlib.sha256(b"\x02\0\0\0\0\0\0\0ab\x02\0\0\0\0\0\0\0\xc3\xbc").hexdigest()


def test_the_fingerprint_tells_where_documents_end() -> None:
    assert len({fingerprint(texts) for texts in (["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""])}) == 4


def test_documents_are_encoded_one_by_one_and_joined(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = ["def f(x):\n", "", "    return x\n"]
    one_by_one = [*tokenizer("def f(x):\n")["input_ids"], *tokenizer("    return x\n")["input_ids"]]
    ids = encode_texts(texts, tokenizer)
    assert ids.dtype == np.int64
    assert ids.tolist() == one_by_one
    assert tokenizer.decode(ids.tolist()) == "".join(texts)


def test_each_document_has_the_special_tokens_of_its_tokenizer(shared_checkpoint: Callable[[str], Path]) -> None:
    llama = AutoTokenizer.from_pretrained(shared_checkpoint("stories260k"))
    start = llama.bos_token_id
    ids = encode_texts(["Once", "upon"], llama)
    assert ids.tolist() == [
        start,
        *llama("Once", add_special_tokens=False)["input_ids"],
        start,
        *llama("upon", add_special_tokens=False)["input_ids"],
    ]
    assert (ids == start).sum() == 2


def test_more_documents_than_go_into_one_batch(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"line {number}\n" for number in range(10)]
    together = encode_texts(texts, tokenizer)
    monkeypatch.setattr("fp8q.calibrate.text.corpus.DOCUMENTS", 3)
    assert encode_texts(texts, tokenizer).tolist() == together.tolist()


def test_a_long_document_is_encoded_in_parts_with_the_same_tokens(
    tokenizer: PreTrainedTokenizerBase, demo_texts: "Texts", monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line.strip() for line in demo_texts.calibration.read_text(encoding="utf-8")[:30_000].splitlines()]
    texts = ["\n".join(lines), "x = 1\n", "", "no end of a line in sight " * 10]
    whole = encode_texts(texts, tokenizer)
    monkeypatch.setattr("fp8q.calibrate.text.corpus.CHARACTERS", 2_000)
    assert encode_texts(texts, tokenizer).tolist() == whole.tolist()
    monkeypatch.setattr("fp8q.calibrate.text.corpus.CHARACTERS", 100)
    assert tokenizer.decode(encode_texts(texts, tokenizer).tolist()) == "".join(texts)


def test_only_the_first_part_of_a_document_has_special_tokens(
    shared_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = AutoTokenizer.from_pretrained(shared_checkpoint("stories260k"))
    monkeypatch.setattr("fp8q.calibrate.text.corpus.CHARACTERS", 20)
    assert (encode_texts(["Once upon a time\n" * 5, "The end"], llama) == llama.bos_token_id).sum() == 2


def test_special_tokens_may_be_left_out(shared_checkpoint: Callable[[str], Path]) -> None:
    llama = AutoTokenizer.from_pretrained(shared_checkpoint("stories260k"))
    assert (encode_texts(["Once", "upon"], llama, special_tokens=False) == llama.bos_token_id).sum() == 0


def test_a_text_longer_than_the_model_takes_is_encoded_without_a_word(
    tokenizer: PreTrainedTokenizerBase, capfd: pytest.CaptureFixture[str]
) -> None:
    assert tokenizer.model_max_length == 512
    assert len(encode_texts(["x = 1\n" * 1000], tokenizer)) > 512
    assert capfd.readouterr() == ("", "")


def test_no_text_has_no_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_texts([], tokenizer).shape == encode_texts([""], tokenizer).shape == (0,)


def test_a_vocabulary_that_cannot_spell_the_text_is_refused() -> None:
    words = Tokenizer(WordLevel({"known": 0}))
    words.pre_tokenizer = Whitespace()
    foreign = PreTrainedTokenizerFast(tokenizer_object=words)
    assert encode_texts(["known known"], foreign).tolist() == [0, 0]
    with pytest.raises(InputError) as refused:
        encode_texts(["known unknown"], foreign)
    assert str(refused.value) == (
        "the tokenizer cannot read the text: WordLevel error: Missing [UNK] token from the vocabulary; put the "
        "tokenizer the model was trained with beside config.json"
    )


def test_a_token_that_the_embedding_lacks_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = encode_texts(["import os"], tokenizer)
    highest = int(ids.max())
    assert encode_texts(["import os"], tokenizer, highest + 1).tolist() == ids.tolist()
    with pytest.raises(InputError) as refused:
        encode_texts(["import os"], tokenizer, highest)
    token = tokenizer.convert_ids_to_tokens(highest)
    assert str(refused.value) == (
        f"the tokenizer gives {token!r} the id {highest:,}, and the model's embedding ends at {highest - 1:,}: it is "
        "not this model's tokenizer; put the right one beside config.json"
    )


@pytest.mark.parametrize(("tokens", "held_out"), [(9, 0), (10, 1), (19, 1), (20, 2), (30, 3), (1_000_000, 100_000)])
def test_the_last_tenth_is_held_out(tokens: int, held_out: int) -> None:
    ids = np.arange(tokens)
    calibration, evaluation = hold_out_tail(ids)
    assert len(evaluation) == held_out
    assert np.concatenate([calibration, evaluation]).tolist() == ids.tolist()


def test_windows_are_cut_one_after_the_other_and_the_rest_is_left_out() -> None:
    assert windows(np.arange(11), 3, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_fewer_windows_are_spread_over_the_text() -> None:
    assert windows(np.arange(20), 2, 4).tolist() == [[0, 1], [4, 5], [10, 11], [14, 15]]  # windows 0, 2, 5, 7 of 10


@given(tokens=st.integers(1, 500), seq_len=st.integers(1, 20), data=st.data())
def test_windows_never_overlap_and_stay_in_order(tokens: int, seq_len: int, data: st.DataObject) -> None:
    tokens += seq_len
    count = data.draw(st.integers(1, tokens // seq_len))
    cut = windows(np.arange(tokens), seq_len, count)
    assert cut.shape == (count, seq_len)
    assert (np.diff(cut, axis=1) == 1).all()
    assert (np.diff(cut[:, 0]) >= seq_len).all()
    assert (cut[:, 0] % seq_len == 0).all()


def test_a_seed_draws_the_windows() -> None:
    ids = np.arange(20)
    # As drawn on NumPy 2.4: the raw output of a bit generator is the same in every version (NEP 19).
    assert windows(ids, 2, 4, seed=(1, 0))[:, 0].tolist() == [4, 0, 2, 8]
    assert windows(ids, 2, 4, seed=(1, 0)).tolist() == windows(ids, 2, 4, seed=(1, 0)).tolist()
    assert len({tuple(windows(ids, 2, 4, seed=seed)[:, 0].tolist()) for seed in ((1, 0), (2, 0), (1, 1))}) == 3


@given(available=st.integers(1, 50), seed=st.integers(0, 2**40), data=st.data())
def test_a_seed_draws_each_window_once(available: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, available))
    drawn = windows(np.arange(3 * available + 2), 3, count, seed=(seed, 0))
    assert len(set(drawn[:, 0].tolist())) == count
    assert (drawn[:, 0] % 3 == 0).all()
    assert (np.diff(drawn, axis=1) == 1).all()


def test_a_text_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(InputError) as refused:
        windows(np.arange(1023), 1024, 1)
    assert (
        str(refused.value)
        == "the text has 1,023 tokens, and one window needs 1,024; give more text, or a smaller --seq-len"
    )


def test_more_windows_than_the_text_has_are_refused() -> None:
    with pytest.raises(InputError) as refused:
        windows(np.arange(6143), 512, 12)
    assert (
        str(refused.value)
        == "--samples 12: the text has 11 windows of 512 tokens; give more text, or a smaller --samples or --seq-len"
    )


def test_a_default_that_fits_is_taken_in_silence(report: "Notebook") -> None:
    assert lower_default("--seq-len", None, 2048, 2048, "the model's positions", report) == 2048
    assert lower_default("--seq-len", None, 2048, None, "the model's positions", report) == 2048
    assert report.lines == []


def test_a_default_that_does_not_fit_is_lowered_with_a_note(report: "Notebook") -> None:
    assert lower_default("--seq-len", None, 2048, 512, "the model's positions", report) == 512
    assert report.lines == ["--seq-len: the default 2,048 is lowered to 512, the model's positions"]


def test_what_was_asked_for_is_taken_or_refused_but_never_changed(report: "Notebook") -> None:
    assert lower_default("--seq-len", 512, 2048, 512, "the model's positions", report) == 512
    assert lower_default("--seq-len", 4096, 2048, None, "the model's positions", report) == 4096
    with pytest.raises(InputError) as refused:
        lower_default("--seq-len", 1024, 2048, 512, "the model's positions", report)
    assert (
        str(refused.value)
        == "--seq-len 1,024: is more than 512, the model's positions; ask for at most that, or leave it out"
    )
    assert report.lines == []
