"""`fp8q.api.quantize`: calibrate a model that the caller has loaded, on texts that he has in memory.

Both are written into the run first, below `loaded/`: the model as the source checkpoint that every later stage reads,
and that validation compares with; the texts as a data set. So the run does not depend on the process that made it, the
same call goes on where it was killed, and `fp8q calibrate RUN/loaded/model --data RUN/loaded/texts` repeats it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..calibrate.input.silence import quiet_transformers
from ..calibrate.input.untrusted import error_text, foreign
from ..calibrate.text.documents import quiet_datasets
from ..calibrate.text.rows import CHATS, IDS
from ..core.errors import InputError
from ..core.files import replacing, sha256_file
from ..core.run import Run
from ..options import QuantizeOptions, RunOptions
from . import preflight
from .calibrate import calibrate, calibration_of
from .loaded_checks import check_loaded, check_process
from .pipeline.stage import Notes

#: Texts as `calibrate` takes them, by name; or in memory: documents, the ids of their tokens, chats, a tokenizer's
#: answer, or a data set.
Texts: TypeAlias = str | Path | Sequence[Any] | Mapping[str, Any] | datasets.Dataset | datasets.DatasetDict
#: The splits of a data set that are evaluated on, the first that is there.
EVALUATION_SPLITS = ("validation", "test")


@dataclass(frozen=True)
class InMemory:
    """The things that a caller has loaded: a model, its tokenizer, and texts to calibrate on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    texts: Texts


def quantize_loaded(run: Run, notes: Notes, loaded: InMemory, options: QuantizeOptions) -> Run:
    """Write model, tokenizer and texts into `run`, and calibrate there.

    Raises InputError before anything is written for a model that files could not hold as it computes, for texts of no
    known kind, and for a directory that is no run or one of another model; then as `calibrate` does.
    """
    check_process()
    check_loaded(loaded.model)
    if not isinstance(loaded.tokenizer, PreTrainedTokenizerBase):
        raise InputError(type(loaded.tokenizer).__name__, "is no tokenizer of transformers", "give that of the model")
    texts = as_rows(loaded.texts)
    preflight.check_out(run)
    run.record()
    with preflight.nothing_left(run):
        write_model(run, loaded.model, loaded.tokenizer, notes)
        data, eval_data = written_texts(run, texts)
        chosen = RunOptions(options.calibrate, options.export)
        return calibrate(run, notes, calibration_of(run.loaded_model, data, eval_data, chosen))


def as_rows(texts: Texts) -> str | Path | datasets.Dataset | datasets.DatasetDict:
    """Make a data set of texts in memory; a name or path stays one.

    Raises InputError for what is none, or holds values of several kinds.
    """
    if isinstance(texts, str | Path | datasets.Dataset | datasets.DatasetDict):
        return texts
    if isinstance(texts, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise InputError(
            "texts", "is a stream, of which nobody knows the end", "give `Dataset.from_list(list(stream.take(N)))`"
        )
    columns = texts if isinstance(texts, Mapping) else _columns(texts)
    plain = {name: [_plain(value) for value in values] for name, values in columns.items()}

    def refusal(error: BaseException) -> InputError:
        return InputError("texts", f"makes no data set: {error_text(error)}", "give values of one kind")

    with quiet_datasets(), foreign(refusal):
        return datasets.Dataset.from_dict(plain)


def _columns(texts: Sequence[Any]) -> Mapping[str, Sequence[Any]]:
    """Name the column that a list of documents, of their ids, or of chats is, or those of a list of rows."""
    values = list(texts)
    kinds = {_kind(value) for value in values}
    if len(kinds) != 1 or None in kinds:
        listed = ", ".join(sorted({type(value).__name__ for value in values})) or "nothing"
        raise InputError(
            "texts",
            f"holds {listed}",
            "give a list of texts, a list of lists of token ids, a list of chats, or a `datasets.Dataset`",
        )
    (kind,) = kinds
    if kind == "rows":
        names = dict.fromkeys(name for row in values for name in row)
        return {name: [row.get(name) for row in values] for name in names}
    return {str(kind): values}


def _kind(value: object) -> str | None:
    """The column of a document that is text, ids or a chat; `rows` where it has columns itself; None: none of these."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "rows"
    value = _plain(value)
    if not isinstance(value, list) or not value:
        return None
    if isinstance(value[0], Mapping):
        return CHATS[0]
    return IDS if isinstance(value[0], int) else None


def _plain(value: Any) -> Any:
    """Turn an array or tensor, or a tuple, into lists of Python's own numbers."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def written_texts(run: Run, texts: str | Path | datasets.Dataset | datasets.DatasetDict) -> tuple[str, str | None]:
    """Save a data set in `run`; return the names of the texts to calibrate and to evaluate on (None: the end of the
    first). Those of texts that have a name are returned as they are.
    """
    if isinstance(texts, str | Path):
        return str(texts), None
    evaluation = None
    if isinstance(texts, datasets.DatasetDict):
        evaluation = next((texts[split] for split in EVALUATION_SPLITS if split in texts), None)
        texts = datasets.DatasetDict({name: rows for name, rows in texts.items() if rows is not evaluation})
    with quiet_datasets():
        for rows, path in ((texts, run.loaded_texts), (evaluation, run.loaded_eval_texts)):
            if rows is not None:
                with replacing(path) as partial:
                    rows.save_to_disk(str(partial))
    return str(run.loaded_texts), None if evaluation is None else str(run.loaded_eval_texts)


def write_model(run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, notes: Notes) -> None:
    """Write the model and its tokenizer into `run`, as the source checkpoint.

    Raises InputError where the run was made of another model, and for what transformers refuses to write.
    """
    target = run.loaded_model

    def refusal(error: BaseException) -> InputError:
        return InputError(type(model).__name__, f"is not written: {error_text(error)}", "mend what it names")

    with replacing(target) as partial:
        with quiet_transformers(), foreign(refusal, OSError):
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        if run.record().model and target.is_dir() and _digests(partial) != _digests(target):
            raise InputError(
                run.root,
                "is a run of another model, or of this one with other weights, than is loaded now",
                "name another directory with out=",
            )
    size = sum(file.stat().st_size for file in target.iterdir())
    notes.note(f"{target}: the loaded model is written there ({size / 1e9:.2f} GB), as the source of this run")


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a checkpoint, by name."""
    return {file.name: sha256_file(file) for file in sorted(folder.iterdir()) if file.is_file()}
