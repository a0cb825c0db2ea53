"""Compare a served model with the checkpoint it is said to be: `fp8q compare ORIGINAL --url URL --data TEXT --out DIR`.

No run is needed: the original is run here in BF16 and FP32, and the server is asked for the log-probabilities of the
same tokens. A server lists the likeliest tokens of a position alone, so KL is over these and one rest, and never more
than the KL over the whole vocabulary; losses and flips are exact.
"""

import hashlib
import os
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import __version__
from ..calibrate.model.architecture import load_config
from ..calibrate.text.evaluation import Evaluation
from ..core.errors import BackendError, InputError
from ..core.reporter import Reporter
from ..options import CompareOptions, PairOptions
from ..serve.loop.text import ModelFileError, Vocabulary
from ..validate.accuracy.compare import (
    BASELINE,
    Outcome,
    TokenMeasure,
    Turns,
    compare_in_turn,
    measure_with_torch,
    summarize_tokens,
)
from ..validate.accuracy.decision import decide
from ..validate.accuracy.divergence import NLL, TOP1, TokenValues, kl_from
from ..validate.accuracy.top_logits import TopTokens, positions_to_keep
from ..validate.endpoint.answers import LikelyTokens
from ..validate.endpoint.asking import answered_form, ask_all, find_model, translated
from ..validate.endpoint.client import Client
from ..validate.endpoint.distance import distances
from ..validate.endpoint.forms import Endpoint
from ..validate.endpoint.judgement import other_count
from ..validate.endpoint.prompts import evenly, prompts_of
from ..validate.endpoint.reading import bound_of, other_reading, reference_readings
from ..validate.pair.document import CANDIDATE, Cause, CheckpointIdentity, PairComparison
from ..validate.pair.models import check_directory, identify
from .compare import KEY, renderer_of
from .compare_pair import (
    LAYERS,
    check_destination,
    check_results_directory,
    evaluation_of,
    flips_and_kl,
    goes_by_layer,
    original_openers,
    results_folder,
    streamed_openers,
    with_buckets,
    write_results,
)

#: The name of the checkpoint in sentences about how the server reads texts.
OWNER = "the original"


@dataclass(frozen=True)
class AskedEndpoint:
    """The answers of a server, the tokens that it was asked for with the original's likeliest ones, and the causes that
    lie in how it reads prompts.
    """

    answers: LikelyTokens
    tops: TopTokens
    form: str
    causes: list[Cause]


def compare_with_server(
    original: Path, served: CompareOptions, options: PairOptions, progress: Reporter
) -> PairComparison:
    """Compare the model that the server at `served.url` answers with and the checkpoint `original`, on `options.data`;
    write `options.out` and return it.

    Some 4,096 tokens of the text are sent, at most 256 of a window. The server is asked anew in every call, but for
    answers of a killed one. A verdict raises no error (`check_pair` does). Raises InputError for a text too short, a
    server that lists no log-probabilities of its prompts, and as `compare_pair` does; BackendError where the server or
    the original fails.
    """
    assert served.url is not None, "the caller looked"
    data, out = check_destination(original, options)
    raw = check_directory(original, "")
    config = load_config(original, str(original), raw)[0].get_text_config()
    check_results_directory(out, (original,))
    client = Client(served.url, served.timeout, os.environ.get(KEY))
    try:
        vocabulary = Vocabulary.read(original)
    except ModelFileError as error:
        raise InputError(error.subject, error.fault, error.remedy) from None
    model = find_model(client, served.served)
    evaluation = _asked_positions(
        evaluation_of(original, config, options, progress), served.windows, model.longest, data
    )
    unanswered = TopTokens(np.arange(len(evaluation.ids)), evaluation.ids, evaluation.scored, {}, {}, config.vocab_size)
    endpoint = Endpoint(client, model.name, unanswered, vocabulary, model.triton, OWNER)
    answered_form(endpoint, prompts_of(unanswered, None, 1, None)[0], None, losses=True)  # before the original runs
    identity = identify(original, raw, progress)
    parts = (
        __version__,
        identity.sha256,
        client.url,
        model.name,
        evaluation.protocol.model_dump_json(),
        served.windows,
    )
    key = hashlib.sha256(repr(parts).encode()).hexdigest()
    by_layer = goes_by_layer(options, [(original, raw, "")], "the original in FP32 takes", progress)
    with results_folder(out) as work, work.until_done({"key": key}) as folder:
        measure = TokenMeasure(measure_with_torch, evaluation.scored)
        whole_model = nullcontext(original_openers(original))
        layers = streamed_openers(original, evaluation.ids, config.vocab_size, folder / LAYERS, progress)
        with layers if by_layer else whole_model as openers:
            outcome = compare_in_turn(
                Turns(evaluation, openers, config.vocab_size, folder / "windows", measure), progress
            )
        if outcome.failed:
            raise BackendError("", "; ".join(outcome.failed.values()))
        losses = {name: nll[evaluation.scored] for name, nll in outcome.nll.items()}
        tops = replace(unanswered, runtimes=outcome.top, nll=losses)
        asked = _ask(replace(endpoint, tops=tops), original, folder, progress)
        paired = _paired(evaluation, outcome, asked)
        candidate = CheckpointIdentity(
            name=f"{model.name} at {client.url}", sha256=_digest(asked.answers), loaded_by="its server"
        )
        comparison = _judged(key, (identity, candidate), evaluation, paired, asked, options)
        return write_results(comparison, paired, out)


