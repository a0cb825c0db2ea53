"""The runtimes that need torch, each as a function from a batch of windows to logits.

With an adapter on, FP8 is compared with BF16 under the same adapter, so that its numbers show the loss by FP8 for the
adapter's users, and nothing of the adapter's own effect (`compare_adapted`). `TorchSession` runs one sequence at a time
through a torch model in the generation loop, to compare generated text; it is not for serving.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from ...calibrate.model.source import Source, load_model
from ...core.files import reading
from ...core.run import Run
from ...options import ONE_TERM_ALONE
from ...quantize.reading.run_checkpoint import adapter_directory
from ...quantize.reference.fp8_model import Reference, load_reference
from ...quantize.reference.linear import Mode
from ...serve.loop.sessions import Pace
from .as_served import served, torch_start
from .compare import FLOAT32, Forward, Opener, Workplace, compare_in_turn
from .document import RuntimeAccuracy, with_adapter
from .perplexity import Evaluation
from .session_logits import session_opener
from .top_logits import TopLogits

#: The runtime of the checkpoint's own type.
ORIGINAL = "original"
#: The runtimes that are the source model, in which type; None: its own.
FLOATS = {"bf16": torch.bfloat16, FLOAT32: torch.float32, ORIGINAL: None}


def float_model(source: Source, dtype: torch.dtype, device: str, prompt: int | None = None) -> Forward:
    """Return the source model in `dtype`; `prompt`: as `openers` has it."""
    model = load_model(source, dtype, device)
    if prompt is not None:
        return served(torch_start(model), prompt)
    return lambda ids: model(input_ids=torch.from_numpy(ids).to(device), use_cache=False).logits


def load_float(source: Source, name: str, device: str) -> torch.nn.Module:
    """Load the source model as the runtime `name` of `FLOATS` has it."""
    return load_model(source, FLOATS[name] or stored_dtype(source), device)


def open_reference(
    run: Run, mode: Mode, device: str, adapter: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> Reference:
    """Load the FP8 reference, its parts outside FP8 in `dtype`, with that adapter on."""
    with reading(run.model, "the checkpoint that `fp8q calibrate` writes"):
        where = None if adapter is None else adapter_directory(run, adapter)
        return load_reference(run.model, mode, dtype, device, where)


def logits_of(loaded: Reference) -> Forward:
    """Return the function that computes logits by `loaded`, with the run's cache."""
    return lambda ids: (
        loaded.model(
            input_ids=torch.from_numpy(ids).to(loaded.model.device), past_key_values=loaded.new_cache(), use_cache=True
        ).logits
    )


def reference(
    run: Run, device: str, adapter: str | None = None, prompt: int | None = None, first_terms: bool = False
) -> Forward:
    """Return the FP8 reference in its fast mode, its parts outside FP8 in BF16, with the run's cache and that adapter
    on.

    `prompt`: as `openers` has it. `first_terms`: with only the first code of each activation.
    """
    loaded = open_reference(run, "fast", device, adapter)
    if first_terms:
        loaded.take_first_terms()
    return logits_of(loaded) if prompt is None else served(torch_start(loaded.model, loaded.new_cache), prompt)


def openers(
    names: tuple[str, ...], run: Run, source: Callable[[], Source], device: str, adapter: str | None = None,
    prompt: int | None = None,
) -> dict[str, Opener]:  # fmt: skip
    """Return the functions that load the named runtimes, with `adapter` on; raises where a file of one is missing.

    `prompt`: the tokens that are read in one call before the others are read one by one (None: all in one call).

    A source in another type than BF16 adds the runtime `original` to `bf16`, its cast, where no named runtime has that
    type.
    """
    loaders: dict[str, Opener] = {}
    for name in names:
        if name in FLOATS:
            opened = source()
            loaders[name] = partial(float_model, opened, FLOATS[name] or stored_dtype(opened), device, prompt)
            dtype = stored_dtype(opened)
            if name == "bf16" and dtype not in [FLOATS[other] for other in names if other in FLOATS]:
                loaders[ORIGINAL] = partial(float_model, opened, dtype, device, prompt)
        elif name in ("reference", ONE_TERM_ALONE):
            loaders[name] = partial(reference, run, device, adapter, prompt, name == ONE_TERM_ALONE)
        else:
            loaders[name] = session_opener(name, run, adapter, prompt)
    return loaders


def stored_dtype(source: Source) -> torch.dtype:
    """The type the source checkpoint says it is stored in; BF16 where it says nothing."""
    dtype = getattr(source.config, "dtype", None) or torch.bfloat16
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def vocabulary(directory: Path) -> int:
    """Number of logits of the model in `directory`."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(directory).get_text_config().vocab_size)


@dataclass(frozen=True)
class AdapterOutcome:
    """The accuracy by adapter and runtime; by `<runtime> with <adapter>` the losses of all tokens, the likeliest tokens
    at `positions_to_keep`, and why one failed.
    """

    rows: dict[str, dict[str, RuntimeAccuracy]] = field(default_factory=dict)
    nll: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    top: dict[str, TopLogits] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def compare_adapted(
    run: Run,
    evaluation: Evaluation,
    runtimes: Mapping[str, tuple[str, ...]],
    source: Callable[[], Source],
    workplace: Workplace,
) -> AdapterOutcome:
    """Run `evaluation` once with each adapter of the run, through its `runtimes`.

    `source` opens the model with its unmerged adapters.
    """
    result, prompt = AdapterOutcome(), evaluation.protocol.prompt
    for variant in source().variants[1:]:
        assert variant.on, "what is beside the base is an adapter"
        name = variant.on.name
        chosen = runtimes[name]
        loaders = openers(chosen, run, lambda: variant, workplace.device, name, prompt)  # noqa: B023  # called before the next
        chosen_loaders = {runtime: opener for runtime, opener in loaders.items() if runtime in chosen}
        workplace.report.note(f"{name}: {', '.join(chosen_loaders)} with this adapter on")
        folder = workplace.folder / f"adapter-{name}"
        outcome = compare_in_turn(evaluation, chosen_loaders, vocabulary(run.model), folder, workplace.report)
        result.rows[name] = outcome.accuracy.runtimes
        result.nll.update({with_adapter(runtime, name): values for runtime, values in outcome.nll.items()})
        result.top.update({with_adapter(runtime, name): top for runtime, top in outcome.top.items()})
        result.failed.update({with_adapter(runtime, name): why for runtime, why in outcome.failed.items()})
    return result


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
        last_logits: NDArray[np.float32] = logits.float().cpu().numpy()
        return last_logits

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
