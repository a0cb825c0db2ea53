"""How much of KL the likeliest tokens show that a run keeps: KL over all logits, and its two bounds, by their number.

    python benchmarks/top_logits.py [MODEL=CALIBRATION,EVALUATION …] [--windows 16] [--context 256]

Calibrated on 64 windows of 256 tokens. At every position of the windows: KL(BF16 || the FP8 reference) over the whole
vocabulary, and by the k likeliest tokens of BF16 with one rest: what it is at least, what it is at most, and the
probability of the rest. `bytes`: of a position and a runtime in `top_logits.npz`. Prints one JSON line.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from models import ModelTexts, main_of

from fp8q.api import CalibrateOptions, calibrate
from fp8q.calibrate.measure.scoring import log_softmax_of_array
from fp8q.calibrate.text.evaluation import cut
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.runtimes import float_model, reference
from fp8q.validate.accuracy.top_divergence import bounded_kl
from fp8q.validate.accuracy.top_logits import TopLogits

NUMBERS = (8, 16, 32, 64, 128)


def likeliest(log_p: npt.NDArray[np.float32], count: int) -> TopLogits:
    """The `count` likeliest tokens of log-probabilities [n, vocabulary]."""
    tokens = np.argsort(-log_p, axis=1, kind="stable")[:, :count]
    others = np.exp(log_p, dtype=np.float64)
    np.put_along_axis(others, tokens, 0.0, axis=1)
    rest = np.log(others.sum(axis=1)).astype(np.float32)
    return TopLogits(tokens.astype(np.int32), np.take_along_axis(log_p, tokens, axis=1), rest)


def measure(model: ModelTexts, windows: int, context: int) -> dict[str, Any]:
    """The KL in nats, and by number of tokens its bounds and the probability of the rest."""
    with tempfile.TemporaryDirectory() as directory:
        options = CalibrateOptions(samples=64, seq_len=256)
        run = calibrate(model.directory, model.data, Path(directory) / "run", model.eval_data, options)
        tokens = load_tokens(run, run.evaluation).ravel()[: windows * context]
        ids = cut(tokens, Path(model.eval_data).name, context, context).ids
        sides = (float_model(source_of(run), torch.bfloat16, "cpu"), reference(run, "cpu"))
        with torch.inference_mode():
            logits = [torch.cat([side(ids[i : i + 1])[:, :-1] for i in range(len(ids))]).float() for side in sides]
    log_p, log_q = (log_softmax_of_array(each.reshape(-1, each.shape[-1]).numpy()) for each in logits)
    p = log_p.astype(np.float64)
    whole = float((np.exp(p) * (p - log_q)).sum(axis=1).mean())
    found: dict[str, Any] = {"vocabulary": log_p.shape[1], "positions": len(log_p), "kl_nats": whole, "kept": {}}
    for count in NUMBERS:
        least, most, rest = (float(each.mean()) for each in bounded_kl(likeliest(log_p, count), log_q))
        assert least <= whole * (1 + 1e-6) <= most, "they are bounds"
        found["kept"][str(count)] = {
            "least_nats": least, "most_nats": most, "share": least / whole, "rest": rest, "bytes": 8 * count + 4,
        }  # fmt: skip
    print(f"{model.name}: {found}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main_of("top_logits", __doc__, measure, "demo", "llama", "qwen2", windows=16))
