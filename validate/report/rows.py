"""The results of a run as rows: the only source of the numbers in the report, `fp8q inspect` and the closing table.

Pure functions of the run's files, read without torch. A stage that has not run gives no rows; a file that its stage did
not write is refused. A quantity that does not apply is None, never zero.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ...calibrate.measure.statistics import Statistics, TensorStatistics, load_record, load_statistics
from ...core.columns import size
from ...core.commands import engine_stage
from ...core.headers import read_header
from ...core.record import FP8_STAGES
from ...core.run import Run
from ...export.engine.info import load_engines
from ...options import BF16, BLOCK, Precision
from ...quantize.codes.formats import CODE_DTYPE, CodeGrid
from ...quantize.scales.activation_scales import group_of
from ...quantize.scales.decisions import (
    GRIDS,
    INHERITED,
    Scales,
    TensorScale,
    WeightScales,
    form_flags,
    load_scales,
)
from ..advice.findings import converged_after, outlier_channels

#: The description of the cache, by the parts of it that are codes.
CACHES = {
    "": "not quantized",
    "v": "values in E4M3, a scale per {per}; keys not quantized",
    "kv": "E4M3, K and V a scale each per {per}",
}
#: The fields of a row that a static scale has, and a dynamic one has not.
OF_A_STATIC_SCALE: dict[str, Any] = dict.fromkeys(
    ("clip", "scale", "saturation", "underflow", "sqnr_db", "sqnr_best_db")
)
#: The names of precisions; FP8 needs none.
PRECISIONS = {"fp8": "", "bf16": "BF16", "int8": "INT8"}


def layer_of(module: str) -> int | None:
    """Index of the decoder layer that a module is in: the first number in its name."""
    return next((int(part) for part in module.split(".") if part.isdigit()), None)


@dataclass(frozen=True)
class ModuleRow:
    """One GEMM or one tensor of the FP8 cache.

    Shares are fractions. `over_nearest`: the error of an expert's compensated weight over that of its nearest codes, on
    `held_out_tokens`. A module in BF16 has a `reason` and no scale. One with its weight alone in FP8 has no scale and 0
    `terms`; a `dynamic` one has none that is stored, but one for each token at run time. With a scale, decibels are
    None where nothing is lost.
    """

    module: str
    kind: Literal["product", "cache"]
    tensor: str | None = None
    amax: float | None = None
    clip: float | None = None
    scale: float | None = None
    terms: int | None = None
    tail: int | None = None
    dynamic: bool | None = None
    block: bool | None = None
    saturation: float | None = None
    underflow: float | None = None
    sqnr_db: float | None = None
    sqnr_best_db: float | None = None
    outlier_channels: int | None = None
    largest_channel: float | None = None
    converged_after: float | None = None
    weight_sqnr_db: float | None = None
    weight_scale_min: float | None = None
    weight_scale_max: float | None = None
    weight_rounding: str | None = None
    over_nearest: float | None = None
    held_out_tokens: int | None = None
    reason: str | None = None
    value: float | None = None
    samples: int | None = None

    @property
    def grid(self) -> CodeGrid:
        """The grid of the values under a scale of 1."""
        return GRIDS[self.terms or 1]

    @property
    def layer(self) -> int | None:
        """The decoder layer's index."""
        return layer_of(self.module)

    @property
    def kind_of_module(self) -> str:
        """The last part of the name, which every layer repeats: `q_proj`, `k cache`."""
        return self.module.rpartition(".")[2] + (" cache" if self.kind == "cache" else "")


