"""The stage `corpus`: from texts to the windows of tokens that are calibrated on, and those that are held out."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from ..options import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN, CalibrateOptions
from ..progress import Reporter
from ..run import Run, replacing
from .steps import Notes, stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..calibrate.source import Source
    from ..validate.perplexity import Evaluation

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Collected:
    """The tokens of one run: `windows` int64 [windows, seq_len] to calibrate on, `evaluation` int64 [tokens] held out; `text`: SHA-256 of the calibration text."""

    windows: Tokens
    evaluation: Tokens
    names: tuple[str, str]
    text: str


def collect(source: "Source", tokenizer: "PreTrainedTokenizerBase", data: str, eval_data: str | None, options: CalibrateOptions, report: Reporter) -> Collected:
    """Read and cut the texts. Raises InputError for all that can be wrong with them."""
    from ..calibrate import corpus

    seq_len = corpus.lower_default("--seq-len", options.seq_len, DEFAULT_SEQ_LEN, source.max_positions, "the model's positions", report)
    vocabulary = source.text_config.vocab_size
    texts = corpus.load_texts(data, report=report)
    ids = corpus.encode(texts, tokenizer, vocabulary)
    if eval_data is None:
        ids, evaluation = corpus.hold_out(ids)
        report.note(f"{data}: the last {len(evaluation):,} of {len(ids) + len(evaluation):,} tokens are held out for evaluation")
    else:
        eval_texts = corpus.load_texts(eval_data, report=report)
        corpus.check_disjoint(texts, eval_texts, data, eval_data, report)
        evaluation = corpus.encode(eval_texts, tokenizer, vocabulary)
    if len(ids) < seq_len:
        raise InputError(f"{data}: has {len(ids):,} tokens, less than one window of {seq_len:,}; give more text or a smaller --seq-len")
    if len(evaluation) < seq_len:
        raise InputError(
            f"{eval_data or data}: leaves {len(evaluation):,} tokens for evaluation, less than one window of {seq_len:,}; give more text, --eval-data, or a smaller --seq-len"
        )
    samples = corpus.lower_default("--samples", options.samples, DEFAULT_SAMPLES, len(ids) // seq_len, f"the windows of {seq_len:,} tokens in {data}", report)
    return Collected(corpus.windows(ids, seq_len, samples), evaluation, (data, eval_data or data), corpus.fingerprint(texts))


def write_corpus(run: Run, source: "Source", collected: Collected, notes: Notes) -> None:
    """The stage `corpus`: `calibration.npz` and `evaluation.npz`."""
    inputs = {"text": collected.text, "tokens": digest(collected.windows), "evaluation": digest(collected.evaluation)}
    options = {"data": collected.names[0], "eval_data": collected.names[1], "model": str(source.path.resolve())}
    if run.is_current("corpus", inputs, options):
        return
    model = {"name": source.title, "path": options["model"], "revision": source.revision or "", "fingerprint": source.fingerprint}
    with stage(run, "corpus", inputs, options, notes, model) as log:
        save_tokens(run.calibration, collected.windows)
        save_tokens(run.evaluation, collected.evaluation)
        log.outputs += [run.calibration, run.evaluation]


def evaluation(run: Run, data: str | None, context: int | None, stride: int | None, report: Reporter) -> "Evaluation":
    """The tokens to evaluate on, cut into windows: those held out, or those of `data`.

    Raises InputError when `data` is what the run was calibrated on, or shorter than a window.
    """
    from transformers import AutoTokenizer

    from ..calibrate import corpus
    from ..validate.perplexity import cut

    collected = run.record().stages.get("corpus")
    held_out = load_tokens(run, run.evaluation)
    calibration = load_tokens(run, run.calibration)
    assert collected is not None, "the tokens were there, so their stage is"
    name = str(collected.options["eval_data"])
    if data is not None:
        name, texts = data, corpus.load_texts(data)
        if corpus.fingerprint(texts) == collected.inputs["text"]:
            raise InputError(f"--data {data}: is the text that {run.root} was calibrated on; evaluate on another")
        held_out = corpus.encode(texts, AutoTokenizer.from_pretrained(run.model))
    limit = positions(run.model) or calibration.shape[1]
    size = corpus.lower_default("--context", context, calibration.shape[1], limit, "the model's positions", report)
    return cut(held_out, name, size, size if stride is None else stride)


def positions(model: Path) -> int | None:
    """How many positions the checkpoint in `model` has, by its config.json."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    found = next((config[key] for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length") if key in config), None)
    return None if found is None else int(found)


def digest(tokens: Tokens) -> str:
    """SHA-256 of token ids, int64 little-endian."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i8").tobytes()).hexdigest()


def save_tokens(path: Path, tokens: Tokens) -> None:
    """Write token ids as `input_ids` in an npz file."""
    with replacing(path) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, input_ids=tokens)


def load_tokens(run: Run, path: Path) -> Tokens:
    """Read the `input_ids` of a file the stage `corpus` wrote."""
    with np.load(run.require(path, "corpus"), allow_pickle=False) as arrays:
        ids: Tokens = arrays["input_ids"]
    return ids
