"""One contender of the part `serve`, in a process of its own; runs in vLLM's environment too, which has no fp8q.

    python serve_job.py < job.json

`job.json`: `{"by": "fp8q" or "vllm", "model": a run or a checkpoint, "runtime": of fp8q, "clients": [numbers],
"prompt": tokens, "tokens": of an answer, "answers": of each client, "cache_bytes": of vLLM, "on_gpu": bool, "engine":
further arguments of vLLM's LLM, "also": [the same fields with other clients, prompts or tokens, asked after it]}`. One
line of JSON goes to standard output: a row for each number of clients.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SAMPLING_S = 0.05
#: Give every prompt an answer of so many tokens.
Answer = Callable[[Sequence[Sequence[int]], int], None]


def open_meter(on_gpu: bool) -> Any:
    """The product's meter of memory and energy, whose file needs nothing else of fp8q; vLLM brings NVML along."""
    with suppress(ImportError):
        if on_gpu and find_spec("pynvml") is None:
            sys.modules["pynvml"] = import_module("vllm.third_party.pynvml")
    spec = spec_from_file_location("fp8q_meter", ROOT / "serve" / "bench" / "meter.py")
    assert spec is not None, "the file is there"
    assert spec.loader is not None, "it is Python"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for themselves
    spec.loader.exec_module(module)
    return module.open_meter(on_gpu)


@contextmanager
def most_memory(meter: Any) -> Iterator[list[int]]:
    """The most memory in use during the block, in a list of one."""
    found, over = [meter.memory_bytes()], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLING_S):
            found[0] = max(found[0], meter.memory_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def sizes_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The job itself, and again with the fields of each of its `also`."""
    return [job, *(job | more for more in job.get("also", ()))]


def open_fp8q(job: dict[str, Any]) -> tuple[Answer, int]:
    """fp8q's loop, as servers have it: a thread that steps, and requests that are handed in."""
    import queue

    from fp8q.core.run import Run
    from fp8q.serve.loop.request import Request
    from fp8q.serve.loop.service import Failed, Service
    from fp8q.stages.generate import open_model

    generator = open_model(Run(Path(job["model"])), job["runtime"], max(job["clients"]))
    service = Service(generator)

    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> None:
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def receive(told: Any) -> None:
            if isinstance(told, Failed) or told.finish_reason:
                ended.put(told)

        for prompt in prompts:
            service.submit(Request(tuple(prompt), tokens, ignore_end=True), receive)
        for _ in prompts:
            told = ended.get()
            if isinstance(told, Failed) or told.output_tokens != tokens:
                raise RuntimeError(f"an answer is not whole: {told}")

    return answer, generator.tokens


def open_vllm(job: dict[str, Any]) -> tuple[Answer, int]:
    """vLLM's engine, without a cache of prefixes, with room for as many as ask at once."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # its memory is then this process's
    more: dict[str, Any] = {"kv_cache_memory_bytes": job["cache_bytes"]}
    if not job["on_gpu"]:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        more = {"enforce_eager": True}
    from vllm import LLM, SamplingParams

    most = max(size["prompt"] + size["tokens"] for size in sizes_of(job))
    served = LLM(
        model=job["model"], dtype="bfloat16", max_model_len=most,
        max_num_seqs=max(clients for size in sizes_of(job) for clients in size["clients"]),
        enable_prefix_caching=False, **(more | job.get("engine", {})),
    )  # fmt: skip

    def answer(prompts: Sequence[Sequence[int]], tokens: int) -> None:
        greedy = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        given: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        found = served.generate(given, greedy, use_tqdm=False)
        if any(len(each.outputs[0].token_ids) != tokens for each in found):
            raise RuntimeError("an answer is not whole")

    return answer, served.model_config.get_vocab_size()


def rows(job: dict[str, Any], answer: Answer, vocabulary: int, meter: Any, before: int) -> Iterator[dict[str, Any]]:
    """A row for each number of clients, each after one answer that is not timed."""
    import numpy as np

    drawn, tokens = np.random.default_rng(0), job["tokens"]
    for clients in job["clients"]:
        rounds = drawn.integers(10, vocabulary, (job["answers"] + 1, clients, job["prompt"])).tolist()
        answer(rounds[0], tokens)
        with most_memory(meter) as most:
            spent, begun = meter.joules(), time.perf_counter()
            for prompts in rounds[1:]:
                answer(prompts, tokens)
            took, after = time.perf_counter() - begun, meter.joules()
        count = clients * tokens * job["answers"]
        yield {
            "clients": clients, "prompt": job["prompt"], "tokens": tokens, "tokens_per_second": count / took,
            "joules_per_token": None if spent is None or after is None else (after - spent) / count,
            "memory_bytes": max(0, most[0] - before), "on": meter.device,
            "version": import_module(job["by"]).__version__,
        }  # fmt: skip


def main() -> None:
    """Do the job."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    job = json.load(sys.stdin)
    meter = open_meter(job["on_gpu"])
    before = meter.memory_bytes()
    answer, vocabulary = {"fp8q": open_fp8q, "vllm": open_vllm}[job["by"]](job)
    measured = [row for size in sizes_of(job) for row in rows(size, answer, vocabulary, meter, before)]
    print(json.dumps(measured), file=answers)
    answers.flush()
    os._exit(0)  # threads of either may never end


if __name__ == "__main__":
    main()