@dataclass(frozen=True)
class EngineRow:
    """One engine: expected and FP8 GEMMs are numbers of modules, `wide` names the GEMMs that do not run in FP8; `ran`:
    the types of the GEMMs in an engine of another precision.

    `evidence` is `outdated`, and other fields are empty, for an engine that was built from other files than the run has
    now.
    """

    runtime: str
    version: str
    target: str
    bytes: int
    promised_products: int | None
    fp8_products: int | None
    wide: tuple[str, ...]
    evidence: str
    build_seconds: float
    precision: Precision = "fp8"
    ran: str | None = None
    adapter: str | None = None

    @property
    def file(self) -> str:
        """The engine's file, in the run."""
        if self.adapter:
            return f"engines/adapters/{self.adapter}/{self.target}.plan"
        return f"engines/{'' if self.precision == 'fp8' else f'{self.precision}/'}{self.target}.plan"


@dataclass(frozen=True)
class StageRow:
    """The time and memory of one stage, and its notes."""

    stage: str
    seconds: float
    peak_memory_bytes: int
    version: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class FactRow:
    """One line of where the numbers come from."""

    what: str
    value: str


def wrote(run: Run, path: Path, stage: str) -> bool:
    """Tell whether `stage` has finished on the files that are in the run now, and `path` is still there."""
    return stage in run.record().stages and path.is_file() and not run.is_stale(stage)


def module_rows(run: Run) -> list[ModuleRow]:
    """Return every GEMM, FP8 first, then those that stay in BF16, then the tensors of an FP8 cache.

    Raises InputError where `scales.json` or the statistics are missing or not what `fp8q calibrate` wrote.
    """
    scales = load_scales(run)
    statistics = load_statistics(run)
    first = group_of(statistics.record.groups)
    tensor_of = {module: f"{first.get(module, module)}.input" for module in scales.fp8_gemms}
    rows = [
        _fp8(module, "product", name, scales.activations[module], statistics.tensors.get(name), scales.weights[module])
        for module, name in tensor_of.items()
    ]
    rows += [_weight_alone(module, scales.weights[module]) for module in scales.in_form(BF16)]
    rows += [
        ModuleRow(module, "product", reason=skipped.reason, value=skipped.value, samples=skipped.samples)
        for module, skipped in scales.skipped.items()
    ]
    rows += [_fp8(name, "cache", name, scale, statistics.tensors.get(name)) for name, scale in scales.kv_cache.items()]
    return rows


def bf16_cache_rows(statistics: Statistics, prospective: Mapping[str, TensorScale]) -> list[ModuleRow]:
    """The tensors of the cache that stay in BF16, at the `prospective` scales that they would have."""
    return [_fp8(name, "cache", name, scale, statistics.tensors[name]) for name, scale in prospective.items()]


def _fp8(
    module: str,
    kind: Literal["product", "cache"],
    tensor: str,
    scale: TensorScale,
    measured: TensorStatistics | None,
    weight: WeightScales | None = None,
) -> ModuleRow:
    outliers, largest = outlier_channels(measured.amax_channels) if measured else (None, None)
    row = ModuleRow(
        module,
        kind,
        tensor,
        amax=scale.amax,
        clip=scale.clip,
        scale=scale.scale,
        saturation=scale.saturation,
        underflow=scale.underflow,
        sqnr_db=scale.sqnr_db,
        sqnr_best_db=scale.sqnr_best_db,
        outlier_channels=outliers,
        largest_channel=largest,
        converged_after=converged_after(measured.amax_batches) if measured else None,
        samples=measured.histogram.samples if measured else None,
        **form_flags(scale.form),
        **_of_weight(weight),
    )
    if scale.form.static:
        return row
    return replace(row, **OF_A_STATIC_SCALE)


def _weight_alone(module: str, weight: WeightScales) -> ModuleRow:
    """Return the row of a GEMM whose input stays in BF16."""
    return ModuleRow(module, "product", **form_flags(BF16), **_of_weight(weight))


def _of_weight(weight: WeightScales | None) -> dict[str, Any]:
    """The fields of a row that describe its weight; none for a tensor of the cache."""
    if weight is None:
        return {}
    held_out = weight.held_out
    return {
        "weight_sqnr_db": weight.sqnr_db,
        "weight_scale_min": weight.scale_min,
        "weight_scale_max": weight.scale_max,
        "weight_rounding": weight.rounding,
        "over_nearest": held_out.over_nearest if held_out else None,
        "held_out_tokens": held_out.tokens if held_out else None,
    }


