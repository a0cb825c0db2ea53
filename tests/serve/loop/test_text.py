import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from fp8q.calibrate.checkpoint import config_fields
from fp8q.serve.loop.text import POSITIONS, ModelFileError, TextStream, Vocabulary, beginning, special_tokens

WORDS = ["the", "he", "in", "Ġt", "Ġa"]
MERGES = [("h", "e"), ("t", "he"), ("i", "n"), ("Ġ", "t"), ("Ġ", "a")]


def byte_level() -> Tokenizer:
    """A GPT-style tokenizer: every byte is a token, and a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate([*alphabet, *WORDS])}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A Llama-style tokenizer: ▁ for spaces, the decoder drops the first one, and bytes for what has no token."""
    tokens = ["<unk>", "<s>", "▁", "a", "b", "▁a", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        BPE(
            {token: i for i, token in enumerate(tokens)},
            [("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


BYTES, FALLBACK = byte_level(), byte_fallback()


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    """The ids of tokens that the vocabulary has."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in tokens]


def stream(tokenizer: Tokenizer, prompt: str, tokens: Sequence[int], stop_words: Sequence[str] = ()) -> list[str]:
    """The pieces, what is flushed last; as the loop does, no token is pushed after the stop."""
    text = TextStream(tokenizer, tokenizer.encode(prompt).ids, stop_words)
    pieces = []
    for token in tokens:
        pieces.append(text.push(token))
        if text.stopped:
            break
    return [*pieces, text.flush()]


def test_a_character_comes_out_with_its_last_byte() -> None:
    tokens = BYTES.encode("é😀!").ids
    assert len(tokens) == 7
    assert stream(BYTES, "x", tokens) == ["", "é", "", "", "", "😀", "!", ""]
    tokens = ids_of(FALLBACK, [f"<0x{byte:02X}>" for byte in "😀😀".encode()])
    assert stream(FALLBACK, "a", tokens) == ["", "", "", "😀", "", "", "", "😀", ""]


def test_a_character_that_is_never_finished_is_flushed_as_one_that_is_none() -> None:
    assert stream(BYTES, "x", BYTES.encode("a😀").ids[:3]) == ["a", "", "", "�"]


def test_a_leading_space_is_kept_after_a_prompt() -> None:
    assert stream(FALLBACK, "ab", FALLBACK.encode("a b", add_special_tokens=False).ids) == [" a", " ", "b", ""]


def test_special_tokens_leave_no_text_and_no_gap() -> None:
    ids = ids_of(FALLBACK, ["▁a", "<s>", "▁a", "b"])
    assert stream(FALLBACK, "ab", ids) == [" a", "", " a", "b", ""]


@given(st.text("thein aé😀"), st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=24))
def test_the_pieces_of_any_tokens_are_their_bytes_decoded(prompt: str, tokens: list[int]) -> None:
    whole: str = BYTES.decode(BYTES.encode(prompt).ids + tokens)
    assert "".join(stream(BYTES, prompt, tokens)) == whole[len(prompt) :]


@given(st.text("ab é😀", min_size=1), st.text("ab é😀", min_size=1))
def test_the_pieces_of_a_text_are_the_text(prompt: str, text: str) -> None:
    tokens = FALLBACK.encode(
        text, add_special_tokens=False
    ).ids  # begins with the ▁ that the normalizer puts before a text
    assert "".join(stream(FALLBACK, prompt, tokens)) == f" {text}"


@given(st.lists(st.integers(0, FALLBACK.get_vocab_size() - 1), max_size=24))
def test_bytes_that_are_no_text_break_nothing(tokens: list[int]) -> None:
    assert isinstance("".join(stream(FALLBACK, "a", tokens)), str)


@pytest.mark.parametrize(
    ("stop_words", "pieces"),
    [
        ([], ["a", " ", "b", " ", "c", ""]),
        (["b"], ["a", " ", "", ""]),
        (["b c"], ["a", " ", "", "", "", ""]),
        (["b d"], ["a", " ", "", "", "b c", ""]),
        (["c d"], ["a", " ", "b", " ", "", "c"]),
        (["c", " b c"], ["a", "", "", "", "", ""]),
        (["b c", " "], ["a", "", ""]),
        (["zzzzzzzzzzzz"], ["a", " ", "b", " ", "c", ""]),
    ],
)
def test_text_ends_before_the_first_stop_word_and_nothing_of_one_slips_out(
    stop_words: list[str], pieces: list[str]
) -> None:
    tokens = ids_of(BYTES, ["a", "Ġ", "b", "Ġ", "c"])
    assert stream(BYTES, "x", tokens, stop_words) == pieces


@given(st.text("ab ", max_size=12), st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3))
def test_stop_words_cut_the_stream_where_they_would_cut_the_text(text: str, stop_words: list[str]) -> None:
    """The first to be complete stops; of several complete at the same token, the one that begins first cuts."""
    expected = text
    for end in range(len(text) + 1):
        found = [at for at in (text[:end].find(word) for word in stop_words) if at >= 0]
        if found:
            expected = text[: min(found)]
            break
    tokens = ids_of(BYTES, ["Ġ" if character == " " else character for character in text])
    assert "".join(stream(BYTES, "x", tokens, stop_words)) == expected


@pytest.mark.parametrize(
    ("text", "word", "length"),
    [("ab", "abc", 2), ("abc", "abc", 0), ("aab", "ab", 0), ("aa", "aab", 2), ("xa", "ab", 1), ("", "a", 0)],
)
def test_the_beginning_of_a_stop_word_is_the_longest(text: str, word: str, length: int) -> None:
    assert beginning(text, word) == length


def write(directory: Path, tokenizer: Tokenizer = FALLBACK, **documents: Any) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in documents.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("config", "generation_config", "end"),
    [
        ({"eos_token_id": 5}, None, {5}),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 7]}, {6, 7}),
        ({"eos_token_id": 5}, {"temperature": 1}, {5}),
        ({}, None, set()),
    ],
)
def test_the_tokens_that_end_a_text_come_from_the_generation_config_first(
    tmp_path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None, end: set[int]
) -> None:
    documents = {"config": {"max_position_embeddings": 9} | config} | (
        {"generation_config": generation_config} if generation_config else {}
    )
    vocabulary = Vocabulary.read(write(tmp_path, **documents))
    assert vocabulary.end == end
    assert vocabulary.positions == 9


@pytest.mark.parametrize(
    ("config", "older", "named"),
    [
        ({"eos_token": "</s>"}, None, {"eos_token": "</s>"}),
        ({"eos_token": {"__type": "AddedToken", "content": "</s>"}}, None, {"eos_token": "</s>"}),
        ({"eos_token": None}, {"eos_token": {"content": "</s>", "lstrip": False}}, {"eos_token": "</s>"}),
        ({"eos_token": "a"}, {"eos_token": "</s>"}, {"eos_token": "</s>"}),
        ({"eos_token": "</s>"}, {"eos_token": None}, {}),
        ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": "a"}, {"eos_token": "</s>"}),
        (None, {"eos_token": "</s>"}, {"eos_token": "</s>"}),
        ({"extra_special_tokens": {"image_token": "<s>"}, "add_bos_token": True}, None, {"image_token": "<s>"}),
        ({"image_token": "<s>", "extra_special_tokens": ["</s>"]}, {"image_token": "a"}, {"image_token": "<s>"}),
    ],
)
def test_special_tokens_are_those_that_transformers_reads_of_the_files(
    tmp_path: Path, config: dict[str, Any] | None, older: dict[str, Any] | None, named: dict[str, str]
) -> None:
    for name, fields in (("tokenizer_config.json", config), ("special_tokens_map.json", older)):
        if fields is not None:
            (tmp_path / name).write_text(json.dumps(fields))
    assert special_tokens(tmp_path) == named


@pytest.mark.parametrize(
    ("ends", "end"), [({}, {2}), ({"eos_token_id": 5}, {2, 5}), ({"eos_token_id": [2, 6]}, {2, 6})]
)
def test_an_answer_ends_at_the_tokenizers_own_token_too(tmp_path: Path, ends: dict[str, Any], end: set[int]) -> None:
    assert FALLBACK.token_to_id("▁") == 2
    files: dict[str, Any] = {"config": {"max_position_embeddings": 9} | ends, "special_tokens_map": {"eos_token": "▁"}}
    assert Vocabulary.read(write(tmp_path, **files)).end == end


def test_the_positions_of_a_text_model_within_another_are_found(tmp_path: Path) -> None:
    assert Vocabulary.read(write(tmp_path, config={"text_config": {"max_position_embeddings": 77}})).positions == 77


def test_a_prompt_begins_once(tmp_path: Path) -> None:
    vocabulary = Vocabulary.read(write(tmp_path, config={"max_position_embeddings": 9, "bos_token_id": 1}))
    a = FALLBACK.token_to_id("▁a")
    assert vocabulary.encode("a") == [1, a]
    assert FALLBACK.encode("<s>a").ids.count(1) == 2
    assert vocabulary.encode("<s>a").count(1) == 1


def test_a_tokenizer_saved_with_truncation_and_padding_does_neither(tmp_path: Path) -> None:
    tokenizer = byte_fallback()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    vocabulary = Vocabulary.read(write(tmp_path, tokenizer, config={"max_position_embeddings": 9}))
    assert len(vocabulary.encode("a")) == 2
    assert len(vocabulary.encode("a b a b a b")) > 4


@pytest.mark.parametrize("key", ["n_positions", "max_position_embeddings", "n_ctx"])
def test_originals_call_the_number_of_positions_otherwise(tmp_path: Path, key: str) -> None:
    tokenizer = Tokenizer(BPE({"a": 0}, []))
    assert Vocabulary.read(write(tmp_path, tokenizer, config={key: 9, "text_config": None})).positions == 9


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def message() -> str:
        with pytest.raises(ModelFileError) as raised:
            Vocabulary.read(tmp_path)
        return str(raised.value)

    config, tokenizer = tmp_path / "config.json", tmp_path / "tokenizer.json"
    assert message() == f"{config}: there is no such file; copy it from the model"
    config.write_text("{")
    assert message() == (
        f"{config}: is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)); "
        "copy it again from the model"
    )
    config.write_text("[]")
    assert message() == f"{config}: holds no JSON object; copy it again from the model"
    for fields in ({}, {"text_config": []}, *({"max_position_embeddings": number} for number in (0, "9", 2**31))):
        config.write_text(json.dumps(fields))
        assert message() == f"{config}: names no number of positions; add max_position_embeddings"
    config.write_text("[" * 100_000)
    assert message().startswith(f"{config}: is not JSON (maximum recursion depth exceeded")
    config.write_text('{"max_position_embeddings": 9, "eos_token_id": [1, "</s>"]}')
    assert message() == (
        f"{tmp_path}: its eos_token_id is \"[1, '</s>']\", and no token id or list of them; mend it in "
        "generation_config.json or config.json"
    )
    config.write_text('{"max_position_embeddings": 9}')
    assert message() == f"{tokenizer}: there is no such file; copy it from the model"
    tokenizer.write_text("{}")
    assert message().startswith(f"{tokenizer}: tokenizers cannot read it (")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert message() == (
        f"{tokenizer}: the library that reads it is missing (import of tokenizers halted; None in sys.modules); "
        "install it with `pip install tokenizers`"
    )


def test_positions_have_the_names_that_calibration_knows() -> None:
    """The loop is copied without fp8q, and so has a list of its own."""
    assert POSITIONS == config_fields.POSITIONS
