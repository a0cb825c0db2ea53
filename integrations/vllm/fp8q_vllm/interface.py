"""The interface of vLLM that this plugin builds on, checked before anything of it is used.

vLLM guarantees none of it to plugins. Where a version lacks a part, checkpoints with inputs in two terms are refused in
one line that names both versions: without the plugin vLLM would run their first terms alone, and say nothing. All other
models are served as before.
"""

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from typing import Any

LAYERS = "vllm.model_executor.layers"
COMPRESSED = f"{LAYERS}.quantization.compressed_tensors"
#: vLLM's question to a format whether a checkpoint is of it, and the argument that has config.json's field `fp8q`.
QUESTION = (f"{LAYERS}.quantization.base_config:QuantizationConfig.override_quantization_method", "hf_config")
#: Module and name of each part -> the parameters that it must have.
NEEDED: Mapping[str, tuple[str, ...]] = {
    QUESTION[0]: ("hf_quant_cfg", "user_quant", QUESTION[1]),
    f"{LAYERS}.quantization.base_config:QuantizationConfig.maybe_update_config": ("model_name", "hf_config"),
    f"{LAYERS}.quantization.base_config:QuantizeMethodBase": (),
    f"{LAYERS}.quantization:register_quantization_config": (),
    f"{COMPRESSED}.compressed_tensors:CompressedTensorsConfig.apply_vllm_mapper": ("hf_to_vllm_mapper",),
    f"{COMPRESSED}.compressed_tensors:CompressedTensorsConfig.get_quant_method": ("layer", "prefix"),
    f"{COMPRESSED}.schemes:CompressedTensorsW8A8Fp8": ("weight_quant", "is_static_input_scheme"),
    f"{COMPRESSED}.schemes:CompressedTensorsW8A8Fp8.create_weights": ("layer",),
    f"{COMPRESSED}.schemes:CompressedTensorsW8A8Fp8.process_weights_after_loading": ("layer",),
    f"{COMPRESSED}.schemes:CompressedTensorsW8A8Fp8.apply_weights": ("layer", "x", "bias"),
    f"{LAYERS}.quantization.input_quant_fp8:QuantFP8.__init__": ("static", "group_shape"),
    f"{LAYERS}.quantization.utils.quant_utils:GroupShape.PER_TENSOR": (),
    f"{LAYERS}.quantization.utils.w8a8_utils:cutlass_fp8_supported": (),
    f"{LAYERS}.fused_moe:RoutedExperts": (),
    f"{LAYERS}.linear:LinearBase": (),
    f"{LAYERS}.vocab_parallel_embedding:ParallelLMHead": (),
    f"{LAYERS}.quantization.base_config:QuantizeMethodBase.process_weights_after_loading": ("layer",),
    "vllm.model_executor.models.utils:WeightsMapper._map_name": (),
    "vllm._custom_ops:cutlass_scaled_mm": ("a", "b", "scale_a", "scale_b", "out_dtype", "bias"),
    "vllm.config:get_current_vllm_config": (),
    "vllm.forward_context:get_forward_context": (),
    "vllm.forward_context:is_forward_context_available": (),
    "vllm.utils.torch_utils:direct_register_custom_op": ("op_name", "op_func", "fake_impl"),
}


def missing_part(needed: Mapping[str, tuple[str, ...]] = NEEDED) -> str | None:
    """Describe the first part of `needed` that this vLLM lacks; None where it has all."""
    for part, parameters in needed.items():
        module, _, name = part.partition(":")
        try:
            target: Any = import_module(module)
            for attribute in name.split("."):
                target = getattr(target, attribute)
        except (ImportError, AttributeError):
            return f"there is no {part}"
        if lacking := [parameter for parameter in parameters if parameter not in signature(target).parameters]:
            return f"{part} takes no {lacking[0]}"
    return None


def refuse_two_terms(reason: str) -> None:
    """Let vLLM refuse checkpoints with inputs in two terms, for this `reason`.

    Raises RuntimeError where it cannot tell them from others.
    """
    if missing_part({QUESTION[0]: (QUESTION[1],), f"{LAYERS}.quantization:register_quantization_config": ()}):
        raise RuntimeError(
            f"{reason}. It cannot even tell which checkpoints have inputs in two terms, so nothing is served; "
            "VLLM_PLUGINS=none leaves the plugin out, and runs one term"
        )
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Refusal(QuantizationConfig):
        """A format that takes no checkpoint."""

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
        ) -> str | None:
            """Raise ValueError for a checkpoint with inputs in two terms."""
            fields = getattr(hf_config, "fp8q", None)
            if isinstance(fields, dict) and fields.get("two_terms"):
                raise ValueError(
                    f"{reason}. This checkpoint has inputs in two terms; VLLM_PLUGINS=none leaves the plugin out, and "
                    "runs one term"
                )
            return None

    register_quantization_config("fp8q")(Refusal)
