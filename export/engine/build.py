"""Build engines from `model.onnx` and check which GEMMs run on FP8.

One path serves TensorRT and TensorRT-RTX: parse, optimization profiles, build, strongly typed, so that all types are
the graph's. TensorRT-RTX gets a target and needs no GPU; TensorRT builds for the GPU of this machine. The engine is
then read back (`plan`, `inspector`), and every GEMM that `scales.json` expects on FP8 must take FP8 on both sides in
every profile. TensorRT's own path, its inspector included, follows its documentation and public dumps, and has not run
yet. The inspector's JSON is written next to the plan, so that it can be read without a GPU and sent with a report.

A graph has two forms (`graph.weight_scale_form`), which TensorRT-RTX compiles to the same kernels. TensorRT's dense
GEMMs are said to run on FP8 only where both sides have one scale each; its inspector says on the GPU which form does.
So the run's own form is built first, the other one where expected GEMMs came out without FP8, and the engine with fewer
of them is kept.

TensorRT makes one fused kernel of an Attention node or fails. A graph that fails so, or for a reason that is not known,
is built again with plain GEMMs and a softmax (`graph.plain_attention`).
"""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...core.errors import BackendError, InputError
from ...core.files import PARTIAL, replacing, write_document
from ...core.findings import places
from ...core.reporter import Reporter
from ...core.run import Run
from ...core.run_files import graph_names
from ...options import BF16, DEFAULT_SEQ_LEN, EngineOptions, Form
from ...quantize.reading.run_checkpoint import checkpoint_of
from ..graph.plain_attention import write_plain_attention
from ..graph.weight_scale_form import link_data, other, recorded_form, write_form
from ..lint.check import expected_attention, lint_graph, sound_graph
from ..lint.rules import Expectation
from ..onnx_file import names
from ..onnx_file.indexed import has_body
from ..onnx_file.loading import load_graph
from . import targets
from .info import LAYERS, LISTED, EngineInfo, engines_of
from .inspector import read_inspector
from .plan import Evidence, Plan, doubt, evidence, modules_by_types, read_plan
from .profiles import Profile, profiles
from .runtime import (
    MaybeAttentionError,
    collecting_logger,
    explain,
    import_runtime,
    inspect_plan,
    may_be_attention,
    start,
)
from .script import write_script
from .targets import Runtime

#: The endings of an engine's files; ONNX if it was built of another form of the graph.
WRITTEN = (".plan", ".json", LAYERS, ".sh", ".onnx")
Built = tuple[EngineInfo, Evidence]
#: A function that builds a graph into the file of an engine and reads the engine back.
Build = Callable[[Path, Path], Built]


def resolve(options: EngineOptions) -> EngineOptions:
    """Replace `auto` and default targets in the options by their meaning on this machine.

    Raises InputError for a target that cannot do FP8 or that the runtime does not know, BackendError when the runtime
    is missing.
    """
    for target in options.targets:
        targets.check_capability(target)
    gpu = targets.gpu_target()
    runtime = targets.choose_runtime(options.runtime, options.targets, targets.available_runtimes(), gpu)
    known = known_targets(runtime, gpu)
    chosen = tuple(dict.fromkeys(options.targets or targets.default_targets(runtime, gpu, known)))
    for target in chosen:
        targets.check_target(target, runtime, known)
    return replace(options, runtime=runtime, targets=chosen)


def known_targets(runtime: Runtime, gpu: str | None) -> tuple[str, ...]:
    """The targets that a runtime can build for, FP8 or not: for TensorRT the GPU of this machine, for TensorRT-RTX the
    builder's list.
    """
    if runtime == "tensorrt":
        return (gpu,) if gpu else ()
    members = import_runtime(runtime).ComputeCapability.__members__
    return tuple(name.lower() for name in members if targets.capability(name.lower()))


