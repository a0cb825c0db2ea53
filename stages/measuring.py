"""The stage `measure`: the float model on the calibration windows, in memory or streamed, and on other text."""

from typing import TYPE_CHECKING

from .. import __version__
from ..errors import InputError
from ..options import CalibrateOptions
from ..run import Run, library_versions, sha256_file
from .corpora import digest, load_tokens
from .other_text import read_other
from .sources import source_of
from .steps import Notes, device, stage

if TYPE_CHECKING:
    from ..calibrate.source import Source
    from ..calibrate.statistics import Statistics


def measure(run: Run, source: "Source", options: CalibrateOptions, notes: Notes) -> None:
    """The stage `measure`: the model on the calibration windows, and `statistics.*`. Streamed or not, these are the same."""
    import torch

    from ..calibrate.measure import measure as run_model
    from ..calibrate.moments import gathering
    from ..calibrate.source import load_model
    from ..calibrate.statistics import Corpus, ModelIdentity, save_statistics
    from ..calibrate.stream import measure_streamed

    inputs = {"model": source.fingerprint, "calibration.npz": sha256_file(run.require(run.calibration, "corpus"))}
    wanted = options.weight_rounding == "gptq"
    chosen = {"batch_size": options.batch_size, "moments": wanted}
    if any(run.is_current("measure", inputs, chosen | {"moments": there}) for there in {wanted, True}):
        return
    windows = load_tokens(run, run.calibration)
    identity = ModelIdentity(name=source.title, revision=source.revision, architecture=source.architecture, fingerprint=source.fingerprint)
    read = run.record().stages["corpus"].options
    texts = {"name": str(read["data"]), "sources": read.get("sources")}
    corpus = Corpus.model_validate(
        texts | {"fingerprint": digest(windows), "windows": len(windows), "seq_len": windows.shape[1], "batch_size": options.batch_size}
    )

    stream = streamed(source, options.stream, notes)
    with stage(run, "measure", inputs, chosen, notes) as log:
        if stream:
            key = inputs | chosen | {"fp8q": __version__, "libraries": library_versions(), "threads": torch.get_num_threads(), "device": device()}
            with run.work("measure", key) as folder, gathering(run, wanted, folder / "moments") as moments:
                statistics = measure_streamed(source, windows, identity, corpus, notes, folder, device(), moments=moments)
        else:
            with gathering(run, wanted) as moments:
                statistics = run_model(load_model(source, torch.bfloat16, device()), windows, identity, corpus, notes, moments=moments)
        log.outputs += [*save_statistics(run, statistics), *sorted(run.moments.glob("*.npy"))]


def streamed(source: "Source", asked: bool | None, notes: Notes) -> bool:
    """Whether to stream: what was asked for, or whether the weights are too large for the memory available, with a note."""
    from ..calibrate.memory import SHARE, available_bytes, weight_bytes

    if asked is not None:
        return asked
    size, available = weight_bytes(source), available_bytes(device())
    if available is None or size <= SHARE * available:
        return False
    notes.note(
        f"--stream: the weights take {size / 1e9:,.3g} GB in BF16, and {SHARE:.0%} of the memory available is {SHARE * available / 1e9:,.3g} GB: calibrating layer by layer"
    )
    return True


def measure_text(run: Run, text: str, notes: Notes) -> "Statistics":
    """The run's float model on other text: windows of the calibration's length, as many at most. Raises InputError where the text fills none."""
    import torch

    from ..calibrate import corpus
    from ..calibrate.measure import measure as run_model
    from ..calibrate.source import load_model, load_tokenizer
    from ..calibrate.statistics import Corpus, StatisticsRecord
    from ..run import read_document

    record, source = read_document(run.require(run.statistics_json, "measure"), StatisticsRecord), source_of(run)
    size = record.corpus.seq_len
    ids = read_other(run, text, load_tokenizer(source), source.text_config.vocab_size, notes).ids
    if len(ids) < size:
        raise InputError(f"--against {text}: has {len(ids):,} tokens, less than one window of {size:,}, in which the run was calibrated; give more text")
    windows = corpus.windows(ids, size, min(len(ids) // size, record.corpus.windows))
    measured = Corpus(name=text, fingerprint=digest(windows), windows=len(windows), seq_len=size, batch_size=record.corpus.batch_size)
    return run_model(load_model(source, torch.bfloat16, device()), windows, record.model, measured, notes)
