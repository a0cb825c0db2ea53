"""Options of running and publishing the FP8 model: those of `generate`, `serve`, `bench`, `triton` and `push`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

from ..core.errors import InputError
from .declare import (
    GENERATION,
    MEASUREMENT,
    OPTIONS,
    SERVING,
    Options,
    Unkeyed,
    between,
    not_empty,
    option,
    sizes_of,
)

#: The most characters of a Triton model's name: a folder has this name, with `_engine` added.
LONGEST_MODEL_NAME = 200
TemplateOption = Annotated[
    Path | None, option(GENERATION, "Render chats by this template (Jinja).", "FILE", "the model's own")
]
RuntimeOption = Annotated[
    Literal["auto", "onnxruntime", "tensorrt", "tensorrt-rtx", "reference", "bf16"],
    option(GENERATION, "The runtime of the model; bf16: the source model."),
]


def temperature_of(option: str, value: float) -> float:
    """The rule of a temperature."""
    if not 0 <= value < float("inf"):
        raise InputError(f"{option} {value}", "must be 0 or more, and finite")
    return value


def nucleus_of(option: str, value: float) -> float:
    """The rule of top-p, the share of probability to sample from."""
    if not 0 <= value <= 1:
        raise InputError(f"{option} {value}", "must lie in [0, 1]")
    return value


@dataclass(frozen=True)
class GenerateOptions(Options):
    """Options of `fp8q generate`: sampling, and the runtime of the model (`auto`: the fastest on this machine)."""

    max_tokens: Annotated[int, option(GENERATION, "Largest number of tokens in an answer.", "N"), between(1)] = 256
    temperature: Annotated[
        float,
        option(GENERATION, "0 takes the best token; higher draws more freely.", "T", default="0"),
        temperature_of,
    ] = 0.0
    top_p: Annotated[
        float, option(GENERATION, "Draw from the fewest tokens that hold this much probability.", "P"), nucleus_of
    ] = 1.0
    seed: Annotated[
        int | None,
        option(GENERATION, "Draw the same tokens again.", "N", "other ones each time"),
        between(0, 2**64 - 1),
    ] = None
    stop: Annotated[
        tuple[str, ...], option(GENERATION, "End the answer before this text. Repeatable.", "TEXT"), not_empty
    ] = ()
    runtime: RuntimeOption = "auto"
    adapter: Annotated[
        str | None, option(GENERATION, "The adapter beside the model to answer with.", "NAME", "the model alone")
    ] = None
    template: TemplateOption = None


def port_of(option: str, value: int) -> int:
    """The rule of a TCP port."""
    if not 0 <= value < 2**16:
        raise InputError(f"{option} {value}", "is no port", "give one from 1 to 65535, or 0 for a free one")
    return value


def plain_of(option: str, value: str) -> str:
    """The rule of a text for an HTTP header or a metric's label."""
    if not value.isascii() or not value.isprintable() or not value or " " in value:
        raise InputError(f"{option} {value!r}", "must be of printable ASCII characters, without spaces")
    return value


@dataclass(frozen=True)
class ServeOptions(Options):
    """Options of `fp8q serve`.

    `name` None: the source model's. `bf16`: serve that model too, as `<name>-bf16`. `grace`: seconds that active
    requests get when the server is told to end. `api_key` None: the variable FP8Q_API_KEY, or none.
    """

    host: Annotated[
        str, option(SERVING, "Address to listen at; 0.0.0.0 or :: is all of this machine's.", "HOST"), plain_of
    ] = "127.0.0.1"
    port: Annotated[int, option(SERVING, "Port to listen at; 0: a free one.", "N"), port_of] = 8000
    name: Annotated[
        str | None, option(SERVING, "The model's name for clients.", "NAME", "the source model's name"), plain_of
    ] = None
    runtime: RuntimeOption = "auto"
    bf16: Annotated[
        bool, option(SERVING, "Serve the BF16 source beside it, as NAME-bf16, to compare; takes its memory and torch.")
    ] = False
    adapter: Annotated[
        tuple[str, ...],
        option(SERVING, "Serve the model with this adapter on too, as a model of that name. Repeatable.", "NAME"),
    ] = ()
    template: TemplateOption = None
    max_batch: Annotated[int, option(SERVING, "Most requests that are answered together.", "N"), between(1)] = 8
    grace: Annotated[
        int, option(SERVING, "Time that active requests get when the server is stopped.", "SECONDS"), between(0)
    ] = 30
    api_key: Annotated[
        str | None,
        option(
            SERVING,
            "Key that clients must send; other users see it in the list of processes.",
            "KEY",
            "FP8Q_API_KEY, if set",
        ),
        plain_of,
    ] = None


def above_zero(option: str, value: float) -> float:
    """The rule of a quantity above zero."""
    if not 0 < value < float("inf"):
        raise InputError(f"{option} {value}", "must be above 0, and finite")
    return value


