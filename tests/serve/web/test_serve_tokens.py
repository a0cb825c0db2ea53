"""What `fp8q serve` says of the tokens of an answer, by a byte-level and a SentencePiece-like tokenizer of 16 tokens.

transformers is the oracle: its decoded prefixes, and the ids that it makes of a chat.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from fp8q.options import GenerateOptions
from fp8q.stages.generate import open_chat
from tests.serve.counting_model import END, make_counting_run
from tests.serve.web.started_server import Thread, in_thread

if TYPE_CHECKING:
    from fp8q.core.run import Run

STOP = "<|im_end|>"
#: Three tokens whose text is "a" by itself, é and a space by their bytes, and what is put in front of a text.
PIECES = [
    "<unk>",
    "<s>",
    "▁",
    "a",
    "b",
    "▁a",
    "▁b",
    "ab",
    STOP,
    "<0x61>",
    "<0xC3>",
    "<0xA9>",
    "<0x20>",
    "▁ab",
    "c",
    "</s>",
]
#: é and 😀 in two tokens, of which each has the text U+FFFD by itself.
BYTES = ["a", "b", "Ġ", "Ġa", "Ġb", "ab", "Ã", "©", STOP, "c", "ðŁ", "ĺĢ", "!", "Ġab", "<s>", "</s>"]
#: Templates that write a BOS, and that write none.
TEMPLATES = {
    "none": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "own": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
}


def sentencepiece() -> Tokenizer:
    """▁ for spaces, of which the decoder drops the first one of a text; bytes for what has no token."""
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(
        BPE({token: i for i, token in enumerate(PIECES)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", STOP, "</s>"])
    return tokenizer


def byte_level() -> Tokenizer:
    """GPT-2's kind, without most of the bytes."""
    merges = [("Ġ", "a"), ("Ġ", "b"), ("a", "b"), ("Ġa", "b")]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(BYTES)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([STOP, "<s>", "</s>"])
    return tokenizer


