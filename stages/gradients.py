"""The stages `first-tokens` and `outputs`: gather what GPTQ takes from gradients.

Some calibration windows run forward and back once through the model in FP32. The first weighs the first token of
windows in the second moments (`--weigh-first-token`), in memory or layer by layer. The second gathers the gradients at
outputs by which codes are revised (`--weigh-outputs`), layer by layer whatever memory there is: H_O of all GEMMs
together is larger than the weights.

Every stage with a pass forward and back asks here if it goes layer by layer, and so does the plan. As a whole it takes
the model in FP32, perhaps the values of its codes, and the inputs and outputs of all GEMMs, and logits, each with its
gradient: 12.4 and 9.6 GB for a 1.5B and 1,024 tokens, which took 22.7 GB in all.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..calibrate.measure.hidden_states import Batches
from ..calibrate.model.expert_modules import experts_of
from ..calibrate.model.gemms import observed_gemms
from ..calibrate.model.memory import weight_bytes
from ..calibrate.model.source import Source, load_model, meta_model
from ..core.errors import InputError
from ..core.files import read_document, replacing, write_document
from ..core.memory import release_memory
from ..core.reporter import SILENT, Reporter
from ..core.run import Run
from ..options import ScaleOptions
from ..options.declare import Options
from ..quantize.sensitivity.backward import WHOLE_BYTES, by_layer_on_cpu
from ..quantize.sensitivity.output_gradients import (
    FirstTokens,
    GradientSquares,
    LayerwiseFirstTokens,
    OutputMoments,
    WatchedGemms,
    added,
    batch_squares,
)
from .corpus import in_batches, load_tokens, spread_windows
from .measure import LayersNeed, observed_shapes, streams_layers
from .pipeline.stage import NO_FACTS, Key, Notes, device
from .pipeline.stages import FIRST_TOKENS, OUTPUTS, OutputFacts

#: The most tokens that run forward and back at a time, in whole windows.
TOKENS = 1024
#: Calibration windows by which first tokens are weighed, evenly spaced.
WINDOWS = 16


@dataclass(frozen=True)
class WholePass:
    """A pass that runs as a whole: the memory of what it holds of the model, as a multiple of its weights in BF16, what
    that is in words, and the work.
    """

    copies: int
    holds: str
    doing: str

    def need(self, source: Source, window: int) -> LayersNeed:
        """The memory that it takes with windows of so many tokens."""
        tensors = pass_bytes(pass_values(source), max(TOKENS, window))
        size = self.copies * weight_bytes(source) + int(tensors)
        return LayersNeed(size, f"{self.holds} and the tensors of a pass take {{}}", self.doing)

    def goes_by_layer(
        self, source: Source, asked: bool | None = None, window: int = TOKENS, report: Reporter = SILENT
    ) -> bool:
        """Tell whether it goes layer by layer: as was `asked` for, or where the model is large and on a CPU, or memory
        does not hold the whole, with a note.
        """
        if asked is not None:
            return asked
        need = self.need(source, window)
        if by_layer_on_cpu(source, device()):
            report.note(
                f"--stream: {need.words}, and a model above {WHOLE_BYTES / 1e9:.2g} GB goes forward and back layer by "
                f"layer on a CPU: {need.doing} layer by layer"
            )
            return True
        return streams_layers(None, need, report)


#: Losses of single tensors, by the values of the codes beside the model.
LOSSES_PASS = WholePass(4, "the model in FP32, its codes", "predicting")
#: The weights of first tokens.
FIRST_TOKENS_PASS = WholePass(2, "the model in FP32", "weighing first tokens")


def pass_bytes(values: float, tokens: int) -> float:
    """The bytes of so many `values` of each of the `tokens` of a pass, and of their gradients, in FP32."""
    return 2.0 * 4 * tokens * values


def pass_values(source: Source) -> float:
    """The values of a token at the inputs and outputs of GEMMs, and in its logits; those of experts as far as tokens
    are routed to them, where the configuration says to how many.
    """
    model = meta_model(source)
    shapes, inputs = observed_shapes(model)
    routed = getattr(source.text_config, "num_experts_per_tok", None)
    shares = {name: (routed or len(layer.experts)) / len(layer.experts) for name, layer in experts_of(model).items()}

    def share(gemm: str) -> float:
        return shares.get(gemm.rpartition(".")[0].rpartition(".")[0], 1.0)

    outputs = sum(share(name) * rows for name, (rows, _) in shapes.items())
    return outputs + sum(share(name) * shapes[name][1] for name in inputs) + float(source.text_config.vocab_size)


def run_gradients(run: Run, source: Source, options: ScaleOptions, notes: Notes, stream: bool | None = None) -> None:
    """Gather what GPTQ takes from gradients, where `options` ask for it and it is not done: `first_tokens.json` and
    `output_moments/`. `stream`: weigh first tokens layer by layer.
    """
    weigh_first_tokens(run, source, options, notes, stream)
    if options.weighs_outputs:
        _weigh_outputs(run, source, options.weigh_outputs, notes)


def weigh_first_tokens(
    run: Run, source: Source, options: ScaleOptions, notes: Notes, stream: bool | None = None
) -> None:
    """Weigh the first token of the calibration windows of `run` for GPTQ where `options` ask for that, unless it is
    done, and write `first_tokens.json`.
    """
    if not options.weigh_first_token:
        return
    name = run.calibration.name
    inputs = {"model": source.fingerprint, name: run.record().stages["corpus"].outputs[name]}
    key = Key(inputs, Options(), NO_FACTS)
    if FIRST_TOKENS.is_current(run, key):
        return
    release_memory()  # of the measurement, before memory decides how this runs
    windows = spread_windows(load_tokens(run, run.calibration, source.text_config.vocab_size), WINDOWS)
    size = max(1, TOKENS // windows.shape[1])
    batches = in_batches(windows, size)
    with FIRST_TOKENS.writing(run, key, notes) as log:
        if FIRST_TOKENS_PASS.goes_by_layer(source, stream, windows.shape[1]):
            with FIRST_TOKENS.working(run, key, notes) as folder:
                layerwise = LayerwiseFirstTokens(source, batches, folder, device())
                layerwise.run(notes.report, "Weighing first tokens in")
                squares = layerwise.results.squares
        else:
            squares = _in_memory(source, batches, notes)
        weights = {module: sums.weight for module, sums in squares.items()}
        write_document(run.first_tokens, FirstTokens(windows=len(windows), weights=weights))
        log.outputs.append(run.first_tokens)
    release_memory()


def _in_memory(source: Source, batches: Batches, notes: Notes) -> dict[str, GradientSquares]:
    model = load_model(source, torch.float32, device()).requires_grad_(False)
    watched = WatchedGemms(model, observed_gemms(model))
    sums: list[dict[str, GradientSquares]] = []
    with notes.track("Weighing first tokens", sum(ids.size for ids in batches.values()), "tokens") as advance:
        for batch, ids in batches.items():
            sums.append(batch_squares(watched, batch, ids))
            advance(ids.size)
    return added(sums)


def load_first_tokens(run: Run) -> dict[str, float]:
    """Read the weights of `first_tokens.json`; raises InputError where it is missing or changed."""
    return read_document(run.require(run.first_tokens, FIRST_TOKENS.name), FirstTokens).weights


def _weigh_outputs(run: Run, source: Source, count: int, notes: Notes) -> None:
    name = run.calibration.name
    inputs = {"model": source.fingerprint, name: run.record().stages["corpus"].outputs[name]}
    windows = spread_windows(load_tokens(run, run.calibration, source.text_config.vocab_size), count)
    key = Key(inputs, Options(), OutputFacts(windows=len(windows)))
    if OUTPUTS.is_current(run, key):
        return
    if count > len(windows):
        notes.note(f"--weigh-outputs {count:,}: the run has {len(windows):,} calibration windows, and all are taken")
    release_memory()
    with OUTPUTS.writing(run, key, notes) as log, OUTPUTS.working(run, key, notes) as folder:
        gathering = OutputMoments(source, in_batches(windows, 1), folder, device())
        gathering.run(notes.report, "Weighing outputs in")
        without = [module for module in gathering.gemms if not (gathering.outputs / f"{module}.npy").is_file()]
        if without:
            notes.note(left_out(without))
        shutil.rmtree(run.output_moments, ignore_errors=True)
        with replacing(run.output_moments) as partial:
            shutil.copytree(gathering.outputs, partial, copy_function=os.link)
        log.outputs += sorted(run.output_moments.glob("*.npy"))
    release_memory()


def check_outputs(options: ScaleOptions, windows: int) -> None:
    """Raise InputError where `options` revise codes by outputs, and of so many calibration `windows` none would be left
    to judge them.
    """
    if not options.weighs_outputs or min(options.weigh_outputs, windows) > 1:
        return
    more = "--weigh-outputs 20" if windows > 1 else "more --samples"
    raise InputError(
        f"--weigh-outputs {options.weigh_outputs:,}",
        "one window gives gradients, and none is left to judge the codes by",
        f"give {more}, or leave it out",
    )


def idle_notes(options: ScaleOptions) -> list[str]:
    """Say why `--weigh-first-token` and `--weigh-outputs` change nothing, where they were asked for and do not."""
    rounded = f"of --weight-rounding gptq, and weights are rounded by {options.weight_rounding}"
    notes = []
    if options.weigh_first_token and not options.weighs_first_token:
        notes.append(f"--weigh-first-token: is {rounded}; it is left out")
    if options.weigh_outputs and not options.weighs_outputs:
        reason = "GPTQ rounds weights in blocks without it" if options.needs_moments else f"revises codes {rounded}"
        notes.append(f"--weigh-outputs {options.weigh_outputs:,}: {reason}; it is left out")
    return notes


def left_out(modules: Sequence[str]) -> str:
    """Note the GEMMs that have no gradients, which are rounded by GPTQ alone."""
    return _without_outputs(modules, "GEMM") + (
        ", which have no finite gradient for each token of a window, as those of experts, or moments that memory does "
        "not hold"
    )


def beyond_memory_note(modules: Sequence[str]) -> str:
    """Note the GEMMs for whose revision memory did not suffice, which are rounded by GPTQ alone."""
    return _without_outputs(modules, "GEMM") + ", whose revision memory does not hold"


def in_blocks_note(modules: Sequence[str]) -> str:
    """Note the weights in blocks, which are rounded by GPTQ alone."""
    return _without_outputs(modules, "weight", " in blocks")


def _without_outputs(modules: Sequence[str], noun: str, where: str = "") -> str:
    one = len(modules) == 1
    listed = f"{len(modules):,} {noun}{'' if one else 's'}{where} ({modules[0]}{'' if one else ' …'})"
    return f"--weigh-outputs: GPTQ rounds {listed} without {'its' if one else 'their'} outputs"


def output_folder(run: Run, options: ScaleOptions) -> Path | None:
    """The folder of what is known of outputs; None where `options` do not ask for it."""
    return run.output_moments if options.weighs_outputs else None
