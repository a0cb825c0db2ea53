"""Trace the checkpoint of a run to `model.onnx` and `model.fp32.onnx` beside it, in FP8 or for an INT8 or BF16
baseline.

Both graphs are traced from config.json on the meta device. No weight is read, so memory does not grow with the model,
and the run is all that is needed.
"""

import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedOpsetsPass
from transformers import PreTrainedConfig, PreTrainedModel

from ...calibrate.input.silence import logging_from
from ...calibrate.measure.statistics import StatisticsRecord
from ...calibrate.model.gemms import cache_shapes
from ...calibrate.model.load import renamed_in
from ...calibrate.model.skeleton import computed_buffers, skeleton
from ...core.errors import BackendError
from ...core.files import replacing
from ...core.reporter import Reporter
from ...core.run import Run
from ...core.run_files import graph_names
from ...options import Logits
from ...quantize.codes.encoding import CODE
from ...quantize.reading.run_checkpoint import with_cache_scales
from ...quantize.reference.fp8_model import written_config
from ...quantize.scales.decisions import AttentionScales, Scales
from ..modules import operators
from ..modules.graph_model import Graph, GraphPlan, prepare_graph
from ..modules.layer_kinds import NotAlikeError, kinds_of, layer_prefix, skip
from ..onnx_file.names import BLOCK
from . import passes, renaming
from .adapters import file_of, lay_in_graph, stored_adapter, stored_names
from .expert_branches import branch_experts
from .layer_copies import stamp
from .passes import split_by_heads