@dataclass(frozen=True)
class BenchOptions(Options):
    """Options of `fp8q bench`.

    `batch_sizes` None: 1 and 8, lowered to the runtime's limit; `prompt_lengths` None: 32 and 256, lowered to the
    model's positions less the answer. `memory`, in GB of 10⁹ bytes, is the memory that the largest batches are computed
    for (None: all of this device); `gpu_hour_price` in any currency.
    """

    runtime: RuntimeOption = "auto"
    batch_sizes: Annotated[
        tuple[int, ...] | None,
        option(
            MEASUREMENT,
            "Sequences answered together; separated by commas.",
            "LIST",
            "1,8, or what the runtime takes",
            sizes_of,
        ),
    ] = None
    prompt_lengths: Annotated[
        tuple[int, ...] | None,
        option(
            MEASUREMENT,
            "Tokens of each prompt; separated by commas.",
            "LIST",
            "32,256, or what the model's positions hold",
            sizes_of,
        ),
    ] = None
    tokens: Annotated[int, option(MEASUREMENT, "Tokens of each answer.", "N"), between(2)] = 64
    rounds: Annotated[int, option(MEASUREMENT, "Answers timed of each model and size.", "N"), between(1)] = 5
    memory: Annotated[
        float | None,
        option(MEASUREMENT, "Memory that the largest batches are computed for.", "GB", "what is here"),
        above_zero,
    ] = None
    gpu_hour_price: Annotated[
        float | None,
        option(MEASUREMENT, "Price of an hour of the GPU; adds the cost of a million tokens.", "PRICE", "no cost"),
        above_zero,
    ] = None


def model_name(text: str) -> str:
    """Make a name for a Triton model of the last part of a path or hub name.

    Characters other than letters, digits, '.', '_' and '-' become '-'.
    """
    named = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).name).lstrip(".-")
    return named[:LONGEST_MODEL_NAME].rstrip(".-") or "model"


def name_of_a_model(option: str, value: str) -> str:
    """The rule of a Triton model's name, which is one part of a path and of a URL."""
    if value != model_name(value):
        raise InputError(
            f"{option} {value}",
            "is no name for a Triton model",
            f"use letters, digits, '.', '_' and '-', for example {model_name(value)}",
        )
    return value


def gpus_of(option: str, value: Sequence[int] | str) -> tuple[int, ...]:
    """The rule of a list of GPUs by their indices, as text separated by commas."""
    words = [word.strip() for word in (value.split(",") if isinstance(value, str) else map(str, value))]
    if not words or not all(re.fullmatch(r"[0-9]{1,4}", word) for word in words):
        raise InputError(
            f"{option} {','.join(words) or '(none)'}",
            "is no list of GPUs by their indices, from 0",
            "give one such as 0,1",
        )
    indices = tuple(sorted(map(int, words)))
    if twice := [first for first, second in pairwise(indices) if first == second]:
        raise InputError(
            f"{option} {','.join(words)}", f"has GPU {twice[0]} twice, and one has one instance", "name it once"
        )
    return indices


@dataclass(frozen=True)
class TritonOptions(Options):
    """Options of `fp8q triton`. `out` None: RUN/triton. `gpus` None: one instance, on the first GPU."""

    out: Annotated[
        Path | None,
        option(OPTIONS, "The repository to write; what fp8q wrote there is replaced.", "REPO", "RUN/triton"),
        Unkeyed("only what is written into the run is recorded"),
    ] = None
    name: Annotated[
        str | None, option(OPTIONS, "What clients call the model.", "NAME", "that of the source"), name_of_a_model
    ] = None
    max_batch: Annotated[int, option(OPTIONS, "Most requests that are generated together.", "N"), between(1)] = 8
    gpus: Annotated[
        tuple[int, ...] | None,
        option(
            OPTIONS,
            "GPUs by their indices, for an instance with an engine on each; separated by commas.",
            "LIST",
            "one instance, on the first GPU",
            gpus_of,
        ),
    ] = None
    engine_model: Annotated[
        bool,
        option(
            OPTIONS,
            "Write the plain TensorRT model even where the run has no plan yet; the plan is added on the GPU host.",
        ),
    ] = False


@dataclass(frozen=True)
class PushOptions(Options):
    """Options of `fp8q push`: the repository `repo`, and whether to upload (`yes`) or only to say what would be."""

    repo: Annotated[str | None, option(OPTIONS, "The repository on the hub, such as owner/name.", "NAME")] = None
    yes: Annotated[bool, option(OPTIONS, "Upload; without it nothing is sent.")] = False
    public: Annotated[bool, option(OPTIONS, "Make a new repository public; it is private otherwise.")] = False
    revision: Annotated[
        str | None, option(OPTIONS, "The branch to upload to, which exists.", "BRANCH", "the main branch")
    ] = None
