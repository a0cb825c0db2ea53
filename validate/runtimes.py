"""The runtimes that can be asked for logits, each as a function of a batch of windows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ..calibrate.model.source import Source, load_model
from ..errors import BackendError
from ..export.lint.check import sound_graph
from ..files import reading
from ..quantize.linear import Mode
from ..quantize.reference import Reference, load_reference
from ..quantize.stored import checkpoint_of
from ..run import GRAPH_FP32, Run
from ..serve.sessions import SessionError, open_session
from .compare import Forward


def float_model(source: Source, dtype: torch.dtype, device: str) -> Forward:
    """The source model in `dtype`."""
    model = load_model(source, dtype, device)
    return lambda ids: model(input_ids=torch.from_numpy(ids).to(device), use_cache=False).logits


def open_reference(run: Run, mode: Mode, device: str) -> Reference:
    """The FP8 reference, its wide parts in BF16."""
    with reading(run.model, "the checkpoint that `fp8q calibrate` writes"):
        return load_reference(run.model, mode, torch.bfloat16, device)


def logits_of(loaded: Reference) -> Forward:
    """What `loaded` computes, with the run's cache."""
    return lambda ids: (
        loaded.model(
            input_ids=torch.from_numpy(ids).to(loaded.model.device), past_key_values=loaded.new_cache(), use_cache=True
        ).logits
    )


def reference(run: Run, device: str) -> Forward:
    """The FP8 reference in its fast mode, its wide parts in BF16, with the run's cache."""
    return logits_of(open_reference(run, "fast", device))


def session(run: Run, runtime: str) -> Forward:
    """A graph in the run on ONNX Runtime or TensorRT (`onnxruntime-int8`: that of another precision): each window is a
    prompt of its own.

    Raises InputError for a graph whose external data cannot be opened, BackendError when the runtime is missing or
    refuses the graph.
    """
    name, _, precision = runtime.partition("-")
    checkpoint = checkpoint_of(run, precision or "fp8")
    if name == "onnxruntime":
        sound_graph(checkpoint / GRAPH_FP32)
    try:
        opened = open_session(checkpoint, name)
    except SessionError as error:
        raise BackendError(str(error)) from error

    def forward(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        positions = np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
        logits, _ = opened.forward(ids, np.ones_like(ids), positions)
        return torch.from_numpy(logits)

    return forward


def forwards(names: tuple[str, ...], run: Run, source: Callable[[], Source], device: str) -> dict[str, Forward]:
    """The named runtimes, loaded.

    A source in another type than BF16 brings its own, `source`, beside `bf16`, which it is cast to.
    """
    made: dict[str, Forward] = {}
    for name in names:
        if name == "bf16":
            opened = source()
            made[name] = float_model(opened, torch.bfloat16, device)
            if (own := stored_dtype(opened)) != torch.bfloat16:
                made["source"] = float_model(opened, own, device)
        elif name == "reference":
            made[name] = reference(run, device)
        else:
            made[name] = session(run, name)
    return made


def stored_dtype(source: Source) -> torch.dtype:
    """The type the source checkpoint says it is stored in; BF16 where it says nothing."""
    dtype = getattr(source.config, "dtype", None) or torch.bfloat16
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def vocabulary(directory: Path) -> int:
    """Number of logits of the model in `directory`."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(directory).get_text_config().vocab_size)