OPSET = 23
Dtype = Literal["bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class UntraceableError(BackendError):
    """torch's exporter cannot trace an architecture; `fault` says why, as a clause of a sentence."""

    def __init__(self, reason: str):
        """Make the whole sentence."""
        super().__init__("", reason, "`model/` is complete without the graph")


def export_model(run: Run, plan: GraphPlan, adapters: Iterable[str], report: Reporter) -> list[Path]:
    """Write both graphs of the FP8 checkpoint in `run`, as `plan` says and in FP32, and for each of the `adapters`;
    return their paths.
    """
    plans = [plan, *(replace(plan, adapter=name) for name in adapters)]
    return [path for planned in plans for path in export_graphs(run.model, planned, report)]


def graph_plan(
    record: StatisticsRecord, scales: Scales, dtype: Dtype, attention: AttentionScales | None = None,
    logits: Logits = "asked",
) -> GraphPlan:  # fmt: skip
    """Plan which parts of a checkpoint with these `scales` run in FP8; `attention`: its scales, where it does;
    `logits`: those that the graph gives.
    """
    return GraphPlan(
        fp8_groups(record.groups, scales),
        frozenset(scales.kv_cache),
        DTYPES[dtype],
        schemes=scales.schemes,
        cache_heads={name: len(scale.heads) for name, scale in scales.kv_cache.items() if scale.heads},
        attention=attention.terms if attention else 0,
        asked_logits=logits == "asked",
    )


def export_baseline_graphs(directory: Path, groups: Mapping[str, list[str]], report: Reporter) -> list[Path]:
    """Write both graphs of the baseline weights in `directory`: INT8 GEMMs for `groups`, BF16 where there are no
    groups.
    """
    return export_graphs(directory, GraphPlan(groups, (), torch.bfloat16, torch.int8), report)


def export_graphs(directory: Path, plan: GraphPlan, report: Reporter) -> list[Path]:
    """Write both graphs of the checkpoint in `directory`, one as `plan` says and one in FP32; return their paths.

    Raises UntraceableError where torch's exporter cannot trace the architecture.
    """
    names = graph_names(plan.adapter)
    plans = {directory / names[0]: plan, directory / names[1]: replace(plan, dtype=torch.float32)}
    layers: int = written_config(directory).get_text_config().num_hidden_layers
    what = f"Exporting {plan.adapter} to ONNX" if plan.adapter else "Exporting to ONNX"
    with report.track(what, len(plans) * 2 * layers, "steps") as advance:
        for path, planned in plans.items():
            tell = at_most(2 * layers, advance)  # a layer counts when the model has run it, and when it is in the graph
            with replacing(path) as partial:
                ir.save(trace(directory, planned, tell), partial)  # held by no name while the next is traced
            tell(2 * layers)
    return list(plans)


def at_most(total: int, advance: Callable[[int], None]) -> Callable[[int], None]:
    """Wrap `advance` so that it gets at most `total` units in all."""
    reported = 0

    def tell(done: int) -> None:
        nonlocal reported
        done = min(done, total - reported)
        reported += done
        advance(done)

    return tell


def fp8_groups(groups: Mapping[str, list[str]], scales: Scales) -> dict[str, list[str]]:
    """The groups of modules that share an input, reduced to the modules in FP8 and keyed by the first of these."""
    quantized = [[member for member in members if member in scales.weights] for members in groups.values()]
    return {members[0]: members for members in quantized if members}


def trace(directory: Path, plan: GraphPlan, ran: Callable[[int], None] = lambda layers: None) -> ir.Model:
    """Make the ONNX model of the checkpoint in `directory`, with its initializers as external data there.

    A few layers of each kind are traced and the others are copied from them (`layer_kinds`, `layer_copies`); all are
    traced where that is not possible. `ran` is called with the number of layers that the model has run.
    """
    try:
        return stamped(directory, plan, ran)
    except (NotAlikeError, BackendError):
        return trace_all(directory, plan, ran)


def stamped(directory: Path, plan: GraphPlan, ran: Callable[[int], None] = lambda layers: None) -> ir.Model:
    """Trace three layers of each kind and copy the others. Raises NotAlikeError where nothing is saved or layers
    differ.
    """
    graph, tensors = _opened(directory, plan)
    model = graph.model
    prefix = layer_prefix(model)
    kinds = kinds_of(model, prefix, tensors.types(), tensors.computed) if prefix else []
    if prefix is None or not any(kind.skipped for kind in kinds):
        raise NotAlikeError("every layer is one of the first two or the last of its kind")
    skip(model, prefix, kinds)
    traced = {index: graph.attention[index] for kind in kinds for index in kind.traced}
    _count(graph, prefix, ran)
    graph.attention = traced
    exported = _finished(_exported(graph, plan), graph, tensors)
    stamp(exported, prefix, kinds, tensors.like)
    return _branched(exported, tensors)


def trace_all(directory: Path, plan: GraphPlan, ran: Callable[[int], None] = lambda layers: None) -> ir.Model:
    """Trace every layer. Raises UntraceableError where torch's exporter cannot trace it."""
    graph, tensors = _opened(directory, plan)
    if prefix := layer_prefix(graph.model):
        _count(graph, prefix, ran)
    return _branched(_finished(_exported(graph, plan), graph, tensors), tensors)


def _branched(model: ir.Model, tensors: passes.Tensors) -> ir.Model:
    """Replace the marked experts of `model` by branches."""
    branch_experts(model, tensors.like)
    RemoveUnusedOpsetsPass()(model)
    passes.order_initializers(model)
    return model


def _count(graph: Graph, prefix: str, ran: Callable[[int], None]) -> None:
    """Call `ran` whenever a decoder layer has run."""
    for index in graph.attention:
        graph.model.get_submodule(f"{prefix}{index}").register_forward_hook(lambda *_: ran(1))


def _opened(directory: Path, plan: GraphPlan) -> tuple[Graph, passes.Tensors]:
    """The empty model of a checkpoint, prepared for tracing, and the places of its tensors."""
    config = written_config(directory)
    model, buffers = empty_model(config, plan.dtype)
    stored = passes.stored_tensors(sorted(directory.glob("*.safetensors")))
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    aliases = tied_names(model) | with_cache_scales(renamed_in(config, shapes), stored)
    graph = prepare_graph(model, plan)
    if plan.adapter:
        adapter = stored_adapter(directory, plan.adapter)
        lay_in_graph(model, adapter, plan.dtype)
        stored |= passes.stored_tensors([directory / file_of(plan.adapter)])
        aliases |= stored_names(adapter)
    return graph, passes.Tensors(directory, stored, aliases, buffers)


def _exported(graph: Graph, plan: GraphPlan) -> ir.Model:
    """Export `graph` by torch's exporter."""
    config = graph.model.config
    # with sizes that are symbols, what the cache of fake tensors keeps costs more to give back than to compute
    with quiet(), torch.no_grad(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        inputs, shapes = example(graph, config, plan)
        try:
            program = torch.export.export(graph, inputs, dynamic_shapes=shapes, strict=False)
            exported = torch.onnx.export(
                program,
                (),
                custom_translation_table=operators.translations(),
                opset_version=OPSET,
                optimize=False,
                dynamo=True,
                verbose=False,
            )
        except (
            torch.onnx.errors.OnnxExporterError,
            torch._dynamo.exc.TorchDynamoException,
            RuntimeError,
            TypeError,
        ) as error:
            raise UntraceableError(
                f"torch {torch.__version__} cannot export {type(graph.model).__name__} to ONNX ({_first_line(error)})"
            ) from error
    assert exported is not None, "torch.onnx.export without a file returns its program"
    return exported.model


def _finished(model: ir.Model, graph: Graph, tensors: passes.Tensors) -> ir.Model:
    """Apply all passes to `model`, in place."""
    renaming.name_interface(model, sorted(graph.attention))
    renaming.read_sizes_first(model)
    renaming.name_nodes(model, graph.attention.values())
    passes.point_at_weights(model, tensors)
    named = frozenset(model.graph.initializers)
    passes.simplify(model)
    passes.state_sizes(model)
    split_by_heads(model)
    passes.widen_initializers(model)
    renaming.name_the_rest(model, named)
    passes.strip(model)
    return model


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, ir.TensorProtocol]]:
    """Make the model on the meta device; return it and the values of buffers that no checkpoint holds."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = skeleton(config, dtype)
    buffers: dict[str, ir.TensorProtocol] = {}
    for name, module in model.named_modules():
        for key, buffer in computed_buffers(module).items():
            buffers[f"{name}.{key}".lstrip(".")] = ir.tensor(buffer.contiguous(), name=key)
            module._buffers[key] = buffer.to("meta")
    return model, buffers


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Map a tied parameter to the other names of its tensor; the first is the name in the checkpoint."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(parameter), name)
        if first_name != name:
            aliases |= {name: first_name, first_name: name}
    return aliases


def example(graph: Graph, config: PreTrainedConfig, plan: GraphPlan) -> tuple[tuple[object, ...], dict[str, object]]:
    """Make the example inputs of the trace, on the meta device, and list their dynamic dimensions.

    The sizes differ, so that the exporter takes no two of them for equal.
    """
    batch = 2
    seq = 3
    blocks = 5
    scored = 4
    parts = dict(zip("kv", cache_shapes(config.get_text_config()), strict=True))

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def stored(attention: str, part: str) -> torch.dtype:
        if f"{attention}.{part}" in plan.cache:
            return CODE
        return plan.dtype

    def past_of(heads: int, size: int) -> tuple[int, ...]:
        return batch * heads * blocks, BLOCK, size

    layers = [graph.attention[index] for index in sorted(graph.attention)]
    past = [
        tuple(empty(*past_of(heads, size), dtype=stored(name, part)) for part, (heads, size) in parts.items())
        for name in layers
    ]
    dynamic = torch.export.Dim.DYNAMIC
    matrix = {0: dynamic, 1: dynamic}
    shapes: dict[str, object] = dict.fromkeys(("input_ids", "attention_mask", "position_ids"), matrix)
    shapes["past"] = [tuple({0: dynamic} for _ in "kv") for _ in layers]
    inputs = (empty(batch, seq), empty(batch, BLOCK * blocks + seq), empty(batch, seq), past)
    if not plan.asked_logits:
        return inputs, shapes
    return (*inputs, empty(batch, scored)), {**shapes, "logits_indices": matrix}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's messages about optional packages."""
    with logging_from("torch.onnx", logging.ERROR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _first_line(error: BaseException) -> str:
    """The first line of an exception's text, without torch's colour codes."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return next((line.strip() for line in plain.splitlines() if line.strip()), type(error).__name__)
