"""The arguments and options of the command line, each worded once: several commands share most of them.

Defaults are those of `options`; what a default depends on is said in words.
"""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from .. import __version__
from ..options import RUNTIMES, AmaxAlgorithm, KvCache, Method, Precision, ScaleGrid, WeightMethod, WeightRounding

# How the help groups them.
TEXT, SCALES, ENGINE, EVALUATION, MODEL = "Text", "Scales", "Graph and engine", "Evaluation", "Model and machine"

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="A checkpoint's directory, or its name on the Hugging Face hub.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run directory that `fp8q calibrate` made.")]
OnnxArgument = Annotated[
    Path, typer.Argument(metavar="PATH", help="An ONNX file; its external data stay where they are, unread.")
]
OfRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN",
        help="Hold it against what this run promises; by default the run in whose model/ the file lies, if any.",
    ),
]
RunsArgument = Annotated[
    list[Path], typer.Argument(metavar="RUN", help="The run directories to add, two or more; they stay as they are.")
]
SourceModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        rich_help_panel=MODEL,
        help="Where the model is here.",
        show_default="where the runs say it was",
    ),
]
Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="TEXT[=WEIGHT]",
        rich_help_panel=TEXT,
        help=(
            "Text to calibrate on: .txt, .jsonl, .parquet, a saved `datasets` directory or a hub data set. "
            "Repeatable: each text gives its weight's share of the windows."
        ),
    ),
]
ChatTemplate = Annotated[
    bool,
    typer.Option(
        "--chat-template",
        rich_help_panel=TEXT,
        help="Render rows of `messages` (role, content) by the tokenizer's own chat template.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        rich_help_panel=TEXT,
        help="Draw the windows with this seed.",
        show_default="evenly over the text",
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="RUN", help="The run directory to write, or to go on with.")]
EvalData = Annotated[
    str | None,
    typer.Option(
        "--eval-data",
        metavar="TEXT",
        rich_help_panel=TEXT,
        help="Text to evaluate on.",
        show_default="the last tenth of --data, held out",
    ),
]
ClipMethod = Annotated[
    Method,
    typer.Option(
        "--method", rich_help_panel=SCALES, help="How the scales of activations and of an FP8 cache are chosen."
    ),
]
Percentile = Annotated[
    float,
    typer.Option("--percentile", metavar="P", rich_help_panel=SCALES, help="For --method percentile, in percent."),
]
WeightRoundingOption = Annotated[
    WeightRounding,
    typer.Option(
        "--weight-rounding",
        rich_help_panel=SCALES,
        help="gptq: let weights make up for each other's rounding errors, by the inputs' second moments.",
    ),
]
Margin = Annotated[
    int,
    typer.Option(
        "--margin",
        metavar="N",
        rich_help_panel=SCALES,
        help="Multiply these scales by 2^N: more headroom, more underflow.",
    ),
]
Grid = Annotated[
    ScaleGrid,
    typer.Option("--scale-grid", rich_help_panel=SCALES, help="Which numbers these scales may be; rounded up to."),
]
HistoryLength = Annotated[
    int,
    typer.Option(
        "--amax-history-len",
        metavar="N",
        rich_help_panel=SCALES,
        help="For --method delayed: batches in the history; more than there are means all.",
    ),
]
Algorithm = Annotated[
    AmaxAlgorithm,
    typer.Option(
        "--amax-compute-algo",
        rich_help_panel=SCALES,
        help="For --method delayed: the history's largest amax, or its last.",
    ),
]
Interval = Annotated[
    int,
    typer.Option(
        "--interval",
        metavar="N",
        rich_help_panel=SCALES,
        help="For --method delayed: batches from one scale to the next.",
    ),
]
ByWeights = Annotated[
    WeightMethod,
    typer.Option(
        "--weight-method", rich_help_panel=SCALES, help="How the scales of the weights' output channels are chosen."
    ),
]
KvCacheOption = Annotated[
    KvCache,
    typer.Option(
        "--kv-cache",
        rich_help_panel=SCALES,
        help="What of the cache is kept in FP8: nothing, the values, or keys and values.",
    ),
]
AS_IT_IS = "as the run has it"
KeptWeightMethod = Annotated[
    WeightMethod | None,
    typer.Option(
        "--weight-method",
        rich_help_panel=SCALES,
        help="How the scales of the weights' output channels are chosen.",
        show_default=AS_IT_IS,
    ),
]
KeptKvCache = Annotated[
    KvCache | None,
    typer.Option(
        "--kv-cache",
        rich_help_panel=SCALES,
        help="What of the cache is kept in FP8: nothing, the values, or keys and values.",
        show_default=AS_IT_IS,
    ),
]
KeptSkip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip",
        metavar="PATTERN",
        rich_help_panel=SCALES,
        help="Keep modules whose name matches (* and ?) in BF16. Repeatable. '' takes back what the run has.",
        show_default=AS_IT_IS,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        "--samples",
        metavar="N",
        rich_help_panel=TEXT,
        help="Windows to calibrate on.",
        show_default="512, or as many as the text has",
    ),
]
SeqLen = Annotated[
    int | None,
    typer.Option(
        "--seq-len",
        metavar="N",
        rich_help_panel=TEXT,
        help="Tokens in a window.",
        show_default="2048, or the model's positions",
    ),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", metavar="N", rich_help_panel=TEXT, help="Windows run together.")
]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip",
        metavar="PATTERN",
        rich_help_panel=SCALES,
        help="Keep modules whose name matches (* and ?) in BF16. Repeatable.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        rich_help_panel=SCALES,
        help="Quantize only modules whose name matches (* and ?). Repeatable.",
    ),
]
KeptOnly = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="PATTERN",
        rich_help_panel=SCALES,
        help="Quantize only modules whose name matches (* and ?). Repeatable. '' takes back what the run has.",
        show_default=AS_IT_IS,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision", metavar="NAME", rich_help_panel=MODEL, help="Branch, tag or commit of a model on the hub."
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        rich_help_panel=MODEL,
        help="Run the Python code that comes with the checkpoint's tokenizer.",
    ),
]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        rich_help_panel=MODEL,
        help="Calibrate one decoder layer at a time.",
        show_default="when memory does not hold the model",
    ),
]
Batches = Annotated[
    str | None,
    typer.Option(
        "--batches",
        metavar="A:B",
        rich_help_panel=TEXT,
        help="Measure batches A up to B alone (B itself not), for `fp8q merge`; choose no scales.",
    ),
]
Dtype = Annotated[
    Literal["bf16", "fp16"],
    typer.Option("--dtype", rich_help_panel=ENGINE, help="What the graph computes in outside its FP8 products."),
]
PrecisionOption = Annotated[
    Precision,
    typer.Option(
        "--precision",
        rich_help_panel=ENGINE,
        help="The FP8 model, or what it is compared with: BF16, or INT8 of the same modules.",
    ),
]
AttentionOption = Annotated[
    Literal["wide", "fp8"],
    typer.Option(
        "--attention",
        rich_help_panel=ENGINE,
        help="Multiply queries by keys and probabilities by values in the compute type, or in FP8.",
    ),
]
RuntimeOption = Annotated[
    Literal["auto", "tensorrt", "tensorrt-rtx"],
    typer.Option("--runtime", rich_help_panel=ENGINE, help="What builds the engine."),
]
Target = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="SM",
        rich_help_panel=ENGINE,
        help="Compute capability to build for. Repeatable.",
        show_default="this GPU, or sm89 and sm120",
    ),
]
MaxBatch = Annotated[
    int, typer.Option("--max-batch", metavar="N", rich_help_panel=ENGINE, help="Most sequences in a batch.")
]
MaxSeqLen = Annotated[
    int | None,
    typer.Option(
        "--max-seq-len",
        metavar="N",
        rich_help_panel=ENGINE,
        help="Most positions of a sequence.",
        show_default="2048, or the model's positions",
    ),
]
MaxPrompt = Annotated[
    int | None,
    typer.Option(
        "--max-prompt",
        metavar="N",
        rich_help_panel=ENGINE,
        help="Most tokens that one step takes in.",
        show_default="--max-seq-len",
    ),
]
OptBatch = Annotated[
    int | None,
    typer.Option(
        "--opt-batch",
        metavar="N",
        rich_help_panel=ENGINE,
        help="Batch that kernels are chosen for.",
        show_default="1 for prompts, --max-batch for decoding",
    ),
]
OptSeqLen = Annotated[
    int | None,
    typer.Option(
        "--opt-seq-len",
        metavar="N",
        rich_help_panel=ENGINE,
        help="Length that kernels are chosen for.",
        show_default="a quarter of --max-seq-len for prompts, all of it for decoding",
    ),
]
Workspace = Annotated[
    int | None,
    typer.Option(
        "--workspace",
        metavar="MIB",
        rich_help_panel=ENGINE,
        help="Most memory for intermediate results.",
        show_default="the runtime's own limit",
    ),
]
MinFp8Share = Annotated[
    str | None,
    typer.Option(
        "--min-fp8-share",
        metavar="SHARE",
        rich_help_panel=ENGINE,
        help="Fail (exit 3) when fewer of the promised products run in FP8, such as 96% or 0.96.",
        show_default="all of them",
    ),
]
BuiltTarget = Annotated[
    list[str] | None,
    typer.Option("--target", metavar="SM", help="Show the engine for this target. Repeatable.", show_default="all"),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", help="Read this engine instead of the run's own, such as one that trtexec built."
    ),
]
EvaluationText = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="TEXT",
        rich_help_panel=EVALUATION,
        help="Text to evaluate on.",
        show_default="what was held out",
    ),
]
Runtimes = Annotated[
    str,
    typer.Option(
        "--runtimes", metavar="LIST", rich_help_panel=EVALUATION, help=f"Of {', '.join(RUNTIMES)}; separated by commas."
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        metavar="N",
        rich_help_panel=EVALUATION,
        help="Tokens in an evaluation window.",
        show_default="the calibration window",
    ),
]
Stride = Annotated[
    int | None,
    typer.Option(
        "--stride", metavar="N", rich_help_panel=EVALUATION, help="Tokens between windows.", show_default="the context"
    ),
]
MaxIncrease = Annotated[
    str | None,
    typer.Option(
        "--max-ppl-increase",
        metavar="SHARE",
        rich_help_panel=EVALUATION,
        help="Fail (exit 3) when perplexity rises by more, such as 1% or 0.01.",
    ),
]
Delayed = Annotated[
    bool, typer.Option("--delayed", help="Also how often the next batch would have saturated under a history of amax.")
]
DelayedHistoryLength = Annotated[
    int,
    typer.Option(
        "--amax-history-len", metavar="N", help="For --delayed: batches in the history; more than there are means all."
    ),
]
DelayedAlgorithm = Annotated[
    AmaxAlgorithm, typer.Option("--amax-compute-algo", help="For --delayed: the history's largest amax, or its last.")
]
DelayedInterval = Annotated[
    int, typer.Option("--interval", metavar="N", help="For --delayed: batches from one scale to the next.")
]
DelayedMargin = Annotated[int, typer.Option("--margin", metavar="N", help="For --delayed: multiply its scales by 2^N.")]
Against = Annotated[
    str | None,
    typer.Option(
        "--against", metavar="TEXT", help="Also measure this text, and show which tensors would saturate on it."
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on one line, and nothing else, on standard output.")
]


def tell_version(asked: bool) -> None:
    """Print the version and end, where it was asked for."""
    if asked:
        sys.stdout.write(f"fp8q {__version__}\n")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=tell_version, help="Print the version and exit.")
]
