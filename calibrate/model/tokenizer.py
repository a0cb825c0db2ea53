"""Load the checkpoint's tokenizer, and check that it can tokenize.

A checkpoint has two: tokenizer.json as it is, which every runtime of fp8q serves by, and what transformers'
AutoTokenizer makes of the files, which vLLM serves by. transformers 5 builds some classes (Qwen2's, GPT-2's,
GPT-NeoX's) with rules of their own and takes but the vocabulary from the file, so that the two may give other ids for
one text. What is calibrated, validated and served must be one of them: with `--tokenizer file` that of the file, with
`auto`, the default of a run for vLLM, the other.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ...core.errors import InputError
from ...core.reporter import SILENT, Reporter
from ...options import TokenizerChoice
from ..checkpoint.adapter import Adapter
from ..checkpoint.companions import REMEDY, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG, check_companion_files
from ..input.silence import muted, quiet_transformers
from ..input.untrusted import error_text, foreign
from ..text.template_files import DEFAULT, read_fields, templates_in
from .source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokenized once as a test: rules that cannot be applied end in a panic at the first letters.
SAMPLE = "The 2 quick foxes' names: Zoë & 狐.\n\tdef f(x): return x**2  # ok\n"
#: Texts that rules of tokenizers read in different ways, and what each shows, in words.
SAMPLES: Mapping[str, str] = {
    "1969 twelve": "numbers",
    "Hello world": "words",
    " Hello": "a space at the beginning",
    "I don't, we'LL": "contractions (don't)",
    "3.14159 x 1,000,000": "numbers",
    "a  b   c": "several spaces",
    "line\n\n  next\r\n\tlast \n": "ends of lines",
    "Zo\u00eb": "accents (\u00eb)",
    "cafe\u0301": "\u00e9 as two code points",
    "\u72d0\u306f\u8d70\u308b": "Chinese and Japanese",
    "\uff21\uff22 \U0001f98a\U0001f469\u200d\U0001f4bb": "wide letters and emoji",
    "def f(x):\n        return x**2  # ok": "indented code",
}
#: What is done where the two differ.
TAKEN: Mapping[TokenizerChoice, str] = {
    "file": f"{TOKENIZER} is calibrated, validated and served (--tokenizer auto takes the other)",
    "auto": f"--tokenizer auto takes the first, and writes it to model/ as {TOKENIZER}",
}
#: Characters of an example, and tokens of it that are shown.
EXAMPLE = 24
SHOWN = 8


@dataclass(frozen=True)
class TokenDifference:
    """The difference of a checkpoint's two tokenizers: kinds of text, in words, and each one's tokens of an example."""

    kinds: tuple[str, ...]
    example: str

    def __str__(self) -> str:
        """Name the kinds, and show the example."""
        return f"{in_words(self.kinds)}: {self.example}"


def in_words(kinds: Iterable[str]) -> str:
    """Enumerate kinds of text."""
    *first, last = kinds
    if first:
        return f"{', '.join(first)} and {last}"
    return last


def load_tokenizer(source: Source, report: Reporter = SILENT) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of `source` that its `tokenizer` chooses; note where the other reads a text as other tokens.

    Raises InputError when its files make none, or one that cannot tokenize.
    """
    with companion_directory(source) as directory:
        auto = auto_tokenizer(source, directory)
        mismatch = None
        with foreign(partial(_refusal, source)), muted():
            if report is not SILENT:
                mismatch = difference(directory, auto)
            tokenizer = chosen(auto, directory, source.tokenizer)
        if mismatch:
            report.note(f"{source.name}: {mismatch}; {TAKEN[source.tokenizer]}")
        return tokenizer


@contextmanager
def companion_directory(source: Source) -> Iterator[Path]:
    """A directory with the companions of `source`: its own, or one for a while, of links to them, where some are a
    merged adapter's.
    """
    files = source.companions
    if all(file.is_relative_to(source.path) for file in files.values()):
        yield source.path
        return
    with TemporaryDirectory() as made:
        for name, file in ({"config.json": source.path / "config.json"} | files).items():
            (Path(made) / name).parent.mkdir(exist_ok=True)
            (Path(made) / name).symlink_to(file.resolve())
        yield Path(made)


def auto_tokenizer(source: Source, directory: Path) -> "PreTrainedTokenizerBase":
    """Load what AutoTokenizer makes of the companions of `source`, which are in `directory`.

    Raises InputError as `load_tokenizer` does.
    """
    refusal = partial(_refusal, source)
    with foreign(refusal), quiet_transformers(), muted():
        tokenizer = auto_of(directory, source.trust_remote_code)
    with (
        foreign(refusal),
        quiet_transformers(),
        muted(),
        suppress(Exception),
    ):  # a vocabulary without these tokens may have those of the text
        tokenizer([SAMPLE], verbose=False)
    return tokenizer


def _refusal(source: Source, error: BaseException) -> InputError:
    if "trust_remote_code" in str(error):
        return InputError(
            source.name,
            "its tokenizer wants code of its own",
            "read it, and if you trust it, run it with --trust-remote-code",
        )
    return InputError(source.name, f"its tokenizer does not load: {error_text(error)}", REMEDY)


