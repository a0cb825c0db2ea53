"""The stage `compare`: ask a server or a checkpoint for the evaluation text, and judge if it is the run's model."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..core.commands import name_in_commands
from ..core.errors import BackendError, GateError, InputError
from ..core.files import write_document
from ..core.output_folder import WorkFolder
from ..core.reporter import Reporter
from ..core.run import Run
from ..options import BLOCK, CompareOptions
from ..quantize.scales.decisions import load_scales
from ..quantize.scales.scheme import tails_of
from ..serve.local.chat_template import ChatTemplate
from ..serve.loop.text import ModelFileError, Vocabulary
from ..validate.accuracy.document import load_accuracy
from ..validate.accuracy.top_logits import TopTokens, load_top_logits
from ..validate.endpoint.answers import LikelyTokens
from ..validate.endpoint.asking import ask_all, find_server, translated, without_prefix
from ..validate.endpoint.checkpoint import check_candidate, run_checkpoint
from ..validate.endpoint.client import Client
from ..validate.endpoint.document import ModelComparison
from ..validate.endpoint.judgement import (
    ARITHMETICS,
    AS_GOOD,
    UNIT_CACHE,
    WEIGHTS_ALONE,
    Judged,
    judge,
    judge_prompt,
    judge_reading,
)
from ..validate.endpoint.prompts import Prompt, compared_positions, more_positions, prompts_of
from ..validate.endpoint.reading import bound_of, other_reading, reference_readings
from .pipeline.stage import CALIBRATE_MODULES, NO_FACTS, Key, Notes, device, lacking, needs
from .pipeline.stages import COMPARE, VALIDATE
from .shared.model_files import checked_model

#: Where the key of a server comes from.
KEY = "OPENAI_API_KEY"
#: The verdicts that an arithmetic which the run has no runtime of may explain.
UNEXPLAINED = ("other-arithmetic", "other-model", "undecided")
#: Prompts that are asked again without their BOS.
WITHOUT_BOS = 4


def compare_served(run: Run, notes: Notes, options: CompareOptions) -> ModelComparison:
    """Ask the server or checkpoint of `options`, write `compare.json` and return it.

    Where a server fails whose cache is in FP8, and torch is installed, the run's model is tried with a cache that is
    written by 1.0. Raises GateError, once that is written, for any verdict but that it is the validated model.
    """
    check_one_subject(options)
    if options.model is not None:
        check_candidate(options.model)
    checked_model(run)
    run.refuse_stale(VALIDATE.name)
    stored_tokens = load_top_logits(run)
    recorded = run.record().stages[VALIDATE.name].outputs
    inputs = {path.name: recorded[path.name] for path in (run.tokens, run.top_logits)}
    key = Key(inputs, options, NO_FACTS)
    with COMPARE.writing(run, key, notes) as log:
        # no part of the key is the machine's arithmetic: it is the server that computes
        depends = {"inputs": inputs, "options": COMPARE.dump(options, NO_FACTS)}
        with WorkFolder(run.root, COMPARE.name).opened(depends) as folder:
            comparison = (
                _asked(run, stored_tokens, options, folder, notes)
                if options.url
                else _run(run, stored_tokens, options, notes)
            )
        write_document(run.comparison, comparison)
        log.outputs.append(run.comparison)
    return comparison


def check_one_subject(options: CompareOptions) -> None:
    """Raise InputError for both, or neither, of a server and a checkpoint."""
    if (options.url is None) == (options.model is None):
        written = f"--url {options.url} and --model {options.model}" if options.url else "neither --url nor --model"
        raise InputError(written, "give one of them, a server's address or a checkpoint's directory")


def check_validated(comparison: ModelComparison) -> None:
    """Raise GateError unless it is the validated model, or cannot be told from that or the original in BF16."""
    if not comparison.passes:
        raise GateError(comparison.answered, comparison.sentence)


def _asked(
    run: Run, stored_tokens: TopTokens, options: CompareOptions, folder: Path, notes: Reporter
) -> ModelComparison:
    assert options.url is not None, "the caller looked"
    client = Client(options.url, options.timeout, os.environ.get(KEY))
    try:
        vocabulary = Vocabulary.read(run.model)
    except ModelFileError as error:
        raise InputError(error.subject, error.fault, error.remedy) from None
    server, longest = find_server(client, options.served, stored_tokens, vocabulary)
    tail = min(tails_of(load_scales(run).forms).values(), default=None)
    prompts = prompts_of(stored_tokens, tail, options.windows, longest)
    asked = ask_all(server, prompts, folder, tail, notes)
    windows = np.nonzero(stored_tokens.positions)[0]
    more = more_positions(load_accuracy(run).protocol, stored_tokens, tail, name_in_commands(run.root))
    judged = judge(stored_tokens, asked.answers, windows, more)
    if judged.verdict != "validated":
        prefix = len(load_accuracy(run).protocol.prefix)
        again = None
        if prefix and asked.answers.with_logprobs:
            shorter = without_prefix(prompts, prefix, WITHOUT_BOS)
            (part := folder / "without-prefix").mkdir(exist_ok=True)
            again = judge(stored_tokens, ask_all(server, shorter, part, tail, notes).answers, windows)
        judged = judge_prompt(judged, asked.answers, again)
    bound = bound_of(asked.answers, stored_tokens.runtimes[judged.runtimes[0].runtime])
    with translated(client):
        reading = other_reading(
            server, reference_readings(stored_tokens, vocabulary), renderer_of(run.model, notes), bound
        )
    if judged.verdict in UNEXPLAINED and asked.answers.with_logprobs and tail is None:
        judged = _by_server_arithmetics(run, stored_tokens, asked.answers, judged, notes)
    server_facts = {"answered": client.url, "model": server.model, "form": asked.form, "requests": client.requests}
    return _document(judge_reading(judged, reading), prompts, asked.answers, tail, server_facts)


def _document(
    judged: Judged, prompts: Sequence[Prompt], answers: LikelyTokens, tail: int | None, answered: Mapping[str, object]
) -> ModelComparison:
    """The document of a comparison; `answered`: its fields on who answered, and how."""
    return ModelComparison.model_validate(
        {
            **answered,
            "prompts": len(prompts),
            "sent": answers.sent,
            "positions": len(answers.rows),
            "which": compared_positions(prompts, tail, len(answers.rows)),
            **vars(judged),
        }
    )


def has_cache_scales(run: Run) -> bool:
    """Tell whether the run has an FP8 cache whose scales differ from 1.0, which servers take where they load none."""
    return any(bool((scale.stored != 1).any()) for scale in load_scales(run).kv_cache.values())


def has_coded_inputs(run: Run) -> bool:
    """Tell whether the run has codes of inputs, none of them in blocks, which a server may leave in BF16."""
    forms = set(load_scales(run).forms.values())
    return BLOCK not in forms and any(form.terms for form in forms)


#: The arithmetic of a server -> the question that it answers, and whether a run may be computed so.
SERVER_ARITHMETICS: Mapping[str, tuple[str, Callable[[Run], bool]]] = {
    UNIT_CACHE: ("whether the server's FP8 cache has its scales", has_cache_scales),
    WEIGHTS_ALONE: ("whether the server leaves inputs in BF16", has_coded_inputs),
}


def _by_server_arithmetics(
    run: Run, stored_tokens: TopTokens, answers: LikelyTokens, judged: Judged, notes: Reporter
) -> Judged:
    """Judge answers again with each arithmetic of servers that the run may be computed in; as before where they have
    none of these. Where no more is lost than was validated inputs in BF16 are no fault.
    """
    as_good = judged.verdict == "undecided" and {*judged.arithmetics} <= AS_GOOD
    for name, (question, possible) in SERVER_ARITHMETICS.items():
        if not possible(run) or (as_good and name == WEIGHTS_ALONE):
            continue
        if missing := lacking(CALIBRATE_MODULES):
            notes.note(f"{question} was not tried: {missing} is not installed")
            continue
        from ..validate.endpoint.server_arithmetics import with_arithmetic  # loads torch

        tried = with_arithmetic(run, stored_tokens, name, device(), notes)
        again = judge(tried, answers, np.nonzero(stored_tokens.positions)[0])
        if again.arithmetics == [ARITHMETICS[name]]:
            return again
    return judged


def renderer_of(model: Path, notes: Reporter) -> Callable[[str], str] | None:
    """The chat template in `model`, for one message of a user; None where it has none, or nothing here renders it."""
    try:
        template = ChatTemplate(model)
    except InputError:
        return None
    except BackendError as error:
        notes.note(f"no chat is sent: {error}")
        return None
    return lambda text: template.render([{"role": "user", "content": text}])


def _run(run: Run, stored_tokens: TopTokens, options: CompareOptions, notes: Reporter) -> ModelComparison:
    needs("calibrate", CALIBRATE_MODULES)
    assert options.model is not None, "the caller looked"
    tail = min(tails_of(load_scales(run).forms).values(), default=None)
    prompts = prompts_of(stored_tokens, tail, options.windows, None)
    answers = run_checkpoint(options.model, run.model, prompts, device(), notes)
    more = more_positions(load_accuracy(run).protocol, stored_tokens, tail, name_in_commands(run.root))
    judged = judge(stored_tokens, answers, np.nonzero(stored_tokens.positions)[0], more)
    return _document(
        judged,
        prompts,
        answers,
        tail,
        {"answered": str(options.model), "model": options.model.name, "form": "transformers", "requests": 0},
    )
