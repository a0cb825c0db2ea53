"""Read other text than the calibration text, to evaluate on or to compare with the scales.

It is read with the run's own options.
"""

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from ..calibrate.measure.statistics import load_record
from ..calibrate.model.architecture import max_positions, text_fields
from ..calibrate.text import corpus
from ..calibrate.text.chat import renderer
from ..calibrate.text.corpus import fingerprint, lower_default
from ..calibrate.text.evaluation import Evaluation, cut, evenly_spaced
from ..calibrate.text.overlap import measure_overlap
from ..calibrate.text.packing import Packing
from ..core.errors import InputError
from ..core.files import reading
from ..core.reporter import Reporter
from ..core.run import Run
from ..options import LEAST_WINDOWS, MAX_TOKENS, ValidateOptions
from ..quantize.reading.run_checkpoint import FP8Q_CONFIG, FP8Q_POSITIONS, vocabulary_size
from .corpus import load_tokens, opening_of
from .pipeline.stages import CORPUS
from .shared.texts import Text, Tokens, read_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def read_other(run: Run, spec: str, tokenizer: "PreTrainedTokenizerBase", vocabulary: int, report: Reporter) -> Text:
    """Read the text `spec`; raises InputError.

    Chats are rendered by the tokenizer's template if the run's were, and where a table contains nothing else.
    """

    def render(where: str, value: object) -> str:  # only chats need a template
        return renderer(tokenizer, str(run.model))(where, value)

    chats_first = run.options(CORPUS).chat_template
    return read_tokens(spec, tokenizer, vocabulary, corpus.Reading(render=render, chats_first=chats_first), report)


def evaluation(run: Run, data: str | None, options: ValidateOptions, report: Reporter) -> Evaluation:
    """The tokens for evaluation, cut into windows that begin like the run's: the held-out tokens, or those of `data`.

    Raises InputError when `data` overlaps with the calibration text, or is shorter than a window.
    """
    ids = load_tokens(run, run.evaluation)
    calibration = load_tokens(run, run.calibration)
    name = evaluation_name(run)
    opening = opening_of(run)
    if data is not None:
        from ..calibrate.model.tokenizer import stored_tokenizer

        tokenizer = stored_tokenizer(run.model)
        text = read_other(run, data, tokenizer, vocabulary_size(run), report)
        share = check_other(run, text, tokenizer, report, options.allow_overlap)
        name = data
        ids = text.ids
        opening = opening.model_copy(update={"overlap": share})
    packing = Packing(calibration.shape[1], tuple(opening.prefix))
    tokens = cut_for(ids, name, options, packing, positions(run), report)
    return replace(tokens, protocol=tokens.protocol.model_copy(update=opening.model_dump()))


def evaluation_name(run: Run) -> str:
    """Name the evaluation text of `run`: the text that was given, or the part of the calibration text that was held
    out, whose tokens are a tenth of those of the file.
    """
    facts = run.facts(CORPUS)
    held_out = facts.eval_data == facts.data and facts.overlap is None
    if held_out:
        return f"the held-out tenth of {facts.eval_data}"
    return facts.eval_data


def cut_for(
    ids: Tokens,
    name: str,
    asked: ValidateOptions,
    calibrated: Packing,
    limit: int | None,
    report: Reporter,
) -> Evaluation:
    """Cut tokens `ids` int64 [tokens] of the text `name` into windows by the context, stride and prompt `asked` for.

    A context of None is the `calibrated` window; a stride of None scores all tokens of the text in a window; of more
    windows than `asked.max_tokens` allows, evenly spaced ones are taken. `limit`: the model's positions. Raises
    InputError for a context beyond these, and as `cut` does.
    """
    window = calibrated.size
    size = lower_default("--context", asked.context, window, limit or window, "the model's positions", report)
    stride = size - len(calibrated.prefix) if asked.stride is None else asked.stride
    all_windows = cut(ids, name, size, stride, calibrated.prefix, asked.as_served)
    scored = evenly_spaced(all_windows, asked.max_tokens or max(MAX_TOKENS, LEAST_WINDOWS * size))
    if asked.max_tokens is None and len(scored.ids) < len(all_windows.ids):
        report.note(
            f"--max-tokens: {scored.protocol.scored} are scored, in {len(scored.ids):,} of {len(all_windows.ids):,} "
            "windows, evenly spaced; --max-tokens N takes more or fewer"
        )
    return scored


def check_other(
    run: Run, text: Text, tokenizer: "PreTrainedTokenizerBase", report: Reporter, allowed: bool
) -> float | None:
    """The share of `text` in the calibration text, or the reverse, where it is too large and `allowed`; None where it
    is small. Raises InputError where it is too large and not allowed; notes it from a hundredth on.

    The run stores windows and not their text, so these are decoded; special tokens are left out where the compared
    texts have none.
    """
    corpus = load_record(run).corpus
    known = {source.fingerprint for part in corpus.parts for source in part.sources or []}
    if fingerprint(text.documents.texts) in known and not allowed:
        raise InputError(
            f"--data {text.name}",
            f"is a text that {run.root} was calibrated on",
            "evaluate on another, leave --data out to evaluate on what was held out, or give --allow-overlap",
        )
    windows = load_tokens(run, run.calibration)
    decoded = tokenizer.batch_decode(windows, skip_special_tokens=not text.documents.chat)
    overlap = measure_overlap(decoded, text.documents.texts, windows.shape[1])
    what = (
        f"it was calibrated on with {run.root}"
        if overlap.of_second >= overlap.of_first
        else f"what {run.root} was calibrated on is in it"
    )
    if overlap.too_much and not allowed:
        raise InputError(
            f"--data {text.name}",
            f"{overlap.shown} of {what}",
            "evaluate on other text, leave --data out to evaluate on what was held out, or give --allow-overlap",
        )
    if overlap.worth_a_note:
        report.note(f"--data {text.name}: {overlap.shown} of {what}")
    return overlap.share if overlap.too_much else None


def positions(run: Run) -> int | None:
    """The number of positions of the run's checkpoint, and of its graph, by its config.json.

    Raises InputError where that is missing or does not parse.
    """
    config = run.model / "config.json"
    if not config.is_file():
        raise InputError(config, "is missing", "`fp8q calibrate` writes it, run that first")
    with reading(config, "a configuration"):
        fields = json.loads(config.read_bytes())
        limits = max_positions(text_fields(fields) or fields), fields.get(FP8Q_CONFIG, {}).get(FP8Q_POSITIONS)
        return min((limit for limit in limits if limit is not None), default=None)
