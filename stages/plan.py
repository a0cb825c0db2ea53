"""Plan `fp8q run` before its first stage: the time, memory and disk of each stage on this machine.

Rates are measured on a few tokens of the run's own windows (`plan_rates`), and multiplied by the tokens, passes and
numbers of weights of each stage. What does not grow with the model (libraries that are loaded, files that are hashed)
is a constant. A disk without the room for all stages together is refused here, before an hour of calibration.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..calibrate.model.source import Source
from ..calibrate.text.evaluation import Evaluation
from ..core.columns import duration, size
from ..core.errors import InputError
from ..core.reporter import SILENT
from ..core.run import Run
from ..export.engine.build import resolve
from ..options import FLOAT, RUNTIMES, WITHOUT_GRAPH, ReportOptions, RunOptions, ScaleOptions
from ..options.calibrate import WITH_SECOND_CODES
from ..quantize.sensitivity.output_gradients import PASSES as OUTPUT_PASSES
from ..validate.accuracy.compare import BASELINES, windows_at_once
from ..validate.accuracy.continuations import PROMPT_TOKENS, TOKENS
from ..validate.accuracy.runtimes import held_type
from .corpus import Collected
from .costliest import WINDOWS as COSTLIEST_WINDOWS
from .costliest import chosen_by_gptq
from .cpu_time import STEP_TOKENS
from .forms import FEW_CONTEXT, FEW_WINDOWS, PREDICTED_WINDOWS
from .gradients import FIRST_TOKENS_PASS, LOSSES_PASS, WholePass
from .gradients import WINDOWS as FIRST_TOKEN_WINDOWS
from .measure import beyond
from .pipeline.stage import Notes, device
from .pipeline.stages import VALIDATE
from .plan_rates import FP32_BYTES, LIBRARY_BYTES, Rates, measured_rates
from .preflight import directory_above
from .sensitivity import GRADIENT_PASSES
from .validate_runtimes import go_by_layer

#: Seconds of a quiet machine in which a stage ends whatever the model is: it loads libraries, and hashes and writes
#: files. The trace of a graph takes some for each decoder layer besides, and an engine's building for each byte.
BEGIN_SECONDS = 1.0
GRAPH_SECONDS = 36.0
GRAPH_LAYER_SECONDS = 0.2
ENGINE_SECONDS = 6.0
REPORT_SECONDS = 8.0
#: The windows that a search measures candidates on, and the candidates that it measures, about.
SEARCH_CANDIDATES = 4
#: Of a weight by GPTQ in a search: once to measure, and once for the form that is chosen.
ROUNDINGS = 2
#: The passes of a forward and backward run for the first tokens' weights, in forward passes.
FIRST_TOKEN_PASSES = 3.0
#: The seconds of a quiet machine in which a code is revised by its outputs: SmolLM2's 106 million took 360
#: (`docs/decisions/0125`), most of them for one move after the other.
REVISION_SECONDS = 3.4e-6
#: The files of hidden states of `--weight-rounding sequential`.
SEQUENTIAL_FILES = 4
#: What scoring takes, in logits of a window in FP32: these, those of the positions whose likeliest tokens are kept, and
#: what glibc keeps of the blocks that are compared.
SCORED_COPIES = 4
#: The bytes of a number of the model in ONNX Runtime, which holds what it folds besides.
ONNX_BYTES = 8


@dataclass(frozen=True)
class PlannedStage:
    """A stage's `seconds`, the peak of its memory, and the disk that it takes, for a time or for good, in bytes;
    `options`: those that change them. `if_needed`: only where one code an activation loses too much. `freed`: the bytes
    of the disk that are free again when it ends; `spare`: those of them that it takes only where they are free.
    """

    name: str
    seconds: float
    memory: float
    disk: float
    options: str
    if_needed: bool = False
    freed: float = 0.0
    spare: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """The decisions before the plan: a `graph` is made, `moments` are gathered, the model is `stream`ed by layers, and
    the moments of a layer are `spent` when it has run.
    """

    graph: bool
    moments: bool
    stream: bool
    spent: bool = False


@dataclass(frozen=True)
class Planned:
    """Everything that a plan follows from."""

    source: Source
    options: RunOptions
    collected: Collected
    evaluation: Evaluation
    outlook: Outlook
    rates: Rates

    @property
    def scales(self) -> ScaleOptions:
        """The options of scales."""
        return self.options.calibrate

    @property
    def tokens(self) -> int:
        """The tokens that are calibrated on, those of rows with images among them."""
        return int(self.collected.windows.size) + self.calibration_rows

    @property
    def calibration_rows(self) -> int:
        """The tokens of rows with images that are calibrated on."""
        images = self.collected.images
        return sum(row.tokens for row in images.calibration) if images else 0

    @property
    def evaluation_rows(self) -> int:
        """The tokens of rows with images that are evaluated on."""
        images = self.collected.images
        return sum(row.tokens for row in images.evaluation) if images else 0

    @property
    def begin(self) -> float:
        """The seconds in which a stage that loads the model begins and ends."""
        return self.rates.load_seconds + self.rates.pace * BEGIN_SECONDS

    def gradients(self, passes: float) -> float:
        """The seconds of so many passes of a window in FP32."""
        return passes * self.window * self.rates.fp32

    @cached_property
    def losses_by_layer(self) -> bool:
        """Tell whether losses are predicted layer by layer."""
        return LOSSES_PASS.goes_by_layer(self.source, None, self.window)

    @cached_property
    def first_tokens_by_layer(self) -> bool:
        """Tell whether first tokens are weighed layer by layer."""
        return FIRST_TOKENS_PASS.goes_by_layer(self.source, self.options.calibrate.stream, self.window)

    def gradient_bytes(self, backward: WholePass, by_layer: bool) -> float:
        """The memory of a stage with a pass forward and back, which goes `by_layer` or as a whole."""
        return self.rates.base_bytes + self.rates.gradient_bytes(backward.copies, self.window, by_layer)

    @property
    def window(self) -> int:
        """The tokens of a calibration window."""
        return int(self.collected.windows.shape[1])


def stages_of(plan: Planned) -> Iterator[PlannedStage]:
    """Plan each stage, in the order of work."""
    rates = plan.rates
    scales = plan.scales
    yield _calibration(plan)
    if scales.weigh_first_token and plan.outlook.moments:
        backward = rates.backward_bytes(FIRST_TOKEN_WINDOWS * plan.window, plan.first_tokens_by_layer)
        yield PlannedStage(
            "first tokens",
            plan.begin + plan.gradients(FIRST_TOKEN_PASSES * FIRST_TOKEN_WINDOWS),
            plan.gradient_bytes(FIRST_TOKENS_PASS, plan.first_tokens_by_layer),
            backward,
            "--no-weigh-first-token",
            freed=backward,
        )
    if scales.weighs_outputs and plan.outlook.moments:
        windows = min(scales.weigh_outputs, len(plan.collected.windows))
        gradients = rates.backward_bytes(windows * plan.window, by_layer=True)
        moments = _moments_bytes(rates.outputs)
        yield PlannedStage(
            "gradients at outputs",
            plan.begin + plan.gradients(OUTPUT_PASSES * windows),
            max(
                plan.gradient_bytes(FIRST_TOKENS_PASS, by_layer=True),
                rates.base_bytes + 2 * rates.layer_bytes + moments / rates.layers,
            ),
            gradients + moments,
            "--weigh-outputs 0",
            freed=gradients,
        )
    if scales.bf16_weights:
        yield _costliest(plan)
    yield _checkpoint(plan)
    if plan.outlook.graph:
        yield from _engines(plan)
    validation = _validation(plan)
    yield validation
    if plan.options.finds_form:
        yield _search(plan, validation)
    yield _report(plan)


def _costliest(plan: Planned) -> PlannedStage:
    """Plan the choice of weights that stay in BF16; where the codes of GPTQ decide, they are rounded for it."""
    rates = plan.rates
    backward = rates.backward_bytes(COSTLIEST_WINDOWS * plan.window, plan.losses_by_layer)
    by_gptq = chosen_by_gptq(plan.scales)
    predicted = plan.gradients(GRADIENT_PASSES * COSTLIEST_WINDOWS)
    codes = _stored_codes(plan) - _spent_codes(plan)
    return PlannedStage(
        "costliest weights",
        2 * plan.begin + rates.scaling * rates.numbers + predicted + (_rounding_seconds(plan) if by_gptq else 0.0),
        plan.gradient_bytes(LOSSES_PASS, plan.losses_by_layer),
        rates.checkpoint_bytes + backward + codes,
        "--bf16-weights 0",
        freed=rates.checkpoint_bytes + backward,
    )


def _rounding_seconds(plan: Planned) -> float:
    """The seconds of GPTQ, and of what revises its codes."""
    rates = plan.rates
    rounding = rates.compensated if plan.scales.needs_moments else 0.0
    if plan.scales.weighs_outputs:
        rounding += rates.pace * REVISION_SECONDS * rates.numbers
    return rounding


def _checkpoint(plan: Planned) -> PlannedStage:
    """Plan scales and rounding; codes that were rounded before lie there until it ends."""
    rates = plan.rates
    scales = plan.scales
    rounding = 0.0 if chosen_by_gptq(scales) else _rounding_seconds(plan)
    work = 0.0
    if scales.weight_rounding == "sequential":
        work = FP32_BYTES * SEQUENTIAL_FILES * plan.tokens * rates.hidden + rates.numbers
    before = _stored_codes(plan)
    return PlannedStage(
        "scales and checkpoint",
        rates.pace * BEGIN_SECONDS + rates.scaling * rates.numbers + rounding,
        rates.base_bytes + (rates.largest_part_bytes if rates.streamed else rates.weight_bytes),
        rates.checkpoint_bytes + work,
        "--weight-rounding",
        freed=work + before,
    )


def _calibration(plan: Planned) -> PlannedStage:
    rates = plan.rates
    token = rates.observed
    work = rates.streamed_bytes(plan.tokens)
    disk = work
    if plan.outlook.moments:
        token += rates.moments
        moments = _moments_bytes(rates.inputs)
        if plan.outlook.spent:
            moments /= rates.layers
            work += moments
        disk += moments + _spent_codes(plan)
    memory = rates.base_bytes + (rates.layer_bytes if rates.streamed else rates.weight_bytes)
    memory += plan.options.calibrate.batch_size * rates.window_bytes
    seconds = plan.begin + plan.tokens * token + plan.calibration_rows * rates.seeing
    return PlannedStage("calibrate", seconds, memory, disk, "--samples, --seq-len", freed=work)


def _stored_codes(plan: Planned) -> float:
    """The bytes of codes that are rounded before the checkpoint is written."""
    return plan.rates.numbers if plan.outlook.spent or chosen_by_gptq(plan.scales) else 0.0


def _spent_codes(plan: Planned) -> float:
    """The bytes of codes that are rounded while the model is measured."""
    return plan.rates.numbers if plan.outlook.spent else 0.0


def _moments_bytes(widths: Iterable[int]) -> float:
    """The bytes of second moments of tensors of these `widths`."""
    return float(FP32_BYTES * sum(width * width for width in widths))


def _engines(plan: Planned) -> Iterator[PlannedStage]:
    """Plan the graphs, and the engines that are built of them."""
    rates = plan.rates
    seconds = rates.pace * (GRAPH_SECONDS + GRAPH_LAYER_SECONDS * rates.layers)
    yield PlannedStage("graphs", seconds, rates.base_bytes + LIBRARY_BYTES, 0.0, "--no-graph")
    count = len(resolve(plan.options.engine).targets)
    yield PlannedStage(
        "engines",
        count * rates.pace * ENGINE_SECONDS,
        rates.base_bytes + 2 * rates.checkpoint_bytes,
        count * rates.checkpoint_bytes,
        "--target, --no-graph",
    )


def _search(plan: Planned, validation: PlannedStage) -> PlannedStage:
    """Plan the search of a form, which ends with another `validation`; the float model's logits stay until then."""
    rates = plan.rates
    runtimes = planned_runtimes(plan)
    if plan.options.server not in WITH_SECOND_CODES:  # the windows are those before, and the float model's results too
        runtimes = tuple(name for name in runtimes if name not in FLOAT)
    few = SEARCH_CANDIDATES * FEW_WINDOWS * min(plan.window, FEW_CONTEXT)
    candidates = few * (rates.reference + rates.scoring) + SEARCH_CANDIDATES * rates.scaling * rates.numbers
    predicted = plan.gradients(GRADIENT_PASSES * PREDICTED_WINDOWS)
    rounding = ROUNDINGS * rates.compensated
    if not plan.scales.weigh_first_token:
        rounding += plan.begin + plan.gradients(FIRST_TOKEN_PASSES * FIRST_TOKEN_WINDOWS)
    gathered = 0.0
    if not plan.outlook.moments:  # the model is measured again
        gathered = _moments_bytes(rates.inputs)
        rounding += plan.begin + plan.tokens * (rates.observed + rates.moments) + plan.calibration_rows * rates.seeing
    work = rates.backward_bytes(PREDICTED_WINDOWS * plan.window, plan.losses_by_layer) + rates.numbers
    return PlannedStage(
        "search of a form",
        predicted + candidates + rounding + _validation_seconds(plan, runtimes),
        plan.gradient_bytes(LOSSES_PASS, plan.losses_by_layer),
        rates.checkpoint_bytes + gathered + work + validation.spare,
        "--form FORM",
        if_needed=True,
        freed=rates.checkpoint_bytes + work + validation.spare,
    )


