"""Serving: fp8q's own loop through an engine, and vLLM with the same `model/` beside it, each in a process of its own.

So many clients ask at once for answers of a fixed length behind prompts of a fixed length, the end of text ignored, and
ask again when all have theirs. Tokens a second, joules a token where NVML counts them, and the most memory that was
taken beside what was there before. Neither side has HTTP before it.

Contenders: fp8q through an engine of each runtime that is installed, FP8 in one term; vLLM (`--vllm`, or installed
here) in BF16, on the same checkpoint, in two terms with the plugin fp8q-vllm, and with FP8 weights alone. What vLLM
loads besides the source are copies of `model/` with the scales chosen anew. A contender whose figures of this model are
in the file is not measured again, so an interrupted call goes on where it was.

With the demo, which is what is served without `--run`, the figures are of the loops, not of products: give a run of a
model that fills the GPU. A dry run asks ONNX Runtime for a few tokens, and vLLM only where `--vllm` names it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm_jobs import installed_plugin

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import Terms
from fp8q.quantize.scales.serving_cost import BF16_BYTES
from fp8q.stages.shared.sources import source_of
from fp8q.validate.bench.document import footprint

from .engines import RUNTIMES, demo
from .timing import Kind, Part, Setting

JOB = Path(__file__).with_name("serve_job.py")
TABLE = "serving"
#: Clients at once, tokens of a prompt and of an answer, answers of each client.
CLIENTS, PROMPT, TOKENS, ANSWERS = (1, 8, 32), 256, 128, 3
#: vLLM's contenders: name -> terms of the checkpoint (None: the source, in BF16), and whether with the plugin.
VLLM: dict[str, tuple[Terms | None, bool]] = {
    "vllm, bf16": (None, False), "vllm, one term": (1, False), "vllm, two terms": (2, True),
    "vllm, weights alone": ("bf16", False),
}  # fmt: skip
#: Bytes that vLLM's cache has beside those of the clients, for its blocks.
SPARE_BYTES = 256 << 20
#: Seconds of a step: guesses where none of its kind was measured, and what a process has in any case.
PREPARE_S, ENGINE_S, VLLM_S, LEAST_S = 90.0, 90.0, 100.0, 60.0


def measure(setting: Setting, part: Part) -> None:
    """Serve by each contender that is here and was not measured."""
    model = Run(setting.run).record().model["fingerprint"][:12] if setting.run else "the demo"
    known = [row for row in setting.earlier.get(TABLE, []) if row["model"] == model]
    for row in known:
        part.row(TABLE, **row)
    waiting = {name: work for name, work in contenders(setting, part) if all(row["by"] != name for row in known)}
    if not waiting:
        return
    with tempfile.TemporaryDirectory() as directory:
        made = partial(demo, setting, Path(directory) / "run")
        run = part.step(setting, "a run", made, Kind("a run", 0.0 if setting.run else PREPARE_S))
        if run is None:
            part.skipped |= dict.fromkeys(waiting, "there is no run for it")
            return
        for name, work in waiting.items():
            kind = Kind("vllm", VLLM_S) if name in VLLM else Kind("engine", ENGINE_S)
            tried = partial(part.tried, name, partial(work, run, Path(directory), name))
            for row in part.step(setting, name, tried, kind) or ():
                part.row(TABLE, by=name, model=model, **row)
            setting.keep(part)


def sizes(setting: Setting) -> dict[str, Any]:
    """The size of the work, as a job has it."""
    clients, prompt, tokens, answers = setting.pick((CLIENTS, PROMPT, TOKENS, ANSWERS), ((1, 2), 8, 4, 1))
    return {"clients": clients, "prompt": prompt, "tokens": tokens, "answers": answers, "on_gpu": not setting.dry}


Work = Callable[[Run, Path, str], list[dict[str, Any]]]


def contenders(setting: Setting, part: Part) -> Iterator[tuple[str, Work]]:
    """Name -> what measures it; those that cannot run here are named as skipped."""
    if setting.dry:
        yield "fp8q, onnxruntime", partial(by_loop, setting, "onnxruntime")
    for runtime, module in RUNTIMES.items():
        if setting.dry or not find_spec(module):
            part.skipped[f"fp8q, {runtime}"] = "a GPU runs it" if setting.dry else f"{module} is not installed"
        else:
            yield f"fp8q, {runtime}", partial(by_loop, setting, runtime)
    python = setting.vllm or (Path(sys.executable) if find_spec("vllm") and not setting.dry else None)
    if python is None:
        part.skipped["vllm"] = "it is not installed here; name the interpreter that has it with --vllm"
        return
    for name, (terms, plugin) in VLLM.items():
        if setting.dry and terms == "bf16":
            part.skipped[name] = "vLLM has no product of FP8 weights alone on a CPU"
        else:
            yield name, partial(by_vllm, setting, python, terms, plugin)


def by_loop(setting: Setting, runtime: str, run: Run, folder: Path, name: str) -> list[dict[str, Any]]:
    """fp8q's loop, on an engine that is built first, in a copy of the run: a session opens the engine that it finds."""
    own = Run(Path(shutil.copytree(run.root, folder / runtime, symlinks=True)))
    job = sizes(setting)
    if runtime != "onnxruntime":
        most = job["clients"][-1]
        fields: dict[str, Any] = {"runtime": runtime, "max_batch": most, "max_prompt": job["prompt"]}
        api.build_engine(own.root, api.EngineOptions(max_seq_len=job["prompt"] + job["tokens"], **fields))
    job |= {"by": "fp8q", "model": str(own.root), "runtime": runtime}
    return asked(setting, Path(sys.executable), job, {})


def by_vllm(
    setting: Setting, python: Path, terms: Terms | None, plugin: bool, run: Run, folder: Path, name: str
) -> list[dict[str, Any]]:
    """vLLM on the source, or on the checkpoint with its scales chosen for these terms."""
    if terms is None:
        model = source_of(run).path
    else:
        own = Path(shutil.copytree(run.root, folder / f"terms-{terms}", symlinks=True))
        api.scales(own, api.RescaleOptions(activation_terms=terms))
        model = own / "model"
    path = {"VLLM_PLUGINS": "none"}
    if plugin:
        (folder / "plugin").mkdir()
        path = {"PYTHONPATH": str(installed_plugin(python, folder / "plugin"))}
    job = sizes(setting) | {"by": "vllm", "model": str(model), "cache_bytes": cache_bytes(run, setting)}
    return asked(setting, python, job, path)


def cache_bytes(run: Run, setting: Setting) -> int:
    """Bytes of a cache in BF16 for all clients, and a quarter more: vLLM would take all that is free."""
    size = sizes(setting)
    positions: int = (size["prompt"] + size["tokens"]) * size["clients"][-1]
    return round(1.25 * BF16_BYTES * positions * footprint(run, "fp8", 0).values) + SPARE_BYTES


def asked(setting: Setting, python: Path, job: dict[str, Any], more: dict[str, str]) -> list[dict[str, Any]]:
    """The rows that a job gives, in a process of its own; raises RuntimeError with the last error that it tells of, and
    subprocess' TimeoutExpired with the part's time.
    """
    words = [str(python), "-P", str(JOB)]
    environment = os.environ | {"PYTHONPATH": ""} | more
    life_s = max(LEAST_S, setting.left_s)
    done = subprocess.run(
        words, input=json.dumps(job), capture_output=True, text=True, env=environment, timeout=life_s, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it ended without a word"]
        raise RuntimeError(next((line for line in reversed(lines) if "Error" in line), lines[-1]))
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows
