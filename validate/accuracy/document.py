"""`accuracy.json` and `tokens.npz`: the results of each runtime on the same tokens, and the protocol.

Perplexity is exp of the mean negative log-likelihood in nats over all scored tokens. The protocol is part of the file
because the number means nothing without it: Llama-2-7B has "WikiText-2 perplexity" 8.71 by one protocol and 5.47 by
another.
"""

from collections.abc import Iterable, Mapping
from html import escape
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ...calibrate.text.evaluation import Protocol
from ...core.arrays import check_array, check_range, read_arrays
from ...core.files import FirstSchema, Strict, read_document, reading, replacing, write_document
from ...core.run import Run
from ...options import ONE_TERM_ALONE
from .log_probabilities import ROUNDING


class FrequencyBucket(Strict):
    """The scored tokens that occur `least` to `most` times in the calibration text; NLL is their mean."""

    least: int
    most: int
    tokens: int
    nll_nats: float
    nll_increase_nats: float | None = Field(default=None, description="over BF16's of the same tokens")


class DistanceBucket(Strict):
    """The decoded tokens `first` to `last` after the prompt, counted from 1; NLL and KL are their means."""

    first: int
    last: int
    tokens: int
    nll_nats: float
    kl_mean_nats: float | None = Field(default=None, description="mean KL(bf16 || this)")


class PositionBucket(Strict):
    """The scored tokens at positions `first` to `last` of their windows, counted from 1; NLL and KL are their means."""

    first: int
    last: int
    tokens: int
    nll_nats: float
    nll_increase_nats: float | None = Field(default=None, description="over BF16's of the same tokens")
    kl_mean_nats: float | None = Field(default=None, description="mean KL(bf16 || this)")


class Divergence(Strict):
    """The KL between two distributions of the next token, over the scored tokens: mean and percentiles, in nats."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class NotFinite(Strict):
    """The position at which a runtime first gave no finite number: the window, and the position in it, both from 0."""

    window: int
    position: int
    module: str | None = Field(default=None, description="the first whose output was not finite, as far as was found")
    bf16: bool | None = Field(default=None, description="whether BF16's is none in that window either, where known")


class Estimate(Strict):
    """A mean over positions, and its interval of 95 % over windows."""

    mean: float
    low: float
    high: float


class StoredDistance(Strict):
    """The distance of a runtime from one that ran on another host, by the results that the run has stored of it."""

    nll_increase_nats: Estimate = Field(description="over its loss of the same token, of all that both scored")
    kl_nats: Estimate = Field(description="KL(that || this) over its likeliest tokens and one rest: at most the KL")
    kl_most_nats: float = Field(description="what the KL is at most, whatever it gave the tokens in the rest")
    rest: float = Field(description="mean probability of that rest, within which no KL is seen")
    top1_agreement: float = Field(description="positions at which both think the same token the likeliest")


class AgainstStored(Strict):
    """Comparison of one runtime with stored results, when BF16 cannot run on this host.

    `positions`: the number of positions with stored likeliest tokens; `top`: the likeliest tokens of each position.
    """

    positions: int
    top: int
    runtimes: dict[str, StoredDistance] = Field(min_length=1)


class RuntimeAccuracy(Strict):
    """One runtime; the comparison with BF16 is absent in BF16's own entry. Shares and increases are fractions."""

    perplexity: float
    nll_nats: float = Field(description="mean per scored token")
    perplexity_increase: float | None = None
    kl_mean_nats: float | None = Field(default=None, description="mean KL(bf16 || this) per scored token")
    kl_p99_nats: float | None = None
    top1_agreement: float | None = Field(default=None, description="scored tokens where both think the same likeliest")
    top5_agreement: float | None = Field(
        default=None, description="mean share of BF16's five likeliest tokens that are among this one's five likeliest"
    )
    kl_fp32_nats: float | None = Field(
        default=None, description="mean KL(fp32 || this), where fp32 ran: BF16's own is the yardstick"
    )
    tokens: int | None = Field(default=None, description="scored, where these are not all of the protocol's")
    kl_sums_nats: float | None = Field(
        default=None, description="mean KL(reference-fp32 || this): what the accumulator alone adds"
    )
    divergences: dict[str, Divergence] | None = Field(
        default=None, description="by direction: KL(bf16||this), KL(this||bf16), and with fp32 where that ran"
    )
    increase_halves: list[float] | None = Field(
        default=None, description="perplexity_increase on every second window, and on the others: what text alone does"
    )
    perplexity_over_fp32: float | None = Field(default=None, description="increase over FP32's, where fp32 ran")
    by_position: list[PositionBucket] | None = Field(default=None, description="by powers of two")
    by_frequency: list[FrequencyBucket] | None = None
    by_distance: list[DistanceBucket] | None = Field(
        default=None, description="of tokens that are decoded behind a prompt, in quarters"
    )
    not_finite: NotFinite | None = None
    stored: AgainstStored | None = Field(
        default=None, description="where it ran on a host without the others: what the run kept of those"
    )

    @property
    def sampled(self) -> bool:
        """Tell whether some of the windows were run, and no gate is for it."""
        return self.tokens is not None


