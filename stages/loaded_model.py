"""`fp8q.api.quantize`: calibrate a model that the caller has loaded, on texts that he has in memory.

Both are written into the run first, below `loaded/`: the model as the source checkpoint that every later stage reads,
and that validation compares with; the texts as a data set. So the run does not depend on the process that made it, the
same call goes on where it was killed, and `fp8q calibrate RUN/loaded/model --data RUN/loaded/texts` repeats it.
"""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..calibrate.input.silence import quiet_transformers
from ..calibrate.input.untrusted import error_text, foreign
from ..calibrate.model.classes import nested
from ..core.errors import InputError
from ..core.files import replacing, sha256_file
from ..core.run import Run
from ..options import QuantizeOptions, RunOptions
from . import preflight
from .calibrate import calibrate, calibration_of
from .loaded_checks import check_loaded, check_process
from .loaded_texts import LoadedTexts, Texts, as_rows, written_texts
from .pipeline.stage import Notes


@dataclass(frozen=True)
class InMemory:
    """The things that a caller has loaded: a model, its tokenizer or processor, and texts to calibrate on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin
    texts: Texts


def quantize_loaded(run: Run, notes: Notes, loaded: InMemory, options: QuantizeOptions) -> Run:
    """Write model, tokenizer and texts into `run`, and calibrate there.

    Raises InputError before anything is written for a model that files could not hold as it computes, for texts of no
    known kind, and for a directory that is no run or one of another model; then as `calibrate` does.
    """
    check_process()
    check_loaded(loaded.model)
    texts = as_rows(loaded.texts)
    check_tokenizer(loaded.tokenizer, texts)
    preflight.check_out(run)
    run.record()
    with preflight.nothing_left(run):
        write_model(run, loaded.model, loaded.tokenizer, notes)
        data, eval_data = written_texts(run, texts)
        chosen = RunOptions(options.calibrate, options.export)
        return calibrate(run, notes, calibration_of(run.loaded_model, data, eval_data, chosen))


def check_tokenizer(tokenizer: object, texts: LoadedTexts) -> None:
    """Raise InputError for a `tokenizer` that is neither one nor a processor with one, and for one that reads no images
    where `texts` have some.
    """
    name = type(tokenizer).__name__
    inside = getattr(tokenizer, "tokenizer", None) if isinstance(tokenizer, ProcessorMixin) else tokenizer
    if not isinstance(inside, PreTrainedTokenizerBase):
        raise InputError(
            name, "is no tokenizer of transformers, and no processor that has one", "give that of the model"
        )
    if texts.with_images and not hasattr(tokenizer, "image_processor"):
        raise InputError(
            name, "reads no images, and texts hold some", "give the model's processor in its place (AutoProcessor)"
        )


def write_model(
    run: Run, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | ProcessorMixin, notes: Notes
) -> None:
    """Write the model and its tokenizer or processor into `run`, as the source checkpoint.

    Raises InputError where the run was made of another model, and for what transformers refuses to write.
    """
    target = run.loaded_model

    def refusal(error: BaseException) -> InputError:
        return InputError(type(model).__name__, f"is not written: {error_text(error)}", "mend what it names")

    with replacing(target) as partial:
        with quiet_transformers(), foreign(refusal, OSError):
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            if isinstance(tokenizer, ProcessorMixin) and hasattr(tokenizer, "image_processor"):
                tokenizer.image_processor.save_pretrained(partial)  # a file of its own, which older loaders read
        if run.record().model and target.is_dir() and _digests(partial) != _digests(target):
            raise InputError(
                run.root,
                "is a run of another model, or of this one with other weights, than is loaded now",
                "name another directory with out=",
            )
    size = sum(file.stat().st_size for file in target.iterdir())
    notes.note(f"{target}: the loaded model is written there ({size / 1e9:.2f} GB), as the source of this run")
    if nested(model.config) and not isinstance(tokenizer, ProcessorMixin):
        notes.note(
            f"{type(tokenizer).__name__}: {type(model).__name__} reads more than text, and the checkpoint gets no "
            "files of its processor; give that in the place of the tokenizer (AutoProcessor)"
        )


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a checkpoint, by name."""
    return {file.name: sha256_file(file) for file in sorted(folder.iterdir()) if file.is_file()}
