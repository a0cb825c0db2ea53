"""Load lm-eval's tasks, and let a model answer one.

lm-eval (EleutherAI's lm-evaluation-harness) has the tasks, builds the prompts, and judges the answers, so that scores
are those of published tables. Each task is asked by itself, so that the answers of a killed call are not lost.
Questions are built before any model is loaded: a fault of a task is reported at once, and their hash identifies the
answers that are stored already.
"""

import hashlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import metadata
from logging import CRITICAL
from math import inf, isclose
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ...calibrate.input.silence import logging_from, quiet_transformers
from ...calibrate.input.untrusted import error_text, foreign
from ...core.errors import BackendError, InputError
from ...options import EvaluateOptions
from .document import MetricAnswers, RuntimeName, TaskAnswers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The seed of everything but sampled answers: of the examples before a question, and of a task's own choices.
FIXED_SEED = 1234
#: Exceptions, by name, of data that is on the hub where the hub cannot be reached, or has it not.
HUB_ERRORS = {
    "ConnectionError", "DatasetNotFoundError", "GatedRepoError", "HfHubHTTPError", "LocalEntryNotFoundError",
    "OfflineModeIsEnabled", "RepositoryNotFoundError",
}  # fmt: skip
#: Turns a list of messages, as chat templates take them, into a prompt.
Template = Callable[..., str]


@dataclass(frozen=True)
class AskedTask:
    """A task with its questions. `task`: lm-eval's; `asked`: SHA-256 of all questions and of how they are judged;
    `requests`: the model's answers that it needs; `samples`: answers are drawn, and so differ from seed to seed.
    """

    name: str
    task: Any
    asked: str
    requests: int
    samples: bool


@dataclass(frozen=True)
class Tasks:
    """The tasks that were asked for, and the tasks of each group among them."""

    questions: list[AskedTask]
    groups: dict[str, list[str]]


