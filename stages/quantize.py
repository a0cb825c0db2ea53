"""The stage `quantize`: choose scales from statistics and write the checkpoint; the model is not run."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from pydantic import TypeAdapter

from ..calibrate.measure.moments import FIRST, SHRINKAGE
from ..calibrate.measure.statistics import Statistics, load_arrays, load_statistics
from ..calibrate.model.gemms import attention_heads, observed_gemms, output_channel_axis, vision_gemms
from ..calibrate.model.source import Source, meta_model
from ..calibrate.ranks.world import World
from ..core.errors import InputError
from ..core.files import disk_errors, replacing, write_document
from ..core.output_folder import WorkFolder, key_text
from ..core.reporter import SILENT
from ..core.run import Run
from ..options import BF16, BLOCK, RescaleOptions, ScaleOptions
from ..quantize.checkpoint.hf_layout import hf_layout_of
from ..quantize.checkpoint.rounding_ranks import RoundingTask, round_group, round_in_ranks, round_share
from ..quantize.checkpoint.writer import quantize_checkpoint
from ..quantize.reading.codecs import CODECS
from ..quantize.reading.inherited_scales import (
    inherited_codes,
    inherited_scales,
    source_blocks,
)
from ..quantize.scales.activation_scales import group_of
from ..quantize.scales.cache_scales import query_scales
from ..quantize.scales.choose_scales import choose_scales
from ..quantize.scales.clip import lost_share
from ..quantize.scales.costliest import load_costliest, stay_reasons
from ..quantize.scales.decisions import Scales
from ..quantize.scales.expert_scales import starved
from ..quantize.scales.policy import (
    ModelGemms,
    check_measured,
)
from ..quantize.weights.channels import (
    WeightMethod,
    WeightScaling,
    joined_families,
    tensor_scales,
)
from ..quantize.weights.code_sources import CodeSource, GptqCodes, LearnedCodes, RoundedCodes, Rounding
from ..quantize.weights.gptq import Compensations, MeasuredWindows
from ..quantize.weights.rounding_progress import CachedCodes, CodesOfAnyInput, Rounded
from ..quantize.weights.sequential import SequentialRounding
from ..quantize.weights.sequential_ranks import SentScaling, SequentialTask
from .choice_notes import choice_notes
from .corpus import in_batches, load_tokens
from .gradients import beyond_memory_note, load_first_tokens, output_folder
from .measure import measure_queries
from .pipeline.stage import Key, Notes, arithmetic, device
from .pipeline.stages import DISTILL, MEASURE, QUANTIZE, QuantizeFacts
from .shared.adapters import fingerprints
from .shared.model_files import carry_graphs, has_graphs
from .shared.texts import Tokens


@dataclass(frozen=True)
class KnownCodes:
    """Codes that are there already. `learned`: those that `fp8q distill` learned from these scales are taken, where
    there are any. `rounded`: a folder of this run's codes by GPTQ, which are read from there and added; it has all of
    them where the run has no second moments. `of_any_input`: codes there that were rounded for an input in another form
    serve too, to measure a candidate. `world`: ranks that round by GPTQ together.
    """

    learned: bool = True
    rounded: Path | None = None
    of_any_input: bool = False
    world: World | None = None

    @property
    def in_ranks(self) -> World | None:
        """The ranks, where there are several."""
        return self.world if self.world and self.world.size > 1 else None


ALL_LEARNED = KnownCodes()


#: What rank 0 may tell the others to take part in.
TASKS: TypeAdapter[RoundingTask | SequentialTask] = TypeAdapter(RoundingTask | SequentialTask)


def take_part_in_rounding(run: Run, source: Source, world: World) -> None:
    """Round, on a rank above 0, what rank 0 assigns, until it has its last codes."""
    work = WorkFolder(run.root, QUANTIZE.name, world.rank)
    with disk_errors(run.root):
        while sent := world.gathered({})[0]:
            task = TASKS.validate_python(sent)
            if isinstance(task, RoundingTask):
                round_share(world, source, task, work.path, device())
                continue
            windows = world.sent(None)
            with work.opened({"task": task.key, "rank": world.rank, "ranks": world.size}) as folder:
                _sequence(source, task, windows, folder, world).run(SILENT)
    work.leave()


def quantize(
    run: Run, source: Source, gemms: ModelGemms, options: ScaleOptions, notes: Notes, known: KnownCodes = ALL_LEARNED
) -> None:
    """The stage `quantize`: choose scales, write `model/` and `scales.json`; `known`: codes that are not made again."""
    if options.q_scale:
        measure_queries(run, "--q-scale", notes)
    key = _key(run, source, options, notes, known)
    if QUANTIZE.is_current(run, key):
        return
    if options.needs_moments and not (known.rounded or run.distilled.name in key.inputs):
        require_moments(run)
    stages = {
        "corpus": run.calibration,
        "queries": run.queries,
        "costliest": run.costliest,
        "first-tokens": run.first_tokens,
        "outputs": run.output_moments,
        DISTILL.name: run.distilled,
    }
    writers = {path.name: stage for stage, path in stages.items()}
    for name in key.inputs:
        folder = name.partition("/")[0]
        run.require(run.root / name, writers.get(name, writers.get(folder, "measure")))
    statistics = load_statistics(run)
    if options.bf16_weights:
        gemms = replace(gemms, stay={**gemms.stay, **stay_reasons(load_costliest(run), options.bf16_weights)})
    check_measured(gemms, options, group_of(statistics.record.groups))
    choose = inherited_scales if options.inherit else choose_scales
    scales = choose(source, statistics, gemms, options)
    scales = scales.model_copy(update={"vision": gemms.named_vision or None})
    exported = has_graphs(run)
    if options.q_scale:
        queries, _ = load_arrays(run.require(run.queries, "queries"))
        heads = attention_heads(source.text_config)["q"] if options.kv_scale == "head" else None
        scales = scales.model_copy(update={"queries": query_scales(queries, options.clip, heads)})
    with QUANTIZE.writing(run, key, notes) as log:
        with (
            _rounding(run, source, scales, key, notes, known) as rounding,
            replacing(run.model) as partial,
        ):
            image_rows = statistics.record.corpus.image_rows
            layout = hf_layout_of(source, scales, gemms.no_graph, CODECS[options.layout], image_rows)
            for by_gptq in rounding.sources:
                if known.in_ranks and isinstance(by_gptq, GptqCodes):
                    round_in_ranks(known.in_ranks, source, by_gptq, layout.axes, scales.modules, device())
            weights = quantize_checkpoint(source, partial, scales, rounding, layout, notes)
            if exported:
                carry_graphs(run, partial)
        scales = scales.with_weights(weights)
        write_document(run.scales, scales)
        for line in (*choice_notes(source, statistics, scales, options), *_memory_notes(rounding)):
            notes.note(line)
        log.outputs += [
            run.scales,
            *sorted(
                path for path in run.model.rglob("*") if path.is_file() and path.suffix != ".onnx" and path != run.card
            ),
        ]


def _memory_notes(rounding: Rounding) -> Iterator[str]:
    """Yield a line where memory did not suffice to revise codes."""
    for source in rounding.sources:
        if isinstance(source, GptqCodes) and source.beyond_memory:
            yield beyond_memory_note(source.beyond_memory)


def _key(
    run: Run, source: Source, options: ScaleOptions, notes: Notes, known: KnownCodes
) -> Key[ScaleOptions, QuantizeFacts]:
    """The key of the codes, learned ones among them where these are taken."""
    key = rounding_key(run, source, options)
    if known.of_any_input and options.weight_rounding == "gptq":
        key = replace(key, facts=key.facts.model_copy(update={"of_any_input": True}))
    if not known.learned:
        return key
    return replace(key, inputs={**key.inputs, **learned_codes(run, key, notes)})


def is_quantized(run: Run, source: Source, options: ScaleOptions, notes: Notes) -> bool:
    """Tell whether the measured `run` has the checkpoint of these `options`."""
    return QUANTIZE.is_current(run, _key(run, source, options, notes, ALL_LEARNED))


def rounding_key(run: Run, source: Source, options: ScaleOptions) -> Key[ScaleOptions, QuantizeFacts]:
    """The key of the codes that rounding gives, without any learned ones."""
    batch_size = run.options(MEASURE).batch_size if options.weight_rounding == "sequential" else None
    facts = QuantizeFacts(
        adapters=fingerprints(source), batch_size=batch_size, shrinkage=_shrinkage(options), tokenizer=source.tokenizer
    )
    return Key(_inputs(run, options), options, facts)


def _shrinkage(options: ScaleOptions) -> tuple[float, float] | None:
    """Return how the moments of GPTQ are shrunk; None for other roundings."""
    return SHRINKAGE if options.weight_rounding == "gptq" else None


def identity(key: Key[ScaleOptions, QuantizeFacts]) -> str:
    """SHA-256 of everything that the codes of a `rounding_key` depend on."""
    options = QUANTIZE.dump(key.options, key.facts)
    del options["layout"]  # codes are the same under other names
    younger = {
        "form": [],
        "weight_scale": "channel",
        "bf16_weights": 0.0,
        "weigh_first_token": False,
        "weigh_outputs": 0,
        "vision": [],
    }
    for name, default in younger.items():
        if options[name] == default:
            del options[name]  # codes that were learned before there was this option are of the same start
    depends = [dict(key.inputs), options]
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()


def learned_codes(run: Run, key: Key[ScaleOptions, QuantizeFacts], notes: Notes) -> dict[str, str]:
    """Name -> SHA-256 of the file of codes that were learned from those of `key`; empty where there are none.

    Codes that were learned from others, of scales that have changed since, are left out with a note.
    """
    recorded = run.record().stages.get(DISTILL.name)
    name = run.distilled.name
    if recorded is None or name not in recorded.outputs:
        return {}
    if run.facts(DISTILL).start != identity(key):
        notes.note(
            f"{name}: was learned from other scales than the run has now, and is left out; `fp8q distill {run.root}` "
            "learns anew"
        )
        return {}
    run.require(run.distilled, DISTILL.name)
    return {name: recorded.outputs[name]}


def _inputs(run: Run, options: ScaleOptions) -> dict[str, str]:
    """The files that the stage reads; they depend on `options`."""
    stages = run.record().stages
    moments = options.weight_rounding == "gptq"
    measured = stages["measure"].outputs
    inputs = {name: digest for name, digest in measured.items() if moments or not is_of_moments(name)}
    if options.weight_rounding == "sequential":
        inputs[run.calibration.name] = stages["corpus"].outputs[run.calibration.name]
    if options.q_scale:
        inputs |= stages["queries"].outputs
    if options.bf16_weights:
        inputs |= stages["costliest"].outputs
    if options.weighs_first_token:
        inputs |= stages["first-tokens"].outputs
    if options.weighs_outputs:
        inputs |= stages["outputs"].outputs
    return inputs


@contextmanager
def _stored_codes(
    run: Run, key: Key[ScaleOptions, QuantizeFacts], notes: Notes, known: KnownCodes
) -> Iterator[CachedCodes | None]:
    """Open the codes by GPTQ that are `known`, or those that ranks round, where a killed call goes on; None without."""
    if known.rounded:
        yield (CodesOfAnyInput if known.of_any_input else CachedCodes)(known.rounded)
    elif known.in_ranks:
        with QUANTIZE.working(run, key, notes) as folder:
            yield CachedCodes(folder)
    else:
        yield None


@contextmanager
def _rounding(
    run: Run, source: Source, scales: Scales, key: Key[ScaleOptions, QuantizeFacts], notes: Notes, known: KnownCodes
) -> Iterator[Rounding]:  # fmt: skip
    """Prepare the rounding of weights, with the codes that are `known`."""
    statistics = load_statistics(run)
    options = key.options
    scaling = weight_scaling(source, statistics, scales, options)
    if run.distilled.name in key.inputs:
        learned = RoundedCodes(LearnedCodes(run.distilled).judged, scaling.method, "learned")
        yield Rounding(scaling, (learned,), device=device())
        return
    inherited = inherited_codes(source, options, scaling.blocks)
    inherited_first = (inherited,) if inherited else ()
    in_blocks = source_blocks(source, scales.modules)
    if options.weight_rounding == "sequential":
        few = starved(statistics, options.min_expert_tokens)
        inputs = scales.activations | dict.fromkeys(scales.in_form(BF16))
        task = SequentialTask(
            activations={name: scale for name, scale in inputs.items() if name not in few},
            scaling=SentScaling.of(scaling),
            batch_size=statistics.record.corpus.batch_size,
            key=key_text(QUANTIZE.work_key(key)),
        )
        with _layer_by_layer(run, source, task, key, notes, known.in_ranks) as rounded:
            sequential = RoundedCodes(rounded.judged, scaling.method, "sequential")
            yield Rounding(scaling, (*inherited_first, sequential), in_blocks, device())
    elif options.weight_rounding == "gptq":
        with _stored_codes(run, key, notes, known) as codes:
            compensations = _compensations(run, statistics, scales, options, run.moments)
            gptq: CodeSource = GptqCodes(scaling, compensations, codes, output_folder(run, options))
            if codes and not any(map(is_of_moments, key.inputs)):
                gptq = _rounded_while_measured(source, scales, codes, compensations, scaling.method)
            yield Rounding(scaling, (*inherited_first, gptq), in_blocks, device())
    else:
        yield Rounding(scaling, inherited_first, in_blocks, device())


@contextmanager
def _layer_by_layer(
    run: Run, source: Source, task: SequentialTask, key: Key[ScaleOptions, QuantizeFacts], notes: Notes,
    ranks: World | None,
) -> Iterator[Rounded]:  # fmt: skip
    """Round layer by layer on the run's windows, in a work folder whose key contains `key`, with the other `ranks`."""
    windows = load_tokens(run, run.calibration)
    with QUANTIZE.working(run, key, notes, ranks.size if ranks else 1) as folder:
        if ranks:
            ranks.gathered(task.model_dump())
            ranks.sent(windows)
        yield _sequence(source, task, windows, folder, ranks or World(device=device())).run(notes)


