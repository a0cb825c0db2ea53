"""The rows of `real_models.py`: what is quantized, by whom and how, as models that compute in FP32.

Weights are the numbers that a checkpoint's codes stand for, whoever wrote it; inputs are rounded before each GEMM as
that form rounds them. `mxfp8.py` takes its forms from here too.
"""

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from accuracy import PEER, modelopt
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fp8q.api import RescaleOptions, scales
from fp8q.calibrate.model.bf16_gemms import compute_gemms_in_fp32
from fp8q.calibrate.model.gemms import attention_modules, observed_gemms, output_channel_axis
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.run import Run
from fp8q.options import ONE, TWO, Clipping
from fp8q.quantize.codes.blocks import group_values
from fp8q.quantize.codes.encoding import code_values, token_scales
from fp8q.quantize.reading.dequantized import fp8_source, recognize
from fp8q.quantize.reference.fp8_model import fp8_cache
from fp8q.quantize.scales.decisions import TensorScale, load_scales
from fp8q.quantize.weights.sequential import gemm_input

BF16, MODELOPT = "BF16", "ModelOpt FP8_DEFAULT_CFG"
EXACT = "fp8q, --preset exact"
SCHEMES = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK")
#: How `fp8q scales --method` chooses the clip of an activation.
CLIPS = ("percentile", "mse", "entropy")
#: The last positions of a prompt that a tail gives second codes.
TAIL = 64
#: The name under which transformers knows attention with rounded queries.
FP8_QUERIES = "fp8_queries"
#: Takes the input of a GEMM and returns the numbers that the GEMM multiplies.
Input = Callable[[torch.Tensor], torch.Tensor]
#: Module -> the numbers that its codes stand for, float32 [out, in].
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    """A model to compare with the original; `cache` makes the KV cache of a window, None: it has none."""

    model: nn.Module
    cache: Callable[[], Cache] | None = None


class LazyWeights(Mapping[str, torch.Tensor]):
    """Weights of which each is made when it is asked for: in FP32 those of larger models take as much as the model."""

    def __init__(self, modules: Iterable[str], make: Callable[[str], torch.Tensor]):
        """`make`: module -> the numbers of its codes, float32 [out, in]."""
        self._modules = tuple(modules)
        self._make = make

    def __getitem__(self, module: str) -> torch.Tensor:
        if module not in self._modules:
            raise KeyError(module)
        return self._make(module)

    def __contains__(self, module: object) -> bool:
        return module in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


@dataclass(frozen=True)
class StoredCodes:
    """An FP8 checkpoint in any form that fp8q reads: code × scale of every weight in codes, read when it is asked for;
    its scale where it has one alone; and the static scale of each module's input where it has one.
    """

    weights: Weights
    scales: Mapping[str, float]
    input_scales: Mapping[str, float]


def stored_codes(directory: Path) -> StoredCodes:
    """Open the checkpoint in `directory`."""
    source = open_source(str(directory), fingerprinted=False, recognize=recognize)
    fp8, tensors = fp8_source(source), source.weights()
    assert fp8 is not None, f"{directory} holds no codes"
    scales = dict[str, float]()
    input_scales = dict[str, float]()
    for module, codes in fp8.checkpoint.codes.items():
        if codes.granularity == "tensor":
            scales[module] = float(fp8.checkpoint.scales(codes).item())
        static = fp8.input_scale(codes.weight)
        if static is not None:
            input_scales[module] = static
    weights = LazyWeights(fp8.checkpoint.codes, lambda module: tensors.tensor(f"{module}.weight"))
    return StoredCodes(weights, scales, input_scales)


def stored_weights(run: Run) -> Weights:
    """Code × scale of every weight that `fp8q calibrate` quantized, read at once: files of a run are replaced."""
    return dict(stored_codes(run.model).weights)


def exact_input(x: torch.Tensor) -> torch.Tensor:
    """`x` itself."""
    return x


def dynamic_input(x: torch.Tensor) -> torch.Tensor:
    """Each token under a scale of its own, by its amax."""
    scale = token_scales(x)
    return code_values(x, scale) * scale


def static_input(activation: TensorScale) -> Input:
    """The codes of `activation`, one or two for each number."""
    return lambda x: gemm_input(x, activation).to(x.dtype)


