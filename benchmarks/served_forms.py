"""What each form of FP8 loses as a server computes it, beside ModelOpt's default and llm-compressor's schemes.

    python benchmarks/served_forms.py [smollm2 gemma3 qwen_coder] [--rows PATTERN] [--samples 64] [--windows N]
        [--runs FOLDER] [--llmcompressor PYTHON] [--save NAME]

The servers are those of `fp8q.quantize.scales.servers`; vLLM's own CPU build takes hours for such models, so GEMMs are
emulated, by what vLLM 0.33 does with a checkpoint when it loads it:

- One scale for a whole weight: vLLM and SGLang make one GEMM of q, k and v, and one of gate and up, under the largest
  scale, and round codes again by way of FP16 (`requantize_with_max_scale`). fp8q's have one scale from the start;
  ModelOpt's and llm-compressor's lose once more; `as written`, ModelOpt's do not.
- Blocks: on Hopper and Blackwell scales become powers of two and codes are rounded again (DeepGEMM), and inputs have
  such scales; `FP32 scales` is what Ada and transformers compute. llm-compressor's are rescaled by `fp8q convert`.
- MXFP8, which fp8q does not write: exponents rounded up, as Blackwell's conversion has them (`mxfp8.py`).
- `two`, and `tail` on windows whose first half is a prompt, by fp8q-vllm; the others by a stock server.

Everything else is FP32: KL from the FP32 model, windows and texts are those of `real_models.py`, calibration is that of
`rounded_runs.py` (64 windows of 512 tokens). Beside each KL stands its ratio to BF16's own by the same windows. Without
`--llmcompressor` its rows are left out. Where no row with `gptq` or `exact` is asked for, second moments are not
measured. Prints one JSON line; exit status 2 where a package or text is not there.
"""

import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accuracy import modelopt
from mxfp8 import mx_values
from real_rows import (
    BF16,
    MODELOPT,
    LazyWeights,
    StoredCodes,
    Weights,
    dynamic_input,
    peer_checkpoint,
    quantized,
    scaled_input,
    static_input,
    stored_codes,
    tail_input,
)
from result import arguments
from rounded_runs import EXACT, GPTQ, PLAIN, RoundedRuns, with_seconds
from row_figures import RowFigures, publish_rows
from torch import nn

from fp8q.api import RescaleOptions, convert, scales
from fp8q.core.run import Run
from fp8q.options import ONE, TWO, Form
from fp8q.quantize.codes.blocks import group_values
from fp8q.quantize.codes.encoding import code_values
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.lint.rules_modules import JOINED
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.corpus import load_tokens

IN_BLOCKS = {"form": ("block",), "weigh_first_token": False, "weigh_outputs": 0, "bf16_weights": 0.0}
NEAREST, TENSOR, TENSOR_GPTQ = "nearest", "one scale, nearest", "one scale, gptq"
BLOCK, BLOCK_GPTQ, BLOCK_FP32 = "block, nearest", "block, gptq", "block, nearest, FP32 scales"
#: Weights -> the options of `fp8q scales` that round them, where `rounded_runs` does not know them.
ROUNDED: Mapping[str, Mapping[str, Any]] = {
    NEAREST: PLAIN | {"weight_rounding": "nearest"},
    TENSOR: PLAIN | {"weight_rounding": "nearest", "weight_scale": "tensor"},
    TENSOR_GPTQ: PLAIN | {"weight_scale": "tensor"},
    BLOCK: IN_BLOCKS | {"weight_rounding": "nearest"},
    BLOCK_GPTQ: IN_BLOCKS | {"weight_rounding": "gptq"},
    BLOCK_FP32: IN_BLOCKS | {"weight_rounding": "nearest", "block_scale_grid": "bf16"},
}
#: Row of fp8q's -> its weights, and how its inputs are coded.
OWN: Mapping[str, tuple[str, str]] = {
    "one, nearest": (NEAREST, "static"),
    "one, --weight-scale tensor, nearest": (TENSOR, "static"),
    "dynamic, nearest": (NEAREST, "token"),
    "block, nearest": (BLOCK, "power-of-two groups"),
    "block, FP32 scales, nearest": (BLOCK_FP32, "groups"),
    "two, nearest": (NEAREST, "two codes"),
    "bf16, nearest": (NEAREST, "exact"),
    "one, gptq": (GPTQ, "static"),
    "one, --weight-scale tensor, gptq": (TENSOR_GPTQ, "static"),
    "dynamic, gptq": (GPTQ, "token"),
    "block, gptq": (BLOCK_GPTQ, "power-of-two groups"),
    "tail:64, gptq": (GPTQ, "tail"),
    "two, gptq": (GPTQ, "two codes"),
    "bf16, gptq": (GPTQ, "exact"),
    "tail:64, --preset exact": (EXACT, "tail"),
    "bf16, --preset exact": (EXACT, "exact"),
}
#: Weights that second moments round.
BY_MOMENTS = (GPTQ, TENSOR_GPTQ, BLOCK_GPTQ, EXACT)
MODELOPT_WRITTEN = f"{MODELOPT}, as written"
COMPRESSOR, COMPRESSOR_DYNAMIC = "llm-compressor FP8", "llm-compressor FP8_DYNAMIC"
COMPRESSOR_BLOCK, COMPRESSOR_BLOCK_FP32 = "llm-compressor FP8_BLOCK", "llm-compressor FP8_BLOCK, FP32 scales"
MX = "MXFP8"


