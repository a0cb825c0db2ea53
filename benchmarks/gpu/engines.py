"""Engines and runtimes on this GPU: the demo's FP8, BF16 and INT8, and FP8 with both forms of `--apply-scales`.

With `tensorrt` (any GPU) and `tensorrt-rtx` (RTX cards; whether it knows this GPU is part of the question): built,
which share of the promised products takes FP8 as the inspector says, the time of an answer, and perplexity through it.
With `onnxruntime-gpu`: whether `model.onnx` runs on its CUDA provider, and its perplexity. A dry run builds for `sm89`
with TensorRT-RTX, which needs no GPU for that and runs nothing, and takes ONNX Runtime's CPU.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fp8q import api
from fp8q.core.run import Run
from fp8q.export.engine.targets import gpu_target
from fp8q.options import WeightScale
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens

from .timing import Kind, Part, Setting

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"
#: Runtime -> the module that it is.
RUNTIMES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
WINDOWS, CONTEXT = 16, 256
#: Seconds to export, build, time and validate, where no engine of the runtime was built.
FIRST_S = 90.0


def measure(setting: Setting, part: Part) -> None:
    """Whatever is installed here."""
    here = [runtime for runtime, module in RUNTIMES.items() if find_spec(module)]
    for runtime in RUNTIMES.keys() - here:
        part.skipped[runtime] = f"{RUNTIMES[runtime]} is not installed"
    with tempfile.TemporaryDirectory() as directory:
        first = demo(setting, Path(directory) / "run")
        onnxruntime(first, setting, part)
        for runtime in here:
            # a run of its own: a session opens the engine that it finds, whoever built it
            run = Run(Path(shutil.copytree(first.root, Path(directory) / runtime)))
            if setting.dry and runtime == "tensorrt":
                part.skipped[runtime] = "it builds on a GPU alone"
                continue
            for form in setting.pick(("dq", "mul"), ("dq",)):
                within(setting, part, f"{runtime}, fp8, --apply-scales {form}", partial(fp8, run, runtime, form))
            for precision in setting.pick(("bf16", "int8"), ()):
                within(setting, part, f"{runtime}, {precision}", partial(baseline, run, runtime, precision))


def demo(setting: Setting, directory: Path) -> Run:
    """A run of our own, with its graph and without engines, which others may have built."""
    if setting.run:
        run = Run(Path(shutil.copytree(setting.run, directory, ignore=shutil.ignore_patterns("engines"))))
    else:
        options = api.CalibrateOptions(samples=64, seq_len=256)
        texts = str(DEMO / "calibration.txt"), directory, str(DEMO / "evaluation.txt")
        run = api.calibrate(str(DEMO / "checkpoint"), *texts, options)
    if not (run.model / "model.onnx").is_file():
        api.export(run.root)
    return run


def within(setting: Setting, part: Part, name: str, work: Callable[[Setting, Part, str], None]) -> None:
    """Do `work` if there is time; a runtime that refuses is an answer."""
    runtime = name.partition(",")[0]
    part.step(setting, name, lambda: part.tried(name, lambda: work(setting, part, name)), Kind(runtime, FIRST_S))


def fp8(run: Run, runtime: str, form: WeightScale, setting: Setting, part: Part, name: str) -> None:
    """Build the FP8 graph in that form, and ask the engine."""
    if form != "dq":  # the run's graph is of the default form
        api.export(run.root, api.ExportOptions(weight_scale=form))
    targets = ("sm89",) if setting.dry else ()
    options = api.EngineOptions(runtime=runtime, targets=targets, max_seq_len=512, min_fp8_share=0)  # type: ignore[arg-type]
    for info in api.build_engine(run.root, options):
        part.row(
            "engines", engine=name, target=info.target, version=info.version, bytes=info.bytes,
            build_seconds=info.build_seconds, promised=info.promised_products, fp8=info.fp8_products,
            evidence=info.evidence,
        )  # fmt: skip
        known = info.target == gpu_target() and info.evidence != "unknown"  # else nothing is known of this GPU
        share = info.fp8_products / info.promised_products if known else None
        part.target(f"{name}: share of promised products in FP8 on this GPU", share, 1, least=True)
        if info.evidence == "unknown":
            part.skipped[f"{name}: what it runs"] = f"{info.target}.layers.json has what its inspector says"
    if not setting.dry:
        answers(run, runtime, "fp8", setting, part, name)
        part.row("perplexity", runtime=name, perplexity=perplexity(run, runtime))


def baseline(run: Run, runtime: str, precision: str, setting: Setting, part: Part, name: str) -> None:
    """Build the graph of another precision, and time it."""
    api.export(run.root, api.ExportOptions(precision=precision))  # type: ignore[arg-type]
    options = api.EngineOptions(runtime=runtime, max_seq_len=512, precision=precision)  # type: ignore[arg-type]
    for info in api.build_engine(run.root, options):
        part.row("engines", engine=name, target=info.target, version=info.version, bytes=info.bytes,
                 build_seconds=info.build_seconds)  # fmt: skip
    answers(run, runtime, precision, setting, part, name)
    part.row("perplexity", runtime=name, perplexity=perplexity(run, f"{runtime}-{precision}"))


def answers(run: Run, runtime: str, precision: str, setting: Setting, part: Part, name: str) -> None:
    """What `fp8q bench` finds of that precision."""
    batches, prompts, tokens = setting.pick(((1, 8), (32, 256), 64), ((1,), (8,), 3))
    options = api.BenchOptions(runtime=runtime, batch_sizes=batches, prompt_lengths=prompts, tokens=tokens)  # type: ignore[arg-type]
    for row in api.bench(run.root, options=options).rows:
        if precision in row.variant:
            part.row("answers", engine=name, **row.model_dump(exclude_none=True))


class OnProvider(OnnxRuntimeSession):
    """The graph on one of ONNX Runtime's providers, and no other."""

    def __init__(self, path: Path, provider: str):
        self.provider = provider
        super().__init__(path)

    def _load(self, path: Path, threads: int) -> Any:
        options = self._runtime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.disable_quant_qdq", "1")  # as in `serve.loop.sessions`
        session = self._runtime.InferenceSession(str(path), options, providers=[self.provider])
        if session.get_providers()[0] != self.provider:
            raise RuntimeError(f"it fell back to {session.get_providers()}")
        return session


