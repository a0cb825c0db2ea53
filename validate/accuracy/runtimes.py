"""The runtimes that need torch, each as a function from a batch of windows to logits.

With an adapter on, FP8 is compared with BF16 under the same adapter, so that its numbers show the loss by FP8 for the
adapter's users, and nothing of the adapter's own effect (`compare_adapted`). `TorchSession` runs one sequence at a time
through a torch model in the generation loop, to compare generated text; it is not for serving.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from ...calibrate.measure.chain import Chain, LayerChain
from ...calibrate.model import caches
from ...calibrate.model.source import Source, load_model
from ...calibrate.text.evaluation import Evaluation
from ...core.files import reading
from ...core.run import Run
from ...options import ONE_TERM_ALONE, RUNTIMES
from ...quantize.reading.run_checkpoint import adapter_directory, vocabulary_size
from ...quantize.reference.fp8_model import RUN_CHECKPOINT, Part, Reference, every_module, load_reference
from ...quantize.reference.layer_chain import ReferenceChain
from ...quantize.reference.linear import Mode
from ...serve.loop.sessions import Pace
from ...serve.loop.step_logits import HostLogits
from .as_served import PartForward, Start, in_groups, served, torch_start
from .compare import FLOAT32, AnyForward, Forward, Opener, Turns, Workplace, compare_in_turn
from .document import RuntimeAccuracy, with_adapter
from .session_logits import session_opener
from .top_logits import TopLogits

#: The runtime of the checkpoint's own type.
ORIGINAL = "original"
#: The runtimes that are the source model, in which type; None: its own.
FLOATS = {"bf16": torch.bfloat16, FLOAT32: torch.float32, ORIGINAL: None}


def float_model(source: Source, dtype: torch.dtype, device: str) -> Forward:
    """Return the function that computes logits of whole windows by the source model in `dtype`."""
    model = load_model(source, dtype, device)
    return lambda ids: model(input_ids=torch.from_numpy(ids).to(device), use_cache=False).logits


def decoding_float_model(source: Source, dtype: torch.dtype, device: str, prompt: int) -> PartForward:
    """Return the function that computes logits behind a `prompt` by the source model in `dtype`."""
    return decoding(torch_start(load_model(source, dtype, device)), prompt)


def decoding(start: Start[torch.Tensor], prompt: int) -> PartForward:
    """Return the function that computes logits behind a `prompt`, over half of the windows where a GPU has no room."""
    return in_groups(served(start, prompt), sys.maxsize, torch.OutOfMemoryError)


def load_float(source: Source, name: str, device: str) -> torch.nn.Module:
    """Load the source model as the runtime `name` of `FLOATS` has it."""
    return load_model(source, FLOATS[name] or stored_dtype(source), device)


def open_reference(
    run: Run, mode: Mode, device: str, adapter: str | None = None, dtype: torch.dtype = torch.bfloat16,
    part: Part = every_module,
) -> Reference:  # fmt: skip
    """Load the FP8 reference, its parts outside FP8 in `dtype`, with that adapter on; with the weights of the modules
    in `part`.
    """
    with reading(run.model, RUN_CHECKPOINT):
        where = None if adapter is None else adapter_directory(run, adapter)
        return load_reference(run.model, mode, dtype, device, where, part)


def logits_of(loaded: Reference) -> Forward:
    """Return the function that computes logits of whole windows by `loaded`, with the run's cache."""
    return lambda ids: (
        loaded.model(
            input_ids=torch.from_numpy(ids).to(loaded.model.device), past_key_values=loaded.new_cache(), use_cache=True
        ).logits
    )


def reference(run: Run, device: str, adapter: str | None = None, first_terms: bool = False) -> Forward:
    """Return the function that computes logits of whole windows by the FP8 reference in its fast mode, its parts
    outside FP8 in BF16, with the run's cache and that adapter on.

    `first_terms`: with only the first code of each activation.
    """
    return logits_of(_fast_reference(run, device, adapter, first_terms))


def logits_behind(loaded: Reference, prompt: int | None) -> AnyForward:
    """Return the function that computes logits of windows by `loaded`, behind a `prompt` where there is one."""
    if prompt is None:
        return logits_of(loaded)
    return decoding(torch_start(loaded.model, loaded.new_cache), prompt)


def open_fast_reference(
    run: Run, device: str, prompt: int | None, adapter: str | None = None, first_terms: bool = False
) -> AnyForward:
    """Load the FP8 reference as `reference` has it, for windows behind a `prompt` where there is one."""
    return logits_behind(_fast_reference(run, device, adapter, first_terms), prompt)


def _fast_reference(
    run: Run, device: str, adapter: str | None, first_terms: bool, part: Part = every_module
) -> Reference:
    loaded = open_reference(run, "fast", device, adapter, part=part)
    if first_terms:
        loaded.take_first_terms()
    return loaded


@dataclass(frozen=True)
class Loading:
    """The run, source model and device that a runtime is loaded for, with `adapter` on.

    `prompt`: the tokens that are read in one call before the others are read one by one (None: all in one call).
    """

    run: Run
    source: Callable[[], Source]
    device: str
    adapter: str | None = None
    prompt: int | None = None


#: Gives, for a block, the functions that load the named runtimes; the folder is for what they leave on disk.
Opening = Callable[[tuple[str, ...], Loading, Path], AbstractContextManager[Mapping[str, Opener]]]
#: The functions that load the runtimes of torch, by their names in `options.RUNTIMES`.
OPENERS: dict[str, Callable[[Loading], Opener]] = {}


