"""The stage `bench`: the time of answers on a runtime, for every precision in a run and for other runs of its model.

It measures anew at every call, since the load of a machine changes.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import numpy as np

from ..core.errors import BackendError, InputError
from ..core.files import replacing, write_document
from ..core.record import library_versions
from ..core.run import Run
from ..options import Baseline, BenchOptions, Precision
from ..quantize.scales.serving_cost import largest_batch
from ..serve.bench.meter import MemoryTaken, Meter, open_meter
from ..serve.bench.timing import Answers, Contender, million_tokens_cost, time_contenders, timing
from ..serve.loop.cuda import CudaDevice, CudaError
from ..serve.loop.sessions import SessionError, import_onnxruntime
from ..validate.bench.document import Bench, BenchProtocol, BenchRow, Footprint, capacities, footprint, with_both
from ..validate.report.plots import bench_plot
from .generate import TORCH_RUNTIMES, runtime_here, session_of
from .other_text import positions
from .pipeline.stage import CALIBRATE_MODULES, NO_FACTS, Key, Notes, device, needs
from .pipeline.stages import BENCH
from .shared.adapters import note_base_alone
from .shared.model_files import files_of
from .shared.opening import open_run

#: A measured model: its name in the tables, its run and precision.
Named = tuple[str, Run, Precision]
#: The default sizes.
BATCH_SIZES = (1, 8)
PROMPT_LENGTHS = (32, 256)
#: The runtimes that multiply FP8 codes by FP8 codes.
FP8_RUNTIMES = ("tensorrt", "tensorrt-rtx")
#: A model of nothing.
EMPTY = '<ir_version: 10, opset_import: ["" : 21]> empty (float[1] x) => (float[1] y) { y = Identity (x) }'
#: The unit of --memory.
GB = 1e9
METHOD = (
    "Each round times one answer of each model, in turns, another one first each time; before them each gives one that "
    "is not timed. Prompts are random tokens, the same for all; every answer has the same number of tokens, the best "
    "one each step. The runtime's own step is driven directly, without tokenizer, server or other requests, and an "
    "answer begins with an empty cache. Medians over rounds; quantiles over all steps of all rounds."
)


def bench(run: Run, notes: Notes, against: Sequence[Path], options: BenchOptions, plot: Path | None) -> Bench:
    """Measure, write `bench.json`, and draw a plot at `plot`.

    Raises InputError for runs or models that cannot be compared, BackendError for a missing runtime.
    """
    check_plot(plot)
    note_base_alone(run, "answers are of", notes)
    runtime = runtime_here(options.runtime)
    named = named_models(run, against, runtime)
    inputs = _inputs(run, named)
    with notes.held():
        _load_library(runtime)
        meter = open_meter(on_gpu(runtime))
        contenders = [_opened(contender, runtime, meter) for contender in named]
        measured_sizes = sizes(run, contenders, options, notes)
        protocol = _protocol(runtime, meter, options, measured_sizes[1][-1])
        taken = [
            (contender.name, _footprint(its, contender, runtime))
            for its, contender in zip(named, contenders, strict=True)
        ]
        check_fits(measured_sizes[0][-1], protocol.positions, taken, meter)
        if protocol.emulated:
            notes.note(
                f"{runtime}: FP8 is emulated here, its codes multiplied as wider numbers; so these times say nothing "
                "of FP8's speed on a GPU, and no improvement is told"
            )
        shown = with_both(taken, run, contenders[0].session.vocabulary)
    with BENCH.writing(run, Key(inputs, options, NO_FACTS), notes) as log:
        measurements = Bench(
            protocol=protocol,
            rows=list(_rows(contenders, measured_sizes, protocol.emulated, options, notes)),
            capacity=capacities(shown, protocol.positions, protocol.memory_bytes),
        )
        write_document(run.bench, measurements)
        log.outputs.append(run.bench)
    if len(named) == 1 and not protocol.emulated:
        notes.note(
            f"{named[0][0]}: was measured alone, so no improvement is told; `fp8q export {run.root} --precision bf16` "
            f"and `fp8q build-engine {run.root} --precision bf16 --runtime {runtime}` put BF16 beside it"
        )
    if plot is not None:
        _draw(measurements, plot)
    return measurements


def _draw(measurements: Bench, plot: Path) -> None:
    with replacing(plot) as partial:
        partial.write_text(bench_plot(measurements).wide, encoding="utf-8")


def check_plot(plot: Path | None) -> None:
    """Raise InputError for a name that is no SVG file, BackendError where the plotting library is missing."""
    if plot is None:
        return
    if plot.suffix != ".svg" or plot.is_dir():
        raise InputError(f"--plot {plot}", "is no name of an SVG file", "give one that ends in .svg")
    needs("report", ("matplotlib",))


def on_gpu(runtime: str) -> bool:
    """Tell whether `runtime` runs the model on a GPU of this machine; raises BackendError for a missing library."""
    if runtime not in TORCH_RUNTIMES:
        return runtime in FP8_RUNTIMES
    needs("calibrate", CALIBRATE_MODULES)
    return device() != "cpu"


def named_models(run: Run, against: Sequence[Path], runtime: str) -> list[Named]:
    """List the models to measure on `runtime`: all precisions of `run`, and FP8 of the other runs.

    Raises InputError for a run of another model, and for a run that is named twice.
    """
    if runtime == "bf16":
        if against:
            raise InputError(
                f"--against {against[0]}",
                "--runtime bf16 runs the source model, which is the same in both",
                "leave one of them out",
            )
        return [("bf16", run, "bf16")]
    stages = run.record().stages
    others = [open_run(path) for path in against]
    check_same_model(run, others)
    baselines = [
        baseline for baseline in get_args(Baseline) if f"export-{baseline}" in stages and runtime != "reference"
    ]
    return [
        *((precision, run, precision) for precision in baselines),
        ("fp8", run, "fp8"),
        *((f"fp8 {other.root}", other, "fp8") for other in others),
    ]


def check_same_model(run: Run, others: Sequence[Run]) -> None:
    """Raise InputError, naming them, for `others` of another model than `run`, and for runs that are named twice."""
    seen = {run.root.resolve()}
    mine = run.record().model
    for other in others:
        if other.root.resolve() in seen:
            raise InputError(f"--against {other.root}", "is measured already", "name each run once")
        seen.add(other.root.resolve())
    models = [(other.root, other.record().model) for other in others]
    if differ := [
        f"{root} ({model['name']}, fingerprint {model['fingerprint'][:12]})"
        for root, model in models
        if model["fingerprint"] != mine["fingerprint"]
    ]:
        raise InputError(
            f"--against {', '.join(differ)}",
            f"of another model than {run.root} ({mine['name']}, fingerprint {mine['fingerprint'][:12]})",
            "compare runs of one model",
        )


def _inputs(run: Run, named: Sequence[Named]) -> dict[str, str]:
    """The hashes of the measured files, after the check that their stages wrote them."""
    inputs: dict[str, str] = {}
    for number, (_, its, precision) in enumerate(named):
        files = files_of(its, precision)
        inputs |= files if its is run else {f"against {number} {name.replace('.', '-')}": files[name] for name in files}
    return inputs


def _load_library(runtime: str) -> None:
    """Load the runtime's library and run something, so that its own memory counts for no model. Errors are left to the
    session.
    """
    with suppress(ImportError, SessionError, CudaError):
        if runtime in FP8_RUNTIMES:
            CudaDevice()
        elif runtime in TORCH_RUNTIMES:
            import transformers  # noqa: F401
        elif runtime == "onnxruntime":
            from onnx import parser

            import_onnxruntime().InferenceSession(
                parser.parse_model(EMPTY).SerializeToString(), providers=["CPUExecutionProvider"]
            ).run(None, {"x": np.zeros(1, np.float32)})


def _opened(named: Named, runtime: str, meter: Meter) -> Contender:
    name, run, precision = named
    held = MemoryTaken(meter)
    with held.counting():
        session = session_of(run, runtime, precision)
    return Contender(name, session, held)


def sizes(
    run: Run, contenders: Sequence[Contender], options: BenchOptions, notes: Notes
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The batch sizes and prompt lengths to measure; defaults are lowered to the limits of the models.

    Raises InputError for options beyond these limits.
    """
    sessions = [contender.session for contender in contenders]
    rows = min((contender.most_rows for contender in sessions if contender.most_rows), default=None)
    bounds = [positions(run), *(contender.most_positions for contender in sessions)]
    most = min((bound for bound in bounds if bound), default=None)
    batches = options.batch_sizes
    prompts = options.prompt_lengths
    if rows is not None and batches and batches[-1] > rows:
        raise InputError(
            f"--batch-sizes {batches[-1]:,}", f"is more than {rows:,}, the most that the runtime takes at once"
        )
    if most is not None and options.tokens >= most:
        raise InputError(
            f"--tokens {options.tokens:,}",
            f"leaves no room for a prompt in {most:,}, the model's positions",
            "ask for less",
        )
    if most is not None and prompts and prompts[-1] + options.tokens > most:
        raise InputError(
            f"--prompt-lengths {prompts[-1]:,}",
            f"is, with --tokens {options.tokens:,}, more than {most:,}, the model's positions",
            "ask for less of either",
        )
    return (
        batches or lowered("--batch-sizes", BATCH_SIZES, rows, notes),
        prompts or lowered("--prompt-lengths", PROMPT_LENGTHS, most and most - options.tokens, notes),
    )


