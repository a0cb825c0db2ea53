"""The stage `queries`: measure the queries of attention, which only attention in FP8 needs, here or in vLLM.

It runs once, when an export or the scales first need it.
"""

import torch

from ..calibrate.measure.queries import query_statistics
from ..calibrate.measure.statistics import load_record, save_arrays
from ..calibrate.model.source import load_model
from ..core.errors import InputError
from ..core.files import sha256_file
from ..core.run import Run
from ..options.declare import Options
from .corpus import load_tokens
from .measure import streamed
from .pipeline.stage import NO_FACTS, Key
from .pipeline.stages import QUERIES
from .pipeline.steps import Notes, device
from .shared.sources import source_of


def measure_queries(run: Run, option: str, notes: Notes) -> None:
    """Run the float model on the calibration windows once more, and write `queries.safetensors`; `option` asks for it.

    Raises InputError when the source checkpoint is missing, and when it does not fit in memory: queries are not
    streamed.
    """
    inputs = {
        "model": run.record().model["fingerprint"],
        "calibration.npz": sha256_file(run.require(run.calibration, "corpus")),
    }
    key = Key(inputs, Options(), NO_FACTS)
    if QUERIES.is_current(run, key):
        return
    source = source_of(run)
    if streamed(source, None, Notes(notes.report)):
        raise InputError(
            option,
            f"queries are measured with the whole of {source.name} in memory, which does not hold it",
            "leave it out",
        )
    corpus = load_record(run).corpus
    with QUERIES.writing(run, key, notes) as log:
        measured = query_statistics(
            load_model(source, torch.bfloat16, device()), load_tokens(run, run.calibration), corpus.batch_size, notes
        )
        save_arrays(run.queries, measured, {})
        log.outputs.append(run.queries)
