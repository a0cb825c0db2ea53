"""Convert text to tokens and back: the tokenizer, the token ids in the model's JSON files, and incremental
detokenization.

A token is not a piece of text: a character may take four tokens, and a decoder drops or adds spaces depending on the
neighbours. So the stream decodes a short window that begins with tokens whose text is out already, and returns the text
behind it. A character with missing bytes decodes to U+FFFD, so these are held back at the end. (All of them: a
byte-fallback decoder turns a whole run of bytes into U+FFFD, good characters too, while the last is incomplete.)
Possible beginnings of stop words are held back too. Special tokens are no part of the text, but a stop word may be one
(`<|im_end|>`): they are sought where they stand, and never shown.

Copied unchanged into Triton repositories: imports only tokenizers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Tokens of a prompt that the first characters of the answer are decoded with.
NEIGHBOURS = 32
#: The number of positions a model was made for: the first is how every config.json that fp8q writes has it, the others
#: are how originals call it, with which checkpoints are compared.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
#: fp8q's own field there: the number of positions that its graphs serve, if that is less.
FP8Q_FIELDS = "fp8q"
MOST_POSITIONS = 2**31 - 1
#: The special tokens that any tokenizer may have.
EVERY_TOKENIZERS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: The bytes of an incomplete character.
MOST_MISSING = 3
#: A byte as byte-fallback tokenizers name it.
BYTE = re.compile("<0x[0-9A-F]{2}>")


def _byte_alphabet() -> dict[str, int]:
    """The characters for bytes in the vocabularies of GPT-2 and its kind: printable bytes stand for themselves, the
    others for 256 and up.
    """
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


ALPHABET = _byte_alphabet()


class ModelFileError(ValueError):
    """A file beside the model's weights is missing or lacks what generation needs.

    The parts are those of `core.errors`, which a Triton repository does not have.
    """

    def __init__(self, subject: Path, fault: str, remedy: str):
        """Store the parts."""
        super().__init__(subject, fault, remedy)
        self.subject = str(subject)
        self.fault = fault
        self.remedy = remedy

    def __str__(self) -> str:
        """Render the error as one line."""
        return f"{self.subject}: {self.fault}; {self.remedy}"


@dataclass(frozen=True)
class Vocabulary:
    """The parts of a model that the loop needs besides the graph: tokenizer, ids that begin and end a text, number of
    positions.
    """

    tokenizer: "Tokenizer"
    begin: int | None
    end: frozenset[int]
    positions: int

    @classmethod
    def read(cls, directory: Path) -> "Vocabulary":
        """Read tokenizer.json and config.json in `directory` and, where they are there, generation_config.json and what
        names special tokens.

        An answer ends at the tokens that generation_config.json names, or else config.json, and at the tokenizer's
        eos_token, as in vLLM.

        Raises ModelFileError when a file is missing or damaged, or config.json names no number of positions.
        """
        config = directory / "config.json"
        generation = directory / "generation_config.json"
        fields = _read_json(config)
        text = fields.get("text_config") or fields  # models of text and images keep the language model's numbers there
        tokens = text if isinstance(text, dict) else {}
        tokens = tokens | fields | (_read_json(generation) if generation.is_file() else {})
        stated = [text[key] for key in POSITIONS if text.get(key) is not None] if isinstance(text, dict) else []
        positions = stated[0] if stated else None
        if not isinstance(positions, int) or not 0 < positions <= MOST_POSITIONS:
            raise ModelFileError(config, "names no number of positions", f"add {POSITIONS[0]}")
        fp8q_fields = fields.get(FP8Q_FIELDS)
        served = fp8q_fields.get("positions") if isinstance(fp8q_fields, dict) else None
        positions = min(positions, served) if isinstance(served, int) else positions
        begin, end = (_token_ids(tokens, name, directory) for name in ("bos_token_id", "eos_token_id"))
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
        named = special_tokens(directory).get("eos_token")
        if named and (token := tokenizer.token_to_id(named)) is not None:
            end.append(token)
        return cls(tokenizer, begin[0] if begin else None, frozenset(end), positions)

    def encode(self, prompt: str, special_tokens: bool = True) -> list[int]:
        """Token ids of `prompt`, with the `special_tokens` that the tokenizer puts around a text.

        A text that begins with the beginning-of-text token itself is not given a second one. A chat's template writes
        all of its special tokens, and its text gets no others, as transformers' `apply_chat_template` has it.
        """
        # other threads go on meanwhile
        ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=special_tokens).ids
        if special_tokens and self.begin is not None and ids[:2] == [self.begin] * 2:
            return ids[1:]
        return ids

    @cached_property
    def special(self) -> Mapping[int, str]:
        """The special tokens, by id, as texts spell them."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token: token_text.content for token, token_text in added.items() if token_text.special}

    @cached_property
    def _bytes(self) -> dict[int, bytes | None]:
        return {}

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special ones too."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        """The text of one token by itself, as lists of log-probabilities show it; bytes that are no text as U+FFFD."""
        return self.text([token])

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that `token` adds within a text, where a SentencePiece decoder writes the space in front of it.

        None for a special token, which adds none, and where a part of a character is not known by its bytes.
        """
        if token not in self._bytes:
            self._bytes[token] = None if token in self.special else self._bytes_of(token)
        return self._bytes[token]

    def _bytes_of(self, token: int) -> bytes | None:
        text = self.token_text(token)
        if REPLACEMENT not in text:
            return self.text([token, token])[len(text) :].encode()
        name = self.tokenizer.id_to_token(token) or ""
        if BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        if name and set(name) <= set(ALPHABET):
            return bytes(ALPHABET[letter] for letter in name)
        return None

    def offsets_in(self, prompt: str, tokens: Sequence[int]) -> list[int]:
        """The offset in `prompt`, in characters, of each of its `tokens`; 0 for a BOS that the tokenizer added.

        Decoding need not return the prompt (spaces behind special tokens, a normalizer): then the tokenizer's own
        offsets count.
        """
        begin = self.text(tokens).find(prompt)
        if begin >= 0:
            return [min(max(0, offset - begin), len(prompt)) for offset in self.offsets(tokens)[:-1]]
        starts = [start for start, _ in self.tokenizer.encode(prompt).offsets]
        return starts[len(starts) - len(tokens) :]

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """The offset of each of `tokens` in `text(tokens)`, in characters; of a part of a character, that of the whole.

        The last number is where a token behind them would begin.
        """
        text = TextStream(self.tokenizer, (), skip_special_tokens=False)
        offsets = [0]
        for token in tokens:
            text.push(token)
            offsets.append(text.characters)
        return offsets


