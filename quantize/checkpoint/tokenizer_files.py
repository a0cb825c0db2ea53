"""Write tokenizer and chat templates beside the weights, so that servers read texts as they were calibrated.

fp8q's runtimes read tokenizer.json, vLLM what AutoTokenizer makes of the files. Where the two differ in the source, the
chosen one is written so that both are it, as far as transformers allows: it builds the tokenizers of some model types
(qwen2) by rules of its own, whatever the files say. Special tokens that a class of transformers has by default are
written too, since readers without transformers, and other classes, have other defaults or none.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from ...calibrate.checkpoint.companions import GENERATION, TOKENIZER, TOKENIZER_CONFIG
from ...calibrate.model.architecture import text_fields
from ...calibrate.model.source import Source
from ...calibrate.model.tokenizer import (
    TokenDifference,
    auto_of,
    auto_tokenizer,
    chosen,
    companion_directory,
    difference,
    in_words,
    unnamed_tokens,
)
from ...core.files import copy_files, json_text

#: The field of the tokens that end a text.
END = "eos_token_id"
#: The class of transformers that takes tokenizer.json as it is, by the name that all versions know.
PLAIN = "PreTrainedTokenizerFast"
#: Fields by which AutoTokenizer chooses another class, or changes what the file puts around a text.
CHANGES = ("auto_map", "add_bos_token", "add_eos_token")
#: What AutoTokenizer makes of the files of a tokenizer with code of its own is in no file.
OWN_CODE = TokenDifference(("any text",), "AutoTokenizer runs code of its own, which is not in the files")
#: A text that differs in all of its tokens, or cannot be read.
UNREAD = TokenDifference(("any text",), "AutoTokenizer does not load it")


def write_companions(source: Source, directory: Path) -> TokenDifference | None:
    """Copy tokenizer and templates of `source` to `directory`, which has its config.json, and let both tokenizers there
    be the chosen one.

    Returns how AutoTokenizer reads texts in another way all the same; None where it does not.
    """
    copy_files(source.companions, directory)
    with companion_directory(source) as where:
        auto = auto_tokenizer(source, where)
        agree = not (where / TOKENIZER).is_file() or difference(where, auto) is None
        tokenizer = chosen(auto, where, source.tokenizer)
    if source.merged:
        _end_as(directory, tokenizer.eos_token_id)
    _name_special_tokens(directory, tokenizer.special_tokens_map)
    if agree:
        return None
    if source.tokenizer == "auto":
        if (made := getattr(auto, "backend_tokenizer", None)) is None:
            return OWN_CODE
        plain = Tokenizer.from_str(made.to_str())
        plain.no_truncation()
        plain.no_padding()
        plain.save(str(directory / TOKENIZER))
    else:
        _read_as_it_is(directory)
    return _remaining(directory)


def difference_in_vllm(source: Source) -> TokenDifference | None:
    """Tell before anything is written how vLLM will read other tokens of the checkpoint than `source` is calibrated on.

    None where it will not. Raises InputError where the tokenizer does not load.
    """
    with companion_directory(source) as where:
        if difference(where, auto_tokenizer(source, where)) is None:
            return None
    with TemporaryDirectory() as made:
        copy_files({"config.json": source.path / "config.json"}, Path(made))
        return write_companions(source, Path(made))


def calibrated_remark(name: str, remaining: TokenDifference) -> str:
    """State before calibrating the model `name` that vLLM reads other tokens of the `remaining` kinds of text."""
    return (
        f"{name}: vLLM reads other tokens than are calibrated, of {remaining}; --tokenizer auto calibrates those that "
        "vLLM reads"
    )


def written_remark(remaining: TokenDifference) -> str:
    """State of what was written that vLLM reads other tokens of the `remaining` kinds of text."""
    return (
        f"model/{TOKENIZER}: vLLM reads other tokens than were calibrated, of {in_words(remaining.kinds)}, since "
        "transformers has rules of its own for this type of model: send it token ids, or calibrate with "
        "--tokenizer auto"
    )


def _end_as(directory: Path, end: int | None) -> None:
    """Let a text end at the token `end` too, by generation_config.json in `directory`: the tokenizer of an adapter may
    have another one than its base.
    """
    file = directory / GENERATION
    fields = _fields(file)
    config = json.loads((directory / "config.json").read_bytes())
    end_ids = fields.get(END, config.get(END, text_fields(config).get(END)))
    known = end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids]
    if end is not None and end not in known:
        file.write_text(json.dumps(fields | {END: [*known, end]}, indent=2) + "\n", encoding="utf-8")


def _name_special_tokens(directory: Path, tokens: Mapping[str, str]) -> None:
    """Name in tokenizer_config.json the special `tokens` that no file in `directory` names so: defaults of a class."""
    file = directory / TOKENIZER_CONFIG
    if missing := unnamed_tokens(directory, tokens):
        file.write_bytes(json_text(_fields(file) | missing))


def _fields(file: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    return fields


def _read_as_it_is(directory: Path) -> None:
    """Let AutoTokenizer take the tokenizer.json in `directory` as it is, by tokenizer_config.json, if that can be."""
    file = directory / TOKENIZER_CONFIG
    before = file.read_bytes() if file.is_file() else None
    fields = _fields(file)
    plain = {key: value for key, value in fields.items() if key not in CHANGES} | {"tokenizer_class": PLAIN}
    file.write_bytes(json_text(plain))
    if _remaining(directory) is None:
        return
    if before is None:
        file.unlink()
    else:
        file.write_bytes(before)


def _remaining(directory: Path) -> TokenDifference | None:
    """Find how the tokenizers in `directory` differ; None where they agree."""
    remaining: TokenDifference | None = UNREAD
    with suppress(OSError, ValueError, ImportError):
        remaining = difference(directory, auto_of(directory))
    return remaining
