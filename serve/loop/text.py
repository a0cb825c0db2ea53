"""Convert text to tokens and back: the tokenizer, the token ids in the model's JSON files, and incremental
detokenization.

A token is not a piece of text: a character may take four tokens, and a decoder drops or adds spaces depending on the
neighbours. So the stream decodes a short window that begins with tokens whose text is out already, and returns the text
behind it. A character with missing bytes decodes to U+FFFD, so these are held back at the end. (All of them: a
byte-fallback decoder turns a whole run of bytes into U+FFFD, good characters too, while the last is incomplete.)
Possible beginnings of stop words are held back too.

Copied unchanged into Triton repositories: imports only tokenizers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Tokens of a prompt that the first characters of the answer are decoded with.
NEIGHBOURS = 32
#: The number of positions a model was made for, as every config.json that fp8q writes has it, whatever the source's
#: called it.
POSITIONS = "max_position_embeddings"
#: What fp8q says of its graphs there: how many positions they serve, where that is fewer.
OWN = "fp8q"
MOST_POSITIONS = 2**31 - 1


class ModelFileError(ValueError):
    """A file beside the model's weights is missing or lacks what generation needs."""


@dataclass(frozen=True)
class Vocabulary:
    """Of a model, what the loop needs besides the graph: its tokenizer, the ids that begin and end a text, and its
    positions. `tails`: its products have second terms at the end of a prompt alone, and in decoded tokens.
    """

    tokenizer: "Tokenizer"
    begin: int | None
    end: frozenset[int]
    positions: int
    tails: bool = False

    @classmethod
    def read(cls, directory: Path) -> "Vocabulary":
        """Read tokenizer.json, config.json and, where there is one, generation_config.json in `directory`.

        Raises ModelFileError when a file is missing or damaged, or config.json names no number of positions.
        """
        config, generation = directory / "config.json", directory / "generation_config.json"
        fields = _read_json(config)
        text = fields.get("text_config", fields)  # models of text and images keep the language model's numbers there
        tokens = text if isinstance(text, dict) else {}
        tokens = tokens | fields | (_read_json(generation) if generation.is_file() else {})
        positions = text.get(POSITIONS) if isinstance(text, dict) else None
        if not isinstance(positions, int) or not 0 < positions <= MOST_POSITIONS:
            raise ModelFileError(f"{config}: names no number of positions; add {POSITIONS}")
        own = fields.get(OWN)
        served = own.get("positions") if isinstance(own, dict) else None
        positions = min(positions, served) if isinstance(served, int) else positions
        begin, end = (_token_ids(tokens, name, directory) for name in ("bos_token_id", "eos_token_id"))
        tokenizer = _read_tokenizer(directory / "tokenizer.json")
        tails = isinstance(own, dict) and bool(own.get("tails"))
        return cls(tokenizer, begin[0] if begin else None, frozenset(end), positions, tails)

    def encode(self, prompt: str) -> list[int]:
        """Token ids of `prompt`, with the special tokens that the tokenizer puts around a text.

        A prompt that begins with the beginning-of-text token itself, as chat templates write it, is not given a second
        one.
        """
        ids: list[int] = self.tokenizer.encode(prompt).ids  # other threads go on meanwhile
        return ids[1:] if self.begin is not None and ids[:2] == [self.begin] * 2 else ids

    def text(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, special ones too."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        """The text of one token by itself, as lists of log-probabilities show it; bytes that are no text as U+FFFD."""
        return self.text([token])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(f"{path}: there is no such file; copy it from the model") from None
    except (ValueError, RecursionError) as error:  # brackets without end
        raise ModelFileError(f"{path}: is not JSON ({error}); copy it again from the model") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: holds no JSON object; copy it again from the model")
    return content


def _read_tokenizer(path: Path) -> "Tokenizer":
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ModelFileError(
            f"{path}: the library that reads it is missing ({error}); install it with `pip install tokenizers`"
        ) from error
    if not path.is_file():
        raise ModelFileError(f"{path}: there is no such file; copy it from the model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no class of its own
        raise ModelFileError(f"{path}: tokenizers cannot read it ({error}); copy it again from the model") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _token_ids(fields: dict[str, Any], name: str, directory: Path) -> list[int]:
    """The token ids of a field that may be one, a list of them, or nothing."""
    given = fields.get(name)
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(each) is int for each in ids):
        raise ModelFileError(
            f"{directory}: its {name} is {str(given)[:60]!r}, and no token id or list of them; mend it in "
            "generation_config.json or config.json"
        )
    return ids


class TextStream:
    """The text of one request, token by token: the pieces put together are the text, up to the first stop word.

    `stopped` becomes true with the token that completes a stop word; neither it nor what follows is part of the text.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        prompt: Sequence[int],
        stop_words: Sequence[str] = (),
        lengths: dict[int, int] | None = None,
    ):
        """Begin after `prompt`, whose text is the neighbour of the first token.

        `lengths`: how many characters single tokens are, as far as that is known; the streams of one tokenizer share
        it, since half of all that is decoded is the last token by itself.
        """
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop_words = stop_words
        self._window = neighbours(tokenizer, prompt)
        self._given = len(self._decode())
        self._lengths = {} if lengths is None else lengths
        self._fresh: list[int] = []
        self._pending = ""

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._window))

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
        text = self._decode()
        if len(text) <= self._given or text.endswith(REPLACEMENT):
            return ""
        piece = text[self._given :]
        self._window, self._fresh = self._fresh, []  # the tokens of this piece are the neighbours of the next
        self._given = self._length()
        return self._until_stop(piece)

    def flush(self) -> str:
        """Return the text that was held back, after the last token."""
        if self.stopped:
            return ""
        piece = self._until_stop(self._decode()[self._given :]) + self._pending
        self._pending = ""
        return piece

    def _until_stop(self, piece: str) -> str:
        """Of the text held back and `piece`, what comes before a stop word and cannot be the beginning of one."""
        if not self._stop_words:
            return piece
        text = self._pending + piece
        found = [at for at in (text.find(word) for word in self._stop_words) if at >= 0]
        if found:
            self.stopped, self._pending = True, ""
            return text[: min(found)]
        held = max((beginning(text, word) for word in self._stop_words), default=0)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]


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
