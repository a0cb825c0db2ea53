"""What vLLM makes of checkpoints, on a CPU; runs in vLLM's environment (`environments.py`).

    python vllm_losses.py < jobs.json

`jobs.json` is a list of `{"model": path, "cache": vLLM's kv_cache_dtype, "windows": [[token id]], "adapter": path or
null, "wide_experts": bool}`, each window a prompt of its own. One line of JSON a job goes to standard output, whatever
else does: `{"nll_nats": [of each token of the windows, in order, but the first of each]}`, or `{"error": …}` where vLLM
refuses the checkpoint.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

#: Engine and script are one process (quicker, and what it complains of is seen), on whichever cores there are.
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def nll_nats(model: str, cache: str, windows: list[list[int]], adapter: str | None) -> list[float]:
    """The negative log-likelihood in nats of each token of `windows` but the first of each, with that adapter on."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    engine = LLM(
        model=model, dtype="bfloat16", kv_cache_dtype=cache, max_model_len=len(windows[0]) + 1, enforce_eager=True,
        enable_prefix_caching=False, enable_lora=adapter is not None, max_lora_rank=8,
        max_num_seqs=1 if adapter else None,
    )  # fmt: skip
    answers = engine.generate(
        [{"prompt_token_ids": window} for window in windows],
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
    )
    return [
        -answer.prompt_logprobs[at][window[at]].logprob
        for answer, window in zip(answers, windows, strict=True)
        for at in range(1, len(window))
    ]


@contextmanager
def experts_in_bf16() -> Iterator[None]:
    """Let experts be multiplied in BF16, by the codes and scales that vLLM has loaded: for CPUs it has no product of
    experts in FP8, and says so only after it has loaded them all.
    """
    from torch.nn import Parameter
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as fp8,
    )

    def widen(method: Any, layer: Any) -> None:
        for name in ("w13_weight", "w2_weight"):
            wide = getattr(layer, name).float() * getattr(layer, f"{name}_scale")
            setattr(layer, name, Parameter(wide.bfloat16(), requires_grad=False))
        plain = UnquantizedFusedMoEMethod(method.moe)
        plain.process_weights_after_loading(layer)
        layer._replace_quant_method(plain)

    with patch.object(fp8.CompressedTensorsW8A8Fp8MoEMethod, "process_weights_after_loading", widen):
        yield


def main() -> None:
    """Do the jobs of standard input one after the other."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm.distributed import cleanup_dist_env_and_memory

    for job in json.load(sys.stdin):
        experts = experts_in_bf16() if job.pop("wide_experts") else nullcontext()
        try:
            with experts:
                outcome: dict[str, Any] = {"nll_nats": nll_nats(**job)}
        except Exception as error:  # noqa: BLE001  # the test knows which it should be
            outcome = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(outcome), file=answers)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
