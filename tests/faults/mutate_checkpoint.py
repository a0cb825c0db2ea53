"""Mutations of a whole checkpoint, as a hostile hand or a careless tool leaves it: tensors of other types, shapes and
names in files that are sound, NaN, other files under an index, fields of config.json, and things beside the weights.
"""

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

from mutate_files import mutate_place

#: A tensor: type, shape and bytes.
Tensor = tuple[str, list[int], bytes]
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
#: The bytes of a value of each type that a tensor is said to have.
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I8": 1, "U8": 1, "I32": 4, "I64": 8, "BOOL": 1, "F8_E4M3": 1}
#: Names of files of weights that mean something else, or lead elsewhere.
FILES = (
    "README.md", "config.json", "tokenizer.json", ".convert.json", "weights.bin", "../up.safetensors",
    "a b.safetensors", "model-00001-of-00001.safetensors", "ünï.safetensors", SINGLE, "sub/x.safetensors",
)  # fmt: skip
#: Endings by which readers tell what a tensor is.
ENDINGS = (
    ".weight_scale", ".weight_scale_inv", ".input_scale", ".k_scale", ".qweight", ".SCB", ".weight.absmax", ".bias",
)  # fmt: skip
FIELDS: tuple[tuple[str, Any], ...] = (
    ("tie_word_embeddings", True), ("quantization_config", {"quant_method": "fp8"}), ("compression_config", {}),
    ("text_config", {"tie_word_embeddings": True}), ("transformers_weights", SINGLE), ("hidden_size", 0),
    ("transformers_weights", "x.bin"), ("note", "\ud800"), ("num_nextn_predict_layers", 1), ("model_type", "gpt_oss"),
    ("model_type", "mixtral"), ("architectures", ["Nobody"]), ("auto_map", {"AutoModel": "own.Own"}),
    ("vocab_size", -1), ("dtype", "float8_e4m3fn"), ("num_hidden_layers", 10**9),
    ("rope_scaling", {"type": "dynamic", "factor": 8}),
    ("layer_types", []), ("quantization_config", []), ("max_position_embeddings", 128), ("unknown", {"deep": [[[[]]]]}),
)  # fmt: skip
#: Names of things beside weights: companions, folders, and what is made anew.
BESIDE = (
    "tekken.json", "own.tiktoken", "1_Pooling", "original", "notes", "vocab.txt", "LICENSE", "README.md",
    "modules.json", "modeling_own.py", "hf_quant_config.json", "pytorch_model.bin", "adapter_config.json",
    "additional_chat_templates", "chat_template.jinja", ".hidden", "a\nb", "kv_cache.safetensors",
)  # fmt: skip


def mutate_checkpoint(draw: random.Random, folder: Path) -> str:
    """Change one thing of the checkpoint in `folder`; what was done."""
    kind = draw.choice(["tensor", "tensor", "tensor", "files", "field", "beside", "index"])
    if kind == "field":
        name, value = draw.choice(FIELDS)
        return _configure(folder, name, value)
    if kind == "beside":
        path = folder / draw.choice(BESIDE)
        if not path.exists():
            path.write_text("[]" if path.suffix == ".json" else "x")
        return f"{folder.name}/{path.name!r}: {mutate_place(draw, path)}"
    if kind == "files":
        return _rename_file(draw, folder)
    if kind == "index" and (folder / INDEX).exists():
        return _mutate_index(draw, folder / INDEX)
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    tensors = load(file)
    what = _mutate_tensors(draw, tensors)
    save(file, tensors)
    return f"{folder.name}/{file.name}: {what}"


def load(file: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items()
    }


