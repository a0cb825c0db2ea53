"""Rules S121 to S124: the scales of a KV cache, as servers read them."""

from ...calibrate.checkpoint.class_defaults import config_field
from ...core.findings import Broken
from ..reading.quantization_config import CONFIG
from .servers import Applies, Served, server_rule

#: Classes of vLLM 0.33 that make their attention without a quantization configuration, which has no scales then.
VLLM_UNREAD = frozenset(
    (
        "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "JambaForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM",
        "Plamo3ForCausalLM", "Step3TextForCausalLM", "Zamba2ForCausalLM",
    )
)  # fmt: skip
#: Classes of SGLang 0.5.23 whose attention has no scales, or whose loader does not map their names.
SGLANG_UNREAD = frozenset(
    (
        "AfmoeForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "ExaoneMoeForCausalLM",
        "FalconH1ForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GemmaForCausalLM", "Glm4ForCausalLM",
        "Glm4MoeForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "InternLM2ForCausalLM",
        "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForCausalLM", "MiniCPMForCausalLM", "MixtralForCausalLM",
        "OPTForCausalLM", "Olmo2ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM", "PersimmonForCausalLM",
        "PhiForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM", "SolarForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM",
        "Step3p5ForCausalLM",
    )
)  # fmt: skip
#: SGLang reads no cache scales of compressed-tensors before this version.
SGLANG_READS = "0.5.19"
#: transformers calls the cache of an attention `cache` from this version on, and compressed-tensors 0.20 looks for
#: `past_key_values`: it takes no attention for one with a cache.
TRANSFORMERS_RENAMED = "5.24"
#: The parents of projections under which ModelOpt's names of scales are mapped.
ATTENTION = ("self_attn", "mixer")
PLACE = "leave the cache in BF16 there"


def _scales(served: Served) -> list[str]:
    """The scales of a cache, by name."""
    if served.fp8:
        return sorted(served.fp8.cache_scales)
    return []


@server_rule(
    "S121",
    "cache-scales-unread",
    "warning",
    Applies("vllm", "the attention of these classes is made without quant_config; `base_config.py`"),
    Applies("sglang", "`models/*.py`: RadixAttention without quant_config, or no maybe_remap_kv_scale_name"),
    Applies("tensorrt-llm", "`_torch/modules/attention.py`: scales are passed for FP4 caches alone"),
    Applies("transformers", "`quantizer_compressed_tensors.py`; compressed-tensors' `lifecycle/initialize.py`"),
)
def cache_scales_unread(served: Served) -> Broken:
    """The class that serves a model has a parameter for each scale of the cache, and maps the checkpoint's names to
    it. Where it has none, or does not, the scale is passed over in silence, and the cache is written by 1.0: keys
    beyond 448 are cut off, and small values fall on few codes. `fp8q compare RUN --url` tells it from outside.
    """
    names = _scales(served)
    if not names:
        return
    many = f"and {len(names) - 1} more are" if len(names) > 1 else "is"
    unread = f"{many} not read by {served.title}, which writes an FP8 cache by 1.0"
    if served.server == "tensorrt-llm":
        yield names[0], f"{unread}; {PLACE}"
        return
    form = served.declared.form if served.declared else ""
    if served.server == "transformers":
        if form != "compressed-tensors":
            yield names[0], f"{many} not read by transformers, which keeps the cache in BF16; leave them out"
        elif served.is_since(TRANSFORMERS_RENAMED):
            fault = f"{many} not read by transformers from {TRANSFORMERS_RENAMED} on with compressed-tensors 0.20"
            yield names[0], f"{fault}, which keeps the cache in BF16; load it by an older transformers"
        return
    classes = VLLM_UNREAD if served.server == "vllm" else SGLANG_UNREAD
    if served.architecture in classes:
        yield names[0], f"{unread}: its {served.architecture} has no scales of a cache; {PLACE}"
    elif served.server == "sglang" and form == "compressed-tensors" and not served.is_since(SGLANG_READS):
        yield names[0], f"{unread}: before {SGLANG_READS} it reads those of ModelOpt alone; take a newer SGLang"
    else:
        for name in names:
            *_, parent, last, _scale = ("", "", *name.split("."))
            if last in ("k_proj", "v_proj") and parent not in ATTENTION:
                where = " and ".join(ATTENTION)
                yield name, f"is mapped by {served.title} under {where} alone: it writes an FP8 cache by 1.0; {PLACE}"


@server_rule(
    "S122",
    "cache-scheme-unread",
    "warning",
    Applies("sglang", "`compressed_tensors.py`, `CompressedTensorsKVCacheMethod.is_supported_scheme`", SGLANG_READS),
)
def cache_scheme_unread(served: Served) -> Broken:
    """The scheme of a cache is static, symmetric and one scale a tensor. SGLang passes over any other with a warning,
    reads no scale of it, and writes an FP8 cache by 1.0.
    """
    cache = served.said.get("kv_cache_scheme")
    if served.method != "compressed-tensors" or not isinstance(cache, dict):
        return
    if cache.get("strategy") != "tensor" or not cache.get("symmetric", True) or cache.get("dynamic"):
        fault = f"has a cache of strategy {cache.get('strategy')!r}, of which SGLang reads no scale"
        yield CONFIG, f"{fault}: it writes an FP8 cache by 1.0; give one static scale a tensor"


@server_rule(
    "S123",
    "cache-head-size",
    "warning",
    Applies("vllm", "`v1/attention/backends/cpu_attn.py`, `flashinfer.py`, `triton_attn.py`"),
)
def cache_head_size(served: Served) -> Broken:
    """The attention that reads an FP8 cache has a kernel for the size of the heads. vLLM's on CPUs wants a multiple of
    32, FlashInfer has 64, 128, 256 and 512, FlashAttention 3 and 4 take multiples of 8, and Triton's 32 and more. A
    size below 32 has none outside of Hopper and data-centre Blackwell.
    """
    size = config_field(served.config, "head_dim")
    declares = served.declared is not None and (served.declared.cache or _scales(served))
    if not isinstance(size, int) or not declares or not size % 32:
        return
    where = "on a CPU" if size > 32 else "outside of Hopper and data-centre Blackwell"
    what = f"has heads of {size}, for which vLLM has no kernel that reads an FP8 cache {where}"
    yield CONFIG, f"{what}; leave the cache in BF16 there"


@server_rule(
    "S124",
    "draft-cache-scales",
    "note",
    Applies("vllm", "`models/qwen3_5_mtp.py`, `quantization/kv_cache.py`"),
    Applies("sglang", "`models/qwen3_5_mtp.py`, `quantization/kv_cache.py`"),
)
def draft_cache_scales(served: Served) -> Broken:
    """Layers for multi-token prediction have a cache too. Where the others have scales of theirs and these have none, a
    server that drafts by them writes their part by 1.0, and says so once, as of the whole model (vllm 54623).
    """
    names = _scales(served)
    prefixes = served.drafts
    if names and prefixes and not any(name.startswith(prefixes) for name in names):
        fault = "has no scales of a cache, and other layers have: drafts read a cache that is written by 1.0"
        yield prefixes[0].removesuffix("."), f"{fault}; calibrate them, or ask for drafts in BF16"
