"""Check that an adapter and a base belong together, and open the base with the adapter merged or beside it.

Merged, a weight is W + s · B A, summed in FP32 and rounded once to BF16 where W is stored in BF16. It is computed when
the tensor is read, so every reader of weights (statistics, codes, the BF16 baseline, streaming) has the merged model,
and nothing is written in between. Beside the base, it is added while the model runs: `adapter_addition`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from ...core.errors import InputError
from ...core.headers import StoredTensor
from ..checkpoint.adapter import MERGE_YOURSELF, TENSORS, WEIGHT, Adapter, check_names, open_adapter
from .gemms import gemm_modules, output_channel_axis, output_head
from .source import Source, meta_model
from .tokenizer import adapter_differences

Mode = Literal["merge", "beside"]


@dataclass(frozen=True)
class Merging:
    """A `Coding` that merges an adapter into the weights of a checkpoint without codes.

    `modules`: stored name -> module, and the axis of its output channels.
    """

    adapter: Adapter
    modules: Mapping[str, tuple[str, Literal[0, 1]]]
    other_files: tuple[Path, ...] = ()

    def headers(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the headers of the same tensors; merged ones that are not stored in BF16 become F32."""
        return {
            name: replace(header, dtype="F32") if name in self.modules and header.dtype != "BF16" else header
            for name, header in stored.items()
        }

    def decoded(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
        """Compute W + s · B A; None for a tensor that the adapter does not change."""
        if name not in self.modules:
            return None
        module, axis = self.modules[name]
        weight = read(name)
        added = self.adapter.added(module)
        merged = weight.float() + (added.T if axis else added)
        if weight.dtype == torch.bfloat16:
            return merged.to(torch.bfloat16)
        return merged


def with_adapters(source: Source, directories: Sequence[Path], mode: Mode) -> Source:
    """Open `source` with the adapters in `directories`: one merged into it, or all of them beside it.

    Raises InputError for an adapter that fp8q does not support, for one of another base, and for several to merge.
    """
    if mode == "merge" and len(directories) > 1:
        raise InputError(
            f"--adapter {directories[1]}",
            "is the second, and one is merged",
            "give --adapter-mode beside for several over one base, or combine them with PEFT's add_weighted_adapter "
            "first",
        )
    adapters = tuple(open_adapter(directory) for directory in directories)
    if not adapters:
        return source
    model = meta_model(source)
    named = tuple(by_model_names(adapter, source, model) for adapter in adapters)
    for adapter in named:
        check_adapter_fits(adapter, source, model)
    if mode == "beside":
        check_names(adapters)
        _check_files_names(adapters, named, source)
        return replace(source, adapters=adapters)
    if source.coding:
        raise InputError(
            f"--adapter {adapters[0].path}",
            f"merging would change the FP8 codes of {source.name}",
            "keep them with --adapter-mode beside, or give the checkpoint they were made from, in BF16",
        )
    return source.merged_with(named[0], merging(named[0], source, model))


def by_model_names(adapter: Adapter, source: Source, model: PreTrainedModel) -> Adapter:
    """The adapter with the names that `model` gives to modules which it calls as the base's files do.

    Training code that makes a linear layer of each expert, as the files have them, calls them by the files' names:
    `block_sparse_moe.experts.0.w1`, where transformers 5 has one tensor for all. Raises InputError where it adapts one
    module under both names.
    """
    in_files = {
        stored.removesuffix(WEIGHT): name.removesuffix(WEIGHT)
        for name, stored in source.renamed.items()
        if name.endswith(WEIGHT) and stored.endswith(WEIGHT)
    }
    modules = dict(model.named_modules())

    def named(module: str) -> str:
        if module in modules:
            return module
        return in_files.get(module, module)

    parts = {named(module): part for module, part in adapter.parts.items()}
    copies = {named(module): name for module, name in adapter.copies.items()}
    if len(parts) < len(adapter.parts):
        twice = next(module for module in adapter.parts if named(module) != module and named(module) in adapter.parts)
        raise InputError(
            adapter.path / TENSORS,
            f"adapts {twice} and {named(twice)}, which is one module of {source.architecture}",
            "take one of the two out",
        )
    return replace(adapter, parts=parts, copies=copies)


def _check_files_names(adapters: Sequence[Adapter], named: Sequence[Adapter], source: Source) -> None:
    """Raise InputError where an adapter that is to lie beside the base calls a module as the base's files do: it is
    served as it is, by its own names.
    """
    for adapter, by_model in zip(adapters, named, strict=True):
        for module, model_name in zip(adapter.parts, by_model.parts, strict=True):
            if module != model_name:
                raise InputError(
                    adapter.path / TENSORS,
                    f"adapts {module} under the name that the files of {source.name} have, and {source.architecture} "
                    f"calls it {model_name}: beside the base it would be looked for there",
                    "merge it, with --adapter-mode merge",
                )


def merging(adapter: Adapter, source: Source, model: PreTrainedModel) -> Merging:
    """Plan the merging of `adapter` into the stored weights of `source`, whose modules are those of `model`."""
    axes = {module: output_channel_axis(model.get_submodule(module)) for module in adapter.parts}
    return Merging(adapter, {source.stored(f"{module}.weight"): (module, axis) for module, axis in axes.items()})


def check_adapter_fits(adapter: Adapter, source: Source, model: PreTrainedModel) -> None:
    """Raise InputError where `adapter` names modules that `model`, made of `source`, lacks or has in other sizes, and
    where it would change an embedding that is tied to the output head.
    """
    gemms = gemm_modules(model)
    other = f"it is of another base than {source.name}; give that one"
    for module, part in adapter.parts.items():
        if module not in gemms:
            raise InputError(
                adapter.path / TENSORS, f"adapts {module}, and {source.architecture} has no such linear layer: {other}"
            )
        weight = gemms[module].weight
        assert isinstance(weight, torch.Tensor), "a GEMM has a weight"
        out, width = tuple(weight.shape)[:: -1 if output_channel_axis(gemms[module]) else 1]
        outputs = adapter.headers[part.b].shape[0]
        inputs = adapter.headers[part.a].shape[1]
        if (outputs, inputs) != (out, width):
            raise InputError(
                adapter.path / TENSORS,
                f"adapts {module} of {inputs} inputs and {outputs} outputs, which here has {width} and {out}: {other}",
            )
    _check_copies(adapter, source, model)
    head = output_head(model) or ""
    if source.text_config.tie_word_embeddings and head in adapter.parts:
        raise InputError(
            adapter.path / TENSORS,
            f"adapts {head}, whose weight is the embedding's too",
            "untie them in the base first",
        )


def _check_copies(adapter: Adapter, source: Source, model: PreTrainedModel) -> None:
    """Raise InputError where a whole weight in the adapter's file is another than the base's.

    PEFT's save_pretrained writes those of embedding and output head, where these are adapted or where it is asked to;
    loading the adapter puts them in the place of the base's.
    """
    weights = source.weights()
    model_names = model.state_dict().keys()
    for module, name in adapter.copies.items():
        file = adapter.path / TENSORS
        stored = source.stored(f"{module}.weight")
        if f"{module}.weight" not in model_names or stored not in weights.names():
            raise InputError(
                file, f"{name} is none of a linear layer's A and B, and plain LoRA alone is read", MERGE_YOURSELF
            )
        adapter_weight = adapter.tensor(name)
        base = weights.tensor(stored)
        if adapter_weight.shape != base.shape or not torch.equal(base.to(adapter_weight.dtype), adapter_weight):
            raise InputError(
                file,
                f"{name} {list(adapter_weight.shape)} is not the weight of {module} {list(base.shape)} in "
                f"{source.name}, so that the adapter has a whole module of its own",
                MERGE_YOURSELF,
            )


def adapter_remarks(source: Source) -> list[str]:
    """List notes about the adapters of `source`: another name of the base, and settings that vLLM ignores.

    vLLM does not read ranks and alphas of single modules.
    """
    adapters = [adapter for adapter in (source.merged, *source.adapters) if adapter]
    remarks = [remark for adapter in adapters if (remark := foreign_base(adapter, source))]
    for adapter in adapters:
        differing = adapter_differences(source, adapter)
        merged = adapter is source.merged
        if differing and merged:
            remarks.append(
                f"--adapter {adapter.path}: its own {' and '.join(differing)} is taken, which is not the base's"
            )
        elif differing:
            remarks.append(
                f"--adapter {adapter.path}: has a {' and '.join(differing)} of its own, which is left aside: base and "
                "adapters are served by the base's"
            )
    for adapter in source.adapters:
        if adapter.patterned:
            remarks.append(
                f"--adapter {adapter.path}: gives single modules a rank or an alpha of their own, which vLLM does not "
                "read: there some would be scaled by another factor"
            )
        if adapter.copies:
            remarks.append(
                f"--adapter {adapter.path}: holds the base's {next(iter(adapter.copies))} too, for which vLLM refuses "
                "it; save it with PEFT's save_pretrained(…, save_embedding_layers=False) for vLLM"
            )
    return remarks


def foreign_base(adapter: Adapter, source: Source) -> str | None:
    """A note where adapter_config.json names another base than `source`; None otherwise.

    The base may have been moved since.
    """
    named = (adapter.config.base_model_name_or_path or "").rstrip("/").rpartition("/")[2]
    known = {source.title.rpartition("/")[2], source.path.resolve().name, source.name.rstrip("/").rpartition("/")[2]}
    if not named or named in known:
        return None
    return (
        f"--adapter {adapter.path}: says that it was trained on {adapter.config.base_model_name_or_path}; its modules "
        f"and sizes fit {source.name}, and whether that is the same model is yours to know"
    )
