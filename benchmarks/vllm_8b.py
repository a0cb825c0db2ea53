"""Measure how fast vLLM on one GPU serves an 8B in BF16 and in each of fp8q's forms, with fp8q-vllm for two codes.

    python benchmarks/vllm_8b.py [--vllm PYTHON] [--plugin FOLDER] [--folder DIR] [--layers 32] [--form NAME …]
        [--seconds N] [--save vllm_8b]

Checkpoints of Llama 3 8B's shape with random weights are written into DIR (24 GB; `/dev/shm` is quick): speed does not
depend on the values. vLLM loads each in a process of its own, as a server would, with its defaults (torch.compile, CUDA
graphs), without a cache of prefixes. Decoding: 1 and 32 clients ask at once for 128 tokens behind prompts of 256.
Prompts: 1 and 8 clients ask for one token behind 2,048. The ceiling of decoding is the weights' bytes over the
bandwidth of a copy that is measured here; `online` is vLLM's own FP8, which quantizes a BF16 checkpoint as it loads it.
`--plugin`: the folder that fp8q-vllm is installed into; by default pip installs it for PYTHON. Prints a table and one
JSON line.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from gpu.llama import Shape
from gpu.serve import asked
from gpu.timing import Setting, seconds
from result import arguments, described, publish
from safetensors.torch import save_file
from vllm_jobs import installed_plugin

from fp8q.options import BF16, DYNAMIC, ONE
from fp8q.quantize.codes.encoding import CODE
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reading.compressed_tensors import quantization_config
from fp8q.quantize.scales.scheme import Scheme

#: Of an activation: a power of two, as two codes ask for.
INPUT_SCALE = 2.0**-6
#: The root mean square of the weights' codes.
CODE_RMS = 60.0
TAIL = 64
DECODE: dict[str, Any] = {"clients": [1, 32], "prompt": 256, "tokens": 128, "answers": 2}
PROMPTS: dict[str, Any] = {"clients": [1, 8], "prompt": 2048, "tokens": 1, "answers": 8}
#: The last GEMM of a decoder layer.
LAST = "mlp.down_proj"


@dataclass(frozen=True)
class StoredForm:
    """How a checkpoint is written and served: its shards, its fields in config.json, vLLM's arguments."""

    shards: tuple[str, ...]
    inputs: str | None = None
    fp8q: str | None = None
    engine: tuple[tuple[str, Any], ...] = ()


WEIGHTS, STATIC = ("other", "codes"), ("other", "codes", "inputs")
FORMS: dict[str, StoredForm] = {
    "bf16": StoredForm(("other", "bf16")),
    "one code": StoredForm(STATIC, "static"),
    "two codes": StoredForm(STATIC, "static", "two_terms"),
    f"tail of {TAIL}": StoredForm(STATIC, "static", "tails"),
    "dynamic": StoredForm(WEIGHTS, "dynamic"),
    "weights alone": StoredForm(WEIGHTS, "bf16"),
    "one code, FP8 cache": StoredForm(STATIC, "static", engine=(("kv_cache_dtype", "fp8"),)),
    "online": StoredForm(("other", "bf16"), engine=(("quantization", "fp8"),)),
}


def gemm_shapes(shape: Shape) -> dict[str, tuple[int, int]]:
    """GEMM of a layer -> outputs and inputs."""
    attention, cached = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    of_attention = {"q_proj": attention, "k_proj": cached, "v_proj": cached}
    return {
        **{f"self_attn.{name}": (outputs, shape.width) for name, outputs in of_attention.items()},
        "self_attn.o_proj": (shape.width, attention),
        "mlp.gate_proj": (shape.inner, shape.width),
        "mlp.up_proj": (shape.inner, shape.width),
        LAST: (shape.width, shape.inner),
    }


def modules(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """The name, outputs and inputs of every quantized GEMM."""
    for layer in range(shape.layers):
        for name, (outputs, inputs) in gemm_shapes(shape).items():
            yield f"model.layers.{layer}.{name}", outputs, inputs


def write_shards(shape: Shape, folder: Path, kinds: set[str]) -> None:
    """Write random tensors of the `kinds` of shards that the forms ask for, a file of each kind and layer."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device, dtype=torch.bfloat16)

    other = {
        "model.embed_tokens.weight": drawn(shape.vocabulary, shape.width),
        "lm_head.weight": drawn(shape.vocabulary, shape.width) * shape.width**-0.5,
        "model.norm.weight": torch.ones(shape.width, dtype=torch.bfloat16),
    }
    for number in range(shape.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            other[f"model.layers.{number}.{norm}.weight"] = torch.ones(shape.width, dtype=torch.bfloat16)
    save(other, folder / "other.safetensors")
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, outputs, inputs in modules(shape):
        layer, scale = name.split(".")[2], float(inputs**-0.5 / CODE_RMS)
        codes = (drawn(outputs, inputs) * CODE_RMS).clamp(-E4M3.max, E4M3.max).to(CODE)
        coded = {f"{name}.weight": codes, f"{name}.weight_scale": torch.full((outputs, 1), scale)}
        shards.setdefault(f"codes-{layer}", {}).update(coded)
        if "bf16" in kinds:
            weight = {f"{name}.weight": (codes.float() * scale).to(torch.bfloat16)}
            shards.setdefault(f"bf16-{layer}", {}).update(weight)
        shards.setdefault("inputs", {})[f"{name}.input_scale"] = torch.tensor([INPUT_SCALE])
        if name.endswith(LAST):
            for kind in (f"codes-{layer}", f"bf16-{layer}"):
                save(shards.pop(kind, {}), folder / f"{kind}.safetensors")
    save(shards.pop("inputs"), folder / "inputs.safetensors")


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write `tensors`, if there are any."""
    if tensors:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def write_form(name: str, shape: Shape, shards: Path, folder: Path) -> Path:
    """Write a checkpoint of links to `shards` with the config.json of the form `name`; return its directory."""
    form, path = FORMS[name], folder / name.replace(" ", "-").replace(",", "")
    path.mkdir()
    index: dict[str, str] = {}
    for shard in sorted(shards.glob("*.safetensors")):
        if shard.name.split("-")[0].removesuffix(".safetensors") in form.shards:
            (path / shard.name).symlink_to(shard)
            index |= dict.fromkeys(tensor_names(shard), shard.name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}), "utf-8")
    (path / "config.json").write_text(json.dumps(config_of(form, shape), indent=1), encoding="utf-8")
    return path


