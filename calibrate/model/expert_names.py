"""Find each expert's weights in a checkpoint, by transformers' own table of conversions to fused tensors.

Mixtral's files have `block_sparse_moe.experts.N.w1.weight`, Qwen's `mlp.experts.N.gate_proj.weight`, and files of
transformers 5 with `save_original_format=False` have all experts in one tensor. transformers' table says which of these
become which part of `gate_up_proj` (`up_proj` where there is no gate) and `down_proj`, so fp8q needs no names of
architectures. A fused tensor is read as views, one for each expert and GEMM, under the names of the original format,
which other loaders read.
"""

import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING

from ..checkpoint.weights import TensorPart
from .expert_modules import experts_of, gemms_of_stack, stack_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


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
    fused = {
        name: model_name for name in shapes if (model_name := conversions.model_name(name)[0]) in conversions.fused
    }
    fused = {name: model_name for name, model_name in fused.items() if _is_stack(model_name, shapes[name])}
    parts: dict[str, TensorPart] = {}
    for name, shape in shapes.items():
        if name not in fused:
            parts[conversions.original(name) if conversions.shares_a_block_with_experts(name) else name] = TensorPart(
                name
            )
            continue
        experts, _, stack = fused[name].rpartition(".")
        for expert, tensor, part in conversions.experts[experts].form.parts(stack, name, shape):
            parts[conversions.original_of(experts, expert, tensor)] = part
    return parts if fused else {}


def _is_stack(name: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor in this `shape` holds the weights or biases of all experts, whose stack is called `name`,
    and not those of one.
    """
    return len(shape) == (2 if name.endswith("_bias") else 3)


class Conversions:
    """transformers' table of conversions for one model."""

    def __init__(self, model: "PreTrainedModel", dense: bool = False):
        """Get the table for `model`, whose experts are unfolded; `dense`: also where it has none."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.experts = experts_of(model)
        #: The fused tensors that there would be, by name.
        self.fused = {f"{name}.{stack}": stack for name, made in self.experts.items() for stack in made.form.stacks()}
        table = get_model_conversion_mapping(model) if self.experts or dense else []
        self._renamings = [conversion for conversion in table if isinstance(conversion, WeightRenaming)]
        self._converters: list[WeightConverter] = [
            conversion for conversion in table if isinstance(conversion, WeightConverter)
        ]
        self._places = {**dict.fromkeys(model.state_dict(), True), **dict.fromkeys(self.fused, True)}
        self._prefix = model.base_model_prefix

    def model_name(self, stored: str) -> tuple[str, str | None]:
        """Return transformers' name of a tensor that files call `stored`, and the pattern of the conversion that makes
        it a part of a fused tensor; None for a tensor that is not converted.
        """
        from transformers.core_model_loading import rename_source_key

        return rename_source_key(stored, self._renamings, self._converters, self._prefix, self._places)

    def operations(self, pattern: str | None) -> tuple[str, ...]:
        """The names of the operations of the conversion that has `pattern`; none for a tensor that is not converted."""
        made = next((converter for converter in self._converters if pattern in converter.source_patterns), None)
        if made:
            return tuple(type(operation).__name__ for operation in made.operations)
        return ()

    def cutting(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The ends of names of weights in files of which transformers makes several weights -> those of these.

        transformers' quantizers add the names of scales to the sources of each conversion whose first weight is in no
        quantized layer (`HfQuantizer.update_weight_conversions`), and a conversion of several tensors to several ends
        with an error, whatever the files hold.
        """
        return tuple(
            (_unescaped(converter.source_patterns[0]), tuple(map(_unescaped, converter.target_patterns)))
            for converter in self._converters
            if len(converter.target_patterns) > 1
            and not any(operation.supports_many_to_many for operation in converter.operations)
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
                    names[f"{model_name.rpartition('.')[0]}.{int(number[1])}.{projection}.weight"] = name
        return names

    def merged(self, stored: Container[str]) -> dict[str, tuple[list[str], int]]:
        """The model's tensors that are several `stored` ones in a row, as the convolution of a hybrid is of those of q,
        k and v -> their names, and the axis.
        """
        from transformers.core_model_loading import Concatenate

        merged_tensors: dict[str, tuple[list[str], int]] = {}
        for converter in self._converters:
            target = _unescaped(converter.target_patterns[0])
            if [type(operation) for operation in converter.operations] != [Concatenate]:
                continue
            for name in self._places:
                if name.endswith(target) and name not in self.fused:
                    prefix = name.removesuffix(target)
                    parts = [self._renamed_back(prefix + _unescaped(part)) for part in converter.source_patterns]
                    if all(part in stored for part in parts):
                        merged_tensors[name] = parts, int(getattr(converter.operations[0], "dim", 0))
        return merged_tensors

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
        from transformers.core_model_loading import Concatenate, MergeModulelist

        gemms = gemms_of_stack(tensor)
        kinds: list[type] = [MergeModulelist] if len(gemms) == 1 else [MergeModulelist, Concatenate]
        for converter in self._converters:
            axes = [getattr(operation, "dim", None) for operation in converter.operations]
            if (
                converter.target_patterns[0].endswith(f"experts.{tensor}")
                and [type(operation) for operation in converter.operations] == kinds
                and axes == [0, 1][: len(kinds)]
                and len(converter.source_patterns) == len(gemms)
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
        for renaming in reversed(self._renamings):
            name, _ = renaming.reverse_transform().rename_source_key(name)
        return name

    def original_of(self, experts: str, number: int, name: str) -> str:
        """The stored name of the tensor `name` of expert `number` in the module `experts`; our own name if transformers
        has none.
        """
        ours = f"{experts}.{number}.{name}"
        projection, _, kind = name.rpartition(".")
        tensor = stack_of(self.experts[experts].form, projection)
        if kind != "weight" or (made := self._maker(tensor)) is None:
            return ours
        pattern, target = (
            _unescaped(patterns[index])
            for patterns, index in (
                (made.source_patterns, gemms_of_stack(tensor).index(projection)),
                (made.target_patterns, 0),
            )
        )
        full = f"{experts}.{tensor}".removesuffix(target) + pattern.replace("*", str(number))
        return next(
            (name for name in (self._renamed_back(full), full) if self.stored_names([name]) == {ours: name}), ours
        )


def _unescaped(pattern: str) -> str:
    """A pattern of transformers' table as part of a name: some of them escape their dots, as Kimi's do."""
    return pattern.replace(r"\.", ".")
