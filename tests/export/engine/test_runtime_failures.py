"""What the builder's errors become: the module, the node, and what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import ModelProto, TensorProto

from fp8q.core.errors import BackendError, InputError
from fp8q.core.reporter import SILENT
from fp8q.export.engine import targets
from fp8q.export.engine.build import Job, build
from fp8q.export.engine.profiles import profiles
from fp8q.export.engine.runtime import explain

Decoders = Callable[..., Any]
Edit = Callable[[Path, Callable[[ModelProto], None]], None]
DOWN = "model.layers.0.mlp.down_proj"
RTX = pytest.mark.skipif(
    "tensorrt-rtx" not in targets.available_runtimes(),
    reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'",
)


def job(target: str = "sm89") -> Job:
    return Job("tensorrt-rtx", target, profiles(2, 16))


def failure(path: Path, target: str = "sm89") -> str:
    with pytest.raises(BackendError) as failed:
        build(path, job(target), SILENT)
    head, _, rest = str(failed.value).partition(f" cannot build {path} for {target}: ")
    assert head.startswith("TensorRT-RTX 1.")
    assert "\n" not in rest
    return rest


@RTX
def test_an_operator_that_the_runtime_lacks_names_module_and_node(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def rename(model: ModelProto) -> None:
        next(node for node in model.graph.node if node.name == f"{DOWN}.matmul").op_type = "BlockMatMul"

    edited(written.path, rename)
    assert failure(written.path) == (
        f"{DOWN} (node {DOWN}.matmul, BlockMatMul): the runtime does not know this operator; export with standard "
        "operators (`fp8q export`), or install a newer runtime"
    )


@RTX
def test_an_unnamed_node_that_the_parser_refuses_is_placed_by_the_module_nearest_to_it(
    decoder: Decoders, edited: Edit
) -> None:
    written, names = decoder(), []

    def refuse(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "Sigmoid")
        node.op_type = "Unique"
        names.append(node.name)

    edited(written.path, refuse)
    assert failure(written.path) == (
        f"near model.layers.0.mlp.gate_proj (node {names[0]}, Unique): the runtime's parser refuses this operator and "
        "gives no reason; "
        "export with standard operators (`fp8q export`), or install a newer runtime"
    )


@RTX
def test_a_product_of_two_types_names_module_and_reason(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def widen(model: ModelProto) -> None:
        node = next(node for node in model.graph.node if node.name == f"{DOWN}.weight.dequantize")
        next(entry for entry in node.attribute if entry.name == "output_dtype").i = TensorProto.FLOAT

    edited(written.path, widen)
    assert failure(written.path) == (
        f"{DOWN} (node {DOWN}.matmul, MatMul): {DOWN}.matmul: IMatrixMultiplyLayer must have same input types. `A` is "
        "of type BFloat16 and `B` is of type Float; "
        "run `fp8q export` again, and if it stays, report this line"
    )


@RTX
@pytest.mark.parametrize(
    "options", [{"head_size": 8}, {"compute": TensorProto.FLOAT}, {"heads": 2, "key_value_heads": 1}]
)
def test_attention_without_a_kernel_says_what_it_takes(
    decoder: Decoders, options: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert failure(decoder(**options).path) == (
        "model.layers.0.self_attn (node model.layers.0.self_attn.attention): there is no fused attention kernel for "
        "its type, head size or number of heads; "
        "it takes BF16 or FP16, a head size that is a multiple of 8 from 16 to 256, and at least 4 heads to decode "
        "with; other models need plain GEMMs and a softmax"
    )
    assert capfd.readouterr().out == ""  # standard output is for results


@RTX
def test_a_gpu_without_fp8_is_explained_where_it_gets_as_far_as_the_builder(decoder: Decoders) -> None:
    assert failure(decoder().path, "sm86") == "the target has no fp8_e4m3; choose sm89 or newer with --target"


@RTX
def test_missing_and_short_external_data_are_explained(decoder: Decoders) -> None:
    written = decoder()
    weights = written.path.with_name("model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    assert failure(written.path) == f"its external data {weights} is cut short; copy the whole of model/ again"
    weights.unlink()
    assert failure(written.path) == f"its external data {weights} is missing; copy the whole of model/ again"


@RTX
def test_a_file_that_is_no_graph_is_explained(tmp_path: Path, decoder: Decoders) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(decoder().path.read_bytes()[:2000])
    assert (
        failure(broken)
        == "the file is no ONNX model, or is cut short; run `fp8q export` again, and if it stays, report this line"
    )


@RTX
def test_a_graph_with_other_dynamic_dimensions_is_refused(decoder: Decoders, edited: Edit) -> None:
    written = decoder()

    def rename(model: ModelProto) -> None:
        for value in model.graph.input:
            if value.name == "input_ids":
                value.type.tensor_type.shape.dim[1].dim_param = "time"

    edited(written.path, rename)
    with pytest.raises(
        InputError,
        match=r"input_ids: its dimension 'time' has no range \(time is none of batch, seq, scored, capacity, blocks\)",
    ):
        build(written.path, job(), SILENT)


def test_an_unknown_failure_is_passed_on_in_its_own_words_without_its_wrapping() -> None:
    driver = (
        "[checkMacros.cpp::catchCudaError::250] Error Code 1: Cuda Runtime (… (cudaError 35: CUDA driver version is "
        "insufficient for CUDA runtime version))"
    )
    message = (
        "IBuilder::build: Error Code 4: API Usage Error (model.layers.1.mlp.up_proj.matmul: dimensions\nmust match. "
        "In validate at /_src/optimizer/matrixMultiplyLayer.cpp:192)"
    )
    layers = ["model.layers.1.mlp.up_proj.matmul", "model.layers.1", "x"]
    assert "; ".join(explain([driver, message], layers=layers)) == (
        "model.layers.1.mlp.up_proj (node model.layers.1.mlp.up_proj.matmul): model.layers.1.mlp.up_proj.matmul: "
        "dimensions must match; "
        "run `fp8q export` again, and if it stays, report this line"
    )
    assert (
        "; ".join(explain([driver])) == "it gave no reason; run `fp8q export` again, and if it stays, report this line"
    )
    assert (
        "; ".join(explain(["Error Code 2: OutOfMemory (requested 68 GB)"]))
        == "there is not enough memory; lower --max-batch or --max-seq-len"
    )


def test_a_workspace_that_is_too_small_is_told_to_be_raised() -> None:
    message = (
        "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([tactic.cpp:1676: enumerate_tactics] Tactic "
        "Selection: no tactics to implement the operation within workspace "
        "limit. Consider increase the allowed workspace size if applicable.; [tactic.cpp:264: run] Error during "
        "tactic selection. In compileGraph at /_src/codeGenerator.cpp:2012)"
    )
    assert "; ".join(explain([message])) == (
        "a kernel takes more memory for intermediate results than --workspace allows; raise --workspace, or leave "
        "it out"
    )
