"""Models that must not pass for a run's FP8 model: by their distance from it each test of another implementation judges
how near is near enough.

An absolute limit says little: of a small random model FP8 changes a hundred times as much as of a trained one, and a
limit that lets the first pass lets the second pass unquantized.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from fp8q.calibrate.model.source import load_model
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of

PROMPTS = (5, 9, 2)
STEPS = 10
#: Implementations part where a value takes another code: then their mean KL over positions is at most this share of the
#: least from another model. A second term tells values apart that differ by 2^-8, so that one of a thousand differs
#: somewhere in the very first position; but it weighs a sixteenth.
SHARE = 0.2
Logits = Sequence[np.ndarray]


def sequences(run: Run) -> list[np.ndarray]:
    """Three texts: a prompt of `PROMPTS` tokens and the `STEPS` tokens that follow it."""
    ids = load_tokens(run, run.evaluation)
    return [ids[64 * row : 64 * row + length + STEPS] for row, length in enumerate(PROMPTS)]


def mean_kl(expected: Logits, logits: Logits) -> float:
    """Mean KL(expected || logits) in nats over positions; each float32 [positions, vocabulary]."""
    log_p, log_q = (torch.log_softmax(torch.from_numpy(np.concatenate(x)).double(), -1) for x in (expected, logits))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def other_models(run: Run) -> dict[str, Logits]:
    """The logits of `sequences`, each row alone and at once: of the source model in FP32, of the exact reference with
    the first term alone, and where the run has two terms of that with both; float32 [positions, vocabulary] each.
    """
    model = load_model(source_of(run), torch.float32, "cpu")
    loaded = load_reference(run.model, "exact", torch.float32)

    def reference(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loaded.model(input_ids=ids, past_key_values=loaded.new_cache(), use_cache=True).logits
        return found

    found = {"unquantized": logits_of_rows(run, lambda ids: model(input_ids=ids, use_cache=False).logits)}
    if in_two_codes(load_scales(run).forms):
        found["two terms"] = logits_of_rows(run, reference)
        loaded.take_first_terms()
    return found | {"one term": logits_of_rows(run, reference)}


def logits_of_rows(run: Run, forward: Callable[[torch.Tensor], torch.Tensor]) -> Logits:
    """The logits of each of the three rows by itself."""
    with torch.inference_mode():
        return [forward(torch.from_numpy(row[None]))[0].float().numpy() for row in sequences(run)]


def least_distance(others: dict[str, Logits], name: str | None = None) -> float:
    """The least mean KL in nats from the model `name` of `others`, or from the run's own, of another of them."""
    name = name or ("two terms" if "two terms" in others else "one term")
    return min(mean_kl(others[name], logits) for other, logits in others.items() if other != name)