def _sequence(source: Source, task: SequentialTask, windows: Tokens, folder: Path, world: World) -> SequentialRounding:
    """The part of one rank of `world` in a `task`."""
    batches = in_batches(windows, task.batch_size)
    return SequentialRounding(source, task.activations, task.scaling.scaling, batches, folder, world)


def _compensations(
    run: Run, statistics: Statistics, scales: Scales, options: ScaleOptions, moments: Path
) -> Compensations:
    """Open the second `moments` for the inputs of `scales`."""
    lost = {module: lost_share(activation.sqnr_db) for module, activation in scales.activations.items()}
    lost |= dict.fromkeys(scales.in_form(BF16), 0.0)
    return compensations_of(run, statistics, options, moments, group_of(statistics.record.groups), lost)


def _rounded_while_measured(
    source: Source, scales: Scales, codes: CachedCodes, compensations: Compensations, method: WeightMethod
) -> RoundedCodes:
    """The `codes` of all weights that GPTQ rounded while the model was measured.

    Raises InputError for a weight that has none there, and is not zero.
    """
    lost = compensations.lost
    weights = source.weights()
    for module in scales.modules:
        if module in compensations.unknown or codes.has(module, lost[module]):
            continue
        if weights.tensor(source.stored(f"{module}.weight")).any():
            raise InputError(
                module, "was not rounded while it was measured", "give --keep-moments, which measures and rounds anew"
            )
    return RoundedCodes(lambda module: codes.of_input(module, lost[module]), method, "gptq")