class ImageAccuracy(Strict):
    """The runtimes of torch on held-out rows with images, which the whole model read."""

    rows: int
    tokens: int = Field(description="scored: those of text behind the first image of a row")
    runtimes: dict[str, RuntimeAccuracy]


Kind = Literal["acceptable", "worse", "different", "unknown", "broken"]
#: The colour of each verdict, of the palette of the plots.
TONES: dict[Kind, str] = {
    "acceptable": "#009e73",
    "worse": "#d55e00",
    "different": "#d55e00",
    "unknown": "#666667",
    "broken": "#d55e00",
}


#: The measures that a verdict holds against limits.
Measure = Literal["perplexity", "kl", "flips"]


class Verdict(Strict):
    """The decision on the FP8 model: `acceptable` where no runtime that serves it exceeds a limit, `worse` where one
    does, `different` where `fp8q compare` names a cause for what no limit shows, `unknown` where the text is too short
    to tell, `broken` without a finite perplexity.

    `runtime` is the one that decided. `sentence` states the decision, `detail` how sure it is. Files of older versions
    have no limit but that of perplexity.
    """

    kind: Kind
    sentence: str
    detail: str = ""
    limit: float = Field(description="largest acceptable increase of perplexity")
    kl_limit_nats: float | None = Field(default=None, description="largest acceptable KL from BF16, a token")
    flips_limit: float | None = Field(default=None, description="largest acceptable share of flips")
    limit_is_default: bool = Field(default=False, description="whether none of the limits was asked for")
    exceeded: list[Measure] = Field(default=[], description="the measures that are beyond their limits")
    runtime: str | None = None
    perplexity_increase: float | None = None
    kl_nats: float | None = Field(default=None, description="mean KL(bf16 || this), or what it is at least")
    flips: float | None = Field(default=None, description="share of tokens of which another is the likeliest")

    def _repr_html_(self) -> str:
        """Render the verdict for a notebook."""
        style = f"border-left:6px solid {TONES[self.kind]};padding-left:1em"
        return f'<p style="{style}"><strong>{escape(self.sentence)}</strong><br>{escape(self.detail)}</p>'


class Accuracy(Strict):
    """`accuracy.json`."""

    schema_: FirstSchema = 1
    protocol: Protocol
    runtimes: dict[str, RuntimeAccuracy]
    verdict: Verdict | None = Field(default=None, description="absent in files of older versions")
    positions: int | None = Field(default=None, description="of the model: the longest window it reads")
    adapters: dict[str, dict[str, RuntimeAccuracy]] | None = Field(
        default=None, description="by adapter: the runtimes with it beside the model, against BF16 with it"
    )
    images: ImageAccuracy | None = Field(default=None, description="of held-out rows with images; no part of verdicts")

    @property
    def in_part(self) -> set[str]:
        """The runtimes that have no finite loss for some of the tokens: they ran some windows only, or broke down."""
        return {
            name
            for name, runtime in self.runtimes.items()
            if runtime.sampled or runtime.not_finite or not isfinite(runtime.nll_nats)
        }

    def not_finite(self, adapter: str | None) -> set[str]:
        """The runtimes whose losses are not finite, with that adapter on."""
        runtimes = self.runtimes if adapter is None else (self.adapters or {}).get(adapter, {})
        return {name for name, runtime in runtimes.items() if runtime.not_finite or not isfinite(runtime.nll_nats)}

    @property
    def one_term_cost(self) -> str | None:
        """State KL from BF16 with one code for each activation, and with the codes of the run; None where either was
        not measured.
        """
        names = (ONE_TERM_ALONE, "reference")
        one, ours = (self.runtimes[name].kl_mean_nats if name in self.runtimes else None for name in names)
        if one is None or ours is None:
            return None
        return f"KL from BF16 is {one:.3g} nats a token in one term, and {ours:.3g} as fp8q multiplies it"

    def with_adapters(self) -> "list[tuple[str, Accuracy]]":
        """Return pairs of a suffix for runtime names and the accuracy, without an adapter and with each adapter."""
        by_adapter = (self.adapters or {}).items()
        return [("", self)] + [
            (f"{WITH}{name}", self.model_copy(update={"runtimes": runtimes})) for name, runtimes in by_adapter
        ]


#: The former name of the runtime `original`, in files of older versions.
FORMER = {"source": "original"}
#: The suffix of a runtime's divergences in `tokens.npz`.
KL = ".kl"
#: The separator between the names of a runtime and of the adapter that is on.
WITH = " with "
ByToken = Mapping[str, npt.NDArray[np.float32]]