def _report(plan: Planned) -> PlannedStage:
    """Plan the page, and the passages that FP8 and BF16 go on from, one after the other, a token at a time; there are
    none where memory does not hold the model.
    """
    rates = plan.rates
    if beyond(round(rates.weight_bytes)):
        return PlannedStage("report", rates.pace * REPORT_SECONDS, rates.base_bytes, 0.0, "")
    tokens = ReportOptions().continuations * (PROMPT_TOKENS + STEP_TOKENS * (TOKENS - 1))
    continued = sum(rates.load_seconds + tokens * rates.of_runtime(name) for name in ("bf16", "reference"))
    memory = rates.base_bytes + rates.weight_bytes + rates.checkpoint_bytes
    return PlannedStage("report", rates.pace * REPORT_SECONDS + continued, memory, 0.0, "")


def planned_runtimes(plan: Planned) -> tuple[str, ...]:
    """The runtimes that evaluate the run."""
    names = plan.options.validate.chosen
    return tuple(name for name in names if plan.outlook.graph or name in WITHOUT_GRAPH)


def _validation_seconds(plan: Planned, names: Sequence[str]) -> float:
    """The seconds of evaluating the runtimes `names`."""
    rates = plan.rates
    windows, context = plan.evaluation.ids.shape
    prompt = plan.evaluation.protocol.prompt
    tokens = float(windows * context)
    if prompt is not None:
        batch = windows_at_once(context, prompt, plan.source.text_config.vocab_size)
        tokens += STEP_TOKENS * -(-windows // batch) * (context - prompt - 1)
    seconds = sum(rates.load_seconds + rates.pace * BEGIN_SECONDS + tokens * rates.of_runtime(name) for name in names)
    seconds += len(names) * plan.evaluation.protocol.tokens * rates.scoring
    return seconds + _rows_seconds(plan, names)


def _rows_seconds(plan: Planned, names: Sequence[str]) -> float:
    """The seconds of evaluating rows with images: whole models of torch read them, or none does."""
    rates = plan.rates
    in_torch = [name for name in names if name in WITHOUT_GRAPH]
    tokens = plan.evaluation_rows
    if not tokens or not in_torch or _by_layer(plan, names, as_served=None, accumulator=None):
        return 0.0
    passes = sum(rates.of_runtime(name) + rates.scoring + rates.seeing for name in in_torch)
    return len(in_torch) * plan.begin + tokens * passes


def _validation(plan: Planned) -> PlannedStage:
    rates = plan.rates
    windows, context = plan.evaluation.ids.shape
    vocabulary = plan.source.text_config.vocab_size
    names = planned_runtimes(plan)
    stored = len([name for name in names if name in BASELINES])
    logits = 2.0 * stored * plan.evaluation.protocol.tokens * vocabulary
    by_layer = _by_layer(plan, names, as_served=plan.evaluation.protocol.prompt)
    hidden = _validated_hidden_bytes(plan, names, windows * context) if by_layer else 0.0
    weights = max((_validated_bytes(plan, name, by_layer) for name in names), default=0.0)
    return PlannedStage(
        VALIDATE.name,
        _validation_seconds(plan, names),
        rates.base_bytes + weights + SCORED_COPIES * FP32_BYTES * context * vocabulary,
        logits + hidden,
        "--max-tokens, --runtimes",
        freed=logits + hidden,
        spare=logits,
    )


def _by_layer(plan: Planned, names: Sequence[str], **changed: Any) -> bool:
    """Tell whether those of the runtimes `names` that torch runs go layer by layer, with `changed` options."""
    in_torch = [name for name in names if name in WITHOUT_GRAPH]
    options = replace(plan.options.validate, **changed)
    return bool(in_torch) and go_by_layer(in_torch, lambda: plan.source, options, Notes(SILENT))


def _validated_bytes(plan: Planned, name: str, by_layer: bool) -> float:
    """The memory of the weights of the runtime `name`, whole or `by_layer`; the whole reference holds its codes in BF16
    on a CPU, beside the pages of the file that they are read from.
    """
    rates = plan.rates
    if RUNTIMES[name].library is not None:
        return ONNX_BYTES * rates.parameters
    if by_layer:
        return rates.largest_part_bytes / 2 * held_type(name, plan.source).itemsize
    if name == "fp32":
        return FP32_BYTES * rates.parameters
    return rates.weight_bytes if name in FLOAT else rates.weight_bytes + rates.checkpoint_bytes


def _validated_hidden_bytes(plan: Planned, names: Sequence[str], tokens: int) -> float:
    """The bytes of the hidden states of the runtimes `names` that torch runs layer by layer, in two files each."""
    numbers = sum(held_type(name, plan.source).itemsize for name in names if name in WITHOUT_GRAPH)
    return float(2 * numbers * tokens * plan.rates.hidden)


def check_free_disk(run: Run, stages: Sequence[PlannedStage]) -> None:
    """Raise InputError where the disk of `run` has no room for a stage beside all that those before it leave there.

    What is taken only where it is free, and a search that may not be needed, are not counted.
    """
    free = shutil.disk_usage(directory_above(run)).free
    certain = [stage for stage in stages if not stage.if_needed]
    largest = max(certain, key=lambda stage: stage.disk - stage.spare)
    needed = disk_needed(replace(stage, disk=stage.disk - stage.spare) for stage in certain)
    if needed > free:
        raise InputError(
            run.root,
            f"has {size(free)} free, and the stages take {size(needed)}, most of it {largest.name} "
            f"({size(largest.disk - largest.spare)})",
            "free some, or name another with --out" + (f", or change {largest.options}" if largest.options else ""),
        )


def disk_needed(stages: Iterable[PlannedStage]) -> float:
    """The most that `stages` take of the disk at a time, in bytes."""
    needed = 0.0
    left = 0.0
    for stage in stages:
        needed = max(needed, left + stage.disk)
        left += stage.disk - stage.freed
    return needed


def lines_of(stages: Sequence[PlannedStage]) -> Iterator[str]:
    """Write the plan, a line each stage."""
    for stage in stages:
        needed = ", if one code an activation loses too much" if stage.if_needed else ""
        change = f"; {stage.options}" if stage.options else ""
        yield (
            f"plan: {stage.name}: {duration(stage.seconds)}, {size(stage.memory)} of memory, {size(stage.disk)} of disk"
            f"{needed}{change}"
        )
    certain = [stage for stage in stages if not stage.if_needed]
    seconds = duration(sum(stage.seconds for stage in certain))
    memory = size(max(stage.memory for stage in certain))
    disk = size(disk_needed(certain))
    yield f"plan: all: {seconds}, {memory} of memory, {disk} of disk, by a few tokens and GEMMs that were measured here"


def plan_of(
    source: Source, collected: Collected, evaluation: Evaluation, options: RunOptions, outlook: Outlook
) -> list[PlannedStage]:  # fmt: skip
    """Measure rates on this machine and plan the stages."""
    batch_size = options.calibrate.batch_size
    stream = outlook.stream
    moments = outlook.moments or options.finds_form
    rates = measured_rates(source, collected, batch_size, device(), stream=stream, moments=moments)
    return [*stages_of(Planned(source, options, collected, evaluation, outlook, rates))]


def tell(stages: Sequence[PlannedStage], notes: Notes) -> None:
    """Show the plan; the run's record does not have it."""
    for line in lines_of(stages):
        notes.report.note(line)
