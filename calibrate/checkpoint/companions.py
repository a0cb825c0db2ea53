"""Find the other files of a checkpoint, besides config.json and weights: tokenizer, chat template, image preprocessing,
licence.

They are checked before any library opens them, and copied unchanged into the FP8 checkpoint.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ...core.files import regular_file, sha256_file
from ..input.untrusted import AGAIN, exists, read_json
from .config_fields import abbreviated, check_token_ids

#: The files that name the special tokens of a tokenizer; the second is of older versions of transformers.
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
COMPANIONS = (
    "tokenizer*",
    SPECIAL_TOKENS,
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
    "generation_config.json",
    "*processor_config.json",
    "LICENSE*",
)
#: The file that holds all of a tokenizer, and the folder of named chat templates.
TOKENIZER = "tokenizer.json"
TEMPLATES = "additional_chat_templates"
#: The file of settings of generation, such as the tokens that end a text.
GENERATION = "generation_config.json"
#: Files that hold a vocabulary; the first is all of a tokenizer, the others are the older forms.
VOCABULARY = (
    TOKENIZER,
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
)
#: The most bytes of a tokenizer's files; the largest published tokenizer.json has 34 MB.
COMPANION_BYTES = 512 << 20
#: The most token ids beyond the rows of the model's embedding: the tokenizers library lists every gap.
HOLES = 1 << 20
REMEDY = "copy the files of the tokenizer it was trained with beside config.json"


def companions(path: Path) -> Iterator[Path]:
    """The companion files in a checkpoint's directory, sorted by name, with other things of such a name that are no
    files, then named chat templates. A folder counts only where a file is expected.
    """
    for name in sorted(os.listdir(path)):
        file = name.endswith((".json", ".jinja", ".model", ".txt"))
        if any(fnmatchcase(name, pattern) for pattern in COMPANIONS) and (file or not (path / name).is_dir()):
            yield path / name
    yield from sorted((path / TEMPLATES).glob("*.jinja"))


def companion_files(path: Path, adapter: Path | None = None) -> dict[str, Path]:
    """Name -> file of the companions of the checkpoint in `path`; those in the directory of an `adapter` that is merged
    into it take their places.

    An adapter with a vocabulary brings a whole tokenizer, one with chat templates alone all templates.
    """
    base_files = {str(file.relative_to(path)): file for file in companions(path)}
    if adapter is None:
        return base_files
    adapter_files = {str(file.relative_to(adapter)): file for file in companions(adapter) if not file.match("LICENSE*")}
    config = adapter_files.get(TOKENIZER_CONFIG)
    templates = any(map(_is_template, adapter_files)) or (config is not None and "chat_template" in read_json(config))
    has_tokenizer = any(name in VOCABULARY for name in adapter_files)
    if not has_tokenizer:  # a configuration without its tokenizer says nothing of the base's
        adapter_files = {name: file for name, file in adapter_files.items() if _is_template(name) or name == GENERATION}

    def replaced(name: str) -> bool:
        if _is_template(name):
            return templates
        return has_tokenizer and name != GENERATION and not fnmatchcase(name, "LICENSE*") and "processor" not in name

    return {name: file for name, file in base_files.items() if not replaced(name)} | adapter_files


def _is_template(name: str) -> bool:
    return name.startswith(("chat_template", f"{TEMPLATES}/"))


def tokenizer_files(path: Path) -> list[Path]:
    """List the vocabulary files in a checkpoint's directory, tokenizer.json first."""
    return [path / name for name in VOCABULARY if exists(path / name)]


def tokenizer_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """File name -> SHA-256, in hexadecimal, of tokenizer.json, or of the older vocabulary files where there is none, of
    the companion `files`.
    """
    names = [TOKENIZER] if TOKENIZER in files else [name for name in VOCABULARY if name in files]
    return {name: sha256_file(files[name]) for name in names}


def check_companions(path: Path, name: str, vocabulary: int) -> None:
    """Check the companion files in the directory `path` of the checkpoint `name`, whose embedding has `vocabulary`
    rows.

    Raises InputError, naming the file, where there is no tokenizer, for a companion that is no file, cannot be read,
    does not parse or is too large, and for a token id far beyond the embedding.
    """
    if not tokenizer_files(path):
        raise InputError(
            name,
            f"has no tokenizer (no {VOCABULARY[0]}, {VOCABULARY[1]} or vocab.json)",
            "copy the files of the one it was trained with beside config.json",
        )
    check_companion_files(companions(path), vocabulary)


def check_companion_files(files: Iterable[Path], vocabulary: int) -> None:
    """Check companion `files` as `check_companions` does."""
    for file in files:
        if file.suffix == ".json":
            _check_json(file, read_json(file, COMPANION_BYTES, finite=file.name not in VOCABULARY), vocabulary)
        elif regular_file(file, AGAIN) > COMPANION_BYTES:
            raise InputError(file, f"has more than {COMPANION_BYTES:,} bytes, as no tokenizer's file has", REMEDY)


def _check_json(file: Path, content: Any, vocabulary: int) -> None:
    if not isinstance(content, dict):
        raise InputError(file, f"holds no JSON object but {abbreviated(content)}", REMEDY)
    if file.name == GENERATION:
        check_token_ids(file, content)
    if content.get("fast_tokenizer_files"):
        raise InputError(
            file, "fast_tokenizer_files has transformers read another file than tokenizer.json", "take it out"
        )
    limit = vocabulary + HOLES
    for token, number in _ids(file.name, content):
        if isinstance(number, int) and number >= limit:
            raise InputError(
                file,
                f"gives {abbreviated(token)} the id {number:,}, and the model's embedding ends at {vocabulary - 1:,}",
                REMEDY,
            )


def _ids(name: str, content: dict[str, Any]) -> Iterator[tuple[object, object]]:
    """Yield tokens with the ids that a file gives them; other forms of entries are left for the library to refuse."""
    if name in ("vocab.json", "added_tokens.json"):
        yield from content.items()
    model = content.get("model")
    decoder = content.get("added_tokens_decoder")
    if isinstance(model, dict) and isinstance(model.get("vocab"), dict):
        yield from model["vocab"].items()
    if isinstance(decoder, dict):
        yield from ((token, int(number)) for number, token in decoder.items() if number.isdecimal())
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict):
            yield token.get("content"), token.get("id")