def tail_input(activation: TensorScale) -> Input:
    """Of a window [1, tokens, width] whose first half is a prompt and whose second half was decoded: two codes for the
    decoded tokens and the last `TAIL` of the prompt, one for those before.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        first = x.shape[1] // 2 - TAIL
        parts = zip((x[:, :first], x[:, first:]), (ONE, TWO), strict=True)
        return torch.cat([gemm_input(part, activation.with_form(form)) for part, form in parts], 1)

    return rounded


def quantized(source: Source, weights: Weights, inputs: Mapping[str, Input]) -> nn.Module:
    """The model in FP32 with other `weights`, and `inputs` (module -> function) before its GEMMs."""
    model = load_model(source, torch.float32, "cpu")
    for name, module in observed_gemms(model).items():
        if name in weights:
            module.weight.data = weights[name].movedim(0, output_channel_axis(module)).contiguous()
        if name in inputs:
            module.register_forward_pre_hook(lambda module, given, change=inputs[name]: (change(given[0]), *given[1:]))
    return model


def bf16_model(source: Source) -> nn.Module:
    """The model in BF16, its sums in FP32 where the processor has no BF16 units."""
    model = load_model(source, torch.bfloat16, "cpu")
    compute_gemms_in_fp32(model, torch.bfloat16, "cpu")
    return model


def peer_checkpoint(
    python: str, scheme: str, directory: Path, windows: npt.NDArray[np.int64], folder: Path
) -> StoredCodes:
    """Have llm-compressor of the interpreter `python` write a checkpoint with `scheme` into a folder in `folder`, where
    it is not there: calibrated on `windows` int64 [windows, tokens] in FP32, for it takes hours in BF16 on a processor
    without its units.
    """
    out = folder / scheme
    if not (out / "config.json").is_file():
        np.save(folder / "windows.npy", windows)
        words = [python, str(PEER), str(directory), str(folder / "windows.npy"), str(out), scheme, "float32"]
        subprocess.run(words, check=True, capture_output=True)
    return stored_codes(out)


def compressed(
    source: Source, python: str, scheme: str, directory: Path, windows: npt.NDArray[np.int64], folder: Path
) -> nn.Module:
    """The model of `source` as llm-compressor writes it with `scheme`, calibrated on `windows` int64 [windows, tokens]:
    no server rounds weights again.
    """
    stored = peer_checkpoint(python, scheme, directory, windows, folder)
    if scheme == "FP8":
        inputs = {module: scaled_input(scale) for module, scale in stored.input_scales.items()}
        return quantized(source, stored.weights, inputs)
    rounded: Input = dynamic_input if scheme == "FP8_DYNAMIC" else partial(group_values, powers=False)
    return quantized(source, stored.weights, dict.fromkeys(stored.weights, rounded))


def scaled_input(scale: float) -> Input:
    """The rounding of an input by the static scale of a checkpoint."""
    one = torch.tensor([scale])
    return lambda x: code_values(x, one) * one


def peer_rows(
    source: Source, directory: Path, windows: npt.NDArray[np.int64], modules: set[str], python: str | None, folder: Path
) -> Iterator[tuple[str, Callable[[], Candidate]]]:
    """ModelOpt, and llm-compressor where an interpreter `python` has it, on the same GEMMs and calibration text."""

    def made_by(python: str, scheme: str) -> Callable[[], Candidate]:
        return lambda: Candidate(compressed(source, python, scheme, directory, windows, folder))

    yield MODELOPT, lambda: Candidate(modelopt(str(directory), windows, modules, torch.float32)[0])
    for scheme in SCHEMES if python else ():
        yield f"llm-compressor {scheme}", made_by(str(python), scheme)


def own_rows(
    run: Run, source: Source, sequential: Callable[[], Run], preset: Callable[[], Run]
) -> Iterator[tuple[str, Callable[[], Candidate]]]:
    """The forms of a run that was just calibrated with GPTQ, whose weights all forms share; `sequential` and `preset`,
    which is `--preset exact`, calibrate others.
    """
    gptq = stored_weights(run)
    nearest = dict[str, torch.Tensor]()

    def in_form(form: str, inputs: Callable[[TensorScale], Input], weights: Weights, clip: str) -> Candidate:
        scales(run.root, RescaleOptions(weight_rounding="nearest", form=(form,), clip=Clipping(clip)))
        if not nearest:
            nearest.update(stored_weights(run))
        rounded = {name: inputs(activation) for name, activation in load_scales(run).activations.items()}
        return Candidate(quantized(source, weights, rounded))

    def row(form: str, inputs: Callable[[TensorScale], Input], weights: Weights, clip: str = "amax") -> Any:
        return lambda: in_form(form, inputs, weights, clip)

    def exact(_: TensorScale) -> Input:
        return exact_input

    def dynamic(_: TensorScale) -> Input:
        return dynamic_input

    yield "fp8q, default", row("one", static_input, nearest)
    yield "fp8q, dynamic", row("one", dynamic, nearest)
    for clip in CLIPS:
        yield f"fp8q, default, {clip}", row("one", static_input, nearest, clip)
    yield "fp8q, one code, gptq", row("one", static_input, gptq)
    yield "fp8q, dynamic, gptq", row("one", dynamic, gptq)
    yield f"fp8q, a tail of {TAIL}, gptq", row(f"tail:{TAIL}", tail_input, gptq)
    yield "fp8q, two codes, gptq", row("two", static_input, gptq)
    yield "weights alone, nearest", row("one", exact, nearest)
    yield "weights alone, gptq", row("one", exact, gptq)
    yield "weights alone, sequential", lambda: Candidate(quantized(source, stored_weights(sequential()), {}))

    def with_tails() -> Candidate:
        run = preset()
        tails = {name: tail_input(activation) for name, activation in load_scales(run).activations.items()}
        return Candidate(quantized(source, stored_weights(run), tails))

    yield EXACT, with_tails
    yield "weights alone, --preset exact", lambda: Candidate(quantized(source, stored_weights(preset()), {}))


def attention_of_rounded_queries(module: nn.Module, query: torch.Tensor, *others: Any, **options: Any) -> Any:
    """Scaled dot-product attention by transformers' interface, whose queries [batch, heads, tokens, size] are rounded
    to FP8 under the module's `query_scale` first.
    """
    scale: torch.Tensor = vars(module)["query_scale"]
    rounded = code_values(query, scale) * scale
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, rounded, *others, **options)


def round_queries(model: PreTrainedModel, query_scales: Mapping[str, float]) -> None:
    """Let attention of `model` round its queries, by the scale of each module; 1 where it has none, as vLLM does."""
    for name in attention_modules(model).values():
        object.__setattr__(model.get_submodule(name), "query_scale", torch.tensor([query_scales.get(name, 1.0)]))
    AttentionInterface.register(FP8_QUERIES, attention_of_rounded_queries)
    AttentionMaskInterface.register(FP8_QUERIES, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(FP8_QUERIES)


def cache_rows(run: Run, source: Source) -> Iterator[tuple[str, Callable[[], Candidate]]]:
    """Keys, values and both in FP8, and nothing else; and queries too, as attention on codes has them."""

    def cached(parts: str, unit: Literal["tensor", "head"], queries: bool | None = None) -> Callable[[], Candidate]:
        """`queries`: rounded under a measured scale, or under 1; None: not rounded."""

        def make() -> Candidate:
            scales(run.root, RescaleOptions(kv_cache="fp8", kv_scale=unit, q_scale=bool(queries)))
            model = load_model(source, torch.float32, "cpu")
            tensors = {
                name: torch.tensor(one.heads).view(-1, 1, 1) if one.heads else torch.tensor([one.scale])
                for name, one in load_scales(run).kv_cache.items()
                if re.search(f"\\.[{parts}]$", name)
            }
            if queries is not None:
                measured = load_scales(run).queries
                round_queries(model, {name.removesuffix(".q"): one.scale for name, one in measured.items()})
            return Candidate(model, lambda: fp8_cache(tensors, model))

        return make

    yield "cache alone, K", cached("k", "tensor")
    yield "cache alone, V", cached("v", "tensor")
    yield "cache alone, K and V", cached("kv", "tensor")
    yield "cache alone, K and V, a scale per head", cached("kv", "head")
    yield "cache alone, K and V, queries by q_scale", cached("kv", "tensor", queries=True)
    yield "cache alone, K and V, queries without q_scale", cached("kv", "tensor", queries=False)