def onnxruntime(run: Run, setting: Setting, part: Part) -> None:
    """Whether ONNX Runtime's provider for this device runs the graphs, and their perplexity."""
    import onnxruntime as ort

    provider = "CPUExecutionProvider" if setting.dry else "CUDAExecutionProvider"
    if provider not in ort.get_available_providers():
        part.skipped["onnxruntime-gpu"] = f"ONNX Runtime {ort.__version__} here has no {provider}"
        return
    for name in setting.pick(("model.onnx", "model.fp32.onnx"), ("model.fp32.onnx",)):
        found = part.tried(f"{name} on {provider}", partial(by_onnxruntime, run, name, provider, setting))
        part.row("perplexity", runtime=f"{name} on {provider}", perplexity=found)


def by_onnxruntime(run: Run, name: str, provider: str, setting: Setting) -> float:
    """Perplexity of a graph by ONNX Runtime, each window a prompt of its own; raises what it raises."""
    session = OnProvider(run.model / name, provider)
    windows, context = setting.pick((WINDOWS, CONTEXT), (1, 32))
    ids = load_tokens(run, run.evaluation)[: windows * context].reshape(windows, context)
    losses = []
    for window in ids:
        given = window[None], np.ones((1, context), np.int64), np.arange(context)[None]
        logits = torch.from_numpy(session.forward(*given)[0])[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.from_numpy(window[1:])))
    return float(torch.stack(losses).mean().exp())


def perplexity(run: Run, runtime: str) -> float:
    """Perplexity of the demo's held-out text through an engine, as `fp8q validate` has it."""
    options = api.ValidateOptions(runtimes=("bf16", runtime), context=CONTEXT)
    return api.validate(run.root, options=options).runtimes[runtime].perplexity
