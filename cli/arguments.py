"""Arguments of the commands beside option classes: the model, texts and runs, and the form of the output.

Options that say how something is done are fields of `options`; a command names the classes it takes, and `without` or
`only` leave out what means nothing there.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..calibrate.text.formats import SUFFIXES
from ..options import GradientFormat, Preset, WeightScale
from ..options.declare import ENGINE, EVALUATION, GENERATION, MEASUREMENT, MODEL, OPTIONS, SCALES, TEXT, Options, option

#: Marks what may be a path or a name on the hub: in a file of options a path is relative to that file.
PATH_OR_NAME = "a path, or a name on the hub"

Model = Annotated[str, Parameter(help="A checkpoint's directory, or its name on the Hugging Face hub."), PATH_OR_NAME]
RunOrLog = Annotated[
    Path,
    Parameter(name="RUN", help="The run directory that `fp8q calibrate` made, or the directory of a training log."),
]
RunOrOriginal = Annotated[
    Path,
    Parameter(
        name="RUN", help="The run directory that `fp8q calibrate` made, or the original of two checkpoints to compare."
    ),
]
RunPath = Annotated[Path, Parameter(help="The run directory that `fp8q calibrate` made.")]
ExaminedRun = Annotated[
    Path | None,
    Parameter(
        name="RUN", help="A run directory that `fp8q calibrate` made; without it: this machine.", show_default=False
    ),
]
RunPaths = Annotated[
    list[Path], Parameter(name="RUN", help="The run directories to add, two or more; they stay as they are.")
]
LintPath = Annotated[
    Path | None,
    Parameter(
        name="PATH",
        help="An ONNX file (its external data stay where they are, unread), a repository, an FP8 checkpoint, or a run.",
    ),
]
OlderApplyScales = Annotated[
    WeightScale | None,
    option(ENGINE, "An older spelling of --apply-scales.", name="--weight-scale", show=False),
]
Out = Annotated[Path, option(OPTIONS, "The run directory: written, or continued where it exists.", "RUN")]
ConvertedOut = Annotated[
    Path, option(OPTIONS, "The directory of the new checkpoint: new, empty, or what a killed call has begun.", "DIR")
]
RuleCode = Annotated[
    str | None,
    option(OPTIONS, "Explain this rule, or all whose code begins so (F1, C, S, R), and lint nothing.", "CODE"),
]
OfRun = Annotated[
    Path | None,
    option(
        OPTIONS,
        "Check it against the scales of this run too; by default the run in whose model/ the file lies, if any.",
        "RUN",
    ),
]
SourceModel = Annotated[
    str | None,
    option(MODEL, "The source model's checkpoint, where it has moved.", "MODEL", "where the runs read it"),
    PATH_OR_NAME,
]
Data = Annotated[
    list[str],
    option(
        TEXT,
        f"Text to calibrate on: {', '.join(SUFFIXES)}, a saved `datasets` directory or a hub data set. Repeatable: "
        "each text gives its weight's share of the windows.",
        "TEXT[=WEIGHT]",
    ),
    PATH_OR_NAME,
]
EvalData = Annotated[
    str | None, option(TEXT, "Text to evaluate on.", "TEXT", "the last tenth of --data, held out"), PATH_OR_NAME
]
LearningData = Annotated[
    str | None, option(TEXT, "Text to learn from.", "TEXT", "that of the calibration"), PATH_OR_NAME
]
OtherData = Annotated[str | None, option(EVALUATION, "Text to evaluate on.", "TEXT", "what was held out"), PATH_OR_NAME]
BuiltTargets = Annotated[
    tuple[str, ...],
    option(OPTIONS, "Show the engine for this target. Repeatable.", "SM", "all", name="--target"),
]
PlanFile = Annotated[
    Path | None,
    option(OPTIONS, "Read this engine instead of the run's own, such as one that trtexec built.", "FILE"),
]
Delayed = Annotated[
    bool,
    option(OPTIONS, "Show also how often the next batch would saturate under a history of amax."),
]
TrainedGradients = Annotated[
    GradientFormat | None,
    option(OPTIONS, "Of a training log: the format that gradients are judged in.", default="e5m2"),
]
Against = Annotated[
    str | None,
    option(OPTIONS, "Also measure this text, and show which tensors would saturate on it.", "TEXT"),
    PATH_OR_NAME,
]
ChosenPreset = Annotated[
    Preset | None,
    option(
        SCALES,
        "Options that go together. exact: GPTQ, and the form that loses least in the server of --for: second codes of "
        "decoded tokens and the end of a prompt (a tail), or FP8 weights with activations in BF16. fast: one code "
        "everywhere and GPTQ, as every FP8 server runs it. Options that you give beside it override it.",
        "NAME",
        "none",
    ),
]
OtherRuns = Annotated[
    tuple[Path, ...],
    option(MEASUREMENT, "Measure the FP8 model of this run too, of the same source. Repeatable.", "RUN"),
]
PlotFile = Annotated[Path | None, option(OPTIONS, "Draw the results as SVG.", "FILE")]
Prompt = Annotated[
    str | None, option(GENERATION, "Text to continue, or the first message of a chat.", "TEXT", "standard input")
]
Chat = Annotated[
    bool, option(GENERATION, "Hold a conversation, by the tokenizer's own template: a line, an answer, and so on.")
]
Compare = Annotated[
    bool, option(GENERATION, "Let the BF16 source answer too, and show both, with the first token that differs.")
]
Apply = Annotated[
    bool, option(OPTIONS, "Write the run's checkpoint and graphs anew with the mix, where it meets the budget.")
]
Json = Annotated[
    bool,
    option(
        OPTIONS,
        "Print one JSON object on one line, and nothing else, on standard output.",
        name="--json",
    ),
]


@Parameter(name="*")
@dataclass(frozen=True)
class RunTexts:
    """The texts of a run, and where it goes."""

    data: Data
    out: Out
    eval_data: EvalData = None


@dataclass(frozen=True)
class Common(Options):
    """The arguments of every command on runs, which no file of options holds."""

    as_json: Json = False
    config: Annotated[
        Path | None,
        option(
            OPTIONS, "Read options that are not given here from this TOML file; paths in it are relative to it.", "FILE"
        ),
    ] = None
    print_config: Annotated[
        bool, option(OPTIONS, "Print the TOML file that repeats this command, and do nothing else.")
    ] = False