def build_engines(run: Run, forms: Mapping[str, Form], options: EngineOptions, report: Reporter) -> list[Path]:
    """Build `engines/<target>.plan` for every target of the resolved `options`, and return all written files.

    Each plan comes with its proof, a trtexec script, the JSON of TensorRT's inspector, and its graph if its other form
    or plain attention was built (`in_buildable_form`). `forms`: modules whose weight is FP8 -> the form of their input;
    the GEMMs of all but those in BF16 must run on FP8, and where there are none, the types are recorded instead.
    `check_share` judges the share of FP8; an engine that falls short stays with its JSON, so that it can be examined.
    Nothing is replaced before all engines are built; engines of other targets, built from an earlier graph, are removed
    then. Raises InputError when the graph breaks a rule of `lint_file`, BackendError when the builder fails.
    """
    assert options.runtime != "auto", "the options are resolved"
    fp8_modules = [module for module, form in forms.items() if form != BF16]
    graph = checkpoint_of(run, options.precision) / graph_names(options.adapter)[0]
    directory = engines_of(run, options.precision, options.adapter)
    if options.precision == "fp8":
        expected = Expectation(dict.fromkeys(fp8_modules), attention=expected_attention(run), forms=forms)
        check_buildable(graph, expected)
    else:
        sound_graph(graph)
    wanted = profiles(
        options.max_batch,
        options.max_seq_len or DEFAULT_SEQ_LEN,
        options.max_prompt,
        options.opt_batch,
        options.opt_seq_len,
    )
    with together(directory) as fresh:
        for target in options.targets:
            job = Job(options.runtime, target, wanted, options.workspace, directory / f"{target}.timings")
            build_one = partial(build_engine, job=job, fp8_modules=fp8_modules, report=report)
            (info, gemm_types), built = in_buildable_form(graph, fresh / f"{target}.plan", build_one, report)
            write_document(fresh / f"{target}.json", info)
            write_script(fresh / f"{target}.sh", built, info, options.workspace)
            for line in remarks(info, gemm_types) if options.precision == "fp8" else []:
                report.note(line)
        placed = {file.name for file in fresh.iterdir()}
    for stale in [path for path in directory.iterdir() if path.suffix in WRITTEN or path.is_symlink()]:
        if stale.name not in placed:
            stale.unlink()
    wanted_names = [f"{target}{kind}" for target in options.targets for kind in WRITTEN]
    return [directory / name for name in wanted_names if name in placed]


