"""Options of `fp8q evaluate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..core.errors import InputError
from .declare import EVALUATION, OPTIONS, Options, Unkeyed, between, option


def task_names(option: str, value: Sequence[str] | str) -> tuple[str, ...]:
    """The rule of a list of tasks, as text separated by commas: each is named once."""
    names = tuple(name.strip() for name in (value.split(",") if isinstance(value, str) else value) if name.strip())
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise InputError(f"{option} {','.join(names)}", f"has {twice[0]} twice", "name each task once")
    return names


@dataclass(frozen=True)
class EvaluateOptions(Options):
    """Options of `fp8q evaluate`. `tasks`: at least one, by lm-eval's names of tasks, groups and tags.

    Without `url` the FP8 model runs here, by transformers with the GEMMs of the reference, and without `bf16_url`
    the BF16 model does. `seeds` are of tasks that sample; the others are asked once. The key for a server comes from
    the environment variable OPENAI_API_KEY.
    """

    tasks: Annotated[
        tuple[str, ...],
        option(EVALUATION, "lm-eval's tasks and groups, separated by commas.", "LIST", "none", task_names),
    ] = ()
    include_path: Annotated[
        tuple[Path, ...],
        option(
            EVALUATION,
            "A folder of task files (YAML) of your own, whose functions, classes and metrics run Python: give what you "
            "trust. Repeatable.",
            "DIR",
        ),
        Unkeyed("what its tasks ask is an input"),
    ] = ()
    limit: Annotated[
        int | None, option(EVALUATION, "The first so many questions of each task.", "N", "all"), between(1)
    ] = None
    num_fewshot: Annotated[
        int | None, option(EVALUATION, "Solved examples before each question.", "N", "as the task says"), between(0)
    ] = None
    chat: Annotated[bool, option(EVALUATION, "Ask by the chat template of the tokenizer.")] = False
    seeds: Annotated[
        int, option(EVALUATION, "Runs, each of another seed, of a task that samples its answers.", "N"), between(1)
    ] = 3
    noise_floor: Annotated[
        bool,
        option(EVALUATION, "Ask the model in FP32 too: flips between it and BF16 are the noise without any FP8."),
    ] = False
    batch_size: Annotated[
        int, option(EVALUATION, "Questions in a batch; of a server, in a request.", "N"), between(1)
    ] = 8
    url: Annotated[
        str | None,
        option(
            OPTIONS, "The server of the FP8 model, such as http://127.0.0.1:8000, in the place of running it.", "URL"
        ),
    ] = None
    served: Annotated[str | None, option(OPTIONS, "Its server's name of it.", "NAME", "its only model")] = None
    bf16_url: Annotated[str | None, option(OPTIONS, "The server of the BF16 model.", "URL")] = None
    bf16_served: Annotated[str | None, option(OPTIONS, "Its server's name of it.", "NAME", "its only model")] = None
    timeout: Annotated[
        int,
        option(OPTIONS, "Seconds to wait for an answer of a server.", "S"),
        between(1),
        Unkeyed("how long to wait changes no answer"),
    ] = 300
