"""Write tokenizer and chat templates beside the weights, so that servers read texts as they were calibrated.

fp8q's runtimes read tokenizer.json, vLLM what AutoTokenizer makes of the files. Where the two differ in the source,
the chosen one is written so that both are it, as far as transformers allows: it builds the tokenizers of some model
types (qwen2) by rules of its own, whatever the files say.
"""

import json
import shutil
from contextlib import suppress
from pathlib import Path

from tokenizers import Tokenizer

from ...calibrate.checkpoint.companions import GENERATION, TOKENIZER
from ...calibrate.model.source import Source
from ...calibrate.model.tokenizer import auto_of, auto_tokenizer, companion_directory, difference

CONFIG = "tokenizer_config.json"
#: The field of the tokens that end a text.
END = "eos_token_id"
#: The class of transformers that takes tokenizer.json as it is, by the name that all versions know.
PLAIN = "PreTrainedTokenizerFast"
#: Fields by which AutoTokenizer chooses another class, or changes what the file puts around a text.
CHANGES = ("auto_map", "add_bos_token", "add_eos_token")


def write_companions(source: Source, directory: Path) -> str | None:
    """Copy what lies beside the weights of `source` to `directory`, which has its config.json, and let both tokenizers
    there be the chosen one.

    Returns a note where AutoTokenizer reads texts in another way all the same; None otherwise.
    """
    for name, file in source.companions.items():
        (directory / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, directory / name)
    with companion_directory(source) as where:
        auto = auto_tokenizer(source, where)
        agree = not (where / TOKENIZER).is_file() or difference(where, auto) is None
    if source.merged:
        _end_as(directory, auto.eos_token_id)
    if agree:
        return None
    if source.tokenizer == "auto":
        if (made := getattr(auto, "backend_tokenizer", None)) is None:
            return f"model/{TOKENIZER}: is not what AutoTokenizer makes of the files, which runs code of its own"
        plain = Tokenizer.from_str(made.to_str())
        plain.no_truncation()
        plain.no_padding()
        plain.save(str(directory / TOKENIZER))
    else:
        _read_as_it_is(directory)
    return _remaining(directory)


def _end_as(directory: Path, end: int | None) -> None:
    """Let a text end at the token `end` too, by generation_config.json in `directory`: the tokenizer of an adapter may
    have another one than its base.
    """
    file = directory / GENERATION
    fields = json.loads(file.read_bytes()) if file.is_file() else {}
    config = json.loads((directory / "config.json").read_bytes())
    end_ids = fields.get(END, (config.get("text_config", {}) | config).get(END))
    known = end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids]
    if end is not None and end not in known:
        file.write_text(json.dumps(fields | {END: [*known, end]}, indent=2) + "\n", encoding="utf-8")


def _read_as_it_is(directory: Path) -> None:
    """Let AutoTokenizer take the tokenizer.json in `directory` as it is, by tokenizer_config.json, if that can be."""
    file = directory / CONFIG
    before = file.read_bytes() if file.is_file() else None
    fields = json.loads(before) if before else {}
    plain = {key: value for key, value in fields.items() if key not in CHANGES} | {"tokenizer_class": PLAIN}
    file.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if _remaining(directory) is None:
        return
    if before is None:
        file.unlink()
    else:
        file.write_bytes(before)


def _remaining(directory: Path) -> str | None:
    """Describe how the tokenizers in `directory` differ; None where they agree."""
    mismatch: str | None = "AutoTokenizer does not load it"
    with suppress(OSError, ValueError, ImportError):
        mismatch = difference(directory, auto_of(directory))
    return mismatch and (
        f"model/{TOKENIZER}: {mismatch}; transformers has rules of its own for this type of model, so that vLLM reads "
        "other tokens than were calibrated: send it token ids, or calibrate with --tokenizer auto"
    )
