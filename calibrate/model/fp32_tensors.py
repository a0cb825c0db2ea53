"""Find the tensors that transformers keeps in FP32, whatever narrower type a model is loaded in.

A router's bias chooses experts: 64 of them between 6.82 and 7.06 are 64 numbers in FP32 and 9 in BF16, and most tokens
then get other experts. transformers finds such tensors by regular expressions over their names, which the classes of a
model list: `_keep_in_fp32_modules_strict` for BF16 and FP16, `_keep_in_fp32_modules` for FP16 alone. Its own plan is
asked here, so that there is no list of ours. A parameter that a class makes in FP32 stays so too.

Tensors of both lists keep FP32 in the files, since a loader in FP16 reads both there.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

#: A pattern without a match.
NOTHING = re.compile(r"(?!)")


def fp32_pattern(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Return the pattern in the names of the tensors that transformers keeps in FP32 where `model` is in `dtype`."""
    plan = model._get_dtype_plan(dtype)
    return re.compile(build_glob_alternation([*plan])[0]) if plan else NOTHING


def hold_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make the tensors of `model`, which has no values and is in `dtype`, FP32 where transformers keeps them so."""
    pattern = fp32_pattern(model, dtype)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and pattern.search(name):
            tensor.data = tensor.data.float()


def fp32_tensors(
    model: PreTrainedModel, names: Iterable[str], renamed: Mapping[str, str], dtype: torch.dtype
) -> frozenset[str]:
    """The tensors among `names`, those in files, that transformers keeps in FP32 where a model is loaded in `dtype`.

    `model`: without values, in BF16; `renamed`: its name of a tensor -> that in the files, where they differ. Tensors
    that it does not know (multi-token prediction) are judged by their names alone.
    """
    model_names, pattern = {under: name for name, under in renamed.items()}, fp32_pattern(model, dtype)
    fp32_names = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    called = {name: model_names.get(name, name) for name in names}
    return frozenset(name for name, under in called.items() if under in fp32_names or pattern.search(under))
