"""Torch models as sessions of the generation loop: the BF16 source and the FP8 reference, which FP8 text is held
against.

One sequence at a time, with the cache that transformers gives the model: this is for comparing, not for serving.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from ...serve.loop.sessions import Pace


class TorchSession:
    """A causal model of transformers."""

    pace = Pace(chunk=512, share=512)
    most_rows: int | None = 1
    most_positions: int | None = None

    def __init__(self, model: PreTrainedModel, new_cache: Callable[[], DynamicCache] = DynamicCache):
        """Generate with `model`, on a cache that `new_cache` makes for each sequence."""
        self._model, self._new_cache = model, new_cache
        self.vocabulary = int(model.config.get_text_config().vocab_size)

    def open_batch(self, rows: int, positions: int) -> "TorchBatch":
        """Room for one sequence."""
        assert rows == 1, "the loop keeps to most_rows"
        return TorchBatch(self._model, self._new_cache)


class TorchBatch:
    """A `Batch` of one row; see there for what each method does."""

    def __init__(self, model: PreTrainedModel, new_cache: Callable[[], DynamicCache]):
        """Nothing is in flight yet."""
        self._model, self._new_cache = model, new_cache
        self._cache = new_cache()

    def reserve(self, needed: int, most: int, rows: int) -> None:
        """Nothing to do: the cache grows by itself."""

    def prefill(
        self, first: int, tokens: NDArray[np.int64], filled: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Take in a chunk of the prompt, which has no padding."""
        if not filled[0]:
            self._cache = self._new_cache()
        return self._forward(tokens)

    def decode(self, tokens: NDArray[np.int64], filled: NDArray[np.int64]) -> NDArray[np.float32]:
        """Take in one token."""
        return self._forward(tokens[:, None])

    def _forward(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        ids = torch.from_numpy(tokens).to(self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True).logits[:, -1]
        found: NDArray[np.float32] = logits.float().cpu().numpy()
        return found

    def move(self, source: int, target: int, filled: int) -> None:
        """Nothing to do: there is one row."""

    def wipe(self, row: int) -> None:
        """Forget the row."""
        self.clear()

    def idle(self) -> None:
        """Forget the row."""
        self.clear()

    def clear(self) -> None:
        """Forget the row."""
        self._cache = self._new_cache()
