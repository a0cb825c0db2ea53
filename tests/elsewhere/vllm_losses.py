"""What vLLM makes of checkpoints, on a CPU; runs in vLLM's environment (`environments.py`).

    python vllm_losses.py < jobs.json

`jobs.json` is a list of `{"model": path, "cache": vLLM's kv_cache_dtype, "windows": [[token id]]}`, each window a
prompt of its own. One line of JSON a job goes to standard output, whatever else does: `{"nll_nats": [of each token of
the windows, in order, but the first of each]}`, or `{"error": …}` where vLLM refuses the checkpoint.
"""

import gc
import json
import os
import sys
from typing import Any

#: Engine and script are one process (quicker, and what it complains of is seen), on whichever cores there are.
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def nll_nats(model: str, cache: str, windows: list[list[int]]) -> list[float]:
    """The negative log-likelihood in nats of each token of `windows` but the first of each."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model, dtype="bfloat16", kv_cache_dtype=cache, max_model_len=len(windows[0]) + 1, enforce_eager=True,
        enable_prefix_caching=False,
    )  # fmt: skip
    answers = engine.generate(
        [{"prompt_token_ids": window} for window in windows],
        SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
        use_tqdm=False,
    )
    return [
        -answer.prompt_logprobs[at][window[at]].logprob
        for answer, window in zip(answers, windows, strict=True)
        for at in range(1, len(window))
    ]


def main() -> None:
    """Do the jobs of standard input one after the other."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm.distributed import cleanup_dist_env_and_memory

    for job in json.load(sys.stdin):
        try:
            outcome: dict[str, Any] = {"nll_nats": nll_nats(job["model"], job["cache"], job["windows"])}
        except Exception as error:  # noqa: BLE001  # the test knows which it should be
            outcome = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(outcome), file=answers)
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
