"""Random checkpoints of the 8 B Llama's shape, and the memory of a process that works on them: what the benchmarks of
memory share.

Width 4,096, intermediate 14,336, 32 heads, 8 KV heads, vocabulary 128,256, embedding and head apart (2.1 GB of them),
random BF16, a shard a layer: 5 layers are 4.3 GB, 14 are 8.2 GB. What is sampled is *anonymous* resident memory
(RssAnon of /proc/PID/status), every 20 ms: the pages of mapped files can be dropped at any time and do not count.
"""

import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from shutil import copyfile

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "demo"
SAMPLING_SECONDS = 0.02
WIDTH, HEAD_SIZE, VOCABULARY = 4096, 128, 128_256


def shape(width: int = WIDTH, layers: int = 1, vocabulary: int = VOCABULARY) -> LlamaConfig:
    """A Llama of that width, of the 8 B one's proportions, and of that many tokens."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_SIZE,
        num_key_value_heads=width // 4 // HEAD_SIZE,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name within a layer -> shape."""
    width, inner = config.hidden_size, config.intermediate_size
    cache = width // 4
    products = {"q": (width, width), "k": (cache, width), "v": (cache, width), "o": (width, width)}
    return {
        **{f"self_attn.{name}_proj.weight": shape for name, shape in products.items()},
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }


@cache
def random_weight(shape: tuple[int, ...]) -> torch.Tensor:
    """BF16 normal values of the size that keeps a product's; ones for a norm.

    One tensor a shape: memory does not know what values it holds.
    """
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=shape[1] ** -0.5)


def write_checkpoint(path: Path, layers: int, width: int = WIDTH, vocabulary: int = VOCABULARY) -> int:
    """Write a random checkpoint of `layers` layers shard by shard; returns the bytes of its weights."""
    path.mkdir()
    config = shape(width, layers, vocabulary)
    table, inside = (config.vocab_size, width), layer_shapes(config)
    shards: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": table}]
    shards += [{f"model.layers.{layer}.{name}": size for name, size in inside.items()} for layer in range(layers)]
    shards += [{"model.norm.weight": (width,)}, {"lm_head.weight": table}]
    names: dict[str, str] = {}
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        names |= dict.fromkeys(shapes, file)
        save_file(
            {name: random_weight(shape).clone() for name, shape in shapes.items()},
            path / file,
            metadata={"format": "pt"},
        )
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    config.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(DEMO / "checkpoint" / name, path / name)
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def sampled(script: str, arguments: list[str]) -> dict[str, dict[str, float]]:
    """Run `script` with `arguments`; it prints the name of each stage that it begins;; stage -> its peak of anonymous
    memory in bytes, and its seconds.
    """
    found: dict[str, dict[str, float]] = {}
    with subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        stage, began = "start", time.monotonic()
        while process.poll() is None:
            told = process.stdout.read()
            if told:
                stage, began = told.decode().split()[-1], time.monotonic()
                print(f"{stage} …", file=sys.stderr)
            peak = found.get(stage, {}).get("peak_anonymous_bytes", 0)
            found[stage] = {
                "peak_anonymous_bytes": max(peak, anonymous_bytes(process.pid)),
                "seconds": round(time.monotonic() - began, 1),
            }
            time.sleep(SAMPLING_SECONDS)
    if process.returncode:
        raise SystemExit(f"the measured process failed with exit status {process.returncode}")
    return found


def anonymous_bytes(process: int) -> int:
    """Anonymous resident memory of a process; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