def special_tokens(directory: Path) -> dict[str, str]:
    """Name (`bos_token`, `image_token`) -> text of the special tokens of the tokenizer in `directory`, as transformers
    reads them of its files.

    They are in tokenizer_config.json. special_tokens_map.json, which older versions wrote, goes before it unless that
    lists `added_tokens_decoder`, too. Those that a class of transformers has by default `fp8q calibrate` writes there.
    Raises ModelFileError for a file that does not read.
    """
    config, older = (
        _read_json(directory / name) if (directory / name).is_file() else {}
        for name in ("tokenizer_config.json", "special_tokens_map.json")
    )
    files = (config,) if "added_tokens_decoder" in config else (config, older)
    named = {name: value for fields in files for name, value in fields.items() if name.endswith("_token")}
    named |= {name: value for name, value in config.items() if name in named and _is_own(name, value)}
    for more in (fields.get("extra_special_tokens") for fields in files):
        named |= more if isinstance(more, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _is_own(name: str, value: object) -> bool:
    """Tell whether a field is a token that this model's tokenizer alone has, which the older file does not change."""
    return name not in EVERY_TOKENIZERS and isinstance(value, str)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():  # a pipe would be waited for
        raise ModelFileError(path, "there is no such file", "copy it from the model")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # brackets without end
        raise ModelFileError(path, f"is not JSON ({error})", "copy it again from the model") from None
    if not isinstance(content, dict):
        raise ModelFileError(path, "holds no JSON object", "copy it again from the model")
    return content


def _read_tokenizer(path: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ModelFileError(
            path, f"the library that reads it is missing ({error})", "install it with `pip install tokenizers`"
        ) from error
    if not path.is_file():
        raise ModelFileError(path, "there is no such file", "copy it from the model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no class of its own
        raise ModelFileError(path, f"tokenizers cannot read it ({error})", "copy it again from the model") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_ids(fields: dict[str, Any], name: str, directory: Path) -> list[int]:
    """Read the token ids in a field that may hold one id, a list of ids, or nothing."""
    value = fields.get(name)
    ids = [*value] if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ModelFileError(
            directory,
            f"its {name} is {str(value)[:60]!r}, and no token id or list of them",
            "mend it in generation_config.json or config.json",
        )
    return ids


class TextStream:
    """The text of one request, token by token: the pieces put together are the text, up to the first stop word.

    `stopped` becomes true with the token that completes a stop word; neither it nor what follows is part of the text.
    `added`: the text that the last token added, whether or not it may be the beginning of a stop word; `characters`:
    the number of characters that all tokens added.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt: Sequence[int],
        stop_words: Sequence[str] = (),
        lengths: dict[int, int] | None = None,
        special: Mapping[int, str] = MappingProxyType({}),
        skip_special_tokens: bool = True,
    ):
        """Begin after `prompt`, whose text is the neighbour of the first token.

        `lengths`: how many characters single tokens are, as far as that is known; the streams of one tokenizer share
        it, since half of all that is decoded is the last token by itself. `special`: the texts of special tokens, which
        stop words may hold; `skip_special_tokens`: they are no part of the text.
        """
        self.stopped = False
        self.added = ""
        self.characters = 0
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stop_words = stop_words
        self._special = special
        self._window = neighbours(tokenizer, prompt)
        text = self._decode()
        self._emitted = len(text)
        self._broken = text if text.endswith(REPLACEMENT) else ""
        self._complete = self._complete_length(text) if self._broken else self._emitted
        self._lengths = {} if lengths is None else lengths
        self._fresh = list(self._window) if self._broken else []
        self._pending: list[tuple[str, bool]] = []

    def _decode(self) -> str:
        return self._text(self._window)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip))

    def _complete_length(self, text: str) -> int:
        """Count the characters of the window's `text` that are complete, where it ends within one.

        A byte-fallback decoder turns complete characters into U+FFFD too, as long as a byte behind them is missing:
        they are counted without the last tokens.
        """
        shorter = (self._text(self._window[:-cut]) for cut in range(1, MOST_MISSING + 1))
        complete = next((beginning_text for beginning_text in shorter if not beginning_text.endswith(REPLACEMENT)), "")
        return max(len(text.rstrip(REPLACEMENT)), len(complete))

    def _length(self) -> int:
        """Return the number of characters of the window."""
        if len(self._window) > 1:
            return len(self._decode())
        (token,) = self._window
        if token not in self._lengths:
            self._lengths[token] = len(self._decode())
        return self._lengths[token]

    def push(self, token: int) -> str:
        """Take the next token; return the text that is certain by now, which may be empty."""
        self._window.append(token)
        self._fresh.append(token)
        self.added = ""
        if self._stop_words and token in self._special:
            return self._until_stop(self._special[token], shown=False)
        text = self._decode()
        start = self._start(text)
        if len(text) <= start or text.endswith(REPLACEMENT):
            return ""
        self.added = text[start:]
        self.characters += len(self.added)
        # this piece's tokens are the next one's neighbours
        self._window = self._fresh
        self._fresh = []
        self._broken = ""
        self._emitted = self._length()
        return self._until_stop(self.added)

    def _start(self, text: str) -> int:
        """Return where the new part of the window's `text` begins: behind what is out, or before the character that the
        prompt ends within and that is complete now.
        """
        if self._broken and not text.startswith(self._broken):
            return self._complete
        return self._emitted

    def flush(self) -> str:
        """Return the text that was held back, after the last token."""
        if self.stopped:
            return ""
        text = self._decode()
        piece = self._until_stop(text[self._start(text) :])
        return piece + self._take(sum(len(text) for text, _ in self._pending))

    def _until_stop(self, piece: str, shown: bool = True) -> str:
        """Return the part of the text held back and `piece` that ends before any stop word or beginning of one.

        A `piece` that is not `shown` is only searched for stop words.
        """
        if not self._stop_words:
            return piece
        self._pending.append((piece, shown))
        text = "".join(part for part, _ in self._pending)
        positions = [at for at in (text.find(word) for word in self._stop_words) if at >= 0]
        if positions:
            self.stopped = True
            return self._take(min(positions))
        held = max((beginning(text, word) for word in self._stop_words), default=0)
        return self._take(len(text) - held)

    def _take(self, length: int) -> str:
        """Let go of the first `length` characters that are held back; return those of them that are shown."""
        taken = ""
        rest = []
        for part, shown in self._pending:
            taken += part[:length] if shown else ""
            rest += [(part[length:], shown)] if part[length:] else []
            length = max(0, length - len(part))
        self._pending = rest
        return taken


def neighbours(tokenizer: "Tokenizer", prompt: Sequence[int]) -> list[int]:
    """The last tokens of `prompt` that the following text can depend on.

    They are few, since they are decoded again with every token until there is text. A run of byte tokens is not cut: it
    is text as a whole or not at all.
    """
    first = max(0, len(prompt) - NEIGHBOURS)
    while first and (tokenizer.id_to_token(prompt[first]) or "").startswith("<0x"):
        first -= 1
    return list(prompt[first:])


def beginning(text: str, word: str) -> int:
    """Count the characters at the end of `text` that are the beginning of `word`, but not all of it."""
    return next((length for length in range(min(len(text), len(word) - 1), 0, -1) if text.endswith(word[:length])), 0)