def engine_rows(run: Run) -> list[EngineRow]:
    """Every engine that was built, FP8 first, by target; a value that could not be read from it is None."""
    kinds: list[tuple[Precision, str | None]] = [(precision, None) for precision in get_args(Precision)]
    with_adapter = engine_stage("fp8", "{}").partition("{}")[0]
    kinds += [("fp8", name.removeprefix(with_adapter)) for name in run.record().stages if name.startswith(with_adapter)]
    return [row for precision, adapter in kinds for row in _engine_rows(run, precision, adapter)]


def _engine_rows(run: Run, precision: Precision, adapter: str | None) -> list[EngineRow]:
    built = engine_stage(precision, adapter) in run.record().stages
    engines = load_engines(run, precision, adapter) if built else []
    if engines and outdated(run, precision, adapter):
        return [
            EngineRow(
                info.runtime,
                info.version,
                info.target,
                info.bytes,
                None,
                None,
                (),
                "outdated",
                info.build_seconds,
                precision,
                adapter=adapter,
            )
            for info in engines
        ]
    return [
        EngineRow(
            runtime=info.runtime,
            version=info.version,
            target=info.target,
            bytes=info.bytes,
            promised_products=info.promised_products or None,
            fp8_products=None if info.evidence == "unknown" or not info.promised_products else info.fp8_products,
            wide=() if info.evidence == "unknown" else tuple(info.wide_products),
            evidence=info.evidence,
            build_seconds=info.build_seconds,
            precision=precision,
            adapter=adapter,
            ran=None if info.ran is None else ", ".join(f"{number} {types}" for types, number in info.ran.items()),
        )
        for info in engines
    ]


def outdated(run: Run, precision: Precision, adapter: str | None = None) -> bool:
    """Tell whether the engines of a precision, or with an adapter, were built from other files than the run has now, or
    from files that are outdated themselves.
    """
    stages = [*(FP8_STAGES if precision == "fp8" else [f"export-{precision}"])]
    stages.append(engine_stage(precision, adapter))
    return any(run.is_stale(stage) for stage in stages if stage in run.record().stages)


def stage_rows(run: Run) -> list[StageRow]:
    """Every finished stage but the report itself, in the order of work."""
    return [
        StageRow(name, record.seconds, record.peak_memory_bytes, record.version, tuple(record.notes))
        for name, record in run.record().stages.items()
        if name != "report"
    ]


def fact_rows(run: Run) -> list[FactRow]:
    """Return the origin of the numbers: model, data, choices, versions."""
    measured = load_record(run)
    model = measured.model
    corpus = measured.corpus
    scales = load_scales(run)
    stages = run.record().stages
    weights = {weight.method for weight in scales.weights.values()}
    clips = {scale.method for scale in scales.activations.values()}
    texts = corpus.sources or []
    facts = {
        "model": f"{model.name}{f', revision {model.revision}' if model.revision else ''} ({model.architecture})",
        "model's SHA-256": model.fingerprint,
        **_adapters(run.record().model.get("adapter"), model.adapters),
        "calibration text": corpus.name
        if len(texts) < 2
        else ", ".join(f"{text.name} ({text.windows:,} of {corpus.windows:,} windows)" for text in texts),
        "its tokens": f"{measured.tokens:,} in windows of {corpus.seq_len:,}, batches of {corpus.batch_size}"
        + (f", and {corpus.images:,} rows with images" if corpus.images else ""),
        "its SHA-256": corpus.fingerprint,
        "weights": f"{scales.format.upper()}, {weight_unit(scales)}, {_chosen(weights)}",
        "activations": f"{scales.format.upper()}, a static scale per tensor, {_chosen(clips)}" if clips else "BF16",
        "KV cache": CACHES[scales.cache_parts].format(per=scales.cache_unit) + scales.cache_left,
        "libraries": ", ".join(
            f"{name} {version}"
            for name, version in {"fp8q": stages["quantize"].version, **stages["measure"].libraries}.items()
        ),
    }
    return [FactRow(what, value) for what, value in facts.items()]