def opening(tokenizer: Tokenizer) -> Tokenizer:
    """Have it put BOS in front of a text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {"sentencepiece": sentencepiece, "byte-level": byte_level}


@dataclass(frozen=True)
class Kind:
    """A server of the counting model with a tokenizer, and transformers' reading of that."""

    run: Run
    server: Thread
    oracle: PreTrainedTokenizerFast

    def token(self, name: str) -> int:
        return self.oracle.get_vocab()[name]

    @property
    def bytes_of_e(self) -> list[int]:
        """The tokens that é is."""
        names = ("Ã", "©") if "©" in self.oracle.get_vocab() else ("<0xC3>", "<0xA9>")
        return [self.token(name) for name in names]

    def decode(self, ids: list[int]) -> str:
        return str(self.oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def ask(self, ids: list[int] | str, **fields: Any) -> dict[str, Any]:
        asked = {"prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
        answer = self.server.post(**asked)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        said = [{"role": "user", "content": text}]
        asked = {"messages": said, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
        answer = self.server.post("/v1/chat/completions", **asked)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    def produced(self, ids: list[int], count: int = 12) -> list[int]:
        """The tokens of the greedy answer, without the server."""
        whole = list(ids)
        for _ in range(count):
            whole.append(sum(token * (1 + position % 3) for position, token in enumerate(whole)) % 16)
        return whole[len(ids) :]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    folder, tokenizer = tmp_path_factory.mktemp("tokens"), opening(KINDS[request.param]())
    run = make_counting_run(folder / "run", 64, tokenizer)
    template = folder / "none.jinja"
    template.write_text(TEMPLATES["none"])
    oracle = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    with in_thread(run.root, name="counting", template=template) as server:
        yield Kind(run, server, oracle)


def prompts(kind: Kind, count: int = 60) -> list[list[int]]:
    """Random ids, and with the first byte of é behind them."""
    drawn = random.Random(5)
    found = [[drawn.randrange(16) for _ in range(drawn.randint(1, 9))] for _ in range(count)]
    return [*found, *([*each, kind.bytes_of_e[0]] for each in found)]


def complete(text: str) -> str:
    """A text without a part of a character at its end."""
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def test_every_position_lists_as_many_as_were_asked_for_and_no_two_tokens_by_one_name(kind: Kind) -> None:
    """By the logits of the counting model: the tokens nearest to the next one, by id."""
    renamed = 0
    for ids in prompts(kind, 20):
        listed = kind.ask(ids, logprobs=12, temperature=1, seed=1)["logprobs"]
        for token, own, top in zip(
            *(listed[name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            assert len(top) == 12
            assert top.get(token, own) == own
            by_text: dict[str, list[float]] = {}
            for name, logprob in top.items():
                number = int(name.removeprefix("token_id:")) if name.startswith("token_id:") else None
                text = name if number is None else str(kind.oracle.decode([number]))
                by_text.setdefault(text, []).append(logprob)
                renamed += number is not None
                assert (number is None) == (len(by_text[text]) == 1)
            assert all(each == sorted(each, reverse=True) for each in by_text.values())
    assert renamed > 20


def test_text_offsets_are_those_in_the_text(kind: Kind) -> None:
    for ids in prompts(kind):
        choice, produced = kind.ask(ids, logprobs=0), kind.produced(ids)
        begin = len(complete(kind.decode(ids)))
        whole = kind.decode(ids + produced)
        prefixes = [complete(kind.decode(ids + produced[:count])) for count in range(len(produced))]
        if "\N{REPLACEMENT CHARACTER}" not in whole:
            assert choice["text"] == whole[begin:]
            assert choice["logprobs"]["text_offset"] == [max(0, len(each) - begin) for each in prefixes]


@pytest.mark.parametrize("text", ["ab a", " b", "c"])
def test_those_of_an_echoed_prompt_too(kind: Kind, text: str) -> None:
    """A BOS that the tokenizer puts in front of a text is no part of it; ids have all that they are."""
    ids: list[int] = kind.oracle(text)["input_ids"]
    read = [str(kind.oracle.decode(ids[:count])) for count in range(len(ids) + 1)]
    for prompt, begin in ((text, read[-1].index(text)), (ids, 0)):
        choice = kind.ask(prompt, echo=True, logprobs=0, max_tokens=1)
        assert choice["logprobs"]["text_offset"] == [max(0, len(each) - begin) for each in read]
        assert choice["text"].startswith(text if isinstance(prompt, str) else read[-1])


def test_a_text_that_decoding_does_not_give_again_is_told_by_its_tokenizer(kind: Kind) -> None:
    """A SentencePiece-like one writes a space behind a special token: `<s>`, a, `<|im_end|>` and b of this text."""
    choice = kind.ask(f"a{STOP}b", echo=True, logprobs=0, max_tokens=1)
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 11, 12]


def test_the_bytes_of_a_chats_tokens_are_its_text(kind: Kind) -> None:
    spaces = compared = 0
    for text in ("a", "b", "ab", "a b", "b a c", "c", "ab ab", "c a", "a c", "b b"):
        choice = kind.chat(text, logprobs=True, top_logprobs=3)["choices"][0]
        joined = b"".join(bytes(each["bytes"] or []) for each in choice["logprobs"]["content"])
        content = choice["message"]["content"]
        assert (
            joined.decode(errors="replace").replace("\N{REPLACEMENT CHARACTER}", "")
            == content.replace("\N{REPLACEMENT CHARACTER}", "")
            or "\N{REPLACEMENT CHARACTER}" in content
        )
        if "\N{REPLACEMENT CHARACTER}" not in content:
            assert joined.decode() == content
            compared += 1
            spaces += " " in content
    assert compared > 2
    assert spaces > 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_the_ids_that_transformers_makes_of_it(kind: Kind, name: str, tmp_path: Path) -> None:
    """In `serve` and `generate --chat`: with the BOS that its template writes, or with none."""
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATES[name])
    said = [{"role": "user", "content": "ab a"}]
    made: Any = kind.oracle.apply_chat_template(said, chat_template=TEMPLATES[name], return_dict=False)
    ids: list[int] = made
    assert ids.count(kind.token("<s>")) == (name == "own")
    expected = kind.ask(ids)["text"]
    with in_thread(kind.run.root, name="counting", template=template) as server:
        found = Kind(kind.run, server, kind.oracle).chat("ab a")
    assert found["usage"]["prompt_tokens"] == len(ids)
    assert found["choices"][0]["message"]["content"] == expected
    chat = open_chat(kind.run, GenerateOptions(max_tokens=12, template=template))
    answer = chat.ask("ab a", lambda _: None)
    produced = kind.produced(ids)
    ended = produced[: produced.index(END) + 1] if END in produced else produced
    assert (answer.input_tokens, list(answer.tokens)) == (len(ids), ended)


def test_an_answer_begins_with_the_character_that_its_prompt_ends_within(kind: Kind) -> None:
    first, last = kind.bytes_of_e
    letters = [kind.token("a"), kind.token("b"), kind.token("c")]
    begun = next(
        [a, b, c, first]
        for a in range(16)
        for b in letters
        for c in letters
        if kind.produced([a, b, c, first], 1) == [last]
    )
    answer = kind.ask(begun, max_tokens=1)
    assert answer["text"] == "é"
    assert kind.ask(begun, max_tokens=1, echo=True)["text"].endswith(kind.decode(begun)[:-1] + "é")


def test_a_special_token_stops_where_it_is_a_stop_word(kind: Kind) -> None:
    """By itself, within a longer one, and among others; it is never shown."""
    stop = kind.token(STOP)
    for begun in prompts(kind, 400):
        produced = kind.produced(begun)
        at = produced.index(stop) if stop in produced else 0
        before = kind.decode(begun + produced[:at])[len(kind.decode(begun)) :]
        if at and before and "\N{REPLACEMENT CHARACTER}" not in kind.decode(begun + produced[:at]):
            break
    free = kind.ask(begun, logprobs=0)
    for words in (STOP, ["never", STOP], f"{before[-1]}{STOP}", "im_end"):
        choice = kind.ask(begun, stop=words, logprobs=0)
        cut = before[:-1] if words == f"{before[-1]}{STOP}" else before
        assert (choice["text"], choice["finish_reason"]) == (cut, "stop")
        assert len(choice["logprobs"]["tokens"]) == at + 1
    for words in (f"{STOP}never", "never"):
        assert kind.ask(begun, stop=words, logprobs=0) == free
