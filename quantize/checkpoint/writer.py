"""Write the FP8 checkpoint: a Hugging Face directory in compressed-tensors "float-quantized" form.

Each quantized module has `weight` F8_E4M3 [out, in] and `weight_scale` F32 [out, 1] ([1] where all of the weight has
one scale, [blocks, blocks] where each block of 128 x 128 has its own), and `input_scale` F32 [1] unless
its input stays in BF16 or has a scale for each token; each attention module with an FP8 cache has `k_scale` and
`v_scale` F32 [1], or [heads, 1, 1] where each head has a scale, and `q_scale` where that was asked for, which vLLM
alone expects. transformers loads this layout, vLLM documents it, and the ONNX graph reads the same bytes. Tensors go
through memory one at a time, into shards of at most `SHARD_BYTES`. Tensors that are not quantized are copied in BF16,
or in FP32 where transformers keeps them so (`narrowing`), under their names in the source.

Parts that Hugging Face's loaders cannot load (`hf_layout`) are written for fp8q and ONNX. A Conv1D has `weight`
[in, out] and `weight_scale` [1, out]. Scales of a cache that compressed-tensors cannot describe, or has no module for,
lie in `CACHE_FILE`. The static input scales of experts lie in `EXPERT_FILE`, since vLLM's experts with a scale for each
channel scale each token. The index names neither file, so that other loaders ignore them. Experts keep their names in
the source.

Tokenizer and chat templates lie beside the weights (`tokenizer_files`).
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...calibrate.checkpoint.beside_weights import CARD_REASON, HIDDEN, BesideWeights, beside_weights
from ...calibrate.checkpoint.companions import companion_files
from ...calibrate.checkpoint.recognizer import QUANTIZATION_KEYS
from ...calibrate.checkpoint.weights import INDEX, index_text
from ...calibrate.input.untrusted import read_json
from ...calibrate.model.classes import nested
from ...calibrate.model.source import Source
from ...core.errors import InputError
from ...core.files import copy_files, json_text
from ...core.reporter import Reporter
from ...core.run_files import CARD
from ..reading.dequantized import fp8_source
from ..reading.run_checkpoint import ADAPTERS, CACHE_FILE, EXPERT_FILE, FP8Q_CONFIG, FP8Q_POSITIONS, patterns_of
from ..scales.decisions import Scales, Skipped, WeightScales
from ..scales.scheme import form_fields
from ..weights.code_sources import FloatWeight, Rounding
from .hf_layout import INTEGERS, UNLOADABLE, HfLayout
from .model_card import model_card
from .narrowing import Narrowing
from .ties import TIE, Ties
from .tokenizer_files import write_companions, written_remark

SHARD_BYTES = 512 << 20


def quantize_checkpoint(
    source: Source,
    directory: Path,
    scales: Scales,
    rounding: Rounding,
    layout: HfLayout,
    report: Reporter,
) -> dict[str, WeightScales | Skipped]:
    """Write the checkpoint of `source` to `directory` (new) in `layout`.

    `scales.modules` are the modules to quantize; returns the scales of the weight of each, or the reason why it has
    none. Codes are of `scales.format`; an INT8 checkpoint is only for the graph beside it (`baselines`), and has no
    tokenizer and no model card. Raises InputError when the source stores a module's weight under another name than
    transformers does.
    """
    source = replace(source, parts=layout.parts)
    weights = source.weights()
    modules = {source.stored(f"{module}.weight"): module for module in scales.modules}
    missing = [modules[name] for name in modules if name not in weights.names()]
    if missing:
        raise InputError(
            source.name,
            f"has no tensor {missing[0]}.weight",
            "load the model once with transformers and save it with save_pretrained, which gives tensors their "
            "present names",
        )
    directory.mkdir(parents=True)
    narrowing = Narrowing(source, weights)
    writer = ShardWriter(directory, layout.ties.renamed)
    quantizer = ModuleQuantizer(layout, scales, rounding)
    decisions = _write_tensors(writer, narrowing, modules, quantizer, report)
    _write_caches(writer, directory, layout, scales)
    writer.close()
    done = scales.with_weights(decisions)
    if scales.format == "int8":
        write_config(source, directory, INTEGERS, layout.ties)
        return decisions
    others = beside_weights(source.path, source.weight_files)
    tokenized = _write_companions(source, directory, done, layout, others)
    remarks = (
        narrowing.remark,
        layout.ties.remark,
        tokenized,
        layout.remark(source.architecture, done),
        layout.heads_remark(done),
        layout.query_remark(done),
        layout.limit,
        layout.mtp_remark,
        *(f"left beside the source: {line}" for line in others.remarks(CARD_REASON, HIDDEN)),
    )
    for remark in filter(None, remarks):
        report.note(remark)
    return decisions


def _write_tensors(
    writer: "ShardWriter",
    narrowing: Narrowing,
    modules: Mapping[str, str],
    quantizer: "ModuleQuantizer",
    report: Reporter,
) -> dict[str, WeightScales | Skipped]:
    """Write every tensor that `narrowing` reads, those of `modules` (stored name -> module) as codes and scales.

    Returns the weight scales of each of `modules`, or the reason why it stays in BF16.
    """
    decisions: dict[str, WeightScales | Skipped] = {}
    expert_scales: dict[str, torch.Tensor] = {}
    names = narrowing.weights.names()
    with report.track("Quantizing weights", len(names), "tensors") as advance:
        for name in names:
            if module := modules.get(name):
                decision = quantizer.tensors(module, partial(narrowing.tensor, name))
                if isinstance(decision, Skipped):
                    decisions[module] = decision
                    writer.add(name, narrowing.tensor(name))
                else:
                    decisions[module], tensors = decision
                    if module in quantizer.layout.experts:
                        expert_scales |= {key: tensors.pop(key) for key in [*tensors] if key.endswith(".input_scale")}
                    for key, tensor in tensors.items():
                        writer.add(key, tensor)
            else:
                writer.add(name, narrowing.tensor(name))
            advance(1)
    if expert_scales:
        save_file(expert_scales, writer.directory / EXPERT_FILE, metadata={"format": "pt"})
    return decisions


def _write_caches(writer: "ShardWriter", directory: Path, layout: HfLayout, scales: Scales) -> None:
    """Write the scales of the cache: among the weights where loaders read them there, otherwise to `CACHE_FILE`.

    Loaders expect those of every layer, and vLLM also takes those of queries; in `CACHE_FILE` are those of codes alone.
    """
    written = scales.loaded_caches if layout.cache else scales.kv_cache
    caches = {name: torch.from_numpy(cache.stored) for name, cache in written.items()}
    if layout.cache:
        for name, tensor in caches.items():
            attention, _, part = name.rpartition(".")
            of_heads = tensor.dim() > 1
            stored = tensor if of_heads else tensor.reshape(layout.codec.end)
            writer.add(layout.codec.cache_scale.format(attention=attention, part=part), stored)
    elif caches:
        apart = {f"{name}_scale": tensor for name, tensor in caches.items()}
        save_file(apart, directory / CACHE_FILE, metadata={"format": "pt"})


@dataclass(frozen=True)
class ModuleQuantizer:
    """Makes the stored tensors of a module, by the names and axes of `layout`, its input scale and its rounding."""

    layout: HfLayout
    scales: Scales
    rounding: Rounding

    def tensors(
        self, module: str, weight: Callable[[], torch.Tensor]
    ) -> Skipped | tuple[WeightScales, dict[str, torch.Tensor]]:
        """The weight scales of `module` and its tensors by name, or why it stays in BF16; `weight` reads its weight in
        BF16.
        """
        axis = self.layout.axis(module)
        name = self.layout.in_files(module)
        quantized = self.rounding.quantized(FloatWeight(module, weight, axis))
        if isinstance(quantized, Skipped):
            return quantized
        end = self.layout.codec.end
        stored = quantized.scale
        if quantized.summary.granularity == "tensor":
            stored = stored[:1].reshape(end)
        elif stored.dim() == 1:
            stored = stored.reshape(-1, *end).movedim(0, axis)
        tensors = {f"{name}.weight": quantized.codes.movedim(0, axis), f"{name}.weight_scale": stored}
        if (activation := self.scales.static_inputs.get(module)) is not None:
            tensors[f"{name}.input_scale"] = torch.tensor(activation.scale, dtype=torch.float32).reshape(end)
        return quantized.summary, tensors


class ShardWriter:
    """Collects tensors into `model-NNNNN-of-NNNNN.safetensors` and their index.

    Invariant: at most one shard is in memory.
    """

    def __init__(self, directory: Path, renamed: Mapping[str, str] | None = None):
        """Write into `directory`, which exists, the tensors `renamed` under those names."""
        self.directory = directory
        self.renamed = renamed or {}
        self.pending: dict[str, torch.Tensor] = {}
        self.shards: list[list[str]] = []
        self.total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add one tensor; write the present shard first where both together exceed `SHARD_BYTES`."""
        if self.pending and sum(held.nbytes for held in self.pending.values()) + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self.pending[self.renamed.get(name, name)] = tensor.contiguous()
        self.total += tensor.nbytes

    def close(self) -> None:
        """Write the last shard, rename all shards to their final names, and write the index."""
        self._flush()
        count = len(self.shards)
        index: dict[str, str] = {}
        for number, names in enumerate(self.shards):
            shard = f"model-{number + 1:05}-of-{count:05}.safetensors"
            self._temporary(number).rename(self.directory / shard)
            index |= dict.fromkeys(names, shard)
        (self.directory / INDEX).write_bytes(index_text(index, self.total))

    def _temporary(self, number: int) -> Path:
        return self.directory / f"shard-{number}"

    def _flush(self) -> None:
        save_file(self.pending, self._temporary(len(self.shards)), metadata={"format": "pt"})
        self.shards.append(list(self.pending))
        self.pending = {}


