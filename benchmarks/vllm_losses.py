"""What vLLM makes of checkpoints, on a CPU; runs in vLLM's environment.

    python vllm_losses.py < jobs.jsonl

Each line of `jobs.jsonl` is `{"model": path, "cache": vLLM's kv_cache_dtype, "windows": [[token id]], "adapter": path
or null, "wide_experts": bool, "exact": path or null, "engine": arguments of vLLM's LLM beside these, "steps": number,
"again": bool}`, each window a prompt of its own. `exact` has the FP32 model's log-probabilities, float32 [windows,
context - 1, vocabulary], as NumPy writes them.

For each job one line of JSON goes to standard output: `{"nll_nats": [of each token of the windows, in order, but the
first of each], "kl_nats": [likewise, KL(exact || vLLM)] or null, "answers": [[8 tokens]], "again": [[8 tokens], to the
same prompts, which may be taken from the cache of prefixes then], "step_ms": the processor time of one of `steps`
decoded tokens of an answer, or null, "scales": {"<attention>": {"k": [scale of the cache of each head, or of all], "v":
…, "q": …}}}`, or `{"error": …, "loaded": whether vLLM had loaded the checkpoint before}` where it fails.

A job with `"drafts": true or false` is answered with `steps` tokens behind each window instead, with drafts of the
checkpoint's layers for multi-token prediction or without: `{"answers": [[token id]], "drafted": [number of drafts for
each answer], "accepted": [number of these that vLLM accepted]}`, the numbers 0 without drafts.
"""

import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from traceback import extract_tb
from typing import Any
from unittest.mock import patch

#: Tokens that are decoded behind a window.
ANSWER = 8

#: vLLM's counters of drafted tokens, and of those that were accepted.
COUNTERS = {"drafted": "vllm:spec_decode_num_draft_tokens", "accepted": "vllm:spec_decode_num_accepted_tokens"}

#: Engine and script are one process (quicker, and what it complains of is seen), on whichever cores there are.
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


class NotRunError(Exception):
    """vLLM has loaded a checkpoint, and does not run it."""


def named(error: Exception) -> str:
    """The type of an error, and what it says, or else the line that raised it."""
    return f"{type(error).__name__}: {str(error) or extract_tb(error.__traceback__)[-1].line}"


def losses(
    model: str, cache: str, windows: list[list[int]], adapter: str | None, exact: str | None, engine: dict[str, Any],
    steps: int, again: bool,
) -> dict[str, Any]:  # fmt: skip
    """Ask vLLM for the probabilities of `windows`, with that adapter on."""
    import numpy as np
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    fields = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 1 if adapter else None} | engine
    longest = len(windows[0]) + max(ANSWER, steps + 1)
    served = LLM(
        model=model, dtype="bfloat16", kv_cache_dtype=cache, max_model_len=longest, max_logprobs=-1,
        enable_lora=adapter is not None, max_lora_rank=8, **fields,
    )  # fmt: skip
    lora = LoRARequest("adapter", 1, adapter) if adapter else None

    def answered(**sampling: Any) -> list[Any]:
        prompts = [{"prompt_token_ids": window} for window in windows]
        greedy = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True, **sampling)
        found: list[Any] = served.generate(prompts, greedy, use_tqdm=False, lora_request=lora)
        return found

    try:
        answers = answered(prompt_logprobs=-1 if exact else 0)
    except Exception as error:
        raise NotRunError(named(error)) from error
    nll, kl = list[float](), list[float]()
    truth = None if exact is None else np.load(exact).astype(np.float64)
    for number, (answer, window) in enumerate(zip(answers, windows, strict=True)):
        for at in range(1, len(window)):
            found = answer.prompt_logprobs[at]
            nll.append(-found[window[at]].logprob)
            if truth is not None:
                right = truth[number, at - 1]
                log_q = np.array([found[token].logprob for token in range(len(right))])
                kl.append(float((np.exp(right) * (right - log_q)).sum()))
    second = answered() if again else []
    first, second = ([list(answer.outputs[0].token_ids) for answer in some] for some in (answers, second))
    step_ms = timed_step(served, windows[0], steps) if steps else None
    kls = kl if exact else None
    scales, *_ = served.apply_model(attention_scales)  # of the first process
    return {"nll_nats": nll, "kl_nats": kls, "answers": first, "again": second, "step_ms": step_ms, "scales": scales}


def drafted_answers(model: str, windows: list[list[int]], tokens: int, drafts: bool) -> dict[str, Any]:
    """Answer `windows` greedily one after the other, past any end of text, and read vLLM's counters after each."""
    from vllm import LLM, SamplingParams

    served = LLM(
        model=model, dtype="bfloat16", max_model_len=len(windows[0]) + tokens + 8, max_num_seqs=1,
        kv_cache_memory_bytes=64 << 20, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if drafts else None,
    )  # fmt: skip
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    answers, counts = list[list[int]](), [counters(served)]
    for window in windows:
        (answer,) = served.generate([{"prompt_token_ids": window}], greedy, use_tqdm=False)
        answers.append(list(answer.outputs[0].token_ids))
        counts.append(counters(served))
    grown = {name: [after[name] - before[name] for before, after in pairwise(counts)] for name in COUNTERS}
    return {"answers": answers} | grown


def counters(served: Any) -> dict[str, int]:
    """Read vLLM's counters of drafts; 0 where it counts none."""
    values = {metric.name: metric.value for metric in served.get_metrics() if metric.name in COUNTERS.values()}
    return {name: int(values.get(counter, 0)) for name, counter in COUNTERS.items()}


def attention_scales(model: Any) -> dict[str, dict[str, list[float]]]:
    """The scales that each attention of vLLM's `model` has loaded, flat."""
    attentions = {
        name.removesuffix(".attn"): module
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale_float")
    }
    return {
        name: {part: getattr(module, f"_{part}_scale").flatten().tolist() for part in "kvq"}
        for name, module in attentions.items()
    }


def timed_step(served: Any, window: list[int], steps: int) -> float:
    """Milliseconds of processor time for a decoded token behind `window`, the least of three."""
    from vllm import SamplingParams

    def seconds(tokens: int) -> float:
        begin = time.process_time()
        greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        served.generate([{"prompt_token_ids": window}], greedy, use_tqdm=False)
        return time.process_time() - begin

    return min(seconds(steps + 1) - seconds(1) for _ in range(3)) / steps * 1e3


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
    """Do the jobs of standard input one after the other, each when its line is there."""
    jobs, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    from vllm.distributed import cleanup_dist_env_and_memory

    for job in map(json.loads, jobs):
        experts = experts_in_bf16() if job.pop("wide_experts") else nullcontext()
        drafts = job.pop("drafts", None)
        try:
            with experts:
                if drafts is None:
                    outcome = losses(**job)
                else:
                    outcome = drafted_answers(job["model"], job["windows"], job["steps"], drafts)
        except NotRunError as error:
            outcome = {"error": str(error), "loaded": True}
        except Exception as error:  # noqa: BLE001  # the test knows which it should be
            outcome = {"error": named(error), "loaded": False}
        print(json.dumps(outcome), file=answers)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