@contextmanager
def together(directory: Path) -> Iterator[Path]:
    """Give a folder whose files move into `directory` when the block ends; none move when it fails or is interrupted.

    Raises FileExistsError, before the block, where `directory` is a file.
    """
    if (directory.exists() or directory.is_symlink()) and not directory.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(directory))
    fresh = directory.with_name(f".{directory.name}{PARTIAL}")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        yield fresh
        directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(fresh.iterdir()):
            file.replace(directory / file.name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def check_buildable(onnx_file: Path, expected: Expectation) -> None:
    """Raise InputError where the graph or its external data cannot be built."""
    if not expected.input_scales and not expected.weights_alone:
        raise InputError(
            onnx_file,
            "scales.json expects no GEMM on FP8, so there is nothing to build",
            "calibrate with fewer --skip",
        )
    errors = [finding for finding in lint_graph(load_graph(onnx_file), expected) if finding.severity == "error"]
    if errors:
        more = f" ({places(errors) - 1} more)" if len(errors) > 1 else ""
        raise InputError(onnx_file, f"{errors[0]}{more}")


@dataclass(frozen=True)
class Job:
    """A build: runtime, target, profiles; `workspace` in MiB, `timings`: the file of TensorRT's timing cache."""

    runtime: Runtime
    target: str
    profiles: tuple[Profile, ...]
    workspace: int | None = None
    timings: Path | None = None


def build_engine(
    onnx_file: Path, path: Path, job: Job, fp8_modules: Sequence[str], report: Reporter
) -> tuple[EngineInfo, Evidence]:
    """Build one engine into the file `path` and read it back."""
    began = time.monotonic()
    plan = build(onnx_file, job, report)
    seconds = round(time.monotonic() - began, 3)
    with replacing(path) as partial_file:
        partial_file.write_bytes(plan)
    read_back = read_built_engine(plan, path, job)
    gemm_types = evidence(read_back, {names.matmul(module): module for module in fp8_modules}, len(job.profiles))
    kind = gemm_types.kind if fp8_modules or read_back is None else read_back.kind
    ran = None if fp8_modules or read_back is None else modules_by_types(read_back)
    info = EngineInfo(
        runtime=job.runtime,
        version=import_runtime(job.runtime).__version__,
        target=job.target,
        bytes=plan.nbytes,
        promised_products=len(fp8_modules),
        fp8_products=len(gemm_types.fp8),
        wide_products=[module for module in fp8_modules if module in gemm_types.not_fp8],
        narrow_products=[module for module in fp8_modules if module in gemm_types.narrow],
        unknown_products=[module for module in fp8_modules if module in gemm_types.unknown],
        evidence=kind,
        profiles=list(job.profiles),
        build_seconds=seconds,
        ran=ran,
        branches=any(has_body(node) for node in load_graph(onnx_file).nodes),
    )
    return info, gemm_types


def read_built_engine(plan: memoryview, path: Path, job: Job) -> Plan | None:
    """Read the GEMMs of the engine at `path`, and write the JSON of TensorRT's inspector next to it; None if they
    cannot be read.
    """
    if job.runtime == "tensorrt":
        information = inspect_plan(plan)
        with replacing(path.with_suffix(LAYERS)) as partial_file:
            partial_file.write_text(information, encoding="utf-8")
        return read_inspector(information)
    read_back = read_plan(plan)
    if read_back is None or doubt(plan, read_back, job.target):
        return None
    return read_back


def remarks(info: EngineInfo, gemm_types: Evidence) -> list[str]:
    """List the expected GEMMs of an engine that do not run on FP8; count those whose types are not known, and those
    whose result is narrower than FP32.
    """
    lines = [
        f"{info.target}: {module} is not FP8 on both sides: {gemm_types.not_fp8[module]}"
        for module in info.wide_products[:LISTED]
    ]
    if gemm_types.unknown:
        example, reason = next(iter(gemm_types.unknown.items()))
        inspector_note = f"; {info.target}{LAYERS} has what its inspector says" if info.runtime == "tensorrt" else ""
        lines.append(
            f"{info.target}: whether {len(gemm_types.unknown)} of {info.promised_products} expected GEMMs are FP8 "
            f"on both sides cannot be told (as {example}: {reason}){inspector_note}"
        )
    if gemm_types.narrow:
        example = min(gemm_types.narrow)
        reason = "their weights' scales are per tensor, or narrower than FP32"
        if gemm_types.kind == "inspector":
            reason = "a kernel that scales by itself rounds its sum once, to the graph's next type"
        lines.append(
            f"{info.target}: {len(gemm_types.narrow)} FP8 GEMMs (as {example}) answer in less than FP32: {reason}"
        )
    return lines


def worth_trying(gemm_types: Evidence) -> bool:
    """Tell whether the other form may do better: TensorRT's inspector shows expected GEMMs that are not FP8."""
    return gemm_types.kind == "inspector" and bool(gemm_types.not_fp8)


def better(first: Evidence, second: Evidence) -> bool:
    """Tell whether the `second` of two engines runs more of the expected GEMMs on FP8 than the `first`."""
    return second.kind != "unknown" and _short(second) < _short(first)


def _short(gemm_types: Evidence) -> tuple[int, int]:
    return len(gemm_types.not_fp8) + len(gemm_types.unknown), len(gemm_types.not_fp8)


def in_buildable_form(graph: Path, path: Path, build: Build, report: Reporter) -> tuple[Built, Path]:
    """Build the engine `path` of a graph, in its better form; with plain attention where its Attention may be why that
    fails.

    Returns the engine and its graph, which is written next to the engine where it is not `graph`. Raises BackendError
    with both reasons where neither can be built.
    """
    try:
        return in_better_form(graph, path, build, report)
    except MaybeAttentionError as error:
        plain = path.with_suffix(".onnx")
        link_data(graph, path.parent)
        if not (nodes := write_plain_attention(graph, plain)):
            raise
        layers = f"{nodes} layer{'s' if nodes > 1 else ''}"
        report.note(f"{error.subject}: {error.fault}; building it with plain attention in {layers}")
        try:
            (info, gemm_types), built = in_better_form(plain, path, build, report)
        except BackendError as again:
            again.subject, again.fault = error.subject, f"{error.fault}; with plain attention: {again.fault}"
            raise again from None
        return (info.model_copy(update={"plain_attention": True}), gemm_types), built


def in_better_form(graph: Path, path: Path, build: Build, report: Reporter) -> tuple[Built, Path]:
    """Build the engine `path` of a graph, and of its other form where that may do better.

    Returns the better engine and its graph; the other form of the graph is written next to the engine if it won.
    """
    built = info, gemm_types = build(graph, path)
    if not worth_trying(gemm_types):
        return built, graph
    form = recorded_form(load_graph(graph))
    other_graph = path.with_suffix(".again.onnx")
    other_plan = path.with_suffix(".again.plan")
    not_fp8 = f"{len(gemm_types.not_fp8)} of {info.promised_products} GEMMs are not FP8 on both sides"
    tried = f"{info.target}: with --apply-scales {form} {not_fp8}"
    links = link_data(graph, path.parent)
    write_form(graph, other_graph, other(form))
    try:
        other_info, other_types = build(other_graph, other_plan)
        other_is_better = better(gemm_types, other_types)
        winner = "second" if other_is_better else "first"
        report.note(f"{tried}, {len(other_types.not_fp8)} with {other(form)}; the {winner} is kept")
    except BackendError as error:
        other_is_better = False
        report.note(f"{tried}; with {other(form)} it cannot be built: {error}")
    inspector_file = other_plan.with_suffix(LAYERS)
    if other_is_better:
        other_plan.replace(path)
        if inspector_file.exists():
            inspector_file.replace(path.with_suffix(LAYERS))
        other_graph.replace(path.with_suffix(".onnx"))
        return (other_info.model_copy(update={"weight_scale": other(form)}), other_types), path.with_suffix(".onnx")
    for file in (other_graph, other_plan, inspector_file, *links):
        file.unlink(missing_ok=True)
    return built, graph


def build(onnx_file: Path, job: Job, report: Reporter) -> memoryview:
    """Build the engine of a graph; returns the serialized plan, in the builder's own memory.

    Ctrl-C stops the builder at its next step. Raises BackendError naming the ONNX node, its module and what to do,
    InputError for a graph whose dynamic dimensions have other names than `profiles` gives ranges to.
    """
    trt = import_runtime(job.runtime)
    logger, errors = collecting_logger(trt)
    failed = f"{targets.TITLES[job.runtime]} {trt.__version__} cannot build {onnx_file} for {job.target}"

    def near(node: str) -> str | None:
        return load_graph(onnx_file).module_near(node)

    builder = start(job.runtime, "Builder", logger)
    flags = trt.NetworkDefinitionCreationFlag.__members__
    network = builder.create_network(1 << int(flags["STRONGLY_TYPED"]) if "STRONGLY_TYPED" in flags else 0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(onnx_file)):
        error = parser.get_error(0)
        kind = MaybeAttentionError if error.node_operator() == "Attention" else BackendError
        raise kind(failed, *explain([error.desc(), *errors], error.node_name(), error.node_operator(), near=near))
    config = configure(trt, builder, job)
    for profile in job.profiles:
        if config.add_optimization_profile(optimization_profile(builder, network, profile)) < 0:
            raise BackendError(failed, *explain(errors))
    with report.track(f"Building the {job.target} engine", BuildProgress.TOTAL, "%") as advance:
        progress = BuildProgress(advance)
        monitor = progress_monitor(trt, progress)
        config.progress_monitor = monitor
        plan = interruptible(lambda: builder.build_serialized_network(network, config), progress)
        progress.reach(1.0)
    if job.runtime == "tensorrt" and job.timings is not None and plan is not None:
        save_timings(config, job.timings)
    if plan is None:
        layers = [network.get_layer(i).name for i in range(network.num_layers)]
        kind = MaybeAttentionError if may_be_attention(errors) else BackendError
        raise kind(failed, *explain(errors, layers=layers, near=near))
    return memoryview(plan).cast("B")


def configure(trt: Any, builder: Any, job: Job) -> Any:
    """The builder's configuration: the target for TensorRT-RTX, and for TensorRT a plan that its inspector can read in
    detail.
    """
    config = builder.create_builder_config()
    if job.runtime == "tensorrt-rtx":
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.__members__[job.target.upper()], 0)
    else:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if job.timings is not None:
            load_timings(config, job.timings)
    if job.workspace is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace << 20)
    return config