def stored_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of the checkpoint in `directory`, to encode as its tokenizer.json does.

    Raises InputError where it does not load: others may have written it, or changed it since.
    """

    def refusal(error: BaseException) -> InputError:
        return InputError(directory, f"its tokenizer does not load: {error_text(error)}", REMEDY)

    with foreign(refusal), quiet_transformers(), muted():
        return chosen(auto_of(directory), directory, "file")


def auto_of(directory: Path, with_code: bool = False) -> "PreTrainedTokenizerBase":
    """Let AutoTokenizer make a tokenizer of the files in `directory`; `with_code`: also of Python code there."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=with_code
    )
    if templates := templates_in(directory):  # those that `fp8q serve` reads; Python code may make others
        tokenizer.chat_template = templates[DEFAULT] if [*templates] == [DEFAULT] else templates
    return tokenizer


def chosen(auto: "PreTrainedTokenizerBase", directory: Path, choice: TokenizerChoice) -> "PreTrainedTokenizerBase":
    """Let `auto`, which AutoTokenizer made of the files in `directory`, encode as `choice` has it; returns it.

    By the file, tokenizer.json takes the place of what it was built of; its special tokens and chat template stay. So
    do special tokens that its class has by default, if tokenizer.json has them.
    """
    if choice == "auto" or not (directory / TOKENIZER).is_file():
        return auto
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer.from_file(str(directory / TOKENIZER))
    plain.no_truncation()
    plain.no_padding()
    for name, text in unnamed_tokens(directory, auto.special_tokens_map).items():
        if plain.token_to_id(text) is None:
            setattr(auto, name, None)
    if not isinstance(auto, PreTrainedTokenizerFast):
        return PreTrainedTokenizerFast(
            tokenizer_object=plain, chat_template=auto.chat_template, **auto.special_tokens_map
        )
    held: Any = auto
    held._tokenizer = plain
    return auto


def unnamed_tokens(directory: Path, tokens: Mapping[str, str]) -> dict[str, str]:
    """Those of the special `tokens` that no file in `directory` names so: a class of transformers has them by default.

    Readers without transformers (`serve.loop.text`) do not know these.
    """
    known = [read_fields(directory / name) for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS)]
    known += [more for fields in known if isinstance(more := fields.get("extra_special_tokens"), dict)]
    named = [(name, _text(token)) for fields in known for name, token in fields.items() if name in tokens]
    return {name: text for name, text in tokens.items() if (name, text) not in named}


def _text(token: object) -> object:
    """The text of a special token, which may be an object with further fields."""
    if isinstance(token, dict):
        return token.get("content")
    return token


def encoder(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], list[int]]:
    """A function from a text to its ids by `tokenizer`, with the special tokens around it."""
    return lambda text: list(tokenizer(text, verbose=False)["input_ids"])


def difference(directory: Path, auto: "PreTrainedTokenizerBase") -> TokenDifference | None:
    """Find the texts that `auto`, made by AutoTokenizer of the files in `directory`, reads as other tokens than
    tokenizer.json does; None where they agree on all samples, or there is no such file.
    """
    if not (directory / TOKENIZER).is_file():
        return None
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(directory / TOKENIZER))
    plain.no_truncation()
    plain.no_padding()
    special = {f"a{token} b": f"the special token {token}" for token in map(str, auto.all_special_tokens)}
    kinds: list[str] = []
    example = ""
    for text, kind in {**SAMPLES, **special}.items():
        with suppress(Exception):  # a text that one of them cannot read says nothing
            theirs = encoder(auto)(text)
            ours = plain.encode(text).ids
            if theirs != ours:
                kinds += [kind] if kind not in kinds else []
                example = example or (
                    f"{text[:EXAMPLE]!r} is {_tokens(theirs, auto.convert_ids_to_tokens)} by AutoTokenizer, which vLLM "
                    f"uses, and {_tokens(ours, lambda ids: [plain.id_to_token(token_id) for token_id in ids])} by "
                    f"{TOKENIZER}"
                )
    if kinds:
        return TokenDifference(tuple(kinds), example)
    return None


def _tokens(ids: list[int], names: Callable[[list[int]], Any]) -> str:
    text = " ".join(map(str, names(ids[:SHOWN])))
    return f"{text} …" if len(ids) > SHOWN else text


def adapter_differences(source: Source, adapter: Adapter) -> list[str]:
    """List what `adapter` has of its own beside its matrices, and other than the base in `source`: a tokenizer, a chat
    template, a token that ends a text.

    Raises InputError for files that do not read.
    """
    base = replace(source, merged=None)
    changed = replace(source, merged=adapter)
    adapter_files = [file for file in changed.companions.values() if not file.is_relative_to(source.path)]
    if not adapter_files:
        return []
    check_companion_files(adapter_files, source.text_config.vocab_size)
    (before, templates), (after, adapter_templates) = (_read(version) for version in (base, changed))
    texts = [encoder(version) for version in (before, after)]
    differences = ["tokenizer"] if any(texts[0](text) != texts[1](text) for text in SAMPLES) else []
    differences += ["chat template"] if templates != adapter_templates else []
    return differences + ([f"end of a text ({after.eos_token})"] if before.eos_token_id != after.eos_token_id else [])


def _read(source: Source) -> tuple["PreTrainedTokenizerBase", dict[str, str]]:
    with companion_directory(source) as directory:
        return chosen(auto_tokenizer(source, directory), directory, source.tokenizer), templates_in(directory)
