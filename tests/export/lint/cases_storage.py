"""Rules F4xx, each broken in one way."""

from collections.abc import Callable

from onnx import ModelProto, TensorProto

from .changes import DOWN, EXPORT, LAYER, Case, set_place, tensor


def move_place(name: str, by: int) -> Callable[[ModelProto], None]:
    def change(model: ModelProto) -> None:
        entry = next(entry for entry in tensor(model, name).external_data if entry.key == "offset")
        entry.value = str(int(entry.value) + by)

    return change


def swap_places(model: ModelProto) -> None:
    """Let the keys' and the values' weights, alike in shape, point at each other's data."""
    one, other = (tensor(model, f"{LAYER}.self_attn.{part}_proj.weight") for part in "kv")
    kept = list(one.external_data)
    del one.external_data[:]
    one.external_data.extend(other.external_data)
    del other.external_data[:]
    other.external_data.extend(kept)


def inline(data: bytes) -> Callable[[ModelProto], None]:
    """The scales of DOWN's weight inside the file, as `data`."""

    def change(model: ModelProto) -> None:
        stored = tensor(model, f"{DOWN}.weight_scale")
        stored.CopyFrom(TensorProto(name=stored.name, data_type=stored.data_type, dims=stored.dims, raw_data=data))

    return change


CASES = [
    Case(
        "F401",
        (
            (
                f"{DOWN}.weight: its data lie in ../model.safetensors, outside the graph's directory; put the file "
                "beside "
                "the graph"
            ),
        ),
        set_place(f"{DOWN}.weight", location="../model.safetensors"),
    ),
    Case(
        "F401",
        (
            (
                f"{DOWN}.weight: its data lie in /etc/hostname, outside the graph's directory; put the file beside the "
                "graph"
            ),
        ),
        set_place(f"{DOWN}.weight", location="/etc/hostname"),
    ),
    Case(
        "F401",
        ((f"{DOWN}.weight: its place has the offset 'start', which is no number; {EXPORT}"),),
        set_place(f"{DOWN}.weight", offset="start"),
    ),
    Case(
        "F402",
        (
            (
                f"{DOWN}.weight: its file more.safetensors is missing (tensors in it: 1); copy the graph's whole "
                "directory again"
            ),
        ),
        set_place(f"{DOWN}.weight", location="more.safetensors"),
    ),
    Case(
        "F403",
        (
            (
                "model.norm.weight: its data end at byte {size1} of model.safetensors, which has {size}; copy the "
                "graph's "
                "whole directory again"
            ),
            (
                "F405 external-tensor: model.norm.weight: no tensor of model.safetensors begins at byte {norm1}; "
                f"{EXPORT}"
            ),
        ),
        move_place("model.norm.weight", 1),
    ),
    Case(
        "F403",
        (
            f"{DOWN}.input_scale: its data begin at byte -8 of model.safetensors, before its start; {EXPORT}",
            f"F405 external-tensor: {DOWN}.input_scale: no tensor of model.safetensors begins at byte -8; {EXPORT}",
        ),
        set_place(f"{DOWN}.input_scale", offset=-8),
    ),
    Case(
        "F404",
        (f"{DOWN}.weight: its data are 100 bytes, and FLOAT8E4M3FN [128, 256] takes 32768; {EXPORT}",),
        set_place(f"{DOWN}.weight", length=100),
    ),
    Case(
        "F405",
        (
            (
                f"{LAYER}.self_attn.k_proj.weight: its data are those of {LAYER}.self_attn.v_proj.weight in "
                f"model.safetensors; {EXPORT}"
            ),
            (
                f"{LAYER}.self_attn.v_proj.weight: its data are those of {LAYER}.self_attn.k_proj.weight in "
                f"model.safetensors; {EXPORT}"
            ),
        ),
        swap_places,
    ),
    Case(
        "F405",
        (f"model.norm.weight: its data are BF16 in model.safetensors, and FLOAT16 in the graph; {EXPORT}",),
        lambda model: setattr(tensor(model, "model.norm.weight"), "data_type", TensorProto.FLOAT16),
    ),
    Case(
        "F406",
        (
            f"F405 external-tensor: {DOWN}.weight: no tensor of model.safetensors begins at byte {{down16}}; {EXPORT}",
            (
                f"{DOWN}.weight_scale: its data begin at byte {{scale}} of model.safetensors, inside those of "
                f"{DOWN}.weight (to {{down_end16}}); {EXPORT}"
            ),
        ),
        move_place(f"{DOWN}.weight", 16),
    ),
    Case("F407", (f"{DOWN}.weight_scale: its data are 3 bytes, and FLOAT [128] takes 512; {EXPORT}",), inline(b"abc")),
]