def harness_version() -> str:
    """The version of lm-eval."""
    return metadata.version("lm_eval")


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> Template:
    """The chat template of `tokenizer`, as lm-eval calls one."""

    def fill(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    return fill


def open_tasks(options: EvaluateOptions, template: Template | None) -> Tasks:
    """Load the tasks of `options` and build their questions, by a chat `template` where there is one.

    Raises InputError for a task that is not there, cannot be loaded, asks nothing, or runs code that a model wrote.
    """
    from lm_eval.tasks import TaskManager  # its modules are there before their bars are silenced

    with quiet_harness(), sandboxed_templates():
        manager = TaskManager(include_path=[str(path) for path in options.include_path] or None)
        for name in options.tasks:
            check_name(name, manager.all_tasks)
        questions: dict[str, AskedTask] = {}
        groups: dict[str, list[str]] = {}
        for name in options.tasks:
            loaded = _load(manager, name)
            tasks = {
                task_name: _question(task_name, task, options, template) for task_name, task in loaded["tasks"].items()
            }
            if twice := sorted(tasks.keys() & questions.keys()):
                raise InputError(f"--tasks {name}", f"has {twice[0]}, which is asked already", "name each task once")
            questions |= tasks
            if name in loaded.get("groups", {}):
                groups[name] = list(tasks)
    return Tasks(list(questions.values()), groups)


@contextmanager
def sandboxed_templates() -> Iterator[None]:
    """Let the Jinja templates of task files reach their documents alone, in this block: lm-eval's own environment lets
    a template call anything in Python (`''.__class__.__mro__ ...`).
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from lm_eval import utils

    before = utils.env
    sandbox = ImmutableSandboxedEnvironment(
        loader=before.loader, undefined=before.undefined, keep_trailing_newline=before.keep_trailing_newline
    )
    sandbox.filters.update(before.filters)
    utils.env = sandbox
    try:
        yield
    finally:
        utils.env = before


def check_name(name: str, known: Sequence[str]) -> None:
    """Raise InputError, with the nearest name, for a task that lm-eval does not know."""
    if name in known:
        return
    near = get_close_matches(name, known, 1)
    raise InputError(
        f"--tasks {name}",
        f"lm-eval {harness_version()} has no such task{f' (it has {near[0]})' if near else ''}",
        "`lm_eval ls tasks` lists them, and --include-path adds a folder of your own",
    )


def _load(manager: Any, name: str) -> dict[str, Any]:
    """Load a task, or all of a group; its data comes from a file, the cache or the hub."""

    def fault(error: BaseException) -> InputError:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & HUB_ERRORS:
            return InputError(
                f"--tasks {name}",
                f"its data is on the hub, which does not give it here ({error_text(error)})",
                "run it once with a network, which leaves the data in the cache, or give a task of local files with "
                "--include-path",
            )
        return InputError(f"--tasks {name}", f"cannot be loaded ({type(error).__name__}: {error_text(error)})")

    _seed(FIXED_SEED)
    with foreign(fault):
        loaded: dict[str, Any] = manager.load([name])
    return loaded


def _question(name: str, task: Any, options: EvaluateOptions, template: Template | None) -> AskedTask:
    """Build the questions of a loaded task."""
    if getattr(task, "UNSAFE_CODE", False):
        raise InputError(f"--tasks {name}", "runs the code that the model writes, which fp8q does not", "leave it out")
    if getattr(task, "MULTIMODAL", False):
        raise InputError(f"--tasks {name}", "shows images, and fp8q gives a model text alone", "leave it out")
    samples = samples_answers(name, task)
    if options.num_fewshot is not None and task.get_config("num_fewshot") != 0:
        task.set_config(key="num_fewshot", value=options.num_fewshot)
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=FIXED_SEED)
    with foreign(lambda error: InputError(f"--tasks {name}", f"its questions cannot be built ({error_text(error)})")):
        task.build_all_requests(
            limit=options.limit,
            apply_chat_template=template is not None,
            fewshot_as_multiturn=True,
            chat_template=template,
        )
    if not task.instances:
        raise InputError(f"--tasks {name}", "asks no question", "give it data")
    digest = hashlib.sha256(json.dumps(task.dump_config(), sort_keys=True, default=_stable).encode())
    for instance in task.instances:
        digest.update(json.dumps([instance.request_type, instance.args, instance.doc_id], default=_stable).encode())
    requests = sum(instance.repeats for instance in task.instances)
    return AskedTask(name, task, digest.hexdigest(), requests, samples and task.OUTPUT_TYPE == "generate_until")


def samples_answers(name: str, task: Any) -> bool:
    """Tell whether a task has its answers drawn at random; raises InputError for settings of other types than lm-eval
    takes, which it passes on as they are.
    """
    fewshot = task.get_config("num_fewshot")
    generation = task.get_config("generation_kwargs") or {}
    remedy = "mend it in the task's file"
    if fewshot is not None and (not isinstance(fewshot, int) or isinstance(fewshot, bool) or fewshot < 0):
        raise InputError(f"--tasks {name}", f"its num_fewshot is {_shown(fewshot)}, and no count", remedy)
    if not isinstance(generation, dict):
        raise InputError(
            f"--tasks {name}", f"its generation_kwargs are {_shown(generation)}, and no names with values",
            remedy,
        )  # fmt: skip
    temperature = generation.get("temperature") or 0
    if not isinstance(temperature, int | float) or not 0 <= temperature < inf:
        raise InputError(f"--tasks {name}", f"its temperature is {_shown(temperature)}, and none", remedy)
    return bool(generation.get("do_sample")) or temperature > 0


def _shown(value: Any) -> str:
    """A value of a task file, in a line of 60 characters at most."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _stable(value: Any) -> str:
    """Name a value that JSON has no form for, by no address in memory."""
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return str(value)


def ask(
    model: Any, question: AskedTask, options: EvaluateOptions, runtime: RuntimeName, seed: int | None,
    advance: Callable[[int], None],
) -> TaskAnswers:  # fmt: skip
    """Let `model`, an LM of lm-eval, answer `question`; `advance` is called with each number of requests done.

    Raises BackendError where the model or the harness fails.
    """

    def fault(error: BaseException) -> BackendError:
        return BackendError(question.name, f"{runtime} failed ({type(error).__name__}: {error_text(error)})")

    from lm_eval.evaluator import evaluate

    drawn = FIXED_SEED if seed is None else seed
    if hasattr(model, "_seed"):  # of a server, which draws by itself
        model._seed = drawn
    with quiet_harness(advance, question.requests), sandboxed_templates(), foreign(fault):
        question.task.set_fewshot_seed(seed=FIXED_SEED)
        _seed(drawn)
        results = evaluate(
            lm=model,
            task_dict={"tasks": {question.name: question.task}, "groups": {}},
            limit=options.limit,
            bootstrap_iters=0,
            apply_chat_template=options.chat,
            fewshot_as_multiturn=True,
        )
        return read_answers(question.name, results, runtime, seed)


def read_answers(task: str, results: dict[str, Any], runtime: RuntimeName, seed: int | None) -> TaskAnswers:
    """Read the scores and the values of each question from lm-eval's results. The key is left empty."""
    scores = results["results"][task]
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    first = [sample for sample in samples if sample["filter"] == filters[0]]
    higher = results["higher_is_better"][task]
    metrics: list[MetricAnswers] = []
    for name, score in scores.items():
        metric, _, filtered = name.partition(",")
        if not filtered or metric.endswith("_stderr") or not isinstance(score, Real):
            continue
        values = [_number(sample.get(metric)) for sample in samples if sample["filter"] == filtered]
        numbers = [value for value in values if value is not None]
        complete = len(numbers) == len(first) and isclose(float(np.mean(numbers)), float(score), abs_tol=1e-9)
        metrics.append(
            MetricAnswers(
                metric=metric, filter=filtered, higher_is_better=bool(higher.get(metric)), score=float(score),
                values=numbers if complete else None,
            )
        )  # fmt: skip
    return TaskAnswers(
        key="",
        task=task,
        runtime=runtime,
        seed=seed,
        version=str(results["versions"].get(task)),
        fewshot=int(results["n-shot"].get(task, 0)),
        questions=[str(sample["prompt_hash"])[:16] for sample in first],
        answers=[answer_of(sample["filtered_resps"]) for sample in first],
        metrics=metrics,
        chance=guessed([sample["filtered_resps"] for sample in first]),
    )


def guessed(responses: list[list[Any]]) -> float | None:
    """The share of questions that a guess gets right: the mean of one over each question's choices; None where some
    have none.
    """
    counts = [len(choices) for choices in responses if len(choices) > 1 and all(map(is_likelihood, choices))]
    if responses and len(counts) == len(responses):
        return float(np.mean([1 / count for count in counts]))
    return None


def is_likelihood(response: Any) -> bool:
    """Tell whether a response is the log-likelihood of a choice, with whether it is the likeliest text."""
    return isinstance(response, list | tuple) and len(response) == 2


def answer_of(responses: list[Any]) -> Any:
    """The answer to one question: the text that was generated, or the number of the likeliest choice."""
    if all(map(is_likelihood, responses)):
        return int(np.argmax([float(response[0]) for response in responses]))
    return json.loads(json.dumps(responses[0] if len(responses) == 1 else responses, default=str))


def _number(value: Any) -> float | None:
    if isinstance(value, Real | np.number | np.bool_):
        return float(value)
    return None


def _seed(seed: int) -> None:
    """Seed the generators that a task chooses its questions by, and that a model draws its answers by."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the generator that tasks draw from


@contextmanager
def quiet_harness(advance: Callable[[int], None] | None = None, most: int = 0) -> Iterator[None]:
    """Keep lm-eval and datasets from logging, printing and drawing bars in this block; `advance` is called with each
    number of requests done, `most` in all.
    """
    import datasets

    bars = datasets.utils.logging.is_progress_bar_enabled()
    levels = datasets.utils.logging.get_verbosity()
    datasets.utils.logging.set_verbosity(CRITICAL)
    datasets.disable_progress_bars()
    try:
        with (
            logging_from("lm_eval", CRITICAL),
            quiet_transformers(),
            redirect_stdout(io.StringIO()),
            _bars(advance, most),
        ):
            yield
    finally:
        datasets.utils.logging.set_verbosity(levels)
        if bars:
            datasets.enable_progress_bars()


@contextmanager
def _bars(advance: Callable[[int], None] | None, most: int) -> Iterator[None]:
    """Draw none of tqdm's bars in lm-eval's modules, and call `advance` with the progress that the models' bars would
    show.
    """
    left = most

    def done(number: float = 1) -> None:
        nonlocal left
        counted = min(left, int(number))
        left -= counted
        if advance is not None and counted:
            advance(counted)

    def bar(drawn: Any) -> Callable[..., Any]:
        def silent(*words: Any, **options: Any) -> Any:
            made = drawn(*words, **{**options, "disable": True})
            made.update = done
            return made

        return silent

    loaded = [module for name, module in sys.modules.items() if name.startswith("lm_eval.")]
    modules = [module for module in loaded if "tqdm" in vars(module)]
    before = [vars(module)["tqdm"] for module in modules]
    for module in modules:
        vars(module)["tqdm"] = bar(vars(module)["tqdm"])
    try:
        yield
        done(left)
    finally:
        for module, drawn in zip(modules, before, strict=True):
            vars(module)["tqdm"] = drawn