def write_config(
    source: Source, directory: Path, quantization: Mapping[str, object] | None, ties: Ties = Ties(), **more: object
) -> None:
    """Write the config.json of `source` into `directory`, with `quantization` for its `quantization_config`, if any.

    It ties no tensors that `ties` has apart.
    """
    config = read_json(source.path / "config.json")
    # the type is written below, and the others describe files that are not copied
    for key in ("torch_dtype", "transformers_weights", FP8Q_CONFIG, *QUANTIZATION_KEYS):
        config.pop(key, None)
    if source.max_positions is not None:
        # under one name for readers without transformers, which knows the other names and the defaults of classes
        fields = config["text_config"] if nested(source.config) else config
        fields.setdefault("max_position_embeddings", source.max_positions)
    if ties.apart:
        config[TIE] = False
        if isinstance(text := config.get("text_config"), dict):
            text[TIE] = False
    config |= {"dtype": "bfloat16"} | ({"quantization_config": quantization} if quantization else {}) | more
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_other_files(others: BesideWeights, source: Source, directory: Path) -> None:
    """Copy what lies beside the weights, but the files that loaders of tokenizers read, which an adapter may replace,
    and the folder of adapters, which is the checkpoint's own.
    """
    names = [name for name in others.copied if name.partition("/")[0] != ADAPTERS]
    of_tokenizers = companion_files(source.path)
    copy_files({name: others.copied[name] for name in names if name not in of_tokenizers}, directory)


