"""Other text than a run was calibrated on: to evaluate on, or to hold against its scales.

Read as the run read its own.
"""

import json
from typing import TYPE_CHECKING

from ..errors import InputError
from ..files import reading
from ..reporter import Reporter
from ..run import Run
from .corpora import Text, Tokens, load_tokens, read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..validate.perplexity import Evaluation


def read_other(run: Run, spec: str, tokenizer: "PreTrainedTokenizerBase", vocabulary: int, report: Reporter) -> Text:
    """The text `spec`; chats are rendered by the tokenizer's template where the run's were, and where a table holds
    nothing else. Raises InputError.
    """
    from ..calibrate.text import corpus
    from ..calibrate.text.chat import renderer

    def render(where: str, value: object) -> str:  # a tokenizer without a template matters only where there are chats
        return renderer(tokenizer, str(run.model))(where, value)

    chats_first = bool(run.record().stages["corpus"].options.get("chat_template"))
    return read(spec, tokenizer, vocabulary, corpus.Reading(render=render, chats_first=chats_first), report)


def evaluation(run: Run, data: str | None, context: int | None, stride: int | None, report: Reporter) -> "Evaluation":
    """The tokens to evaluate on, cut into windows: those held out, or those of `data`.

    Raises InputError when `data` holds what the run was calibrated on, or is shorter than a window.
    """
    from transformers import AutoTokenizer

    from ..validate.runtimes import vocabulary

    ids, calibration = load_tokens(run, run.evaluation), load_tokens(run, run.calibration)
    name = str(run.record().stages["corpus"].options["eval_data"])
    if data is not None:
        tokenizer = AutoTokenizer.from_pretrained(run.model, local_files_only=True)
        text = read_other(run, data, tokenizer, vocabulary(run.model), report)
        check_other(run, text, tokenizer, report)
        name, ids = data, text.ids
    return cut_for(ids, name, (context, stride), calibration.shape[1], positions(run), report)


def cut_for(
    ids: Tokens, name: str, asked: tuple[int | None, int | None], window: int, limit: int | None, report: Reporter
) -> "Evaluation":
    """Tokens `ids` int64 [tokens] of the text `name`, cut into windows of the context and the stride that are `asked`
    for; None stands for the `window` of calibration, and for the context. `limit`: the model's positions.

    Raises InputError for more than the positions, and as `cut` does.
    """
    from ..calibrate.text.corpus import lower_default
    from ..validate.perplexity import cut

    context, stride = asked
    size = lower_default("--context", context, window, limit or window, "the model's positions", report)
    return cut(ids, name, size, size if stride is None else stride)


def check_other(run: Run, text: Text, tokenizer: "PreTrainedTokenizerBase", report: Reporter) -> None:
    """Raise InputError when a tenth of `text` was calibrated on, or the other way round; note it when a hundredth was.

    The run keeps the windows and not their text, so these are decoded; special tokens are left out where the texts to
    compare have none.
    """
    from ..calibrate.measure.statistics import load_record
    from ..calibrate.text.corpus import fingerprint
    from ..calibrate.text.overlap import SAME, WORTH_A_NOTE, run_within, shares

    corpus = load_record(run).corpus
    if fingerprint(text.documents.texts) in {
        source.fingerprint for part in corpus.parts for source in part.sources or []
    }:
        raise InputError(
            f"--data {text.name}: is a text that {run.root} was calibrated on; evaluate on another, or leave --data "
            "out to evaluate on what was held out"
        )
    windows = load_tokens(run, run.calibration)
    decoded = tokenizer.batch_decode(windows, skip_special_tokens=not text.documents.chat)
    of_run, of_text = shares(decoded, text.documents.texts, run_within(windows.shape[1]))
    share, what = max(
        (of_text, f"it was calibrated on with {run.root}"), (of_run, f"what {run.root} was calibrated on is in it")
    )
    if share >= SAME:
        raise InputError(
            f"--data {text.name}: {share:.0%} of {what}; evaluate on other text, or leave --data out to evaluate on "
            "what was held out"
        )
    if share >= WORTH_A_NOTE:
        report.note(f"--data {text.name}: {share:.1%} of {what}")


def positions(run: Run) -> int | None:
    """How many positions the run's checkpoint can tell apart, by its config.json.

    Raises InputError where that is missing or does not parse.
    """
    from ..calibrate.model.architecture import max_positions

    config = run.model / "config.json"
    if not config.is_file():
        raise InputError(f"{config}: is missing; `fp8q calibrate` writes it, run that first")
    with reading(config, "a configuration"):
        return max_positions(json.loads(config.read_bytes()))
