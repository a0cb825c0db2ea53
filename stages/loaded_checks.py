"""Check that a model in memory computes as its files would say, before they are written.

`save_pretrained` writes config.json and tensors; what else makes a model (quantizers, adapters, parametrizations,
hooks, a replaced `forward`) is lost without a word, or fails far from its cause. No list of such things is complete, so
the model is compared with one that its class makes of its configuration on the meta device: the same modules of the
same classes, with parameters of the same names, shapes and classes.
"""

import copy
import inspect
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from ..calibrate.input.silence import quiet_transformers
from ..calibrate.input.untrusted import error_text, foreign
from ..calibrate.ranks.torchrun import process_rank
from ..core.errors import InputError

#: The types of weights that a checkpoint can hold and calibration can read.
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: The packages whose modules and tensors are quantized; the last is this one.
QUANTIZERS = ("modelopt", "torch.ao", "torchao", "compressed_tensors", "bitsandbytes", __name__.partition(".")[0])
UNQUANTIZED = "give the model as it was before, in BF16"
ADAPTERS = "has adapters loaded, which its files would not hold"
MERGED = "merge them into the weights, or save the base and give it to calibrate with adapter="
#: The remedy for modules that the model's class does not make.
AS_MADE = "give the model as its class makes it of its config"


def check_process() -> None:
    """Raise InputError where torchrun started several processes: each would write a model of its own."""
    if process_rank().ranks > 1:
        raise InputError(
            "quantize",
            f"is called in {process_rank().ranks} processes, and a loaded model is written by one",
            "call save_pretrained of the model, and give its directory to calibrate",
        )


def check_loaded(model: object) -> None:
    """Raise InputError for a `model` that is none of transformers, or does not compute what its files would say."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        inside = " (PEFT: `model.merge_and_unload()`; torch.compile, DDP: the model inside)"
        raise InputError(name, "is no PreTrainedModel of transformers", f"give one{inside}")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        raise InputError(name, "is quantized already", "load it without quantization_config, in BF16")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise InputError(name, ADAPTERS, MERGED)
    made = _made_of_config(name, model)
    _check_modules(name, model, made)
    _check_values(name, model)
    _check_parameters(name, model, made)
    _check_calls(name, model)


def _made_of_config(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """Make a model of the class and configuration of `model`, without values."""

    def refusal(error: BaseException) -> InputError:
        return InputError(name, f"is not made of its config alone: {error_text(error)}", "mend what it names")

    with foreign(refusal), quiet_transformers(), torch.device("meta"):
        made: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    return made


def _check_modules(name: str, model: PreTrainedModel, made: PreTrainedModel) -> None:
    """Raise InputError for the first module that the model's config makes of another class or not at all, or that is
    missing.
    """
    expected = dict(made.named_modules())
    modules = dict(model.named_modules())
    for place, module in modules.items():  # first, since a quantizer may replace other modules too
        _check_quantized(name, place, module)
    for place, module in modules.items():
        _check_class(name, place, module, expected.get(place))
    _check_none_missing(name, modules, expected)


def _check_class(name: str, place: str, part: object, expected: object | None) -> None:
    """Raise InputError for a module or parameter that is not of the class that the model's config makes there."""
    if type(part) is type(expected):
        return
    _check_quantized(name, place, part)
    package = type(part).__module__
    what = _named(place, part)
    if package.partition(".")[0] == "peft":
        raise InputError(name, f"{ADAPTERS}: {what}", MERGED)
    if package == nn.utils.parametrize.__name__:
        remedy = f"call remove_parametrizations of {package} before"
        raise InputError(name, f"has parametrizations, which its files would not hold: {what}", remedy)
    wanted = "none" if expected is None else _with_article(type(expected))
    raise InputError(name, f"{what}, where its config has {wanted}", AS_MADE)


def _check_quantized(name: str, place: str, part: object) -> None:
    """Raise InputError for a module or parameter of a package that quantizes."""
    if type(part).__module__.startswith(QUANTIZERS):
        raise InputError(name, f"is quantized already: {_named(place, part)}", UNQUANTIZED)


def _named(place: str, part: object) -> str:
    """Name a module or parameter with its class and the package of that."""
    kind = type(part)
    return f"its {place} is {_with_article(kind)} of {kind.__module__.partition('.')[0]}"


def _with_article(kind: type) -> str:
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return f"{article} {kind.__name__}"


def _check_none_missing(name: str, present: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Raise InputError for the first of `expected` that is not among those `present`."""
    missing = next((place for place in expected if place not in present), None)
    if missing is not None:
        raise InputError(name, f"lacks {missing}, which its config has", AS_MADE)


def _check_values(name: str, model: PreTrainedModel) -> None:
    """Raise InputError for parameters without values here, or of a type that is none of weights."""
    for place, parameter in model.named_parameters():
        if parameter.device.type == "meta":
            raise InputError(
                name,
                f"its {place} has no values here (it is offloaded, or on the meta device)",
                "load the model on one device, or give its directory to calibrate",
            )
        if parameter.dtype not in FLOATS:
            raise InputError(
                name,
                f"its {place} is of {str(parameter.dtype).removeprefix('torch.')}, and weights are of float32, float16 "
                "or bfloat16",
                "load it in BF16",
            )


def _check_parameters(name: str, model: PreTrainedModel, made: PreTrainedModel) -> None:
    """Raise InputError for the first parameter that is missing, or that the model's config makes of another class or
    shape, or not at all.
    """
    expected = _parameters(made)
    parameters = _parameters(model)
    for place, parameter in parameters.items():
        _check_class(name, place, parameter, expected.get(place))
        shape = list(parameter.shape)
        wanted = list(expected[place].shape)
        if shape != wanted:
            remedy = f"make the config say so, or {AS_MADE}"
            raise InputError(name, f"its {place} is of shape {shape}, and {wanted} by its config", remedy)
    _check_none_missing(name, parameters, expected)


def _parameters(model: PreTrainedModel) -> Mapping[str, nn.Parameter]:
    """The parameters of `model` by name; one that is tied has each of its names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _check_calls(name: str, model: PreTrainedModel) -> None:
    """Raise InputError for what changes or moves the things that a module computes: hooks, of which transformers' own
    only look, and a `forward` that is not its class's.
    """
    for place, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise InputError(
                name,
                f"accelerate moves the tensors of {place or 'the model'} between devices (device_map)",
                "load it on one device, or give its directory to calibrate",
            )
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        foreign_hook = next((hook for hook in hooks if not _is_of_transformers(hook)), None)
        if foreign_hook is not None:
            called = getattr(foreign_hook, "__qualname__", type(foreign_hook).__name__)
            raise InputError(
                name,
                f"{place or 'the model'} has a forward hook ({called}), which no file would hold",
                "remove it before",
            )
        if not _calls_its_class(module):
            forward = vars(module)["forward"]
            called = getattr(forward, "__qualname__", type(forward).__name__)
            raise InputError(
                name,
                f"the forward of {place or 'the model'} was replaced ({called}), which no file would hold",
                "remove it before (`del module.forward`)",
            )


def _calls_its_class(module: nn.Module) -> bool:
    """Tell whether the `forward` of `module` is its class's, also as accelerate gives it back, or as it wraps it for
    training in mixed precision.
    """
    if "forward" not in vars(module):
        return True
    forward = vars(module)["forward"]
    function = getattr(forward, "__func__", forward)
    plain = inspect.unwrap(type(module).forward)
    if function in (type(module).forward, plain):
        return True
    return "_original_forward" in vars(module) and inspect.unwrap(function) is plain


def _is_of_transformers(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("transformers.")
