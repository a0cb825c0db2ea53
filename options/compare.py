"""Options of `fp8q compare`: of a run and a server or checkpoint, and of two checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .declare import EVALUATION, OPTIONS, Options, Unkeyed, between, option
from .limits import VerdictLimits

#: Tokens in a window of two checkpoints.
PAIR_CONTEXT = 512


@dataclass(frozen=True)
class CompareOptions(Options):
    """Options of `fp8q compare`: a server at `url`, or a checkpoint in the directory `model`.

    `served` None: the only model of the server. `windows` None: all that the run keeps likeliest tokens of. The key for
    a server comes from the environment variable OPENAI_API_KEY.
    """

    url: Annotated[
        str | None, option(OPTIONS, "The server, such as http://127.0.0.1:8000; it is sent the evaluation text.", "URL")
    ] = None
    model: Annotated[Path | None, option(OPTIONS, "Compare this checkpoint instead, run by transformers.", "DIR")] = (
        None
    )
    served: Annotated[str | None, option(OPTIONS, "The server's name of the model.", "NAME", "its only model")] = None
    windows: Annotated[
        int | None,
        option(EVALUATION, "Windows of the evaluation text to send, a request each.", "N", "all that were kept"),
        between(1),
    ] = None
    timeout: Annotated[
        int,
        option(OPTIONS, "Seconds to wait for an answer.", "S"),
        between(1),
        Unkeyed("how long to wait changes no answer"),
    ] = 120


@dataclass(frozen=True)
class PairOptions(VerdictLimits):
    """Options of `fp8q compare ORIGINAL --model CANDIDATE`, where ORIGINAL is a checkpoint and no run.

    `context` None: `PAIR_CONTEXT`, or the model's positions if fewer. `max_tokens` None: as `fp8q validate` has it.
    `stream` None: layer by layer where the models do not fit in memory.
    """

    data: Annotated[
        str | None,
        option(EVALUATION, "The text to compare two checkpoints on, where the first is no run.", "TEXT"),
    ] = None
    out: Annotated[
        Path | None, option(OPTIONS, "Where the comparison of two checkpoints goes: report.html and numbers.", "DIR")
    ] = None
    context: Annotated[
        int | None, option(EVALUATION, "Tokens in a window, with two checkpoints.", "N", f"{PAIR_CONTEXT}"), between(2)
    ] = None
    max_tokens: Annotated[
        int | None,
        option(EVALUATION, "Score at most so many tokens, with two checkpoints.", "N", "as fp8q validate"),
        between(1),
    ] = None
    module_windows: Annotated[
        int,
        option(EVALUATION, "Windows on which each module's output is compared (0: none).", "N"),
        between(0),
    ] = 2
    stream: Annotated[
        bool | None,
        option(
            OPTIONS,
            "Compare one decoder layer at a time, of both checkpoints or of one and a server.",
            default="when memory does not hold them",
            negative="--no-stream",
        ),
        Unkeyed("layer by layer or at once, the results are the same but for rounding"),
    ] = None
