"""`fp8q.api.load`: a run's FP8 model as Hugging Face's, for lm-eval, notebooks and others that call such models."""

from typing import Literal, get_args

import torch
from transformers import PreTrainedModel

from ..core.errors import InputError
from ..core.record import FP8_STAGES
from ..core.run import Run
from ..quantize.reference.hugging_face import hugging_face_model
from ..validate.accuracy.runtimes import open_reference
from .pipeline.stage import Notes, device
from .shared.adapters import check_adapter
from .shared.model_files import checked_model, hashes_of

#: The types in which everything but FP8 GEMMs computes.
FloatType = Literal["bfloat16", "float16", "float32"]
#: `fast` rounds sums to BF16 on CPUs, as validation does; `exact` keeps them in FP32 until they are scaled.
GemmMode = Literal["fast", "exact"]


def load_fp8_model(
    run: Run, notes: Notes, arithmetic: tuple[FloatType, GemmMode], where: str | torch.device | None,
    as_served: int | None, adapter: str | None,
) -> PreTrainedModel:  # fmt: skip
    """Load the model of `run` with the GEMMs of the reference, in this `arithmetic`, on the device `where`.

    Raises InputError for files that their stages did not write, and for arguments that name nothing.
    """
    dtype, mode = arithmetic
    check_choice("dtype", dtype, get_args(FloatType))
    check_choice("mode", mode, get_args(GemmMode))
    if as_served is not None and as_served < 0:
        raise InputError(f"as_served {as_served}", "must be at least 0")
    place = usable_device(where)
    check_adapter(run, adapter, "reference")
    run.refuse_stale(*FP8_STAGES)
    checked_model(run)
    hashes_of(run, "export")
    reference = open_reference(run, mode, place, adapter, getattr(torch, dtype))
    return hugging_face_model(reference, run.model, as_served)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InputError for a `value` of the argument `name` that is none of `choices`."""
    if value not in choices:
        raise InputError(f"{name} {value}", f"is none of {', '.join(choices)}")


def usable_device(where: str | torch.device | None) -> str:
    """Name the device `where`; None: the first GPU, or the CPU. Raises InputError for one that is not here."""
    try:
        if where is not None:
            return str(torch.empty(0, device=where).device)
        return device()
    except (RuntimeError, AssertionError) as error:  # of a build without CUDA
        raise InputError(f"device {where}", str(error).splitlines()[0].rstrip("."), "name another") from None
