"""Options of the graph and its engine: those of `export`, `build-engine` and `lint`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from ..core.errors import InputError
from .calibrate import DEFAULT_SEQ_LEN
from .declare import ENGINE, OPTIONS, Options, Unkeyed, between, first_changed, option, share_of

#: MiB of workspace that a runtime takes: int64 in bytes.
LARGEST_WORKSPACE = (2**63 - 1) >> 20
WeightScale = Literal["dq", "mul"]
Logits = Literal["asked", "all"]
#: The precisions that FP8 is compared with.
Baseline = Literal["bf16", "int8"]
Precision = Literal["fp8", "bf16", "int8"]
PrecisionOption = Annotated[
    Precision, option(ENGINE, "The FP8 model, or a baseline: BF16, or INT8 of the same modules.")
]


@dataclass(frozen=True)
class ExportOptions(Options):
    """Options of `fp8q export`, and of the commands that end with it; these alone can leave out the `graph`.

    `dtype`: the compute type of the FP8 graph outside its GEMMs; graphs of other precisions compute in BF16.
    """

    dtype: Annotated[
        Literal["bf16", "fp16"], option(ENGINE, "The type of everything outside the graph's FP8 GEMMs.")
    ] = "bf16"
    precision: PrecisionOption = "fp8"
    attention: Annotated[
        Literal["wide", "fp8"],
        option(ENGINE, "Multiply queries by keys and probabilities by values in the compute type, or in FP8."),
    ] = "wide"
    weight_scale: Annotated[
        WeightScale,
        option(
            ENGINE,
            "Apply the scales of a weight's channels in its DequantizeLinear (dq), or by a Mul behind the GEMM (mul).",
            name="--apply-scales",
        ),
    ] = "dq"
    logits: Annotated[
        Logits,
        option(
            ENGINE,
            "Give the logits of the positions that the graph's input logits_indices asks for, or without that "
            "input of all positions.",
        ),
    ] = "asked"
    graph: Annotated[
        bool,
        option(
            ENGINE,
            "Make the ONNX graphs. Without them engines and Triton are left out, model/ is complete for vLLM and "
            "transformers, and `fp8q export` makes them later.",
            negative="--no-graph",
        ),
    ] = True

    def __post_init__(self) -> None:
        """Refuse choices of the FP8 graph for graphs of another precision."""
        super().__post_init__()
        for name in ("attention", "weight_scale", "logits"):
            if self.precision != "fp8" and (option := first_changed(self, [name])):
                raise InputError(
                    option, f"is for the FP8 graph, not for --precision {self.precision}", "leave one of them out"
                )
        if self.precision != "fp8" and self.dtype != ExportOptions.dtype:
            raise InputError(
                f"--dtype {self.dtype}",
                f"is for the FP8 graph, and --precision {self.precision} computes in BF16",
                "leave one of them out",
            )


@dataclass(frozen=True)
class EngineOptions(Options):
    """Options of `fp8q build-engine`.

    No target: this machine's GPU, or every RTX target. `max_seq_len` None: 2048, or the model's positions.
    `max_prompt`: the most tokens of one step (None: `max_seq_len`). `opt_batch`, `opt_seq_len`: the sizes that kernels
    are chosen for (None: see `export.engine.profiles`). `workspace`: MiB that the engine's kernels may use for
    intermediate results (None: the runtime's own limit). `min_fp8_share` is stored as a fraction (None: all expected
    GEMMs), and may be given as text, `"96%"`.
    """

    runtime: Annotated[Literal["auto", "tensorrt", "tensorrt-rtx"], option(ENGINE, "The builder of the engine.")] = (
        "auto"
    )
    targets: Annotated[
        tuple[str, ...],
        option(
            ENGINE, "Compute capability to build for. Repeatable.", "SM", "this GPU, or sm89 and sm120", name="--target"
        ),
    ] = ()
    max_batch: Annotated[int, option(ENGINE, "Most sequences in a batch.", "N"), between(1)] = 8
    max_seq_len: Annotated[
        int | None,
        option(ENGINE, "Most positions of a sequence, in blocks of 64.", "N", f"{DEFAULT_SEQ_LEN}, or the model's"),
        between(1),
    ] = None
    min_fp8_share: Annotated[
        float | None,
        option(
            ENGINE,
            "Fail (exit 3) when fewer of the expected GEMMs (those in FP8 by scales.json) run in FP8, such as 96% "
            "or 0.96.",
            "SHARE",
            "all of them",
            share_of("GEMMs", "96% or 0.96"),
        ),
        Unkeyed("a gate on what is written"),
    ] = None
    max_prompt: Annotated[
        int | None,
        option(ENGINE, "Most tokens that one step takes in.", "N", "--max-seq-len"),
        between(1),
    ] = None
    opt_batch: Annotated[
        int | None,
        option(ENGINE, "Batch that kernels are chosen for.", "N", "1 for prompts, --max-batch for decoding"),
        between(1),
    ] = None
    opt_seq_len: Annotated[
        int | None,
        option(
            ENGINE,
            "Length that kernels are chosen for.",
            "N",
            "1024 for prompts, as they are read in chunks, --max-seq-len for decoding",
        ),
        between(1),
    ] = None
    workspace: Annotated[
        int | None,
        option(ENGINE, "Most memory for intermediate results.", "MIB", "the runtime's own limit"),
        between(1, LARGEST_WORKSPACE),
    ] = None
    precision: PrecisionOption = ExportOptions.precision
    adapter: Annotated[
        str | None,
        option(ENGINE, "Build from the graph with this adapter beside the model.", "NAME", "the model alone"),
    ] = None

    def __post_init__(self) -> None:
        """Refuse sizes that do not fit together, and a minimal share for an engine without FP8."""
        super().__post_init__()
        for name, limit in (("max_prompt", "max_seq_len"), ("opt_seq_len", "max_seq_len"), ("opt_batch", "max_batch")):
            value = getattr(self, name)
            most = getattr(self, limit)
            if value is not None and most is not None and value > most:
                option, of = (self.declared()[field].option for field in (name, limit))
                raise InputError(
                    f"{option} {value:,}", f"is more than {of} {most:,}", f"ask for at most that, or raise {of}"
                )
        if self.min_fp8_share is not None and self.precision != "fp8":
            raise InputError(
                f"--min-fp8-share {self.min_fp8_share:g}",
                f"is for the FP8 engine, and --precision {self.precision} expects no GEMM in FP8",
                "leave one of them out",
            )

        if self.adapter is not None and self.precision != "fp8":
            raise InputError(
                f"--adapter {self.adapter}",
                f"lies beside the FP8 graph, and --precision {self.precision} has another",
                "leave one of them out",
            )


#: The servers whose source was read for rules.
CheckpointServer = Literal["vllm", "sglang", "tensorrt-llm", "transformers"]


@dataclass(frozen=True)
class LintOptions(Options):
    """Options of `fp8q lint`: say also what `server` does with a checkpoint, of any form or none, in this `version`."""

    server: Annotated[
        CheckpointServer | None,
        option(
            OPTIONS, "Say what this server does with the checkpoint, by rules from its source.", "SERVER", name="--for"
        ),
    ] = None
    version: Annotated[
        str | None, option(OPTIONS, "The server's version, with --for.", "V", "the newest that was read")
    ] = None
