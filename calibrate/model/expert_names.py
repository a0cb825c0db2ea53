"""Find each expert's weights in a checkpoint, by transformers' own table of conversions to fused tensors.

Mixtral's files have `block_sparse_moe.experts.N.w1.weight`, Qwen's `mlp.experts.N.gate_proj.weight`, and files of
transformers 5 with `save_original_format=False` have all experts in one tensor. transformers' table says which of these
become which part of `gate_up_proj` (`up_proj` where there is no gate) and `down_proj`, so fp8q needs no names of
architectures. A fused tensor is read as views, one for each expert and GEMM, under the names of the original format,
which other loaders read.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoint.weights import JoinedTensors, TensorPart
from .expert_modules import experts_of, gemms_of_stack, stack_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

#: The operation that makes the experts of two modules of one list.
DIVIDING = "ErnieFuseAndSplitTextVisionExperts"


def expert_names(model: "PreTrainedModel", stored: Iterable[str]) -> dict[str, str]:
    """The name of each expert's weight in `model`, whose experts are unfolded -> its name among the `stored`
    tensors.
    """
    return Conversions(model).stored_names(stored)


def views(model: "PreTrainedModel", shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorPart]:
    """Tensor name -> the part of a stored tensor (of these `shapes`), where experts of `model` are stored fused; else
    empty.
    """
    conversions = Conversions(model)
    stacks = {name: stack for name, shape in shapes.items() if (stack := conversions.stack(name, shape))}
    parts: dict[str, TensorPart] = {}
    for name, shape in shapes.items():
        if name not in stacks:
            parts[conversions.original(name) if conversions.shares_a_block_with_experts(name) else name] = TensorPart(
                name
            )
            continue
        experts, tensors = stacks[name]
        for expert, tensor, part in conversions.experts[experts].form.parts(tensors, name, shape):
            parts[conversions.original_of(experts, expert, tensor)] = part
    return parts if stacks else {}


def _is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor in this `shape` holds the weights or biases of all experts, whose stack is called `name`,
    and not those of one.
    """
    return len(shape) == (2 if name.endswith("_bias") else 3)


@dataclass(frozen=True)
class ConvertedTensor:
    """The tensor `name` of a `model` that the `converter` of transformers makes of `sources`: stored name -> pattern.

    `target`: the name of the first tensor that it makes of them.
    """

    name: str
    target: str
    sources: Mapping[str, str]
    converter: "WeightConverter"
    model: "PreTrainedModel"

    def computed(self, read: "Callable[[str], torch.Tensor]") -> "torch.Tensor":
        """Read the stored tensors, and convert them."""
        converter: Any = deepcopy(self.converter)
        for name, pattern in self.sources.items():
            converter.add_tensor(self.target, name, pattern, read(name))
        tensor = converter.convert(self.target, model=self.model, config=self.model.config)[self.name]
        return tensor[0] if isinstance(tensor, list) else tensor  # type: ignore[no-any-return]


