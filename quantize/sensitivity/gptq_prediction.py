"""Predict the share of a weight's loss that GPTQ would leave, without rounding.

GPTQ lets the later inputs compensate the rounding error of input j as far as they correlate with it: the rest is the
part of x_j that they do not predict, 1 / U[j, j]² of the second moments H, with U the upper Cholesky factor of H^-1
(`quantize.weights.gptq`). So from the squared errors D_j of nearest rounding for input j the GEMM keeps Σ D_j / U[j,
j]² where it had Σ D_j H[j, j]; the KL is assumed to fall by the same share. Rounding all weights takes many times the
passes of everything else here.

H of n tokens overfits: p inputs explain p of n tokens by chance. Akaike's final prediction error (1969, "Fitting
autoregressive models for prediction") gives the error on other text, where N tokens are used for rounding: (1 + p / N)
/ (1 - p / n) times as much, and never more than x_j itself.

On the demo the codes of `gptq` lose, by the same gradients on windows that they were not rounded by, 0.85 to 1.42 times
the predicted loss in 15 of 16 groups, and 1.8 times where a fifteenth is left; 1.17 times in the median.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...calibrate.measure.moments import SecondMoments, load_moments
from ...core.files import replacing
from ..weights.gptq import DAMPING
from ..weights.no_waiting import factor_in_place
from .document import Site
from .site_quantizers import Quantizer

#: The moments of one in so many batches are gathered, from the first on.
EVERY = 2
#: Seconds after which sums that a GPU holds are written again, so that a killed call can go on from there.
SECONDS = 120.0
#: The least share of the tokens that is taken not to be explained by chance.
LEAST = 0.05


class Gathered:
    """Second moments of the inputs of GEMMs, in a folder, batch by batch.

    Sums that a GPU holds are written after the first batch, and then every `SECONDS`: copied after each batch, those of
    an 8B would be 32.7 GB. Invariant: the folder holds all of the batches that `batches` counts and no others, or
    `batches` is -1.
    """

    def __init__(self, folder: Path):
        """Gather in `folder`, which is made."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._count = folder / "batches"
        self._moments: SecondMoments | None = None
        self._tokens: dict[str, int] = {}
        self._added = 0
        self._written = -math.inf

    @property
    def batches(self) -> int:
        """The number of batches whose sums are in the folder; -1 where a killed call wrote part of one."""
        if self._count.is_file():
            return int(self._count.read_text(encoding="utf-8"))
        return 0

    @property
    def tokens(self) -> dict[str, int]:
        """The number of tokens of each tensor."""
        return {path.stem: int(path.read_text(encoding="utf-8")) for path in self.folder.glob("*.tokens")}

    def add(self, batch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add each tensor [windows, seq_len, width] (or [tokens, width]) of `batch`, if that is one to be gathered; the
        first one begins anew.
        """
        if batch == 0 or self._moments is None:
            self._tokens = self.tokens if batch else {}
            self._moments = SecondMoments(self.folder, frozenset(self._tokens))
            self._write_count(-1)
        if batch % EVERY == 0:
            if self._moments.in_files:
                self._write_count(-1)
            for name, tensor in tensors.items():
                self._moments.add(name, tensor)
                self._tokens[name] = self._tokens.get(name, 0) + tensor.shape[:-1].numel()
        self._added = batch + 1
        if self._moments.in_files or time.monotonic() - self._written > SECONDS:
            self.save()

    def save(self) -> None:
        """Write the sums of all batches that were added."""
        if self._moments is None:
            return
        self._write_count(-1)
        self._moments.save()
        for name, count in self._tokens.items():
            (self.folder / f"{name}.tokens").write_text(str(count), encoding="utf-8")
        self._write_count(self._added)
        self._written = time.monotonic()

    def _write_count(self, batches: int) -> None:
        with replacing(self._count) as partial:
            partial.write_text(str(batches), encoding="utf-8")


@dataclass(frozen=True)
class Unexplained:
    """The energy of an input's channels that later channels do not explain: the `order` int64 [in] of rounding, each
    channel's damped `energy` float32 [in], and the part of it that is `left` unexplained, float32 [in].
    """

    order: torch.Tensor
    energy: torch.Tensor
    left: torch.Tensor

    @classmethod
    def from_moments(cls, moments: torch.Tensor) -> "Unexplained":
        """Compute it from the second moments `moments` float32 [in, in]. Reversed, H has a Cholesky factor whose
        diagonal is one over U's.
        """
        order = torch.argsort(moments.diagonal(), descending=True, stable=True)
        damped = moments[order[:, None], order]
        mean = damped.diagonal().mean().double()
        damped.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1.0))
        energy = damped.diagonal().clone()
        reverse = damped.flip(0, 1)
        factor_in_place(reverse)  # damping bounds what FP32 loses
        return cls(order, energy, reverse.diagonal().square().flip(0))


def share_left(error: torch.Tensor, unexplained: Unexplained, tokens: int, calibrated: int) -> torch.Tensor:
    """Predict the share that GPTQ leaves of the loss by `error` float32 [out, in], the error of rounding a weight to
    nearest, float64 [].

    `unexplained`: of the weight's input, over `tokens`; `calibrated`: the tokens that GPTQ would use.
    """
    after = torch.arange(len(unexplained.order) - 1, -1, -1, device=error.device)
    chance = (1 + after / calibrated) / (1 - after / tokens).clamp_min(LEAST)
    errors = error.square().sum(0)[unexplained.order]
    now = (errors * unexplained.energy).sum().double()
    later = (errors * torch.minimum(chance * unexplained.left, unexplained.energy)).sum().double()
    return torch.where(now > 0, later / now, 1.0)


def left_of_sites(quantizer: Quantizer, sites: Iterable[Site], gathered: Gathered, calibrated: int) -> dict[str, float]:
    """Predict the share of the loss that GPTQ would leave of each weight: module -> share, for weights rounded to
    nearest whose input among `sites` was `gathered`; `calibrated`: the tokens that GPTQ would use.
    """
    shares: dict[str, float] = {}
    weights = quantizer.scales.weights
    tokens = gathered.tokens
    for site in sites:
        if site.kind == "activation" and site.module in tokens:
            nearest = [member for member in site.members if weights[member].rounding == "nearest"]
            errors = {member: quantizer.weight_error(member) for member in nearest}
            shares |= shares_left(errors, site.module, gathered, calibrated)
    return shares


def shares_left(errors: Mapping[str, torch.Tensor], name: str, gathered: Gathered, calibrated: int) -> dict[str, float]:
    """Predict the share of the loss that GPTQ would leave, for each weight in `errors` that reads tensor `name`."""
    tokens = gathered.tokens
    if name not in tokens or not errors:
        return {}
    device = next(iter(errors.values())).device
    unexplained = Unexplained.from_moments(load_moments(gathered.folder, name).to(device))
    shares = torch.stack([share_left(error, unexplained, tokens[name], calibrated) for error in errors.values()])
    return dict(zip(errors, shares.tolist(), strict=True))