def _write_companions(
    source: Source, directory: Path, scales: Scales, layout: HfLayout, others: BesideWeights
) -> str | None:
    """Write config.json, tokenizer, adapters, `others` and the model card; return a note on tokenizers that differ, if
    any.
    """
    fields = form_fields(scales.forms, layout.bf16_cache.values())
    if patterns := patterns_of(layout.stored):
        fields["stored"] = patterns
    if layout.positions is not None:
        fields[FP8Q_POSITIONS] = layout.positions
    more: dict[str, object] = {FP8Q_CONFIG: fields} if fields else {}
    if layout.cache and not hasattr(source.text_config, "num_key_value_heads"):
        more["num_key_value_heads"] = source.text_config.num_attention_heads  # compressed-tensors asks for it
    quantization: Mapping[str, object] = UNLOADABLE
    if layout.loadable:
        assert layout.codec.of_run is not None, "the layouts of the option are written of runs"
        quantization = layout.codec.of_run(
            sorted({*map(layout.in_files, scales.skipped), *layout.ignored}),
            layout.cache_strategy(scales),
            {layout.in_files(module): scheme for module, scheme in scales.schemes.items() if scheme.weights},
            bool(layout.experts),
        )
        for name, content in layout.codec.beside(quantization).items():
            (directory / name).write_bytes(json_text(content))
    write_config(source, directory, quantization, layout.ties, **more)
    for adapter in source.adapters:
        copy_files({path.name: path for path in adapter.files}, directory / ADAPTERS / adapter.name)
    _copy_other_files(others, source, directory)
    card = model_card(source, scales, layout, from_fp8=fp8_source(source) is not None)
    (directory / CARD).write_text(card, encoding="utf-8")
    remaining = write_companions(source, directory)
    if remaining:
        return written_remark(remaining)
    return None
