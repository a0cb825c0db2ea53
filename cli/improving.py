"""The commands that find the cause of a loss, and lessen it; registered with the others, whose file imports this."""

from ..calibrate.ranks.torchrun import process_rank
from ..core.errors import InputError
from ..core.run import Run
from ..options import DistillOptions, DoctorOptions, SensitivityOptions, TuneOptions
from ..options.declare import first_given
from .application import app, terminal
from .arguments import Apply, Common, ExaminedRun, LearningData, RunPath

__all__ = ["distill", "doctor", "sensitivity", "tune"]


@app.command
def distill(
    run: RunPath,
    /,
    *,
    data: LearningData = None,
    options: DistillOptions = DistillOptions(),
    common: Common = Common(),
) -> None:
    """Learn the codes of the weights from the BF16 model, so that FP8 gives its distribution more nearly.

    Scales, and the cost of the engine, stay as they are. One window in ten is held out, and the weights of the best
    moment win; where nothing gets better, nothing changes. It gains most where inputs have two FP8 codes.

    With --train adapter the FP8 model stays as it is, and a LoRA adapter is learned beside it, in PEFT's form.
    """
    from .. import api
    from . import views

    speak = terminal()
    learned = api.distill(run, data, options, speak)
    if process_rank().rank == 0:
        views.show_distillation(speak, Run(run), learned, common.as_json)


@app.command
def sensitivity(
    run: RunPath, /, *, options: SensitivityOptions = SensitivityOptions(), common: Common = Common()
) -> None:
    """Tell which tensor causes the loss: the KL of quantizing each one alone, worst first.

    Weights, activations and caches; beside each the KL that two FP8 codes an activation, or BF16, would leave.
    """
    from .. import api
    from . import views

    speak = terminal()
    views.show_losses(speak, api.sensitivity(run, options, speak), common.as_json)


@app.command
def tune(
    run: RunPath, /, *, options: TuneOptions = TuneOptions(), apply: Apply = False, common: Common = Common()
) -> None:
    """Find the cheapest mix of formats that meets a budget of loss; without a budget, the cost of every loss.

    For each module a mix takes one FP8 code an activation (one term), two codes (two terms; a tail: two for decoded
    tokens and the end of a prompt, one for the rest) or BF16. It also chooses how weights are rounded and the cache is
    stored. docs/tune.md explains it.
    """
    from .. import api
    from ..stages.tune import check_met
    from . import views

    speak = terminal()
    tuning = api.tune(run, options, apply, speak)
    views.show_tuning(speak, run, tuning, common.as_json)
    check_met(tuning)


@app.command
def doctor(run: ExaminedRun = None, /, *, options: DoctorOptions = DoctorOptions(), common: Common = Common()) -> None:
    """List this machine's runtimes and GPUs; or check the numbers of a RUN, with verdict, module and remedy.

    Exit code 3 where a check is bad. `fp8q lint RUN` checks the files, `fp8q inspect RUN` shows every module.
    """
    from . import checklist

    if run is None:
        if option := first_given(options, options.declared()):
            raise InputError(option, "is for a RUN, and none is given", "name one, or leave this out")
        checklist.machine(terminal(), common.as_json)
    else:
        checklist.show_checklist(terminal(), run, options, common.as_json)


for position, name in enumerate(app):
    app[name].sort_key = position  # the help lists the commands as they stand here, not by name
