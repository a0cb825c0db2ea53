"""Every stage of a run as a value, in the order of work.

This page shows what each stage reads, writes and depends on. Its options are the fields of its class in `options`. Its
facts, the classes here, are other conditions that it works under: they are recorded and part of its key, like options.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from ...calibrate.measure.statistics import TextSource
from ...core.commands import engine_stage
from ...core.files import Strict
from ...options import (
    Accumulator,
    AdapterLearningOptions,
    Baseline,
    BenchOptions,
    Clipping,
    CompareOptions,
    ContinueOptions,
    CorpusOptions,
    EngineOptions,
    EvaluateOptions,
    ExportOptions,
    FormChoiceOptions,
    MeasureOptions,
    PageOptions,
    Precision,
    ScaleOptions,
    SensitivityOptions,
    TokenizerChoice,
    TritonOptions,
    TuneOptions,
    ValidateOptions,
    WeightLearningOptions,
    WeightMethod,
)
from ...options.declare import Options
from .stage import Choices, Facts, NoFacts, Stage

#: The largest token id that a tokenizer can hold: tokenizers counts in 32 bits.
LARGEST_ID = 2**32 - 1
Prefix = Annotated[
    list[Annotated[int, Field(ge=0, le=LARGEST_ID)]], Field(description="tokens that each window begins with")
]
Fingerprints = Annotated[dict[str, str], Field(description="name -> fingerprint of what lies beside the model")]
Overlap = Annotated[
    float | None, Field(description="share of a text that is in the other, where it is too much and was allowed")
]


class CorpusFacts(Strict):
    """Facts of the texts that windows were cut from, and what tokenized them. `other_tokens`: the kinds of text, in
    words, that vLLM reads as other tokens; `runs`: paths of merged runs.
    """

    data: str
    eval_data: str
    model: str
    sources: list[TextSource] | None = None
    tokenizer: TokenizerChoice = "file"
    other_tokens: list[str] | None = None
    prefix: Prefix = Field(default=[])
    overlap: Overlap = None
    runs: list[str] | None = None


class MeasureFacts(Strict):
    """Facts of a measurement. `moments`: second moments were gathered for GPTQ; `runs`: paths of merged runs."""

    moments: bool = False
    prefix: Prefix = Field(default=[])
    adapters: Fingerprints | None = None
    runs: list[str] | None = None


class CostliestFacts(Strict):
    """Facts of the choice of weights that stay in BF16: the options that decide which are candidates, what each loses,
    and how many stay. `rounded`: what the codes by GPTQ depend on whose losses decide; None: nearest ones decide.
    """

    bf16_weights: float
    weight_method: WeightMethod = "mse"
    skip: list[str] = Field(default=[])
    only: list[str] = Field(default=[])
    rounded: str | None = None


class OutputFacts(Strict):
    """Facts of the gradients at outputs. `windows`: those that ran forward and back."""

    windows: int


class QuantizeFacts(Strict):
    """Facts of a checkpoint. `batch_size`: windows that ran through a layer together, for sequential rounding;
    `shrinkage`: how the moments of GPTQ are shrunk, which is `SHRINKAGE`; `of_any_input`: a search's candidate, whose
    codes may be for inputs in other forms; `tokenizer`: the one that is written.
    """

    adapters: Fingerprints | None = None
    batch_size: int | None = None
    shrinkage: tuple[float, float] | None = None
    of_any_input: bool | None = None
    tokenizer: TokenizerChoice = "file"


class FormFacts(Strict):
    """Facts of a form that was searched for. `limit`: of the increase of perplexity, a fraction; `max_kl`, `max_flips`:
    those that were asked for; `scales`: digest of the options of scales that were asked for; `asked`: those of them
    that the search obeys since somebody gave them, be it with their default values.
    """

    limit: float
    max_kl: float | None = None
    max_flips: float | None = None
    scales: str
    asked: list[str] | None = None


class HostRuntime(Strict):
    """A runtime that another host added to what `validate` wrote: the inputs that are its own, and the host's time and
    versions.
    """

    inputs: list[str]
    version: str
    libraries: dict[str, str]
    seconds: float


class GraphFacts(Strict):
    """Facts of a graph. `past`: it takes the cache in blocks, or as before decision 73, to concatenate new keys to."""

    past: Literal["blocks", "concatenated"] = "blocks"


class ValidateFacts(Strict):
    """Facts of the evaluated windows. `beside`: the runtimes that were added on other hosts."""

    prefix: Prefix = Field(default=[])
    overlap: Overlap = None
    beside: dict[str, HostRuntime] | None = None


class EvaluateFacts(Strict):
    """Facts of answers to tasks. `harness`: the version of lm-eval."""

    harness: str


class NeedleFacts(Strict):
    """Facts of needles. `accumulator`: of the sums that some are asked with too."""

    accumulator: Accumulator | None = None


class DistillFacts(Strict):
    """Facts of learned weights. `start`: digest of everything that the codes to begin with depend on."""

    data: str
    start: str


class AdapterFacts(Strict):
    """Facts of a learned adapter. `data`: the text that it was learned from."""

    data: str


class ContinueFacts(Strict):
    """Facts of the continuations. `tokens`: the length of each."""

    tokens: int


#: The stages of a run, in the order of work.
STAGES: list[Stage[Any, Any]] = []


def stage(
    name: str, options: type[Choices], facts: type[Facts], *, inputs: tuple[str, ...], outputs: tuple[str, ...],
    older: Mapping[str, JsonValue] = MappingProxyType({}),
) -> Stage[Choices, Facts]:  # fmt: skip
    """Define a stage (`Stage` has its fields), and enter it into `STAGES`."""
    STAGES.append(defined := Stage(name, options, facts, inputs, outputs, older))
    return defined


#: The files that every FP8 runtime reads.
FP8_FILES = ("scales.json", "model/*", "attention.json")
STATISTICS = ("statistics.safetensors", "statistics.json", "moments/*")
#: What scales and codes are chosen by besides statistics.
CHOICES = ("costliest.json", "first_tokens.json", "output_moments/*")

#: Cuts texts into calibration windows and evaluation tokens.
CORPUS = stage(
    "corpus",
    CorpusOptions,
    CorpusFacts,
    inputs=("tokens", "evaluation", "images"),
    outputs=("calibration.npz", "evaluation.npz", "images.json"),
    older={"bos": "never", "tokenizer": "auto"},
)
#: Runs the float model on the windows.
MEASURE = stage(
    "measure",
    MeasureOptions,
    MeasureFacts,
    inputs=("model", "calibration.npz", "images.json", "statistics [0-9]*"),
    outputs=STATISTICS,
)
#: Measures the queries of attention, for their FP8 scales.
QUERIES = stage(
    "queries",
    Options,
    NoFacts,
    inputs=("model", "calibration.npz"),
    outputs=("queries.safetensors",),
)
#: Weighs the first token of the windows in second moments.
FIRST_TOKENS = stage(
    "first-tokens",
    Options,
    NoFacts,
    inputs=("model", "calibration.npz"),
    outputs=("first_tokens.json",),
)
#: Gathers the gradients at the outputs of GEMMs, to revise GPTQ's codes by.
OUTPUTS = stage(
    "outputs",
    Options,
    OutputFacts,
    inputs=("model", "calibration.npz"),
    outputs=("output_moments/*",),
)
#: Chooses the weights that stay in BF16 since FP8 costs them most.
COSTLIEST = stage(
    "costliest",
    Options,
    CostliestFacts,
    inputs=("model", "calibration.npz"),
    outputs=("costliest.json",),
)
#: Learns the codes of weights from the float model, beginning with those that `quantize` gives without it.
DISTILL = stage(
    "distill",
    WeightLearningOptions,
    DistillFacts,
    inputs=(*STATISTICS, *CHOICES, "calibration.npz", "queries.safetensors", "windows", "held out"),
    outputs=("distill.json", "distilled.safetensors"),
)
#: Chooses scales from statistics, and writes the checkpoint.
QUANTIZE = stage(
    "quantize",
    ScaleOptions,
    QuantizeFacts,
    inputs=(*STATISTICS, *CHOICES, "calibration.npz", "queries.safetensors", "distilled.safetensors"),
    outputs=("scales.json", "model/*"),
    older={"tokenizer": "auto"},
)
#: Finds the cheapest form that meets the limit, where `fp8q run` was asked for none.
FORMS = stage(
    "forms",
    FormChoiceOptions,
    FormFacts,
    inputs=("model", "calibration.npz", "evaluation.npz"),
    outputs=("forms.json",),
)
#: Exports both ONNX graphs of the checkpoint.
EXPORT = stage(
    "export",
    ExportOptions,
    GraphFacts,
    inputs=(*FP8_FILES, "queries.safetensors", *STATISTICS),
    outputs=("model/*", "attention.json"),
    older={"logits": "all", "past": "concatenated"},
)
#: Learns an adapter on the checkpoint, toward the float model.
ADAPTER = stage(
    "adapter",
    AdapterLearningOptions,
    AdapterFacts,
    inputs=("scales.json", "model/*", "windows", "held out"),
    outputs=("adapter.json", "adapter/*"),
)
#: Export the source model in the precisions that FP8 is compared with.
EXPORT_BASELINE: dict[Baseline, Stage[Clipping, GraphFacts] | Stage[Options, GraphFacts]] = {
    "bf16": stage(
        "export-bf16",
        Options,
        GraphFacts,
        inputs=("model",),
        outputs=("baselines/bf16/*",),
        older={"past": "concatenated"},
    ),
    "int8": stage(
        "export-int8",
        Clipping,
        GraphFacts,
        inputs=("model", *STATISTICS, "scales.json"),
        outputs=("baselines/int8/*",),
        older={"past": "concatenated"},
    ),
}
#: Builds engines of the FP8 model.
BUILD_ENGINE = stage(
    engine_stage("fp8"),
    EngineOptions,
    NoFacts,
    inputs=FP8_FILES,
    outputs=("engines/*",),
)
#: Runs the held-out text through the runtimes.
VALIDATE = stage(
    "validate",
    ValidateOptions,
    ValidateFacts,
    inputs=(*FP8_FILES, "baselines/*", "engines/*", "tokens", "images.json"),
    outputs=("accuracy.json", "tokens.npz", "top_logits.npz"),
)
#: Asks BF16 and FP8 for sentences that are hidden in long prompts.
NEEDLES = stage(
    "needles",
    Options,
    NeedleFacts,
    inputs=(*FP8_FILES, "model", "prompts"),
    outputs=("needles.json",),
)
#: Asks a server, or another checkpoint, for the evaluation text.
COMPARE = stage(
    "compare",
    CompareOptions,
    NoFacts,
    inputs=("tokens.npz", "top_logits.npz"),
    outputs=("compare.json",),
)
#: Asks BF16 and FP8 lm-eval's tasks.
EVALUATE = stage(
    "evaluate",
    EvaluateOptions,
    EvaluateFacts,
    inputs=(*FP8_FILES, "model", "tasks"),
    outputs=("evaluation.json", "answers/*"),
)
#: Measures the loss that each tensor causes alone.
SENSITIVITY = stage(
    "sensitivity",
    SensitivityOptions,
    NoFacts,
    inputs=(*FP8_FILES, "calibration.npz"),
    outputs=("sensitivity.json",),
    older={"stream": False},
)
#: Finds the cheapest mix within a budget of loss.
TUNE = stage(
    "tune",
    TuneOptions,
    NoFacts,
    inputs=(*CORPUS.outputs, *STATISTICS, *FP8_FILES),
    outputs=("tune.json",),
)
#: Writes the Triton model repository.
TRITON = stage(
    "triton",
    TritonOptions,
    NoFacts,
    inputs=(*FP8_FILES, "engines/*"),
    outputs=("triton/*",),
)
#: Measures the time of answers.
BENCH = stage(
    "bench",
    BenchOptions,
    NoFacts,
    inputs=(*FP8_FILES, "baselines/*", "against *"),
    outputs=("bench.json",),
)
#: Continues the same prompts with BF16 and FP8.
CONTINUE = stage(
    "continue",
    ContinueOptions,
    ContinueFacts,
    inputs=(*FP8_FILES, "evaluation.npz"),
    outputs=("continuations.json",),
)
#: Writes the page and the notebook, from the outputs of all other stages.
REPORT = stage(
    "report",
    PageOptions,
    NoFacts,
    inputs=("*",),
    outputs=("report.html", "report.ipynb"),
)


def build_engine_stage(precision: Precision, adapter: str | None = None) -> Stage[EngineOptions, NoFacts]:
    """The stage that builds the engines of a precision, or of the FP8 model with an adapter."""
    inputs = FP8_FILES if precision == "fp8" else (f"baselines/{precision}/*",)
    return replace(BUILD_ENGINE, name=engine_stage(precision, adapter), inputs=inputs)
