"""The remedy of a loss in one sentence: what each part of it becomes by which option, the command, its time and what it
needs. `sensitivity`, `doctor`, the report and the `next:` lines say the same.

The parts are the sums of what `sensitivity` predicts for each tensor. A change that gains little is not advised.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from shlex import quote
from typing import Any

from ...calibrate.measure.statistics import Corpus, load_record
from ...calibrate.text.mixture import written
from ...core.columns import nats
from ...core.run import Run
from ...options import CorpusOptions, MeasureOptions, ScaleOptions
from ...options.declare import words_of
from ...options.scales import OLDER_SPELLINGS
from ...quantize.reading.run_checkpoint import vocabulary_size
from ...quantize.scales.decisions import load_scales
from ...quantize.scales.scheme import in_two_codes
from ...quantize.sensitivity.document import Loss, Sensitivity, load_sensitivity
from ..bench.document import gemm_shapes

#: The share of the whole loss that a change must take away to be advised.
WORTH = 0.1
#: GPTQ's multiplications, output channels × inputs squared of a weight, that a core does in a second, about: SmolLM2's
#: 86 × 10⁹ took 74 to 180 seconds of a core.
ROUNDED_A_SECOND = 0.7e9
#: The form that is advised, and the one where a bare vLLM or another reader of the checkpoint serves it.
ADVISED_FORM = "tail:64"
FORM_ELSEWHERE = "bf16"


@dataclass(frozen=True)
class LossSums:
    """The predicted losses of a run, summed by kind, in nats a token: now, inputs in two codes, and weights by GPTQ."""

    weights: float
    inputs: float
    cache: float
    inputs_in_two: float
    weights_by_gptq: float

    @classmethod
    def of(cls, sensitivity: Sensitivity) -> "LossSums":
        """Add up the losses of all tensors."""

        def total(kind: str, after: str | None = None) -> float:
            losses = [loss for loss in sensitivity.modules if loss.kind == kind]
            return sum(_after(loss, after) for loss in losses)

        return cls(
            total("weight"), total("activation"), total("kv_cache"), total("activation", "exact"),
            total("weight", "gptq"),
        )  # fmt: skip

    @property
    def now(self) -> float:
        """The sum of all."""
        return self.weights + self.inputs + self.cache

    def __str__(self) -> str:
        """The sums in words."""
        cache = f", the cache {nats(self.cache)}" if self.cache else ""
        return (
            f"KL in nats a token, each tensor alone, summed: weights {nats(self.weights)}, inputs "
            f"{nats(self.inputs)}{cache}; together about {nats(self.now)}."
        )


def _after(loss: Loss, choice: str | None) -> float:
    """The loss of a tensor after a choice; as it is where that changes nothing of it."""
    changed = getattr(loss.kl_after, choice) if choice else None
    if changed is None:
        return loss.kl_nats
    return float(changed)


@dataclass(frozen=True)
class NextStep:
    """A step to take next with a run: why, or with what effect, in words, and the command."""

    why: str
    command: str

    def __str__(self) -> str:
        """The sentence."""
        return f"{self.why}: `{self.command}`"


def remedy_of(run: Run, sensitivity: Sensitivity | None = None) -> NextStep | None:
    """The change of forms and rounding that lessens the loss of `run`, by its `sensitivity` (None: `sensitivity.json`).

    None where neither takes a tenth of the loss away, and where nothing was measured of the run as it is.
    """
    stages = run.record().stages
    if sensitivity is None:
        if "sensitivity" not in stages or run.is_stale("sensitivity"):
            return None
        sensitivity = load_sensitivity(run)
    sums = LossSums.of(sensitivity)
    changes: list[str] = []
    words: list[str] = []
    elsewhere = run.without_graph() is not None and not in_two_codes(load_scales(run).forms)
    if sums.inputs - sums.inputs_in_two > WORTH * sums.now:
        after = "0 in BF16" if elsewhere else f"{nats(sums.inputs_in_two)} in two codes"
        changes.append(f"inputs {nats(sums.inputs)} -> {after}")
        words += ["--form", FORM_ELSEWHERE if elsewhere else ADVISED_FORM]
    if sums.weights - sums.weights_by_gptq > WORTH * sums.now:
        changes.append(f"weights {nats(sums.weights)} -> {nats(sums.weights_by_gptq)} by GPTQ")
        words += ["--weight-rounding", "gptq"]
    if not changes:
        return None
    needs = "; needs the plugin fp8q-vllm in vLLM" if ADVISED_FORM in words else ""
    minutes = _minutes(run) if "gptq" in words else 1
    effect = f"{', '.join(changes)}, about {minutes} minute{'' if minutes == 1 else 's'}{needs}"
    return NextStep(effect, command_for(run, words))


def command_for(run: Run, words: list[str]) -> str:
    """The command that makes `run` anew with the options `words`: `fp8q scales`, or where the second moments that GPTQ
    needs were not measured, `fp8q calibrate` with the run's model, texts, windows and other options.
    """
    measured = run.record().stages["measure"].outputs
    if "gptq" not in words or any(name.startswith("moments/") for name in measured):
        return " ".join(["fp8q scales", quote(str(run.root)), *words])
    return calibrate_command(run, words)


def calibrate_command(run: Run, words: list[str]) -> str:
    """`fp8q calibrate` with the model, texts, windows and other options of `run`, and the options `words`."""
    corpus = load_record(run).corpus
    record = run.record()
    recorded = {name: stage.options for name, stage in record.stages.items()}
    model = [quote(record.model.get("path", "MODEL"))]
    model += ["--adapter", quote(record.model["adapter"])] if "adapter" in record.model else []
    model += ["--tokenizer", "auto"] if record.model.get("tokenizer") == "auto" and "--tokenizer" not in words else []
    texts = [word for text in texts_of(corpus) for word in ("--data", quote(text))]
    if (evaluated := evaluation_text(corpus, recorded.get("corpus", {}))) is not None:
        texts += ["--eval-data", quote(evaluated)]
    texts += words_of(CorpusOptions, recorded.get("corpus", {}))
    texts += ["--allow-overlap"] if recorded.get("corpus", {}).get("overlap") else []
    sizes = ["--samples", str(corpus.windows), "--seq-len", str(corpus.seq_len)]
    sizes += words_of(MeasureOptions, recorded["measure"], {"batches", "vision"})
    chosen = [*OLDER_SPELLINGS, "form"] if "--form" in words else []
    chosen += ["weight_rounding"] if "--weight-rounding" in words else []
    scales = words_of(ScaleOptions, recorded.get("quantize", {}), chosen)
    graph = ["--no-graph"] if run.without_graph() else []
    out = ["--out", quote(str(run.root))]
    return " ".join(["fp8q calibrate", *model, *texts, *out, *sizes, *scales, *words, *graph])


def texts_of(corpus: Corpus) -> list[str]:
    """The values of `--data` that give `corpus` again: each text once, with its weight.

    In a corpus that `merge` joined each text weighs as many windows as it gave.
    """
    weights: dict[str, float] = {}
    for part in corpus.parts:
        for source in part.sources or []:
            if corpus.texts:
                weights[source.name] = weights.get(source.name, 0) + source.windows
            else:
                weights[source.name] = source.weight
        if not part.sources:  # a record of before there were several
            weights[part.name] = weights.get(part.name, 0) + part.windows
    alone = len(weights) == 1
    return [written(name, 1 if alone else weight) for name, weight in weights.items()]


def evaluation_text(corpus: Corpus, recorded: Mapping[str, Any]) -> str | None:
    """The value of `--eval-data` that a corpus was collected with, by the record of that stage; None where its own end
    was held out, and where `merge` joined the held-out ends of several.
    """
    evaluated = str(recorded.get("eval_data", ""))
    held_out = evaluated == recorded.get("data")
    if held_out or (corpus.texts and not Path(evaluated).exists()):
        return None
    calibrated = {source.name for part in corpus.parts for source in part.sources or []}
    if not evaluated or evaluated in calibrated:
        return None
    return evaluated


def _minutes(run: Run) -> int:
    """The minutes that GPTQ takes for the weights of `run` on this machine, about."""
    shapes = gemm_shapes(run, vocabulary_size(run))
    weights = [shape for name, shape in shapes.items() if name in load_scales(run).weights]
    work = sum(prod(shape) * shape[-1] for shape in weights)
    return max(1, ceil(work / ROUNDED_A_SECOND / (os.cpu_count() or 1) / 60))