def tensor_names(shard: Path) -> list[str]:
    """The names of the tensors in a file."""
    from safetensors import safe_open

    with safe_open(shard, "pt") as file:
        return [*file.keys()]


def config_of(form: StoredForm, shape: Shape) -> dict[str, Any]:
    """The config.json of a form."""
    names = [name for name, _, _ in modules(shape)]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "hidden_size": shape.width, "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if form.inputs:
        scheme = Scheme("channel", {"bf16": BF16, "dynamic": DYNAMIC}.get(form.inputs, ONE))
        config["quantization_config"] = quantization_config(["lm_head"], None, dict.fromkeys(names, scheme), False)
    if form.fp8q:
        tails = {"tails": dict.fromkeys(names, TAIL)} if form.fp8q == "tails" else {}
        config["fp8q"] = {"two_terms": names, **tails}
    return config


def bandwidth() -> float:
    """Bytes a second that a copy of 2 GB on the GPU moves, read and written."""
    source = torch.zeros(2 * 10**9, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / seconds([lambda: target.copy_(source)], Setting(False))


def weight_bytes(name: str, shape: Shape) -> int:
    """Bytes of weights that a decode step reads: those of the GEMMs and of the head."""
    gemms = sum(outputs * inputs for _, outputs, inputs in modules(shape))
    return gemms * (2 if name == "bf16" else 1) + 2 * shape.vocabulary * shape.width


def main() -> int:
    """Write the checkpoints, serve each, print."""
    parser = arguments(__doc__)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", default=Path(sys.executable), help="(this interpreter)")
    parser.add_argument("--plugin", type=Path, metavar="FOLDER", help="that fp8q-vllm is installed into")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="for checkpoints (a temporary one)")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--form", action="append", choices=FORMS, help="this form alone; repeatable")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no form later than after so many")
    parser.add_argument("--cache-bytes", type=int, default=8 << 30, help="of vLLM's cache (%(default)s)")
    options = parser.parse_args()
    head, shape = described("vllm_8b"), Shape(layers=options.layers)
    names = options.form or [*FORMS]
    rows, failed, begun = list[dict[str, Any]](), dict[str, str](), monotonic()
    with tempfile.TemporaryDirectory(dir=options.folder) as directory:
        folder = Path(directory)
        (shards := folder / "shards").mkdir()
        copied = bandwidth()
        write_shards(shape, shards, {kind for name in names for kind in FORMS[name].shards})
        torch.cuda.empty_cache()
        plugin = options.plugin or installed_plugin(options.vllm, folder)
        for name in names:
            if monotonic() - begun > options.seconds:
                failed[name] = f"not begun: {options.seconds:g} s had passed"
                continue
            try:
                rows += measured(name, write_form(name, shape, shards, folder), plugin, options)
            except Exception as error:  # noqa: BLE001  # the other forms are still to be measured
                failed[name] = f"{type(error).__name__}: {error}"[:600]
                print(f"{name}: {failed[name]}", file=sys.stderr, flush=True)
    floors = {name: weight_bytes(name, shape) / copied * 1e3 for name in names}
    figures = {
        "layers": shape.layers, "copy_gb_per_second": copied / 1e9, "step_floor_ms": floors, "rows": rows,
        "failed": failed,
    }  # fmt: skip
    return publish(head, figures, options.save)


def measured(name: str, path: Path, plugin: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one form, printed as they come."""
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32], "skip_tokenizer_init": True}
    job = {
        **DECODE, "by": "vllm", "model": str(path), "on_gpu": True, "also": [PROMPTS],
        "cache_bytes": options.cache_bytes, "engine": graphs | dict(FORMS[name].engine),
    }  # fmt: skip
    more = {"PYTHONPATH": str(plugin)} if FORMS[name].fp8q else {"VLLM_PLUGINS": "none"}
    rows = [{"form": name, **row} for row in asked(Setting(False), options.vllm, job, more)]
    for row in rows:
        took_ms = 1e3 * row["clients"] / row["tokens_per_second"]
        kind = "a prompt of 2,048" if row["tokens"] == 1 else "a step, prompts included"
        print(f"{name}: {row['clients']} clients, {took_ms:.2f} ms {kind}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
