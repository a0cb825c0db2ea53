"""Options of `fp8q compare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .declare import EVALUATION, OPTIONS, Options, Unkeyed, between, option


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
