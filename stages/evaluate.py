"""The stage `evaluate`: ask BF16 and FP8 lm-eval's tasks, and compare their answers question by question."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..calibrate.model.source import Source, load_model
from ..calibrate.model.tokenizer import stored_tokenizer
from ..core.errors import BackendError, InputError
from ..core.files import read_document, sha256_file, write_document
from ..core.record import FP8_STAGES
from ..core.reporter import SILENT
from ..core.run import Run
from ..options import EvaluateOptions
from ..quantize.checkpoint.card_additions import TASKS, state_in_card
from ..quantize.scales.decisions import load_scales
from ..quantize.scales.scheme import tails_of
from ..validate.endpoint.asking import find_model
from ..validate.endpoint.client import Client
from ..validate.tasks.document import (
    RuntimeName,
    TaskAnswers,
    TaskScores,
    answers_file,
    load_evaluation,
    markdown_table,
)
from ..validate.tasks.harness import AskedTask, Tasks, ask, chat_template, harness_version, open_tasks
from ..validate.tasks.models import local_model, served_model
from ..validate.tasks.results import all_results
from ..validate.tasks.task_files import check_task_files
from .compare import KEY
from .load import load_fp8_model
from .pipeline.stage import Key, Notes, device, needs, note_other_arithmetic
from .pipeline.stages import EVALUATE, EvaluateFacts
from .shared.adapters import note_base_alone
from .shared.model_files import checked_model, hashes_of, may_change_card
from .shared.sources import source_of

#: The import name of the package of the extra `evaluate`.
HARNESS_MODULES = ("lm_eval",)
#: The types of the source model, by the runtimes that run it.
SOURCE_TYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Contestant:
    """A model that is asked. `identity`: all that its answers depend on; `where`: where it answers, in words."""

    runtime: RuntimeName
    identity: Mapping[str, object]
    where: str
    open: Callable[[], Any]

    def key(self, question: AskedTask, options: EvaluateOptions, seed: int | None) -> str:
        """The hash of all that this model's answers to `question` depend on."""
        depends = [self.identity, question.asked, options.batch_size, seed, _harness(), __version__]
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def evaluate_tasks(run: Run, notes: Notes, options: EvaluateOptions) -> TaskScores:
    """Ask the models of `run` the tasks of `options`, unless that is done, and write `evaluation.json`.

    Raises InputError for tasks that cannot be asked, BackendError for a server that does not answer; answers that were
    complete before stay in both cases.
    """
    check_asked(options)
    check_task_files(options.include_path)
    needs("evaluate", HARNESS_MODULES)
    inputs = loaded_files(run)
    note_base_alone(run, "tasks are answered by", notes)
    source = source_of(run)
    tokenizer = stored_tokenizer(run.model)
    tasks = open_tasks(options, chat_template(tokenizer) if options.chat else None)
    asked = hashlib.sha256(json.dumps([question.asked for question in tasks.questions]).encode()).hexdigest()
    contestants = _contestants(run, source, tokenizer, options, inputs)
    inputs |= {"model": source.fingerprint, "tasks": asked}
    key = Key(inputs, _resolved(options, tasks), EvaluateFacts(harness=_harness()))
    if not EVALUATE.is_current(run, key):
        note_other_arithmetic(run, notes)
        check_servers(options)
        stored = Stored(run, options, spoiled(run))
        with EVALUATE.writing(run, key, notes) as log:
            answers = _ask_all(tasks, contestants, stored, notes)
            log.outputs += _write(run, tasks, contestants, options, answers)
    evaluation = load_evaluation(run)
    _tell_card(run, evaluation)
    return evaluation


def loaded_files(run: Run) -> dict[str, str]:
    """Name -> SHA-256 of the files that the FP8 model is loaded from: graphs, which it needs none of, are left out.

    Raises InputError for a file that its stage did not write.
    """
    run.refuse_stale(*FP8_STAGES)
    hashes = checked_model(run) | hashes_of(run, "export")
    return {name: digest for name, digest in hashes.items() if not name.endswith(".onnx")}


