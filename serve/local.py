"""Generating from a run directory in this process: what `fp8q generate` does, with the errors of the command line."""

from collections.abc import Sequence

from ..errors import BackendError, InputError
from ..export.lint.check import sound_graph
from ..run import Run
from .generate import Completion, Generator, Request, RequestError, complete
from .sessions import SessionError, open_session
from .text import ModelFileError, Vocabulary


def open_generator(run: Run, runtime: str = "onnxruntime", max_batch: int = 8) -> Generator:
    """The generation loop over the model in `run`, up to `max_batch` requests at a time.

    Raises InputError when the run has no graph or the model's files do not serve, BackendError when the runtime does
    not.
    """
    sound_graph(run.require(run.onnx_fp32, "export"))
    try:
        return Generator(open_session(run.model, runtime), Vocabulary.read(run.model), max_batch)
    except SessionError as error:
        raise BackendError(str(error)) from error
    except ModelFileError as error:
        raise InputError(str(error)) from error


def generate(
    run: Run, requests: Sequence[Request], runtime: str = "onnxruntime", max_batch: int = 8
) -> list[Completion]:
    """Generate an answer to each of `requests` with the model in `run`; `open_generator(...).run(requests)` gives it
    piece by piece.

    Raises InputError for a request that cannot be served, and what `open_generator` raises.
    """
    generator = open_generator(run, runtime, max_batch)
    try:
        return complete(generator, requests)
    except RequestError as error:
        raise InputError(str(error)) from error