def joined_again(weights: Weights, weight_scales: Mapping[str, float]) -> Weights:
    """`weights`, whose codes have one scale each, as vLLM multiplies them: those that it joins are coded again under
    the largest of their scales.
    """
    first = {name: names[0] for names in JOINED for name in names}
    families = dict[str, list[str]]()
    for module in weights:
        parent, _, name = module.rpartition(".")
        families.setdefault(f"{parent}.{first.get(name, name)}", []).append(module)
    largest = dict[str, float]()
    for modules in families.values():
        scale = max(weight_scales[module] for module in modules)
        largest |= dict.fromkeys(modules, scale)

    def coded(module: str) -> torch.Tensor:
        scale = torch.tensor([largest[module]])
        return code_values(weights[module].half(), scale) * scale

    return LazyWeights(weights, coded)


class ServedRows:
    """The rows of a model's runs."""

    def __init__(self, runs: RoundedRuns, judged: RowFigures):
        """`judged`: has the model's source, and judges the rows."""
        self.runs = runs
        self.source = judged.source
        self.activations = load_scales(runs.whole).activations
        self.windows = load_tokens(runs.run, runs.run.calibration)

    def makers(self, python: str | None) -> dict[str, Callable[[], nn.Module]]:
        """Row -> a function that makes its model; `python`: the interpreter that has llm-compressor."""
        rows: dict[str, Callable[[], nn.Module]] = {
            MODELOPT: lambda: self._static(self._modelopt),
            MODELOPT_WRITTEN: lambda: self._as_written(self._modelopt),
        }
        if python:
            rows |= {
                COMPRESSOR: lambda: self._static(self._compressed(python, "FP8")),
                COMPRESSOR_DYNAMIC: lambda: self._in_form(self._compressed(python, "FP8_DYNAMIC").weights, "token"),
                COMPRESSOR_BLOCK: lambda: self._rescaled(python),
                COMPRESSOR_BLOCK_FP32: lambda: self._in_form(self._compressed(python, "FP8_BLOCK").weights, "groups"),
            }
        rows[MX] = self._mx
        for row, (weights, inputs) in OWN.items():
            rows[f"fp8q, {row}"] = partial(self._own, weights, inputs)
        return rows

    def _own(self, weights: str, inputs: str) -> nn.Module:
        make = partial(self._rounded, ROUNDED[weights]) if weights in ROUNDED else None
        return self._in_form(self.runs.rounded(weights, make).weights, inputs)

    def _rounded(self, options: Mapping[str, Any]) -> tuple[Run, float]:
        run = self.runs.copied("copy")
        return with_seconds(scales(run.root, RescaleOptions(**options)))

    def _in_form(self, weights: Weights, inputs: str) -> nn.Module:
        """The model with `weights`, and `inputs` coded by a name of `OWN`."""

        def static(form: Form) -> dict[str, Any]:
            return {module: static_input(self.activations[module].with_form(form)) for module in weights}

        if inputs == "exact":
            return quantized(self.source, weights, {})
        if inputs == "static":
            return quantized(self.source, weights, static(ONE))
        if inputs == "two codes":
            return quantized(self.source, weights, static(TWO))
        if inputs == "tail":
            return quantized(self.source, weights, {module: tail_input(self.activations[module]) for module in weights})
        if inputs == "token":
            return quantized(self.source, weights, dict.fromkeys(weights, dynamic_input))
        groups = partial(group_values, powers=inputs == "power-of-two groups")
        return quantized(self.source, weights, dict.fromkeys(weights, groups))

    def _as_written(self, stored: StoredCodes) -> nn.Module:
        """One scale for each weight and each input."""
        inputs = {module: scaled_input(scale) for module, scale in stored.input_scales.items()}
        return quantized(self.source, stored.weights, inputs)

    def _static(self, stored: StoredCodes) -> nn.Module:
        """One scale for each weight and each input, as vLLM loads them."""
        return self._as_written(replace(stored, weights=joined_again(stored.weights, stored.scales)))

    @cached_property
    def _modelopt(self) -> StoredCodes:
        """ModelOpt's weights and inputs under its scales, which are amax / 448 in FP32."""
        model, _ = modelopt(str(self.runs.directory), self.windows, set(self.activations), torch.float32)
        weight_scales = dict[str, float]()
        input_scales = dict[str, float]()
        for name in self.activations:
            module: Any = model.get_submodule(name)
            weight_scales[name] = float(module.weight_quantizer.amax) / E4M3.max
            input_scales[name] = float(module.input_quantizer.amax) / E4M3.max

        def coded(module: str) -> torch.Tensor:
            scale = torch.tensor([weight_scales[module]])
            return code_values(self._weight(module), scale) * scale

        return StoredCodes(LazyWeights(weight_scales, coded), weight_scales, input_scales)

    def _mx(self) -> nn.Module:
        weights = LazyWeights(self.activations, lambda module: mx_values(self._weight(module), up=True))
        return quantized(self.source, weights, dict.fromkeys(self.activations, partial(mx_values, up=True)))

    def _weight(self, module: str) -> torch.Tensor:
        """The weight of `module` in the source, BF16 [out, in]."""
        return self.source.weights().tensor(self.source.stored(f"{module}.weight")).to(torch.bfloat16)

    def _compressed(self, python: str, scheme: str) -> StoredCodes:
        return peer_checkpoint(python, scheme, self.runs.directory, self.windows, self.runs.folder)

    def _rescaled(self, python: str) -> nn.Module:
        """llm-compressor's blocks, rounded again under powers of two, as servers do and `fp8q convert` writes them."""
        self._compressed(python, "FP8_BLOCK")
        folder = self.runs.folder / "FP8_BLOCK, rounded again"
        shutil.rmtree(folder, ignore_errors=True)
        convert(self.runs.folder / "FP8_BLOCK", folder, form="block")
        return self._in_form(stored_codes(folder).weights, "power-of-two groups")


def measure(runs: RoundedRuns) -> RowFigures:
    """Judge every row that is asked for."""
    wanted = {row: weights for row, (weights, _) in OWN.items() if re.search(runs.asked.rows, f"fp8q, {row}")}
    if not set(wanted.values()) & set(BY_MOMENTS):
        runs.first = "nearest"
    judged = RowFigures(runs, BF16, "bf16")
    for row, make in ServedRows(runs, judged).makers(runs.asked.llmcompressor).items():
        if re.search(runs.asked.rows, row):
            judged.judge(row, make, f"served, {row}")
            judged.show(row)
    return judged


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--llmcompressor", type=Path, metavar="PYTHON", help="an interpreter that has llm-compressor")
    return publish_rows("served_forms", parser, measure)


if __name__ == "__main__":
    sys.exit(main())