def weight_unit(scales: Scales) -> str:
    """Name the parts of weights that have a scale each."""
    in_one = len(scales.tensor_weights)
    in_blocks = len(scales.in_form(BLOCK))
    if in_blocks:
        return "a scale per block of 128 x 128" + (", or per output channel" if in_blocks < len(scales.weights) else "")
    if not in_one:
        return "a scale per output channel"
    return "a scale per tensor" + (", or per output channel of experts" if in_one < len(scales.weights) else "")


def _adapters(merged: str | None, unmerged: Mapping[str, str] | None) -> dict[str, str]:
    """Name the adapters, merged into the weights or unmerged; empty without adapters."""
    if merged is not None:
        return {"adapter": f"{Path(merged).name}, merged into the weights"}
    if unmerged:
        return {"adapters": f"{', '.join(unmerged)}, beside the model"}
    return {}


def _chosen(methods: Collection[str]) -> str:
    """Name the method that chose scales: `by amax`, `inherited` from an FP8 checkpoint, or both."""
    chosen = " and ".join(sorted(set(methods) - {INHERITED}))
    if INHERITED not in methods:
        return f"by {chosen}"
    if chosen:
        return f"{INHERITED} or by {chosen}"
    return INHERITED


@dataclass(frozen=True)
class SizeRow:
    """A file, or files, of the run and their bytes, as a share of the BF16 weights where they hold little else;
    `contents`: the parts of an engine.
    """

    what: str
    path: str | None
    bytes: int
    share_of_bf16: float | None = None
    contents: str | None = None


def size_rows(run: Run) -> list[SizeRow]:
    """Return the sizes of the weights: in BF16, in the FP8 checkpoint, in the graphs, in each engine."""
    shards = sorted(run.model.glob("*.safetensors"))
    if not shards:
        return []
    bf16 = sum(map(bf16_bytes, shards))
    held = sum(path.stat().st_size for path in shards)
    rows = [
        SizeRow("weights in BF16", None, bf16, 1.0),
        SizeRow("FP8 checkpoint", "model/*.safetensors", held, held / bf16),
    ]
    rows += [
        SizeRow(what, f"model/{path.name}", path.stat().st_size)
        for path, what in _graphs(run).items()
        if path.is_file()
    ]
    return [*rows, *(_engine(row, held if row.precision == "fp8" else bf16, bf16) for row in engine_rows(run))]


def _engine(engine: EngineRow, weights: int, bf16: int) -> SizeRow:
    """Return the row of an engine that holds some `weights` bytes of weights. The rest is its program, which does not
    grow with the size of a GEMM: the share of `bf16` bytes is given only for an engine that is mostly weights.
    """
    program = engine.bytes - weights
    small = program > weights
    return SizeRow(
        f"{PRECISIONS[engine.precision]} engine for {engine.target}".lstrip(),
        engine.file,
        engine.bytes,
        None if small else engine.bytes / bf16,
        None
        if program < 0
        else f"some {size(weights)} of weights, and {size(program)} of compiled program"
        + (", which does not grow with the size of a GEMM" if small else ""),
    )


def _graphs(run: Run) -> dict[Path, str]:
    return {
        run.onnx: "ONNX graph; its weights are the checkpoint’s",
        run.onnx_fp32: "the same graph, computing in FP32",
    }


def bf16_bytes(shard: Path) -> int:
    """Return the bytes that the tensors of an FP8 checkpoint's file take in the BF16 model: codes doubled, scales left
    out. Reads the header alone.
    """
    return sum(
        (at.end - at.start) * (2 if at.dtype == CODE_DTYPE else 1)
        for name, at in read_header(shard).items()
        if not name.endswith("_scale")
    )