class Conversions:
    """transformers' table of conversions for one model."""

    def __init__(self, model: "PreTrainedModel", dense: bool = False):
        """Get the table for `model`, whose experts are unfolded; `dense`: also where it has none."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.experts = experts_of(model)
        #: The fused tensors that there would be, by name.
        self.fused = {f"{name}.{stack}": stack for name, made in self.experts.items() for stack in made.form.stacks()}
        asked = bool(self.experts) or dense
        table = get_model_conversion_mapping(model) if asked else []
        written = get_model_conversion_mapping(model, add_legacy=False) if asked else []
        self._renamings = [conversion for conversion in table if isinstance(conversion, WeightRenaming)]
        #: Those that transformers reverts when it writes files: without names that older files have.
        self._reverted = [conversion for conversion in written if isinstance(conversion, WeightRenaming)]
        self._converters: list[WeightConverter] = [
            conversion for conversion in table if isinstance(conversion, WeightConverter)
        ]
        self._places = {**dict.fromkeys(model.state_dict(), True), **dict.fromkeys(self.fused, True)}
        self._prefix = model.base_model_prefix
        self._model = model

    def model_name(self, stored: str) -> tuple[str, str | None]:
        """Return transformers' name of a tensor that files call `stored`, and the pattern of the conversion that makes
        it a part of a fused tensor; None for a tensor that is not converted.
        """
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(stored, self._renamings, self._converters, self._prefix, self._places)

    def operations(self, pattern: str | None) -> tuple[str, ...]:
        """The names of the operations of the conversion that has `pattern`; none for a tensor that is not converted."""
        made = self._converter(pattern)
        if made:
            return tuple(type(operation).__name__ for operation in made.operations)
        return ()

    def _converter(self, pattern: str | None) -> "WeightConverter | None":
        return next((converter for converter in self._converters if pattern in converter.source_patterns), None)

    def stack(self, stored: str, shape: tuple[int, ...]) -> tuple[str, tuple[str, ...]] | None:
        """The module of experts whose tensors the `stored` one (in this `shape`) holds, and which tensors of each: gate
        and up, or one of them where the stacks of both are stored apart, as Step 3.7's are; None for other tensors.
        """
        model_name, pattern = self.model_name(stored)
        if model_name not in self.fused or not _is_stack(model_name, shape):
            return None
        experts, _, stack = model_name.rpartition(".")
        tensors = self.experts[experts].form.stacks()[stack]
        converter = self._converter(pattern)
        if converter is None or self.operations(pattern) != ("Concatenate",):
            return experts, tensors
        number = converter.source_patterns.index(str(pattern))
        return experts, tensors[number : number + 1]

    def cutting(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The ends of names of weights in files of which transformers makes several weights -> those of these.

        transformers' quantizers add the names of scales to the sources of each conversion whose first weight is in no
        quantized layer (`HfQuantizer.update_weight_conversions`), and a conversion of several tensors to several ends
        with an error, whatever the files hold: that of ERNIE 4.5 VL's experts asks for every source.
        """
        return tuple(
            (_unescaped(converter.source_patterns[0]), tuple(map(_unescaped, converter.target_patterns)))
            for converter in self._converters
            if len(converter.target_patterns) > 1
            and all(source.endswith(".weight") for source in converter.source_patterns)
        )

    def stored_names(self, stored: Iterable[str]) -> dict[str, str]:
        """Return the names of experts' weights, as `expert_names` does."""
        names: dict[str, str] = {}
        for name in stored:
            model_name, pattern = self.model_name(name)
            if pattern is None:
                gemm = model_name.removesuffix(".weight").removesuffix(".bias")
                if gemm.rpartition(".")[0].rpartition(".")[0] in self.experts:
                    names[model_name] = name
            elif model_name in self.fused and (projection := self._projection(self.fused[model_name], pattern)):
                number = re.search(re.escape(_unescaped(pattern)).replace(r"\.\*\.", r"\.(\d+)\."), name)
                if number:
                    names[f"{self._expert(model_name, int(number[1]))}.{projection}.weight"] = name
        return names

    def _expert(self, stack: str, number: int) -> str:
        """The name of the expert that files call `number`, and of which a weight goes into the fused tensor `stack`, or
        into a later one of the same conversion: files have the experts of ERNIE 4.5 VL's two modules in one list.
        """
        first, _, tensor = stack.rpartition(".")
        targets = self._targets(tensor)
        count = len(self.experts[first].experts)
        share = min(number // count, len(targets) - 1)
        module = (stack.removesuffix(targets[0]) + targets[share]).rpartition(".")[0]
        return f"{module}.{number - share * count}"

    def _targets(self, tensor: str) -> list[str]:
        """The ends of the names of the fused tensors that the conversion to `tensor` makes."""
        made = self._maker(tensor)
        return [_unescaped(target) for target in made.target_patterns] if made else []

    def _share(self, experts: str, tensor: str) -> int:
        """The index of the module `experts` among those that the conversion to `tensor` divides experts among."""
        name = f"{experts}.{tensor}"
        return next((share for share, target in enumerate(self._targets(tensor)) if name.endswith(target)), 0)

    def numbered_behind_others(self) -> frozenset[str]:
        """The modules of experts that files number behind those of another module, as those of images are in ERNIE 4.5
        VL.
        """
        return frozenset(name for name in self.experts if self._share(name, "down_proj"))

    def merged(self, stored: Container[str]) -> dict[str, JoinedTensors]:
        """The model's tensors that are several `stored` ones in a row, as the convolution of a hybrid is of those of q,
        k and v.
        """
        from transformers.core_model_loading import Concatenate

        merged_tensors: dict[str, JoinedTensors] = {}
        for converter in self._converters:
            target = _unescaped(converter.target_patterns[0])
            if [type(operation) for operation in converter.operations] != [Concatenate]:
                continue
            for name in self._places:
                if name.endswith(target) and name not in self.fused:
                    prefix = name.removesuffix(target)
                    parts = tuple(self._renamed_back(prefix + _unescaped(part)) for part in converter.source_patterns)
                    if all(part in stored for part in parts):
                        merged_tensors[name] = JoinedTensors(parts, int(getattr(converter.operations[0], "dim", 0)))
        return merged_tensors

    def converted(self, stored: Iterable[str]) -> "dict[str, ConvertedTensor]":
        """The model's tensors that transformers makes of `stored` ones by its operations, but for stacks of experts."""
        sources: dict[str, dict[str, str]] = {}
        for name in stored:
            target, pattern = self.model_name(name)
            if pattern is not None and target in self._places and target not in self.fused:
                sources.setdefault(target, {})[name] = pattern
        tensors: dict[str, ConvertedTensor] = {}
        for target, patterns in sources.items():
            converter = self._converter(next(iter(patterns.values())))
            assert converter is not None, "the pattern is of one"
            first, *others = map(_unescaped, converter.target_patterns)
            for end in (first, *others):
                name = target.replace(first, end)
                tensors[name] = ConvertedTensor(name, target, patterns, converter, self._model)
        return tensors

    def _projection(self, tensor: str, pattern: str) -> str | None:
        """The GEMM of an expert whose weights match `pattern`, and are stacked into `tensor`.

        None where the conversion does more than stacking.
        """
        made = self._maker(tensor)
        if made is None or pattern not in made.source_patterns:
            return None
        return gemms_of_stack(tensor)[made.source_patterns.index(pattern)]

    def unread(self, in_files: Callable[[str], str]) -> frozenset[str]:
        """The modules of experts that transformers loads from stacks alone, and not from the weights of single experts;
        `in_files`: the name of a tensor of the model -> its name in the files.
        """
        from transformers.quantizers.base import MODULES_TO_PATCH_FOR_QUANTIZATION

        stacked: set[str] = set()
        for name, experts in self.experts.items():
            weights = [in_files(f"{name}.0.{gemm}.weight") for gemms in experts.form.fused.values() for gemm in gemms]
            read = all(self.model_name(weight)[0] in self.fused for weight in weights)
            if not read and experts.replaced not in MODULES_TO_PATCH_FOR_QUANTIZATION:
                stacked.add(name)
        return frozenset(stacked)

    def reads_single_experts(self, tensor: str) -> bool:
        """Tell whether transformers loads the fused `tensor` from files that hold each expert's weights apart."""
        return self._maker(tensor) is not None

    def _maker(self, tensor: str) -> "WeightConverter | None":
        """The conversion to `tensor` that stacks all experts and concatenates gate and up."""
        gemms = gemms_of_stack(tensor)
        for converter in self._converters:
            if (
                converter.target_patterns[0].endswith(f"experts.{tensor}")
                and len(converter.source_patterns) == len(gemms)
                and _steps(converter) == [("MergeModulelist", 0), ("Concatenate", 1)][: len(gemms)]
            ):
                return converter
        return None

    def shares_a_block_with_experts(self, stored: str) -> bool:
        """Tell whether the `stored` tensor is in a block of experts without being an expert's: a router or a shared
        expert.
        """
        model_name = self.model_name(stored)[0]
        return any(model_name.startswith(f"{name.rpartition('.')[0]}.") for name in self.experts)

    def original(self, model_name: str) -> str:
        """The stored name of the tensor that transformers calls `model_name`."""
        name = self._renamed_back(model_name)
        if self.model_name(name)[0] == model_name:
            return name
        return model_name

    def _renamed_back(self, name: str) -> str:
        for renaming in reversed(self._reverted):
            name, _ = renaming.reverse_transform().rename_source_key(name)
        return name

    def original_of(self, experts: str, number: int, name: str) -> str:
        """The stored name of the tensor `name` of expert `number` in the module `experts`; our own name if transformers
        has none.
        """
        ours = full = f"{experts}.{number}.{name}"
        projection, _, kind = name.rpartition(".")
        tensor = stack_of(self.experts[experts].form, projection)
        if kind == "weight" and (made := self._maker(tensor)) is not None:
            pattern = _unescaped(made.source_patterns[gemms_of_stack(tensor).index(projection)])
            share = self._share(experts, tensor)
            numbered = pattern.replace("*", str(number + share * len(self.experts[experts].experts)))
            full = f"{experts}.{tensor}".removesuffix(self._targets(tensor)[share]) + numbered
        return next(
            (name for name in (self._renamed_back(full), full) if self.stored_names([name]) == {ours: name}), ours
        )


def _steps(converter: "WeightConverter") -> list[tuple[str, int | None]]:
    """The operations of a conversion, and the axis of each; that of ERNIE 4.5 VL, which also divides the experts among
    two modules, is the two that others have.
    """
    steps: list[tuple[str, int | None]] = []
    for operation in converter.operations:
        name = type(operation).__name__
        if name == DIVIDING:
            axes = [getattr(operation, axis) for axis in ("stack_dim", "concat_dim")]
            steps += zip(("MergeModulelist", "Concatenate"), axes[: len(converter.source_patterns)])
        else:
            steps.append((name, getattr(operation, "dim", None)))
    return steps


def _unescaped(pattern: str) -> str:
    """A pattern of transformers' table as part of a name: some of them escape their dots, as Kimi's do."""
    return pattern.replace(r"\.", ".")
