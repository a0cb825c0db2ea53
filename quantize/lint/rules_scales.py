"""Rules C104 to C110: the presence, names, types and shapes of scales."""

from collections.abc import Iterator
from math import prod
from typing import Literal, NamedTuple

from ...calibrate.checkpoint.class_defaults import config_field
from ...core.findings import Broken
from ..reading.fp8_tensors import CACHE_SCALES, TYPES, Checkpoint, Codes
from .rules import AGAIN, checkpoint_rule

#: The most numbers of a scale: no weight has more outputs.
MOST_NUMBERS = 4_194_304
#: Further scale names that loaders know: those of a cache, and vLLM's older names of these.
OF_CACHES = (*CACHE_SCALES, "q_scale", "kv_scale", "output_scale")
FLOAT_TYPES = ("F32", "BF16", "F16")


class Scale(NamedTuple):
    """A stored scale, and the weight, input or cache that it belongs to."""

    name: str
    kind: Literal["weight", "input", "cache"]


def form_scales(checkpoint: Checkpoint) -> Iterator[Scale]:
    """Every scale with a name of the checkpoint's form."""
    for codes in checkpoint.codes.values():
        if codes.scale is not None:
            yield Scale(codes.scale, "weight")
        if codes.input_scale is not None:
            yield Scale(codes.input_scale, "input")
    for name in checkpoint.cache_scales:
        yield Scale(name, "cache")


def readable(checkpoint: Checkpoint, name: str) -> bool:
    """Tell whether the values of a scale can be read: it has a type of scales and a limited size."""
    tensor = checkpoint.tensors[name]
    return tensor.dtype in TYPES and 0 < prod(tensor.shape) <= MOST_NUMBERS


@checkpoint_rule("C104", "scale-there")
def scale_there(checkpoint: Checkpoint) -> Broken:
    """Every weight in codes has a scale, and where the configuration says static, every input has one. Loaders begin
    with 1.0 or with whatever memory holds, and warn of a missing key at most: the model runs, and says nothing true.
    """
    codec = checkpoint.declared.codec
    for codes in checkpoint.codes.values():
        if codes.scale is None:
            yield codes.weight, f"has no {codec.weight_scales[0]}; {AGAIN}, and take no 1.0 for it"
        if codes.scheme.input.static and codes.input_scale is None:
            source = checkpoint.declared.source.name
            yield codes.weight, f"has no {codec.input_scales[0]}, and {source} says static; {AGAIN}, or say dynamic"


@checkpoint_rule("C105", "scale-name")
def scale_name(checkpoint: Checkpoint) -> Broken:
    """A scale bears a name that transformers or vLLM read in that form: weight_scale and input_scale in
    compressed-tensors' and ModelOpt's, weight_scale_inv and activation_scale in fp8's. Others are unexpected keys,
    which are passed over.
    """
    codec = checkpoint.declared.codec
    form = checkpoint.declared.form
    known = (*codec.weight_scales, *codec.input_scales, *OF_CACHES)
    for name in checkpoint.tensors:
        module, _, last = name.rpartition(".")
        codes = checkpoint.codes.get(module)
        if codes is None or name == codes.weight or not ("scal" in last or "amax" in last):
            continue
        in_blocks = codes.scheme.weights == "block"
        if last not in known or (form == "fp8" and in_blocks and last == "weight_scale"):
            wanted = " or ".join([*codec.weight_scales[:1], *codec.input_scales[:1]])
            yield name, f"is read by neither transformers nor vLLM in the form {form}; call it {wanted}, or take it out"


@checkpoint_rule("C106", "scale-name-of-one", "note")
def scale_name_of_one(checkpoint: Checkpoint) -> Broken:
    """In the form fp8 no name of a weight's one scale is everybody's. vLLM and SGLang read weight_scale and
    input_scale, as AutoFP8 writes them. transformers reads weight_scale_inv and activation_scale, and goes on with the
    1.0 that it began with where they are called otherwise. To rename them would take the file from the servers that
    it was written for.
    """
    if checkpoint.declared.form != "fp8":
        return
    names = [name for codes in checkpoint.codes.values() for name in (codes.scale, codes.input_scale)]
    alone = [name for name in names if name is not None and name.endswith((".weight_scale", ".input_scale"))]
    blocks = [codes for codes in checkpoint.codes.values() if codes.scheme.weights == "block"]
    if alone and not blocks:
        more = f" and {len(alone) - 1:,} more are" if len(alone) > 1 else " is"
        read = "read by vLLM and SGLang, and not by transformers, which goes on with 1.0"
        yield alone[0], f"{more.strip()} {read}; take one of these servers for it"


