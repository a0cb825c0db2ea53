"""Say of each stored tensor what the model's class makes of it: a linear layer's weight, experts, or something else.

transformers' own table of conversions leads from a file's names to the class's: what it renames, joins and cuts when it
loads a checkpoint is not repeated here. Kept is what the class multiplies by in another way than a linear layer does
(an embedding, a convolution, a forward pass of its own), what is tied, since loaders tie a weight and not its scale,
and what transformers cuts or turns when it loads it, since scales are not cut with it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

from ...calibrate.input.untrusted import foreign
from ...calibrate.model.classes import non_text_modules
from ...calibrate.model.expert_modules import Expert, fused, unfold
from ...calibrate.model.expert_names import Conversions, views
from ...calibrate.model.gemms import multiplies_as_linear
from ...core.headers import StoredTensor
from .model_class import NoClassError, class_model
from .reasons import CONV1D, EMBEDDING, HEAD, LAYER, TIED_EMBEDDING, TURNED, vocabulary_sizes

WEIGHT = ".weight"
#: Conversions of transformers that take the weights of single experts, and leave each as it is.
_OF_EXPERTS = ("MergeModulelist", "ErnieFuseAndSplitTextVisionExperts")
#: Conversions that join weights along their rows, with their scales.
_JOINING = (*_OF_EXPERTS, "Concatenate")
WHOLE = "a stack of experts that transformers reads whole alone, and in FP8 on GPUs alone"
Place = Literal["layer", "tower", "outside"]


@dataclass(frozen=True)
class Judgement:
    """The class's word on a stored tensor: the `module` that it belongs to; the `reason` why it is kept, None where it
    can be quantized; and whether it is a `matrix`, which is listed where it is kept.

    `parts`: of a stack of experts, the modules that it is cut into, expert by expert; `turned`: each of them is stored
    [in, out]. `place`: in a numbered layer, in a tower that text does not reach, or outside of both.
    """

    module: str
    reason: str | None = None
    matrix: bool = True
    parts: tuple[str, ...] = ()
    turned: bool = False
    place: Place = "layer"


@dataclass(frozen=True)
class ClassTensors:
    """A class of transformers, by `name`, and its verdict on each stored tensor that it knows.

    `linears`: each linear layer of the class -> the stored tensors that it is made of, and `file_names` its name in
    files, by the name of the module. `renamed`: stored tensors that get another name when experts are cut apart.
    `cutting`: ends of names of stored weights -> those of the several weights that transformers makes of each.
    """

    name: str
    verdicts: Mapping[str, Judgement]
    linears: Mapping[str, tuple[str, ...]]
    file_names: Mapping[str, str]
    renamed: Mapping[str, str]
    cutting: tuple[tuple[str, tuple[str, ...]], ...] = ()


def class_tensors(config: Mapping[str, Any], headers: Mapping[str, StoredTensor]) -> ClassTensors:
    """Ask the class of `config` (config.json) about the tensors of `headers`.

    Raises NoClassError where transformers has no class for it, or the class knows none of the tensors.
    """
    shapes = {name: header.shape for name, header in headers.items()}
    model = class_model(config, list(shapes.values()))
    kind = type(model).__name__
    with foreign(lambda error: NoClassError(f"{kind} cannot be read: {type(error).__name__}"), NoClassError):
        judge = _Judge(model, config)
        judged = {name: judge.verdict(name, shape) for name, shape in shapes.items()}
        verdicts = {name: verdict for name, verdict in judged.items() if verdict is not None}
        if not verdicts:
            raise NoClassError(f"{kind} has none of these tensors")
        linears = judge.linears(verdicts)
        file_names = {name: judge.file_name(name) for name in linears}
        renamed = judge.cut(verdicts, shapes)
    name = f"{kind} of transformers {transformers.__version__}"
    return ClassTensors(name, verdicts, linears, file_names, renamed, judge.table.cutting())


class _Judge:
    """A model on the meta device, and what is asked of it again and again."""

    def __init__(self, model: PreTrainedModel, config: Mapping[str, Any]):
        self.model = model
        self.table = Conversions(model, dense=True)
        self.modules: dict[str, nn.Module] = dict(model.named_modules())
        self.tensors = model.state_dict(keep_vars=True)
        ties = model.all_tied_weights_keys
        self.ties = {**{source: tied for tied, source in ties.items()}, **ties}
        self.heads = {model.get_output_embeddings(), *_heads(model)} - {None}
        self.vocabularies = vocabulary_sizes(config) | vocabulary_sizes(model.config.to_dict())
        self.fused = fused(model)
        self.towers = frozenset(non_text_modules(model)) if model.can_generate() else frozenset[str]()

    def verdict(self, name: str, shape: tuple[int, ...]) -> Judgement | None:
        """Judge the stored tensor `name`; None for one that the class does not know."""
        target, pattern = self.table.model_name(name)
        if target not in self.tensors:
            return None
        operations = self.table.operations(pattern)
        module_name, _, leaf = target.rpartition(".")
        module = self.modules[module_name]
        place = self._place(module_name)
        if any(operation in _OF_EXPERTS for operation in operations) and len(shape) == 2:
            return Judgement(module_name, self._conversion(operations), place=place)
        if leaf == "weight" and isinstance(module, nn.Linear):
            if not operations and shape != tuple(module.weight.shape):
                return None  # not the class of this file: names decide
            return Judgement(module_name, self._of_linear(module_name, module, operations), place=place)
        if isinstance(module, nn.Embedding):
            tied = self.modules.get(self.ties.get(target, "").removesuffix(WEIGHT))
            return Judgement(module_name, TIED_EMBEDDING if tied in self.heads else EMBEDDING, place=place)
        if isinstance(module, Conv1D):
            return Judgement(module_name, CONV1D, place=place)
        if len(shape) == 3 and not isinstance(module, nn.modules.conv._ConvNd):
            return self._of_stack(name, target, shape, operations)
        reason = f"a {type(module).__name__}, which is no linear layer"
        return Judgement(module_name, reason, name.endswith(WEIGHT) or "expert" in name, place=place)

    def _of_linear(self, name: str, module: nn.Linear, operations: tuple[str, ...]) -> str | None:
        """The reason why the weight of a linear layer is kept; None where it can be quantized."""
        rows = module.weight.shape[0]
        if module in self.heads or (rows in self.vocabularies and not LAYER.match(f"{name}.")):
            return HEAD
        if (other := self.ties.get(f"{name}{WEIGHT}")) is not None:
            return f"tied to {other}: loaders tie the weight, and not its scale"
        owner = self.modules[name.rpartition(".")[0]]
        if isinstance(owner, nn.MultiheadAttention) or not multiplies_as_linear(module):
            return f"a {type(module).__name__} with a forward pass of its own"
        return self._conversion(operations)

    def _conversion(self, operations: tuple[str, ...]) -> str | None:
        """The reason why a weight that goes through these conversions is kept, if any is more than joining."""
        if all(operation in _JOINING for operation in operations):
            return None
        return "transformers makes other tensors of it when it loads it, and their scales have no place"

    def _of_stack(self, name: str, target: str, shape: tuple[int, ...], operations: tuple[str, ...]) -> Judgement:
        """Judge a tensor with three axes that is no convolution: experts of a layer, mostly."""
        module_name, _, leaf = target.rpartition(".")
        module = self.modules[module_name]
        place = self._place(module_name)
        if "Transpose" in operations:
            return Judgement(module_name, TURNED, place=place)
        as_stored = not operations and shape == tuple(self.tensors[target].shape)
        patched = MODULES_TO_PATCH_FOR_QUANTIZATION.get(type(module).__name__, {})
        if as_stored and patched and leaf in Expert.fused:
            stem = name.rpartition(".")[0]
            parts = tuple(f"{stem}.{index}.{part}" for index in range(shape[0]) for part in Expert.fused[leaf])
            return Judgement(module_name, place=place, parts=parts, turned=True)
        if getattr(module, "is_transposed", False):
            return Judgement(module_name, TURNED, place=place)
        if as_stored and module_name in self.fused:
            if not self.table.reads_single_experts(leaf):
                return Judgement(module_name, WHOLE, place=place)
            return Judgement(module_name, place=place, parts=("",))
        return Judgement(module_name, f"{type(module).__name__}: experts in a form of their own", place=place)

    def _place(self, module: str) -> Place:
        if module in self.towers:
            return "tower"
        if LAYER.match(f"{module}."):
            return "layer"
        return "outside"

    def linears(self, verdicts: Mapping[str, Judgement]) -> dict[str, tuple[str, ...]]:
        """Each linear layer of the class -> the stored tensors that its weight is made of."""
        stored: dict[str, list[str]] = defaultdict(list)
        for name, verdict in verdicts.items():
            if name.endswith(WEIGHT):
                stored[verdict.module].append(name)
        return {
            name: tuple(stored.get(name, ())) for name, module in self.modules.items() if isinstance(module, nn.Linear)
        }

    def file_name(self, module: str) -> str:
        """The name of `module` in files."""
        return self.table.original(f"{module}{WEIGHT}").removesuffix(WEIGHT)

    def cut(self, verdicts: dict[str, Judgement], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
        """Enter the names of experts into the `verdicts` on stacks; return the tensors that get other names with it."""
        if all(verdict.parts != ("",) for verdict in verdicts.values()):
            return {}
        unfold(self.model)
        parts = defaultdict[str, list[str]](list)
        renamed: dict[str, str] = {}
        for view_name, part in views(self.model, shapes).items():
            name = _in_layer_of(view_name, part.tensor)
            if part.index is not None:
                parts[part.tensor].append(name.removesuffix(WEIGHT))
            elif name != part.tensor:
                renamed[part.tensor] = name
        for name, verdict in verdicts.items():
            if verdict.parts == ("",):
                verdicts[name] = Judgement(verdict.module, place=verdict.place, parts=tuple(parts[name]))
        return renamed


def _in_layer_of(name: str, stored: str) -> str:
    """Give `name` the beginning of the `stored` name, up to the number of the layer: a file has one for all tensors."""
    layer = LAYER.match(name)
    stored_layer = LAYER.match(stored)
    if layer and stored_layer:
        return f"{stored_layer[1]}{name[layer.end(1) :]}"
    return name


def _heads(model: PreTrainedModel) -> list[nn.Module | None]:
    """The output heads of the models inside `model`."""
    inner = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return [module.get_output_embeddings() for module in inner]
