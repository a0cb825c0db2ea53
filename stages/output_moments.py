"""The stage `outputs`: gather the gradients at outputs by which GPTQ's codes are revised (`--weigh-outputs`).

Some calibration windows run forward and back through the model in FP32, layer by layer whatever memory there is: H_O of
all GEMMs together is larger than the weights.
"""

import os
import shutil
from pathlib import Path

from ..calibrate.model.source import Source
from ..core.files import replacing
from ..core.memory import release_memory
from ..core.run import Run
from ..options import ScaleOptions
from ..options.declare import Options
from ..quantize.sensitivity.output_moments import OutputMoments
from .corpus import in_batches, load_tokens, spread_windows
from .first_tokens import weigh_first_tokens
from .pipeline.stage import Key, Notes, device
from .pipeline.stages import OUTPUTS, OutputFacts


def run_gradients(run: Run, source: Source, options: ScaleOptions, notes: Notes, stream: bool | None = None) -> None:
    """Gather what GPTQ takes from gradients, where `options` ask for it and it is not done: `first_tokens.json` and
    `output_moments/`. `stream`: weigh first tokens layer by layer.
    """
    weigh_first_tokens(run, source, options, notes, stream)
    if options.weigh_outputs:
        _weigh_outputs(run, source, options.weigh_outputs, notes)


def _weigh_outputs(run: Run, source: Source, count: int, notes: Notes) -> None:
    name = run.calibration.name
    inputs = {"model": source.fingerprint, name: run.record().stages["corpus"].outputs[name]}
    key = Key(inputs, Options(), OutputFacts(windows=count))
    if OUTPUTS.is_current(run, key):
        return
    release_memory()
    windows = spread_windows(load_tokens(run, run.calibration, source.text_config.vocab_size), count)
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


def left_out(modules: list[str]) -> str:
    """Note the GEMMs that have no gradients, which are rounded by GPTQ alone."""
    return (
        f"--weigh-outputs: {len(modules):,} GEMMs ({modules[0]}{' …' if len(modules) > 1 else ''}) have no finite "
        "gradients at outputs of a window's tokens, as experts, or no held-out ones; GPTQ rounds them without"
    )


def output_folder(run: Run, options: ScaleOptions) -> Path | None:
    """The folder of what is known of outputs; None where `options` do not ask for it."""
    return run.output_moments if options.weighs_outputs else None