def check_asked(options: EvaluateOptions) -> None:
    """Raise InputError for no task, and for the name of a model on a server without the server."""
    if not options.tasks:
        raise InputError(
            "--tasks", "names no task", "give lm-eval's names, separated by commas, such as hellaswag,gsm8k"
        )
    for served, url, which in ((options.served, options.url, ""), (options.bf16_served, options.bf16_url, "bf16-")):
        if served is not None and url is None:
            raise InputError(
                f"--{which}served {served}", f"names a model on a server, and there is no --{which}url", "give it too"
            )


def _resolved(options: EvaluateOptions, tasks: Tasks) -> EvaluateOptions:
    """The options as the key has them: seeds count where a task samples."""
    sampled = any(question.samples for question in tasks.questions)
    if sampled:
        return options
    return replace(options, seeds=EvaluateOptions.seeds)


def _harness() -> str:
    return harness_version()


def _contestants(
    run: Run, source: Source, tokenizer: PreTrainedTokenizerBase, options: EvaluateOptions, files: Mapping[str, str]
) -> list[Contestant]:
    """The models to ask, BF16 first; each is loaded when it is asked something.

    Raises InputError for an address that is none of a server.
    """

    def here(runtime: RuntimeName, identity: Mapping[str, object], load: Callable[[], PreTrainedModel]) -> Contestant:
        where = {**identity, "device": device()}
        return Contestant(
            runtime, where, f"here, {device().upper()}", lambda: local_model(load(), tokenizer, options.batch_size)
        )

    def there(runtime: RuntimeName, identity: Mapping[str, object], client: Client, served: str | None) -> Contestant:
        longest = source.max_positions or LONGEST
        where = {**identity, "url": client.url, "served": served}
        return Contestant(
            runtime, where, client.url, lambda: served_model(client, served, run.model, options.batch_size, longest)
        )

    of_source = {"model": source.fingerprint}
    of_fp8 = {"fp8": dict(files)}
    contestants: list[Contestant] = []
    if client := _client(options.bf16_url, "--bf16-url", options):
        contestants.append(there("bf16", of_source, client, options.bf16_served))
    else:
        contestants.append(here("bf16", of_source, lambda: _float(run, source, "bf16")))
    if client := _client(options.url, "--url", options):
        contestants.append(there("fp8", of_fp8, client, options.served))
    else:
        contestants.append(here("fp8", of_fp8, lambda: _fp8(run)))
    if options.noise_floor:
        contestants.append(here("fp32", of_source, lambda: _float(run, source, "fp32")))
    return contestants


#: The positions of a model that states none.
LONGEST = 2048


def _client(url: str | None, option: str, options: EvaluateOptions) -> Client | None:
    if url is None:
        return None
    return Client(url, options.timeout, os.environ.get(KEY), option, "--batch-size")


