"""Rounding by GPTQ on the GPU: each weight of an 8B's layer, beside what was counted without one, and the CPU's codes.

An 8B takes 32 times its layer; a 70B is extrapolated from the shapes of its own layer, of which each is measured once.
Times are of the whole step as `fp8q calibrate` takes it: the factor of an input, then scales, codes and facts of each
weight. Reading and writing files are not in them.
"""

import warnings
from functools import partial

import torch
from pages.guides import LLAMA_8B, LLAMA_70B, Sizes
from rounding_launches import Input, inputs

from fp8q.calibrate.model import launching
from fp8q.quantize.weights.channels import channel_scales, weight_facts
from fp8q.quantize.weights.gptq import Compensation, compensation, gptq_codes

from .timing import Kind, Part, Setting, seconds

#: Seconds of rounding an 8B, and minutes of a 70B on eight GPUs, at most; the difference of a channel's error.
LIMIT_8B_S, LIMIT_70B_S, LIMIT_ERROR = 180.0, 3600.0, 1e-3
TINY = Sizes(2, 48, 96, 16, 64)


def measure(setting: Setting, part: Part) -> None:
    """Codes against the CPU's, waits, then the time of every shape."""
    part.step(setting, "codes", partial(codes, setting, part), Kind("codes", 30))
    if not setting.dry:
        part.step(setting, "waits", partial(waits, setting, part), Kind("waits", 10))
    models = setting.pick({"8B": LLAMA_8B, "70B": LLAMA_70B}, {"8B": TINY})
    limits = {"8B": LIMIT_8B_S, "70B": LIMIT_70B_S}
    for name, model in models.items():
        layer = []
        for group in inputs(model):
            kind = Kind("an input", 20, group.width**2 * sum(group.outputs))
            work = partial(one_input, name, group, setting, part)
            layer.append(part.step(setting, f"{name}, {group.width}", work, kind))
        took = [step_seconds for step_seconds in layer if step_seconds is not None]
        total = model.layers * sum(took) if len(took) == len(layer) else None
        gpus = setting.pick({"8B": 1, "70B": 8}, {"8B": 1})[name]
        part.target(f"{name}: seconds of rounding on {gpus} GPU", total and total / gpus, limits[name])


def moments(width: int, device: str) -> torch.Tensor:
    """Second moments of inputs that resemble their neighbours."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(min(2 * width, 8192), width, generator=draw).to(device)
    x += x.roll(1, 1)
    return x.T @ x


def weight(outputs: int, width: int, device: str) -> torch.Tensor:
    """A random weight."""
    draw = torch.Generator().manual_seed(1)
    return torch.randn(outputs, width, generator=draw).mul(0.02).bfloat16().to(device)


def rounded(dense: torch.Tensor, factored: Compensation) -> torch.Tensor:
    """Scales, codes and facts of a weight."""
    scale = channel_scales(dense, "mse")
    assert scale is not None
    return weight_facts(dense, gptq_codes(dense, scale, factored), scale)


def one_input(model: str, group: Input, setting: Setting, part: Part) -> float:
    """Seconds of an input's factor and of its weights."""
    h = moments(group.width, setting.device)
    rounds = setting.pick(3, 1)
    factor = seconds([partial(compensation, h, 0.001)], setting, graph=False, rounds=rounds)
    factored = compensation(h, 0.001)
    total = factor
    for outputs in group.outputs:
        dense = weight(outputs, group.width, setting.device)
        took = seconds([partial(rounded, dense, factored)], setting, graph=False, rounds=rounds)
        total += took
        part.row("rounding", model=model, outputs=outputs, inputs=group.width, factor_s=factor, round_s=took)
    return total


def codes(setting: Setting, part: Part) -> None:
    """Codes of the device beside the CPU's: bit for bit on dyadic numbers, by each channel's error on others."""
    outputs, width = setting.pick((1024, 4096), (16, 48))
    dense, h = weight(outputs, width, "cpu"), moments(width, "cpu")
    scale = channel_scales(dense, "mse")
    assert scale is not None
    here = gptq_codes(dense, scale, compensation(h, 0.001))
    device = setting.device
    there = gptq_codes(dense.to(device), scale.to(device), compensation(h.to(device), 0.001)).cpu()
    wide = h.double() + 0.001 * h.diagonal().double().diag()
    errors = []
    for made in (here, there):
        lost = dense.double() - made.double() * scale.double()[:, None]
        errors.append(((lost @ wide) * lost).sum(1))
    part.row("codes beside the CPU's", differing=int((here.float() != there.float()).sum()), of=here.numel())
    part.target("a channel's error over the CPU's, less 1", float((errors[1] / errors[0] - 1).max()), LIMIT_ERROR)
    exact = (dense.float() * 64).round().div(64).bfloat16()
    unit, plain = torch.full((outputs,), 0.25), 4 * torch.eye(width)
    pair = [gptq_codes(exact.to(at), unit.to(at), compensation(plain.to(at))).cpu().view(torch.uint8)
            for at in ("cpu", device)]  # fmt: skip
    part.target("codes of dyadic numbers other than the CPU's", int((pair[0] != pair[1]).sum()), 0)
    part.target("kernels that do not start", len(launching.FAILURES), 0)


def waits(setting: Setting, part: Part) -> None:
    """PyTorch's warnings of waits within a weight."""
    dense, h = weight(1024, 1024, setting.device), moments(1024, setting.device)
    rounded(dense, compensation(h, 0.001))
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            rounded(dense, compensation(h, 0.001))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    part.target("waits within a weight", sum("synchronizing" in str(warning.message) for warning in warned), 0)