def lowered(option: str, wanted: tuple[int, ...], most: int | None, notes: Notes) -> tuple[int, ...]:
    """Lower default sizes above `most` to it, with a note."""
    sizes_within = tuple(sorted({size if most is None else min(size, most) for size in wanted}))
    if sizes_within != wanted:
        notes.note(f"{option}: lowered from {','.join(map(str, wanted))} to {','.join(map(str, sizes_within))}")
    return sizes_within


def _footprint(named: Named, contender: Contender, runtime: str) -> Footprint:
    _, run, precision = named
    weights: tuple[Path, ...] = ()
    if runtime == "bf16":
        from .shared.sources import source_of

        weights = source_of(run).weight_files
    return footprint(run, precision, contender.session.vocabulary, weights)


def check_fits(rows: int, length: int, taken: Sequence[tuple[str, Footprint]], meter: Meter) -> None:
    """Raise InputError for more sequences than fit in the memory here."""
    for name, its in taken:
        most = largest_batch(meter.total_bytes, its.weight_bytes, length * its.cost.cache_bytes)
        if rows > most:
            raise InputError(
                f"--batch-sizes {rows:,}",
                f"is more than the {most:,} sequences of {length:,} positions that the memory here holds beside the "
                f"weights of {name}",
                "ask for fewer",
            )