def _asked_positions(evaluation: Evaluation, windows: int | None, longest: int | None, data: str) -> Evaluation:
    """Leave the positions that a server is asked for: some of `windows` windows, within its `longest` prompt."""
    scored = positions_to_keep(evaluation)
    if longest is not None:
        scored[:, longest:] = False
    chosen = evenly(np.flatnonzero(scored.any(axis=1)).tolist(), windows)
    if not chosen:
        raise InputError(
            f"--context {evaluation.ids.shape[1]}",
            f"the server takes {longest:,} tokens of a prompt, and the tokens of {data} that are scored come later",
            "give a smaller --context",
        )
    total = int(evaluation.scored.sum())
    asked = int(scored[chosen].sum())
    update = {"tokens": asked, "of_tokens": evaluation.protocol.of_tokens or (total if asked < total else None)}
    return replace(
        evaluation,
        ids=evaluation.ids[chosen],
        scored=scored[chosen],
        protocol=evaluation.protocol.model_copy(update=update),
    )


def _ask(endpoint: Endpoint, original: Path, folder: Path, progress: Reporter) -> AskedEndpoint:
    """Ask for all positions, and how the server reads texts and a chat."""
    client = endpoint.client
    (stored := folder / "answers").mkdir(exist_ok=True)
    asked = ask_all(endpoint, prompts_of(endpoint.tops, None, None, None), stored, None, progress, losses=True)
    answers = asked.answers
    with translated(client):
        nearest = endpoint.tops.runtimes[BASELINE]
        readings = reference_readings(endpoint.tops, endpoint.vocabulary)
        reading = other_reading(endpoint, readings, renderer_of(original, progress), bound_of(answers, nearest))
    faults = [fault for fault in (other_count(answers), reading) if fault is not None]
    return AskedEndpoint(answers, endpoint.tops, asked.form, [_cause(client.url, fault) for fault in faults])


def _cause(url: str, fault: str) -> Cause:
    remedy = "give the server the original's tokenizer and template files, as they are"
    return Cause(rule="other-prompt", severity="error", subject=url, fault=fault, remedy=remedy)


def _paired(evaluation: Evaluation, outcome: Outcome, asked: AskedEndpoint) -> Outcome:
    """Set the server's numbers beside those of the original at the answered positions."""
    rows = asked.answers.rows
    answers = asked.answers
    measured: dict[str, TokenValues] = {
        name: {quantity: values[rows] for quantity, values in of_runtime.items()}
        for name, of_runtime in outcome.measured.items()
    }
    to_runtimes = distances(asked.tops, answers)
    measured[CANDIDATE] = {
        NLL: answers.nll.astype(np.float32),
        TOP1: to_runtimes[BASELINE].flips == 0,
        **{kl_from(name): np.maximum(to.kl, 0).astype(np.float32) for name, to in to_runtimes.items()},
    }
    base = measured[BASELINE][NLL]
    runtimes = {name: summarize_tokens(values, None if name == BASELINE else base) for name, values in measured.items()}

    def scattered(values: npt.NDArray[np.float32 | np.bool_]) -> npt.NDArray[np.float32]:
        of_scored = np.full(int(evaluation.scored.sum()), np.nan, np.float32)
        of_scored[rows] = values
        table = np.full(evaluation.ids.shape, np.nan, np.float32)
        table[evaluation.scored] = of_scored
        return table

    nll = {name: scattered(values[NLL]) for name, values in measured.items()}
    divergence = kl_from(BASELINE)
    kl = {name: scattered(values[divergence]) for name, values in measured.items() if divergence in values}
    accuracy = outcome.accuracy.model_copy(update={"runtimes": runtimes})
    return with_buckets(Outcome(accuracy, nll, {}, kl, measured=measured))


def _judged(
    key: str, models: tuple[CheckpointIdentity, CheckpointIdentity], evaluation: Evaluation, paired: Outcome,
    asked: AskedEndpoint, options: PairOptions,
) -> PairComparison:  # fmt: skip
    """Judge the server by the limit of `options`."""
    flips, kl = flips_and_kl(paired, np.nonzero(evaluation.scored)[0][asked.answers.rows])
    note = (
        f"the server was asked for {asked.form}; KL is over the {asked.answers.logprobs.shape[1]} likeliest tokens "
        "that it lists and one rest, and so a lower bound; modules cannot be compared through a server"
    )
    return PairComparison(
        key=key,
        original=models[0],
        candidate=models[1],
        protocol=evaluation.protocol.model_copy(update={"tokens": len(asked.answers.rows)}),
        runtimes=paired.accuracy.runtimes,
        flips=flips,
        kl_nats=kl,
        verdict=decide(paired.accuracy, paired.nll, options, paired.kl),
        modules=[],
        hidden=[],
        causes=asked.causes,
        notes=[note],
    )


def _digest(answers: LikelyTokens) -> str:
    """SHA-256 of all answers."""
    digest = hashlib.sha256()
    for column in fields(answers):
        digest.update(np.ascontiguousarray(getattr(answers, column.name)).tobytes())
    return digest.hexdigest()