def save_accuracy(run: Run, accuracy: Accuracy, nll: ByToken, kl: ByToken = MappingProxyType({})) -> list[Path]:
    """Write `accuracy.json` and `tokens.npz`; returns both paths.

    `nll`, and `kl` from BF16: runtime -> float32 [windows, context], nats, NaN where a token is not scored; stored
    under the runtime's name, with `.kl` behind it.
    """
    arrays = {**nll, **{f"{name}{KL}": values for name, values in kl.items()}}
    with replacing(run.tokens) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, **{name: arrays[name] for name in sorted(arrays)})
    write_document(run.accuracy, accuracy)
    return [run.accuracy, run.tokens]


def load_accuracy(run: Run) -> Accuracy:
    """Read `accuracy.json`; raises InputError when it is missing or not the file `fp8q validate` wrote."""
    accuracy = read_document(run.require(run.accuracy, "validate"), Accuracy)
    runtimes = {FORMER.get(name, name): runtime for name, runtime in accuracy.runtimes.items()}
    return accuracy.model_copy(update={"runtimes": runtimes})


def load_token_arrays(run: Run) -> dict[str, npt.NDArray[np.float32]]:
    """Read all arrays of `tokens.npz`, by their names in the file."""
    return dict(_load(run))


def with_adapter(runtime: str, adapter: str | None) -> str:
    """Name a runtime with an adapter on, as both files of tokens do."""
    if adapter:
        return f"{runtime}{WITH}{adapter}"
    return runtime


def of_adapter(names: Iterable[str], adapter: str | None) -> dict[str, str]:
    """Select the `names` of runtimes with that adapter on (None: without one): runtime -> its name."""
    if adapter is None:
        return {name: name for name in names if WITH not in name}
    ending = with_adapter("", adapter)
    return {name.removesuffix(ending): name for name in names if name.endswith(ending)}


def load_token_losses(run: Run, adapter: str | None = None) -> dict[str, npt.NDArray[np.float32]]:
    """Read `tokens.npz`: runtime -> NLL (negative log-likelihood) in nats, float32 [windows, context], NaN unscored;
    with that adapter on.
    """
    held = {name: values for name, values in _load(run).items() if not name.endswith(KL)}
    return {runtime: held[name] for runtime, name in of_adapter(held, adapter).items()}


def load_divergences(run: Run) -> dict[str, npt.NDArray[np.float32]]:
    """Read `tokens.npz`: runtime -> KL(bf16 || this) in nats, float32 [windows, context], NaN unscored; nothing in what
    older versions wrote.
    """
    return {name.removesuffix(KL): values for name, values in _load(run).items() if name.endswith(KL)}


def _of_today(name: str) -> str:
    """The name of today of an array in `tokens.npz`."""
    runtime = name.removesuffix(KL)
    return FORMER.get(runtime, runtime) + name[len(runtime) :]


def _load(run: Run) -> dict[str, npt.NDArray[np.float32]]:
    """Read and check `tokens.npz`: it has every runtime of `accuracy.json` and no other, and every array has the
    protocol's tokens, in the same places, unless `accuracy.json` says that its runtime ran some windows only, or is not
    finite.
    """
    path = run.require(run.tokens, "validate")
    again = "restore it, or run `fp8q validate` again"
    arrays = read_arrays(path, "losses of tokens", again)
    stored = {_of_today(name): values for name, values in arrays.items()}
    accuracy = load_accuracy(run)
    partial = {f"{name}{suffix}" for suffix, evaluated in accuracy.with_adapters() for name in evaluated.in_part}
    with reading(path, "losses of tokens", again):
        if not stored:
            raise ValueError("it has no runtime")
        if absent := accuracy.runtimes.keys() - stored.keys():
            raise ValueError(f"it has no losses of {min(absent)}, which {run.accuracy.name} has")
        known = {name + suffix for suffix, evaluated in accuracy.with_adapters() for name in evaluated.runtimes}
        if unknown := {name for name in stored if name.removesuffix(KL) not in known}:
            raise ValueError(f"it has {min(unknown)}, which is no runtime of {run.accuracy.name}")
        shape = next(iter(stored.values())).shape
        for name, values in stored.items():
            check_array(name, values, "float32", shape if len(shape) == 2 else (None, None))
            of_broken = name.endswith(KL) and "bf16" in partial  # a divergence from BF16, which has no number there
            if name.removesuffix(KL) in partial or of_broken:
                continue
            check_range(name, values, -ROUNDING, float(np.finfo(np.float32).max))
            if (scored := int(np.isfinite(values).sum())) != accuracy.protocol.tokens:
                raise ValueError(f"{name} has {scored:,} losses for {accuracy.protocol.tokens:,} tokens")
    return stored
