"""Held-out rows with images through the runtimes of torch: the whole model reads a row, and its text is scored.

Scored are the tokens of text behind the first image of a row, which are predicted from what is seen in it. A token that
stands for an embedding of an image is an input and no target.

Rows have lengths of their own and run one after the other, each in one call. What compares runtimes takes windows of
one length, so rows are padded at the end, and the last column, which is never scored, has the number of the row.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from ...calibrate.model.processor import Inputs, RowInputs, on_device
from ...calibrate.text.evaluation import Evaluation, Protocol, sha256_of
from ...options import ONE_TERM_ALONE
from ...quantize.reference.fp8_model import Reference
from .compare import Forward, Opener
from .runtimes import FLOATS, Loading, load_float, open_reference


@dataclass(frozen=True)
class SeenText:
    """Rows with images to evaluate on, called `name`; their models put the token `placeholder` where an image is."""

    name: str
    rows: RowInputs
    placeholder: int

    def evaluation(self) -> Evaluation:
        """Make windows of the rows, padded, with their scored tokens; raises InputError for an image that changed."""
        ids = [row["input_ids"][0].numpy() for row in self.rows]
        width = max(map(len, ids)) + 1
        padded = np.zeros((len(ids), width), np.int64)
        scored = np.zeros((len(ids), width), np.bool_)
        for number, row in enumerate(ids):
            padded[number, : len(row)] = row
            padded[number, -1] = number
            scored[number, : len(row)] = self._scored(row)
        protocol = Protocol(
            dataset=self.name, sha256=sha256_of(padded), tokens=int(scored.sum()), context=width, stride=width
        )
        return Evaluation(padded, scored, protocol)

    def _scored(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Mark the tokens of text behind the first image of a row `ids` [tokens]."""
        of_images = ids == self.placeholder
        scored: npt.NDArray[np.bool_] = np.logical_or.accumulate(of_images) & ~of_images
        return scored

    def behind(self, inputs: Inputs) -> int:
        """The number of tokens behind the last image of a row, which stand for those that are decoded."""
        of_images = torch.nonzero(inputs["input_ids"][0] == self.placeholder)
        return int(inputs["input_ids"].shape[1] - 1 - of_images.max())

    def openers(self, names: Sequence[str], asked: Loading) -> dict[str, Opener]:
        """Return the functions that load the runtimes `names` of torch for these rows."""
        openers: dict[str, Opener] = {}
        for name in names:
            if name in FLOATS:
                openers[name] = partial(self._open_float, name, asked)
            else:
                openers[name] = partial(self._open_reference, asked, name == ONE_TERM_ALONE)
        return openers

    def _open_float(self, name: str, asked: Loading) -> Forward:
        model: Any = load_float(asked.source(), name, asked.device)
        return self._forward(lambda inputs: model(**on_device(inputs, model), use_cache=False).logits)

    def _open_reference(self, asked: Loading, first_terms: bool) -> Forward:
        loaded = open_reference(asked.run, "fast", asked.device)
        if first_terms:
            loaded.take_first_terms()
        return self._forward(partial(self._reference_logits, loaded))

    def _reference_logits(self, loaded: Reference, inputs: Inputs) -> torch.Tensor:
        model: Any = loaded.model
        with loaded.answering(self.behind(inputs)) if loaded.tail else nullcontext():
            logits: torch.Tensor = model(
                **on_device(inputs, model), past_key_values=loaded.new_cache(), use_cache=True
            ).logits
        return logits

    def _forward(self, logits_of: Callable[[Inputs], torch.Tensor]) -> Forward:
        """Run the rows that the last column of windows numbers, and pad their logits to the width of these."""

        def forward(ids: npt.NDArray[np.int64]) -> torch.Tensor:
            logits = [logits_of(self.rows[int(number)])[0] for number in ids[:, -1]]
            return torch.stack([pad(row, (0, 0, 0, ids.shape[1] - len(row))) for row in logits])

        return forward