@dataclass(frozen=True)
class LayerRounding:
    """Round the weights of `run` by GPTQ while it is measured layer by layer, from second moments that are not stored,
    into codes in `folder`.
    """

    run: Run
    source: Source
    gemms: ModelGemms
    options: ScaleOptions
    folder: Path

    @cached_property
    def axes(self) -> dict[str, Literal[0, 1]]:
        """The axis of output channels in the weight of each module."""
        model = meta_model(self.source)
        modules = observed_gemms(model) | vision_gemms(model, self.options.vision)
        return {name: output_channel_axis(module) for name, module in modules.items()}

    @property
    def key(self) -> str:
        """SHA-256 of everything that the codes depend on, besides the measurement."""
        key = codes_key(self.run, self.source, self.options)
        return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()

    def spend(self, moments: Path, names: Sequence[str], statistics: Statistics) -> None:
        """Round the weights that read the tensors `names`, by their second `moments` and `statistics`."""
        options = replace(self.options, kv_cache="off", kv_scale="tensor", kv_skip=(), q_scale=False)
        chosen = choose_scales(self.source, statistics, self.gemms, options)
        members = {module for name in names for module in statistics.record.groups[name]}
        scales = Scales.before_weights(
            {module: scale for module, scale in chosen.activations.items() if module in members}, {}, (), {},
            [module for module in chosen.bf16_inputs if module in members],
        )  # fmt: skip
        scaling = weight_scaling(self.source, statistics, scales, options)
        compensations = _compensations(self.run, statistics, scales, options, moments)
        codes = GptqCodes(scaling, compensations, CachedCodes(self.folder), output_folder(self.run, options))
        round_group(self.source, codes, scales.modules, self.axes, device())