def opens(name: str) -> Callable[[Callable[[Loading], Opener]], Callable[[Loading], Opener]]:
    """Enter a function, which returns the one that loads the runtime `name`, into `OPENERS`."""

    def enter(function: Callable[[Loading], Opener]) -> Callable[[Loading], Opener]:
        OPENERS[name] = function
        return function

    return enter


@opens("bf16")
def open_bf16(asked: Loading) -> Opener:
    """Open the source model in BF16."""
    return _float_opener(asked, torch.bfloat16)


@opens(FLOAT32)
def open_fp32(asked: Loading) -> Opener:
    """Open the source model in FP32."""
    return _float_opener(asked, torch.float32)


@opens(ORIGINAL)
def open_original(asked: Loading) -> Opener:
    """Open the source model in the type that its checkpoint is stored in."""
    return _float_opener(asked, None)


@opens("reference")
def open_fp8(asked: Loading) -> Opener:
    """Open the FP8 reference in its fast mode."""
    return _reference_opener(asked, first_terms=False)


@opens(ONE_TERM_ALONE)
def open_one_term(asked: Loading) -> Opener:
    """Open the FP8 reference with only the first code of each activation."""
    return _reference_opener(asked, first_terms=True)


def _reference_opener(asked: Loading, *, first_terms: bool) -> Opener:
    return partial(open_fast_reference, asked.run, asked.device, asked.prompt, asked.adapter, first_terms)


def _float_opener(asked: Loading, dtype: torch.dtype | None) -> Opener:
    source = asked.source()
    dtype = dtype or stored_dtype(source)
    if asked.prompt is None:
        return partial(float_model, source, dtype, asked.device)
    return partial(decoding_float_model, source, dtype, asked.device, asked.prompt)


def openers(names: tuple[str, ...], asked: Loading) -> dict[str, Opener]:
    """Return the functions that load the named runtimes; raises where a file of one is missing.

    A source in another type than BF16 adds the runtime `original` to `bf16`, its cast, where no named runtime has that
    type.
    """
    loaders: dict[str, Opener] = {}
    asked = replace(asked, source=cache(asked.source))
    for name in names:
        if RUNTIMES[name].library is not None:
            loaders[name] = session_opener(name, asked.run, asked.adapter, asked.prompt)
            continue
        loaders[name] = OPENERS[name](asked)
        if name == "bf16":
            named_types = [FLOATS[other] for other in names if other in FLOATS]
            if stored_dtype(asked.source()) not in named_types:
                loaders[ORIGINAL] = open_original(asked)
    return loaders


def layer_chain(name: str, asked: Loading) -> LayerChain:
    """Open the runtime `name` of torch, whole windows in a call, so that one decoder layer of it has weights at a time.

    Raises NoChainError for a model that is no chain of layers.
    """
    if name in FLOATS:
        source = asked.source()
        return Chain(source, asked.device, held_type(name, source), rounded=False)
    load = partial(_fast_reference, asked.run, asked.device, asked.adapter, name == ONE_TERM_ALONE)
    return ReferenceChain(asked.run.model, load, torch.bfloat16, asked.device)


def held_type(name: str, source: Source) -> torch.dtype:
    """The type that the runtime `name` of torch holds its weights in, at most: codes are held in BF16 on a CPU."""
    return FLOATS.get(name, torch.bfloat16) or stored_dtype(source)


def stored_dtype(source: Source) -> torch.dtype:
    """The type the source checkpoint says it is stored in; BF16 where it says nothing."""
    dtype = getattr(source.config, "dtype", None) or torch.bfloat16
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


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
    opening: Opening,
) -> AdapterOutcome:
    """Run `evaluation` once with each adapter of the run, through its `runtimes`.

    `source` opens the model with its unmerged adapters; `opening` gives what loads runtimes.
    """
    result = AdapterOutcome()
    prompt = evaluation.protocol.prompt
    for variant in source().variants[1:]:
        assert variant.on, "a variant of the base has an adapter on"
        name = variant.on.name
        chosen = runtimes[name]
        asked = Loading(run, lambda: variant, workplace.device, name, prompt)  # noqa: B023  # called before the next
        workplace.report.note(f"{name}: {', '.join(chosen)} with this adapter on")
        folder = workplace.folder / f"adapter-{name}"
        folder.mkdir(exist_ok=True)
        with opening(chosen, asked, folder) as loaders:
            chosen_loaders = {runtime: loaders[runtime] for runtime in chosen}
            outcome = compare_in_turn(Turns(evaluation, chosen_loaders, vocabulary_size(run), folder), workplace.report)
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

    def __init__(self, model: PreTrainedModel, new_cache: Callable[[], DynamicCache] | None = None):
        """Generate with `model`, on a cache that `new_cache` makes for each sequence (None: the model's own)."""
        self._model = model
        self._new_cache = new_cache or partial(caches.new_cache, model)
        self.vocabulary = int(model.config.get_text_config().vocab_size)

    def open_batch(self, rows: int, positions: int) -> "TorchBatch":
        """Room for one sequence."""
        assert rows == 1, "the loop keeps to most_rows"
        return TorchBatch(self._model, self._new_cache)


class TorchBatch:
    """A `Batch` of one row; see there for what each method does."""

    def __init__(self, model: PreTrainedModel, new_cache: Callable[[], DynamicCache]):
        """Nothing is in flight yet."""
        self._model = model
        self._new_cache = new_cache
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

    def decode(self, tokens: NDArray[np.int64], filled: NDArray[np.int64]) -> HostLogits:
        """Take in one token."""
        return HostLogits(self._forward(tokens[:, None]))

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