def _float(run: Run, source: Source, runtime: str) -> PreTrainedModel:
    """The source model, which generates by the run's settings, as FP8 does."""
    model = load_model(source, getattr(torch, SOURCE_TYPES[runtime]), device())
    if (run.model / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(run.model)
    return model


def _fp8(run: Run) -> PreTrainedModel:
    """The FP8 model; with a tail the answers' own form, since lm-eval scores question and answer in one call."""
    as_served = 0 if tails_of(load_scales(run).forms) else None
    return load_fp8_model(run, Notes(SILENT), ("bfloat16", "fast"), None, as_served, None)


def check_servers(options: EvaluateOptions) -> None:
    """Raise InputError for a server without the model that is asked for.

    A server that is not there yet may be started once the other model, on the same GPU, has answered.
    """
    for url, option, served in (
        (options.bf16_url, "--bf16-url", options.bf16_served), (options.url, "--url", options.served),
    ):  # fmt: skip
        if client := _client(url, option, options):
            with suppress(BackendError):
                find_model(client, served)


def spoiled(run: Run) -> frozenset[Path]:
    """The files of answers that are no longer as this stage recorded them; what they say is asked again."""
    record = run.record().stages.get(EVALUATE.name)
    recorded = {run.root / name: digest for name, digest in (record.outputs if record else {}).items()}
    return frozenset(
        path
        for path, digest in recorded.items()
        if path.parent == run.answers and path.is_file() and sha256_file(path) != digest
    )


@dataclass(frozen=True)
class Stored:
    """The answers in `RUN/answers`, each under the key of all that it depends on.

    They are written as they come, and not when the stage ends: so a killed call, or one with other tasks, goes on with
    them, whatever the record says.
    """

    run: Run
    options: EvaluateOptions
    spoiled: frozenset[Path]

    def load(self, contestant: Contestant, question: AskedTask, seed: int | None) -> TaskAnswers | None:
        """Read the answers of this model to this question; None where there are none, or of another state."""
        path = answers_file(self.run.answers, question.name, contestant.runtime, seed)
        if path in self.spoiled or not path.is_file():
            return None
        with suppress(InputError):  # written by another version
            answers = read_document(path, TaskAnswers)
            if answers.key == contestant.key(question, self.options, seed):
                return answers
            return None
        return None

    def save(self, answers: TaskAnswers) -> None:
        """Write a file of answers."""
        self.run.answers.mkdir(exist_ok=True)
        write_document(answers_file(self.run.answers, answers.task, answers.runtime, answers.seed), answers)


def _ask_all(
    tasks: Tasks, contestants: list[Contestant], stored: Stored, notes: Notes
) -> dict[str, dict[RuntimeName, list[TaskAnswers]]]:
    """Ask each model in turn what it has not answered yet: task -> model -> answers by seed."""
    answers_of: dict[str, dict[RuntimeName, list[TaskAnswers]]] = {answer.name: {} for answer in tasks.questions}
    for contestant in contestants:
        jobs = [(question, seed) for question in tasks.questions for seed in _seeds(question, stored.options)]
        answers = [stored.load(contestant, *job) for job in jobs]
        left = sum(question.requests for (question, _), answer in zip(jobs, answers, strict=True) if answer is None)
        if there := sum(answer is not None for answer in answers):
            notes.note(f"{contestant.runtime}: {there} of {len(jobs)} answers to tasks are there already")
        model = contestant.open() if left else None
        with (
            notes.track(f"Asking {contestant.runtime}", left, "requests") if left else nullcontext(_ignored) as advance
        ):
            for (question, seed), answer in zip(jobs, answers, strict=True):
                if answer is None:
                    answer = ask(model, question, stored.options, contestant.runtime, seed, advance)
                    answer = answer.model_copy(update={"key": contestant.key(question, stored.options, seed)})
                    stored.save(answer)
                answers_of[question.name].setdefault(contestant.runtime, []).append(answer)
        del model
    return answers_of


def _ignored(_: int) -> None:
    """Take the place of a bar where there is nothing to do."""


def _seeds(question: AskedTask, options: EvaluateOptions) -> list[int] | list[None]:
    """The seeds by which a question is asked: of a task that samples several, else none."""
    if question.samples:
        return list(range(1, options.seeds + 1))
    return [None]


def _write(
    run: Run, tasks: Tasks, contestants: list[Contestant], options: EvaluateOptions,
    answers_of: dict[str, dict[RuntimeName, list[TaskAnswers]]],
) -> list[Path]:  # fmt: skip
    """Write the results; return their path, and those of all answers."""
    evaluation = TaskScores(
        harness=_harness(),
        limit=options.limit,
        chat=options.chat,
        models={contestant.runtime: contestant.where for contestant in contestants},
        results=all_results(answers_of, tasks.groups),
    )
    write_document(run.evaluated, evaluation)
    return [run.evaluated, *sorted(run.answers.glob("*.json"))]


def _tell_card(run: Run, evaluation: TaskScores) -> None:
    """Write the table of scores into the model card, where the card has a place for it."""
    if may_change_card(run):
        caption = f"By {evaluation.protocol} (`fp8q evaluate`); the interval is of 95 %, over questions."
        state_in_card(run.card, TASKS, f"{markdown_table(evaluation)}\n\n{caption}")
