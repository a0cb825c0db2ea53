"""The scales and codes of all choices, and the model under a mix of them.

One FP32 model serves every mix: its weights are replaced by the values of their codes, and hooks round the inputs of
GEMMs, while a mix is measured. Scales are those that `fp8q scales` would choose, so that the measured model is the one
that it would write. Codes are rounded to nearest, and by `gptq` for each form of the activation, whose error they
compensate (`quantize.weights.gptq`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ...calibrate.measure.moments import SecondMoments, moments_file
from ...calibrate.measure.observe import Watch
from ...calibrate.model.caches import new_cache
from ...calibrate.model.gemms import attention_modules, observed_gemms, output_channel_axis
from ...calibrate.text.evaluation import prompt_of
from ...core.reporter import Reporter
from ...quantize.reference.fp8_model import fp8_cache, round_to_codes
from ...quantize.reference.linear import CallPositions, Tail
from ...quantize.scales.clip import lost_share
from ...quantize.scales.decisions import TensorScale
from ...quantize.sensitivity.site_quantizers import input_with_tail
from ...quantize.weights.channels import QuantizedWeight, WeightMethod, WeightScaling
from ...quantize.weights.code_sources import FloatWeight, GptqCodes, Rounding
from ...quantize.weights.gptq import Compensations
from ...quantize.weights.rounding_progress import Rounded
from ...quantize.weights.sequential import gemm_input, weight_rows
from .choices import COARSEST, TWO_TERMS, GroupForm, Mix, RoundingName

#: Rounding -> the forms of the input that it gives other codes for.
ROUNDED_FOR: Mapping[RoundingName, tuple[GroupForm, ...]] = {"nearest": (COARSEST,), "gptq": (COARSEST, TWO_TERMS)}
#: Says of a folder that what was gathered in it is complete.
DONE = "done"


@dataclass(frozen=True)
class Candidates:
    """The candidates: `groups` (GEMMs that read one tensor, by the first), `inputs` form -> GEMM -> scale, the
    `roundings` of weights, whose codes are in `folder`, `cache` tensor -> scale (none where an FP8 cache has none),
    `of_tail` GEMM -> the rows of a `call` that have two terms in the form of that name.
    """

    model: PreTrainedModel
    groups: Mapping[str, tuple[str, ...]]
    inputs: Mapping[GroupForm, Mapping[str, TensorScale]]
    roundings: tuple[RoundingName, ...]
    folder: Path
    cache: Mapping[str, torch.Tensor]
    of_tail: Mapping[str, Tail]
    call: CallPositions

    @property
    def forms(self) -> tuple[GroupForm, ...]:
        """The forms in which weights are codes."""
        return (*self.inputs, "weights_alone")

    @property
    def first(self) -> dict[str, str]:
        """GEMM -> the first of its group."""
        return {member: name for name, members in self.groups.items() for member in members}

    @property
    def gemms(self) -> dict[str, nn.Module]:
        """The GEMMs that may be quantized, by name."""
        wanted = self.first
        return {name: module for name, module in observed_gemms(self.model).items() if name in wanted}

    @property
    def attention(self) -> dict[int, str]:
        """Layer index -> name of the module that writes that layer of the cache."""
        return attention_modules(self.model)

    def codes(self, rounding: str, form: GroupForm) -> Rounded:
        """The codes of weights for a form of their input; for a tail and for weights alone those of two terms."""
        name = rounding
        if rounding != "nearest":
            name += f"-{COARSEST if form == COARSEST else TWO_TERMS}"
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return Rounded(folder)

    def weight(self, module: str, rounding: str, form: GroupForm) -> torch.Tensor:
        """Dequantize the codes of a weight, float32 [out, in]."""
        rounded = self.codes(rounding, form).get(module)
        assert rounded is not None, "every GEMM is rounded in every way before it is looked at"
        codes, scale = rounded
        return (codes.float() * scale[:, None]).to(self.model.device)

    def input(self, module: str, form: GroupForm, x: torch.Tensor) -> torch.Tensor:
        """Dequantize the codes of the input `x` of the GEMM `module`."""
        if form == "weights_alone":
            return x
        scale = self.inputs[form][module]
        if scale.form.tail is None:
            return gemm_input(x, scale)
        return input_with_tail(x, scale, self.of_tail[module])

    def prompt(self, positions: int) -> int:
        """Return the number of a window's `positions` that the next call reads as a prompt."""
        prompt = prompt_of(positions)
        self.call.positions, self.call.decoded = positions, positions - prompt
        return prompt

    def cache_error(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Compute the rounding error of the cache tensor `name`."""
        return round_to_codes(x, self.cache[name]) - x

    def exact(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [windows, seq_len] to the float model's logits."""
        logits: torch.Tensor = self.model(input_ids=ids, past_key_values=new_cache(self.model), use_cache=True).logits
        return logits

    def runner(self, mix: Mix) -> Callable[[torch.Tensor], torch.Tensor]:
        """Token ids int64 [windows, seq_len] to logits, by the model with the codes of `mix` in the place of weights,
        inputs and cache.
        """
        coded = {member: form for member, first in self.first.items() if (form := mix.forms[first]) != "bf16"}
        cache_scales = {name: scale for name, scale in self.cache.items() if mix.codes(name)}

        def run(ids: torch.Tensor) -> torch.Tensor:
            self.prompt(ids.shape[1])
            gemms = self.gemms
            with ExitStack() as stack:
                for name, form in coded.items():
                    weight = self.weight(name, mix.rounding, form)
                    stack.enter_context(self._on_codes(name, gemms[name], form, weight))
                with torch.inference_mode():
                    cache = fp8_cache(cache_scales, self.model)
                    logits: torch.Tensor = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            return logits

        return run

    @contextmanager
    def _on_codes(self, name: str, gemm: nn.Module, form: GroupForm, weight: torch.Tensor) -> Iterator[None]:
        """Replace the weight of `gemm` by `weight` [out, in], and its inputs by codes, in the block."""
        before = gemm.get_parameter("weight")
        rounding = gemm.register_forward_pre_hook(lambda _, inputs: (self.input(name, form, inputs[0]), *inputs[1:]))
        gemm.register_parameter("weight", nn.Parameter(weight.movedim(0, output_channel_axis(gemm)), False))
        try:
            yield
        finally:
            gemm.register_parameter("weight", before)
            rounding.remove()


def gather(candidates: Candidates, batches: Sequence[torch.Tensor], folder: Path, report: Reporter) -> None:
    """Add up the second moments of each group's input on `batches` (ids int64 [windows, seq_len]) in `folder`, as
    `calibrate` does, unless that is done: first tokens apart, and tokens of experts from batches held out.
    """
    if (folder / DONE).is_file():
        return
    moments = SecondMoments(folder, first_apart=True)
    groups = {first: [*members] for first, members in candidates.groups.items()}
    watch = Watch(candidates.model, candidates.gemms, groups, len(batches), moments)
    with report.track("Gathering second moments", len(batches), "batches") as advance:
        for batch, ids in enumerate(batches):
            watch.forward(ids, batch)
            advance(1)
    moments.close()
    (folder / DONE).touch()


def round_weights(
    candidates: Candidates,
    method: WeightMethod,
    compensations: Callable[[Mapping[str, float]], Compensations],
    report: Reporter,
) -> None:
    """Round every weight in every way that is not done, experts judged as `fp8q scales` judges them; a group that no
    token reached is rounded to nearest.

    `compensations`: module -> the share of its input's energy that is lost, to the second moments that GPTQ rounds by.
    """
    gemms = candidates.gemms
    scaling = WeightScaling(method)
    kinds = [(rounding, form) for rounding in candidates.roundings for form in ROUNDED_FOR[rounding]]
    with report.track("Rounding weights", len(gemms) * len(kinds), "weights") as advance:
        for rounding, form in kinds:
            rounded = candidates.codes(rounding, form)
            lost = {module: lost_share(scale.sqnr_db) for module, scale in candidates.inputs[form].items()}
            of_form = compensations(lost) if rounding == "gptq" else None
            for module, name in candidates.first.items():
                if rounded.get(module) is None:
                    reached = of_form is not None and moments_file(of_form.folder, name).is_file()
                    sources = (GptqCodes(scaling, of_form),) if reached and of_form else ()
                    read = partial(weight_rows, gemms[module])
                    ordered = Rounding(scaling, sources, device=str(candidates.model.device))
                    weight = ordered.quantized(FloatWeight(module, read))
                    assert isinstance(weight, QuantizedWeight), "scales.json says that it was quantized"
                    rounded.add(module, weight)
                advance(1)