@checkpoint_rule("C107", "scale-type")
def checkpoint_scale_type(checkpoint: Checkpoint) -> Broken:
    """Scales are FP32, BF16 or FP16, in the form fp8 also E8M0. vLLM copies any other type into an FP32 parameter as
    the numbers it holds, and transformers takes bytes for exponents.
    """
    taken = (*FLOAT_TYPES, "F8_E8M0") if checkpoint.declared.form == "fp8" else FLOAT_TYPES
    for name, _ in form_scales(checkpoint):
        if (dtype := checkpoint.tensors[name].dtype) not in taken:
            yield name, f"is {dtype}; store it as F32"


@checkpoint_rule("C108", "scale-shape")
def checkpoint_scale_shape(checkpoint: Checkpoint) -> Broken:
    """A scale has the shape that the configuration says: one number, one for each output channel, or one for each
    block; of an input it is one number, and of a cache one, or with the strategy attn_head one for each head. vLLM
    refuses another; transformers takes what it can stretch.
    """
    for codes in checkpoint.codes.values():
        said = codes.scheme.weights or codes.granularity
        if codes.scale is not None and (codes.granularity != said or said is None) and not _untiled(codes):
            granularity = f"{codes.granularity or 'neither one nor one a channel'}"
            shape = list(checkpoint.tensors[codes.scale].shape)
            yield (
                codes.scale,
                f"is {shape} for {list(codes.shape)} ({granularity}), and should be one a {said}; {AGAIN}",
            )
    heads = _heads(checkpoint) if checkpoint.declared.cache_heads else {}
    for name, kind in form_scales(checkpoint):
        shape = list(checkpoint.tensors[name].shape)
        if kind == "cache" and heads:
            continue
        a_head = kind == "cache" and len(shape) == 3 and shape[1:] == [1, 1] and not checkpoint.declared.cache
        stack = kind == "input" and name.endswith("_activation_scale") and len(shape) == 1
        if kind != "weight" and prod(shape) != 1 and not (a_head or stack):
            yield name, f"is {shape}, and should be one number; {AGAIN}"

    for name, tensor in checkpoint.tensors.items():
        wanted = heads.get(name.rpartition(".")[2])
        if wanted is not None and list(tensor.shape) != [wanted, 1, 1]:
            yield name, f"is {list(tensor.shape)}, and should be one a head, {[wanted, 1, 1]}; {AGAIN}"


def _heads(checkpoint: Checkpoint) -> dict[str, int]:
    """The heads that scales of a cache, and of queries, are of; empty where config.json does not say."""
    queries, keys = (config_field(checkpoint.config, f"num_{heads}_heads") for heads in ("attention", "key_value"))
    if not isinstance(queries, int) or not isinstance(keys, int):
        return {}
    return dict.fromkeys(CACHE_SCALES, keys) | {"q_scale": queries}


def _untiled(codes: Codes) -> bool:
    return codes.granularity is None and codes.scheme.weights == "block"


@checkpoint_rule("C109", "block-tiles")
def block_tiles(checkpoint: Checkpoint) -> Broken:
    """The blocks of a weight tile it: the scale has a row for each block of rows and a column for each block of
    columns, the last of them rounded up. Otherwise some codes have no scale, or another block's.
    """
    for codes in checkpoint.codes.values():
        if codes.scale is not None and _untiled(codes):
            rows, columns = codes.scheme.block
            wanted = [-(-codes.shape[-2] // rows), -(-codes.shape[-1] // columns)]
            shape = list(checkpoint.tensors[codes.scale].shape)
            blocks = f"in blocks of {rows} by {columns} has {wanted}"
            yield codes.scale, f"is {shape}, and {list(codes.shape)} {blocks}; {AGAIN}, or set the size of its blocks"


@checkpoint_rule("C110", "block-remainder", "warning")
def block_remainder(checkpoint: Checkpoint) -> Broken:
    """In the form fp8 the side of a weight is a multiple of its blocks', or transformers sees that it is not. Where
    there is no GPU it dequantizes, with blocks of the side over the number of scales: 192 rows in blocks of 128 have
    two scales, and each is taken for 96 rows.
    """
    for codes in checkpoint.codes.values():
        if checkpoint.declared.form != "fp8" or codes.granularity != "block" or codes.block is None:
            continue
        for side, of, what in zip(codes.shape[-2:], codes.block, ("rows", "columns"), strict=True):
            count = -(-side // of)
            if side % count == 0 and side // count != of and count > 1:
                taken = f"which transformers without a GPU takes for blocks of {side // count}"
                yield codes.weight, f"has {side} {what} in blocks of {of}, {taken}; load it on a GPU or in vLLM"