def _protocol(runtime: str, meter: Meter, options: BenchOptions, longest: int) -> BenchProtocol:
    return BenchProtocol(
        runtime=runtime,
        version=library_versions().get("torch" if runtime in TORCH_RUNTIMES else runtime, "unknown"),
        device=meter.device,
        emulated=runtime not in FP8_RUNTIMES,
        tokens=options.tokens,
        rounds=options.rounds,
        positions=longest + options.tokens,
        memory_bytes=int(options.memory * GB) if options.memory else meter.total_bytes,
        method=METHOD,
    )


def _rows(
    contenders: Sequence[Contender],
    batch_and_prompt_sizes: tuple[Sequence[int], Sequence[int]],
    emulated: bool,
    options: BenchOptions,
    notes: Notes,
) -> Iterator[BenchRow]:
    """Measure each batch size with each prompt length."""
    batches, prompts = batch_and_prompt_sizes
    total = len(batches) * len(prompts) * len(contenders) * (options.rounds + 1)
    with notes.track("Measuring", total, "answers") as advance:
        for rows in batches:
            for length in prompts:
                size = rows, length, options.tokens
                try:
                    answers = time_contenders(contenders, size, options.rounds, advance)
                except SessionError as error:
                    raise BackendError("", str(error)) from error
                names = [contender.name for contender in contenders]
                yield from rows_of_size(names, answers, size, options.gpu_hour_price, emulated)


def rows_of_size(
    names: Sequence[str], answers: Sequence[Answers], size: tuple[int, int, int], price: float | None, emulated: bool
) -> list[BenchRow]:
    """Make the rows of one `size`: batch size, tokens of each prompt, tokens of each answer."""
    rows, length, tokens = size
    timings = [timing(answer.timings, rows) for answer in answers]
    return [
        BenchRow(
            variant=name,
            batch=rows,
            prompt=length,
            **asdict(its),
            memory_bytes=answer.memory_bytes,
            improvement=None if emulated or len(names) == 1 else timings[0].latency_ms / its.latency_ms,
            joules_per_token=None if answer.joules is None else answer.joules / (len(answer.timings) * rows * tokens),
            cost_per_million_tokens=price and million_tokens_cost(price, its.tokens_per_second),
        )
        for name, answer, its in zip(names, answers, timings, strict=True)
    ]