def save(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file whose header tells the truth of them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def _mutate_tensors(draw: random.Random, tensors: dict[str, Tensor]) -> str:
    """Change one of the tensors; what was done."""
    name = draw.choice(sorted(tensors))
    dtype, shape, data = tensors[name]
    kind = draw.choice(["type", "shape", "name", "values", "another", "gone"])
    if kind == "type":
        dtype = draw.choice(sorted(SIZES))
        count = len(data) // SIZES[dtype]
        tensors[name] = (dtype, [count], data[: count * SIZES[dtype]])
        if len(shape) == 2 and draw.random() < 0.7:
            size = shape[0] * shape[1] * SIZES[dtype]
            tensors[name] = (dtype, shape, (data * 8)[:size])
    elif kind == "shape":
        shape = draw.choice([shape[::-1], [len(data) // SIZES[dtype]], [1, *shape], [*shape, 1], [0, *shape[1:]], []])
        size = SIZES[dtype]
        for side in shape:
            size *= side
        tensors[name] = (dtype, shape, data[:size])
    elif kind == "name":
        new = draw.choice(
            [name.removesuffix(".weight") + draw.choice(ENDINGS), name.upper(), f"re:{name}", f"x.{name}"]
        )
        tensors[new] = tensors.pop(name)
        name = f"{name} is {new}"
    elif kind == "values":
        value = draw.choice([b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x00\x00", b"\xe0\x43", b"\x01\x00", b"\x7f\x7f"])
        many = draw.random() < 0.5
        tensors[name] = (dtype, shape, value * (len(data) // 2) if many else value + data[2:])
        kind = f"values {value.hex()}{' throughout' * many}"
    elif kind == "another":
        new = draw.choice([
            name.removesuffix(".weight") + draw.choice(ENDINGS), "lm_head.weight", "model.mtp.0.eh_proj.weight",
            "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.0.gate_proj.weight", "",
        ])  # fmt: skip
        tensors[new] = draw.choice(
            [tensors[name], ("F32", [1], bytes(4)), ("I64", [2, 2], bytes(32)), ("BOOL", [], b"\x01")]
        )
        name = f"{new} as well"
    else:
        del tensors[name]
    return f"{name}: {kind}"


def _configure(folder: Path, name: str, value: Any) -> str:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps(config | {name: value}), encoding="utf-8")
    return f"{folder.name}/{CONFIG}: {name} = {value!r}"[:120]


def _rename_file(draw: random.Random, folder: Path) -> str:
    """Let a file of weights have another name, which an index or config.json tells, or be a link."""
    file = draw.choice(sorted(folder.glob("*.safetensors")))
    if draw.random() < 0.3:
        target = folder.parent / "elsewhere"
        file.rename(target)
        file.symlink_to(draw.choice([str(target), "../elsewhere", "../nowhere", "/dev/zero"]))
        return f"{folder.name}/{file.name}: a link to {os.readlink(file)}"
    new = draw.choice(FILES)
    tensors = load(file)
    place = folder / new
    place.parent.mkdir(exist_ok=True)
    file.rename(place)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, new)}
    if (folder / INDEX).exists():
        before = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        index["weight_map"] = before | index["weight_map"]
    told = draw.choice(["index", "index", "own index", "config", "nobody"])
    if told == "index":
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    elif told == "own index":
        (folder / "own.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    if told in ("own index", "config") and (folder / CONFIG).exists() and new != CONFIG:
        _configure(folder, "transformers_weights", new if told == "config" else "own.safetensors.index.json")
    return f"{folder.name}/{file.name}: called {new}, which {told} tells"


def _mutate_index(draw: random.Random, path: Path) -> str:
    index = json.loads(path.read_text(encoding="utf-8"))
    weight_map = index["weight_map"]
    name = draw.choice(sorted(weight_map))
    new = draw.choice([*FILES, "", ".", "/dev/zero", "\ud800.safetensors", "x" * 300, *weight_map.values()])
    weight_map[draw.choice([name, "lm_head.weight", ""])] = new
    path.write_text(json.dumps(index), encoding="utf-8")
    return f"{path.parent.name}/{path.name}: {name} in {new[:40]!r}"
