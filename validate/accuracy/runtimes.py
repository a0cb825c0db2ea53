"""The runtimes that can be asked for logits, each as a function of a batch of windows; those that need torch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ...calibrate.model.source import Source, load_model
from ...core.files import reading
from ...core.run import Run
from ...options import ONE_TERM_ALONE
from ...quantize.reading.run_checkpoint import adapter_directory
from ...quantize.reference.fp8_model import Reference, load_reference
from ...quantize.reference.linear import Mode
from .as_served import served, torch_start
from .compare import FLOAT32, Forward, Opener
from .session_logits import session_opener

#: The runtime of the checkpoint's own type.
ORIGINAL = "original"
#: The runtimes that are the source model, in which type; None: its own.
FLOATS = {"bf16": torch.bfloat16, FLOAT32: torch.float32, ORIGINAL: None}


def float_model(source: Source, dtype: torch.dtype, device: str, prompt: int | None = None) -> Forward:
    """The source model in `dtype`; `prompt`: as `openers` has it."""
    model = load_model(source, dtype, device)
    if prompt is not None:
        return served(torch_start(model), prompt)
    return lambda ids: model(input_ids=torch.from_numpy(ids).to(device), use_cache=False).logits


def load_float(source: Source, name: str, device: str) -> torch.nn.Module:
    """The source model as the runtime `name` of `FLOATS` has it."""
    return load_model(source, FLOATS[name] or stored_dtype(source), device)


def open_reference(
    run: Run, mode: Mode, device: str, adapter: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> Reference:
    """The FP8 reference, its wide parts in `dtype`, with that adapter on."""
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
    """The FP8 reference in its fast mode, its wide parts in BF16, with the run's cache and that adapter on.

    `prompt`: as `openers` has it. `first_terms`: with one code for each activation, the first.
    """
    loaded = open_reference(run, "fast", device, adapter)
    if first_terms:
        loaded.take_first_terms()
    return logits_of(loaded) if prompt is None else served(torch_start(loaded.model, loaded.new_cache), prompt)


def openers(
    names: tuple[str, ...], run: Run, source: Callable[[], Source], device: str, adapter: str | None = None,
    prompt: int | None = None,
) -> dict[str, Opener]:  # fmt: skip
    """The functions that load the named runtimes, with `adapter` on; raises where a file of one is missing.

    `prompt`: the tokens that are read in one call before the others are read one by one (None: all in one call).

    A source in another type than BF16 adds the runtime `original` beside `bf16`, its cast, where no named runtime has
    that type.
    """
    made: dict[str, Opener] = {}
    for name in names:
        if name in FLOATS:
            opened = source()
            made[name] = partial(float_model, opened, FLOATS[name] or stored_dtype(opened), device, prompt)
            own = stored_dtype(opened)
            if name == "bf16" and own not in [FLOATS[each] for each in names if each in FLOATS]:
                made[ORIGINAL] = partial(float_model, opened, own, device, prompt)
        elif name in ("reference", ONE_TERM_ALONE):
            made[name] = partial(reference, run, device, adapter, prompt, name == ONE_TERM_ALONE)
        else:
            made[name] = session_opener(name, run, adapter, prompt)
    return made


def stored_dtype(source: Source) -> torch.dtype:
    """The type the source checkpoint says it is stored in; BF16 where it says nothing."""
    dtype = getattr(source.config, "dtype", None) or torch.bfloat16
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def vocabulary(directory: Path) -> int:
    """Number of logits of the model in `directory`."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(directory).get_text_config().vocab_size)