def codes_key(run: Run, source: Source, options: ScaleOptions) -> dict[str, object]:
    """Everything that codes depend on that are rounded while `run` is measured."""
    stages = run.record().stages
    inputs = {"model": source.fingerprint, **stages["corpus"].outputs}
    if options.weighs_first_token:
        inputs |= stages["first-tokens"].outputs
    if options.weighs_outputs:
        inputs |= stages["outputs"].outputs
    facts = QuantizeFacts(shrinkage=_shrinkage(options))
    return {"inputs": inputs, "options": QUANTIZE.dump(options, facts), **arithmetic()}


def compensations_of(
    run: Run,
    statistics: Statistics,
    options: ScaleOptions,
    moments: Path,
    first: Mapping[str, str],
    lost: Mapping[str, float],
) -> Compensations:
    """Open the second `moments` that GPTQ rounds by, first tokens weighed as `options` have it, experts judged.

    `first`: module -> the first module of its group; `lost`: module -> the share of its input's energy that is lost.
    """
    few = starved(statistics, options.min_expert_tokens)
    experts = statistics.record.experts or {}
    weights = load_first_tokens(run) if options.weigh_first_token else {}
    windows = MeasuredWindows(statistics.record.corpus.seq_len, weights)
    return Compensations(moments, first, lost, few.keys(), experts, windows)


