"""Rules C119, C120, C126 and C127: the scales of a KV cache, and who reads them."""

import re
from collections import defaultdict

import numpy as np

from ...core.findings import Broken
from ..reading.fp8_tensors import Checkpoint, cache_parts
from ..reading.quantization_config import CONFIG
from ..reading.run_checkpoint import CACHE_FILE, FP8Q_CONFIG
from ..scales.scheme import bf16_caches_in
from .rules import AGAIN, checkpoint_rule
from .rules_scales import readable

#: Projections of an attention module that writes to a cache: compressed-tensors' `_KV_CACHE_PROJECTION_NAMES`.
WRITE_CACHES = ("k_proj", "qkv_proj", "kv_b_proj")
#: The projection of latent attention, from the latent vectors to keys and values.
LATENT = "kv_b_proj"


@checkpoint_rule("C119", "cache-default", "warning")
def cache_default(checkpoint: Checkpoint) -> Broken:
    """The scales of a cache come from calibration. 1.0 is what vLLM takes where a scale is missing, and the least that
    most exports of ModelOpt write. With it keys beyond 448 are cut off, and small values fall on few codes. vLLM warns
    of it too.
    """
    for name in checkpoint.cache_scales:
        if readable(checkpoint, name) and np.all(checkpoint.values(name) == 1):
            yield (
                name,
                "is 1.0, which loaders take where nothing was measured; calibrate the cache, or leave it in BF16",
            )


@checkpoint_rule("C120", "cache-scales", "warning")
def cache_scales(checkpoint: Checkpoint) -> Broken:
    """A cache that the configuration says is FP8 has two scales at every attention, of keys and of values; where it
    says none, there are none. Missing ones are 1.0 to vLLM; those that are not announced are unexpected keys to
    transformers.
    """
    there: defaultdict[str, set[str]] = defaultdict(set)
    for name, module in checkpoint.cache_scales.items():
        there[module].update(f"{part}_scale" for part in cache_parts(name))
    if not checkpoint.declared.cache:
        first = next(iter(checkpoint.cache_scales), None)
        if first is not None and checkpoint.declared.form != "fp8":  # the form fp8 has no field for a cache
            yield (
                first,
                f"is there, and {checkpoint.declared.source.name} says nothing of a cache; say so, or take it out",
            )
        return
    for module in sorted(_attentions(checkpoint)):
        missing = [name for name in ("k_scale", "v_scale") if name not in there[module]]
        if missing:
            yield module, f"has no {' and no '.join(missing)}, and {checkpoint.declared.source.name} says FP8; {AGAIN}"


def _attentions(checkpoint: Checkpoint, writers: tuple[str, ...] = WRITE_CACHES) -> set[str]:
    """The modules with one of the projections `writers`."""
    modules = (name.removesuffix(".weight").rpartition(".") for name in checkpoint.tensors if name.endswith(".weight"))
    return {parent for parent, _, projection in modules if projection in writers}


@checkpoint_rule("C126", "cache-unread", "warning")
def cache_unread(checkpoint: Checkpoint) -> Broken:
    """A server reads the scales of a cache and stores every layer as they are meant. Scales of modules that are no
    attention to compressed-tensors are unexpected keys, and those of heads do not fit latent attention, which caches
    latents. Scales in fp8q's kv_cache.safetensors are for its own graphs: others keep that cache in the compute type.
    Of layers that stay wide among others in FP8 vLLM is told on its command line alone.
    """
    known = _attentions(checkpoint)
    latent = _attentions(checkpoint, (LATENT,))
    for name, module in checkpoint.cache_scales.items():
        if module in latent:
            yield name, f"is of latent attention, of which servers cache latents ({LATENT}); leave the cache in BF16"
        elif module not in known and not checkpoint.problems:  # its projections may be in what is missing
            attentions = ", ".join(WRITE_CACHES)
            yield name, f"is of {module}, which loaders know as no attention ({attentions}); leave the cache in BF16"
    if (checkpoint.root / CACHE_FILE).is_file():
        yield (
            CACHE_FILE,
            "is named by no index: vLLM and transformers keep this cache in BF16; take fp8q's graphs for it",
        )
    if in_bf16 := _bf16_cache_layers(checkpoint):
        layers = f"{len(in_bf16)} layer{'s' if len(in_bf16) > 1 else ''}"
        fault = f"has {layers} whose cache stays in BF16, and other loaders store it in FP8"
        yield CONFIG, f"{fault}; give vLLM --kv-cache-dtype-skip-layers {' '.join(map(str, in_bf16))}"


@checkpoint_rule("C127", "cache-heads", "warning")
def scales_of_heads(checkpoint: Checkpoint) -> Broken:
    """A server attends by the scales of the cache that the checkpoint has. For those of heads (the strategy attn_head)
    vLLM has FlashAttention 3 and 4, on Hopper and data-centre Blackwell GPUs. For other GPUs it finds no attention, and
    ends with an error; on a CPU it takes the largest of a layer's heads for all of them, and says nothing.
    """
    if checkpoint.declared.cache_heads:
        said = (
            "says a scale for each head of the cache, which vLLM has attention for on Hopper and data-centre Blackwell"
        )
        yield CONFIG, f"{said}: other GPUs end with an error, a CPU takes a layer's largest; give one a layer for those"


def _bf16_cache_layers(checkpoint: Checkpoint) -> list[int]:
    """The layers that fp8q's own field of config.json leaves out of an FP8 cache that servers know of."""
    named = bf16_caches_in(checkpoint.config.get(FP8Q_CONFIG)) if checkpoint.declared.cache else []
    numbers = (re.search(r"\.(\d{1,6})\.", name) for name in named)
    return [int(number[1]) for number in numbers if number]
