"""Learn a LoRA adapter on the frozen FP8 model, and write it as PEFT does.

    y = x̂ · ŵᵀ + bias + s · B (A x)        s = alpha / rank

x̂ and ŵ are on codes and stay as they are; A and B are floats, and x is not quantized for them, as servers compute an
adapter beside an FP8 base (docs/decisions/0025). PEFT's own layers hold A and B, so that the file and the sum are its
own. B begins as zeros: at step 0 the model is the FP8 model. The gradient of x passes straight through its rounding
(`linear`).
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from ...calibrate.checkpoint.adapter import PREFIX, TENSORS
from ...calibrate.checkpoint.weights import ADAPTER
from ...core.files import replacing
from ..reference.fp8_model import experts_around
from ..scales.decisions import TensorScale
from .linear import on_grid


class FrozenLinear(nn.Linear):
    """A linear layer on E4M3 codes whose weight stays as it is; all arithmetic is FP32.

    It is a `torch.nn.Linear` of the codes' values, as which PEFT knows it.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        weight_scale: torch.Tensor,
        activation: TensorScale | None,
        bias: torch.Tensor | None,
    ):
        """Hold `codes` float8_e4m3fn [out, in] under `weight_scale` float32 [out]; `activation`: the scale of the
        input, None for one that is not quantized; `bias` [out] or None.
        """
        super().__init__(codes.shape[1], codes.shape[0], bias is not None, device="meta")
        self.activation = activation
        self.weight = nn.Parameter(codes.float() * weight_scale.float()[:, None], requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.float(), requires_grad=False)
        input_scale = torch.tensor(1.0 if activation is None else activation.scale, device=codes.device)
        self.register_buffer("input_scale", input_scale, persistent=False)

    input_scale: torch.Tensor

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` [..., in] to [..., out], in its type."""
        x = input.float()
        if self.activation is not None:
            x = on_grid(x, self.input_scale, self.activation)
        return nn.functional.linear(x, self.weight, self.bias).to(input.dtype)


def add_adapter(student: PreTrainedModel, modules: Sequence[str], rank: int, alpha: int, seed: int) -> dict[str, Any]:
    """Add PEFT's LoRA layers to the linear layers `modules` of `student`, in place; everything else is frozen.

    `seed`: of the numbers that A begins with. Returns the fields of adapter_config.json.
    """
    import peft

    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
        target_modules=target_names(student, modules),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # PEFT draws on the CPU, whatever holds the model
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(config, student)
    student.eval()
    fields: dict[str, Any] = config.to_dict()  # type: ignore[no-untyped-call]  # PEFT annotates some of its functions
    return fields


def adaptable(student: PreTrainedModel, modules: Sequence[str]) -> list[str]:
    """Return those of the FP8 layers `modules` that an adapter's file has a name for: all but layers of experts, which
    Hugging Face's models hold as one tensor for all experts.
    """
    return [module for module in modules if experts_around(student, module) is None]


def target_names(model: nn.Module, modules: Sequence[str]) -> list[str]:
    """Return the names by which PEFT finds just `modules` in `model`: `q_proj` where every module called so is among
    them, or else their whole names.
    """
    ends = {module.rpartition(".")[2] for module in modules}
    matched = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends}
    return sorted(ends if matched == set(modules) else modules)


def adam(student: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Make Adam's optimizer of the parameters of `student` that are not frozen."""
    return torch.optim.Adam([parameter for parameter in student.parameters() if parameter.requires_grad], learning_rate)


def save_adapter(folder: Path, student: PreTrainedModel, config: dict[str, Any], base: str) -> list[Path]:
    """Write the adapter in `student` to `folder` in PEFT's form, and return its two files.

    `config`: as `add_adapter` returned it; `base`: the name of the model that it is for.
    """
    import peft

    fields = config | {"base_model_name_or_path": base, "inference_mode": True}
    fields["target_modules"] = sorted(fields["target_modules"])  # PEFT has a set, of no order
    state = peft.get_peft_model_state_dict(student)
    tensors = {f"{PREFIX}{name}": tensor.detach().float().cpu().contiguous() for name, tensor in state.items()}
    with replacing(folder) as partial:
        partial.mkdir()
        text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
        (partial / ADAPTER).write_text(text, encoding="utf-8")
        save_file(tensors, partial / TENSORS, metadata={"format": "pt"})
    return [folder / ADAPTER, folder / TENSORS]