def weight_scaling(source: Source, statistics: Statistics, scales: Scales, options: ScaleOptions) -> WeightScaling:
    """Decide how the scales of the weights in `scales.modules` are chosen, and choose those that several share."""
    blocks = frozenset(scales.in_form(BLOCK))
    scaling = WeightScaling(options.weight_method, blocks=blocks, block_grid=options.block_scale_grid)
    if options.weight_scale == "channel":
        return scaling
    experts = tuple(f"{layer}." for layer in statistics.record.experts or {})
    weights = source.weights()
    dense = [module for module in scales.modules if not module.startswith(experts) and module not in blocks]

    def read(module: str) -> torch.Tensor:
        return weights.tensor(source.stored(f"{module}.weight")).to(device(), torch.bfloat16)

    families = joined_families(dense, statistics.record.groups.values())
    return replace(scaling, tensor_scales=tensor_scales(families, read, options.weight_method))


def rescaled(run: Run, options: RescaleOptions) -> ScaleOptions:
    """The options to choose the run's scales again: those given in `options`, the run's for the others, or defaults
    where a killed run has no record.

    Raises InputError when the run was not measured, and for rounding that runs the model.
    """
    run.require(run.statistics, "measure")
    run.refuse_stale("measure")
    chosen = options.over(scale_options(run))
    if chosen.weight_rounding == "sequential":
        raise InputError(
            "--weight-rounding sequential",
            "runs the model, and scales are chosen again without it",
            "use `fp8q calibrate` with the options of the run and those that are to change",
        )
    if chosen.needs_moments:
        require_moments(run)
    measured = run.record().stages["measure"].outputs
    if chosen.weighs_first_token and not any(name.endswith(FIRST) for name in measured):
        raise InputError(
            "--weigh-first-token",
            f"needs the first tokens of windows apart from other second moments, and {run.root} was measured by an "
            "older version, which did not keep them",
            "use `fp8q calibrate` with the options of the run, or give --no-weigh-first-token",
        )
    return chosen


def is_of_moments(name: str) -> bool:
    """Tell whether an output of `measure` is a file of second moments."""
    return name.startswith("moments/")


def rounded_without_moments(run: Run) -> bool:
    """Tell whether the weights of `run` were rounded by GPTQ while it was measured."""
    recorded = run.record().stages
    if not {MEASURE.name, QUANTIZE.name} <= recorded.keys() or run.facts(MEASURE).runs is not None:
        return False
    return scale_options(run).needs_moments and not any(map(is_of_moments, recorded[MEASURE.name].outputs))


def require_moments(run: Run) -> None:
    """Raise InputError where `run` has no second moments to round by."""
    if any(map(is_of_moments, run.record().stages[MEASURE.name].outputs)):
        return
    without = "since it was measured without them"
    remedy = "use `fp8q calibrate` with the options of the run and --weight-rounding gptq"
    if run.facts(MEASURE).runs is not None:
        without = "since it was merged without them"
        remedy = "measure its parts, and merge them, with --weight-rounding gptq"
    elif rounded_without_moments(run):
        without = "since its layers were rounded while they were measured"
        remedy = "use `fp8q calibrate` with the options of the run and --keep-moments"
    raise InputError(
        "--weight-rounding gptq", f"needs the second moments of inputs, which {run.root} has not, {without}", remedy
    )


def scale_options(run: Run) -> ScaleOptions:
    """Read back the options that chose the scales of `run`; the defaults after a killed run."""
    if QUANTIZE.name in run.record().stages:
        return run.options(QUANTIZE)
    return ScaleOptions()