def load_timings(config: Any, file: Path) -> None:
    """Load the timing cache of an earlier build, or begin a new one where the file is of another version or GPU;
    TensorRT-RTX has none.
    """
    known = file.read_bytes() if file.is_file() else b""
    if not (
        known
        and (cache := config.create_timing_cache(known)) is not None
        and config.set_timing_cache(cache, ignore_mismatch=False)
    ):
        config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)


def save_timings(config: Any, file: Path) -> None:
    """Save the timing cache for the next build."""
    with replacing(file) as partial_file:
        partial_file.write_bytes(bytes(config.get_timing_cache().serialize()))


def optimization_profile(builder: Any, network: Any, profile: Profile) -> Any:
    """Set `profile` for every input of `network`, from the names of its dimensions."""
    profile_shapes = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        dimensions = [
            size if size >= 0 else tensor.get_dimension_name(axis) or "" for axis, size in enumerate(tensor.shape)
        ]
        profile_shapes.set_shape(tensor.name, *profile.shapes(tensor.name, dimensions))
    return profile_shapes


class BuildProgress:
    """The finished share of a build. Each phase is one step of its parent phase and has steps of its own.

    The builder calls from its own threads. `cancel` makes it stop at the next step.
    """

    TOTAL = 100

    def __init__(self, advance: Callable[[int], None]):
        """Call `advance` for every finished hundredth."""
        self._advance = advance
        self._reported = 0
        self._phases: dict[
            str, tuple[float, float, int]
        ] = {}  # where it begins, how wide one of its steps is, how many are done
        self._lock = threading.Lock()
        self._cancelled = threading.Event()

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Begin a phase of `steps` steps within `parent`."""
        begin, width, done = self._phases.get(parent or "", (0.0, 1.0, 0))
        self._phases[phase] = (begin + done * width, width / max(1, steps), 0)

    def step(self, phase: str, index: int) -> bool:
        """Finish step `index` of a phase; return whether to go on."""
        if phase in self._phases:
            begin, width, _ = self._phases[phase]
            self._phases[phase] = (begin, width, index + 1)
            self.reach(begin + (index + 1) * width)
        return not self._cancelled.is_set()

    def finish(self, phase: str) -> None:
        """End a phase."""
        self._phases.pop(phase, None)

    def reach(self, share: float) -> None:
        """Report the finished share of the whole; a smaller share than before is ignored."""
        with self._lock:
            if (percent := min(self.TOTAL, int(share * self.TOTAL + 1e-9))) > self._reported:
                self._advance(percent - self._reported)
                self._reported = percent

    def cancel(self) -> None:
        """Make the builder stop."""
        self._cancelled.set()


def progress_monitor(trt: Any, progress: BuildProgress) -> Any:
    """Adapt `progress` to the interface that the builder calls."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            return progress.step(phase_name, step)

        def phase_finish(self, phase_name: str) -> None:
            progress.finish(phase_name)

    return Monitor()


def interruptible(work: Callable[[], Any], progress: BuildProgress) -> Any:
    """Do `work` in a thread, so that Ctrl-C reaches the builder, which then stops at its next step.

    An exception raised in a callback of the builder would have to cross its C++ frames; in a thread of its own it does
    not.
    """
    with ThreadPoolExecutor(1, "builder") as pool:
        future = pool.submit(work)
        try:
            return future.result()
        except BaseException:
            progress.cancel()
            raise
