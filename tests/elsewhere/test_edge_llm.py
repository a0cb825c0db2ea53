"""TensorRT Edge-LLM's own export to ONNX, on a CPU, of a run in ModelOpt's layout: the engine is built of that graph.

The graph is read here by the ONNX library alone: what each GEMM multiplies, and under which scale.
"""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file, save_file

from fp8q import api

from ..conftest import Texts, WithoutGraphs

LIFE_S = 900
#: A weight whose scale is written as 1.9 · 2^-20, which FP16 does not have, and that scale's neighbour there.
SMALL = "model.layers.1.mlp.down_proj.weight_scale"
SCALE, ROUNDED = 1.9 * 2.0**-20, 30 * 2.0**-24
#: What stands between a GEMM and the DequantizeLinear of its sides.
PASSED = {"Transpose", "Cast", "Reshape", "Identity"}


@dataclass(frozen=True)
class Exported:
    """The scales of the checkpoint by name, the graph, and the number of GEMMs in FP8."""

    scales: dict[str, float]
    graph: onnx.GraphProto
    gemms: int


@pytest.fixture(scope="module")
def exported(
    home_of: Callable[[str], Path], demo_checkpoint: Path, demo_texts: Texts, without_graphs: WithoutGraphs,
    tmp_path_factory: pytest.TempPathFactory,
) -> Exported:  # fmt: skip
    folder, python = tmp_path_factory.mktemp("edge-llm"), home_of("edge-llm") / "bin" / "python"
    options = api.CalibrateOptions(
        samples=4, seq_len=64, layout="modelopt", weight_scale="tensor", form=("one",), kv_cache="fp8"
    )
    with without_graphs():
        texts = str(demo_texts.calibration), str(demo_texts.evaluation)
        run = api.calibrate(str(demo_checkpoint), texts[0], folder / "run", texts[1], options)
    (shard,) = run.model.glob("*.safetensors")
    tensors = load_file(shard)
    tensors[SMALL] = torch.full_like(tensors[SMALL], SCALE)
    save_file(tensors, shard, {"format": "pt"})
    (run.model / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")  # it asks for one
    command: list[str | Path] = [python, "-P", "-m", "tensorrt_edgellm.scripts.export", run.model, folder / "onnx"]
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=LIFE_S,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    model = onnx.load(str(folder / "onnx" / "llm" / "model.onnx"))
    scales = {name: float(value) for name, value in tensors.items() if name.endswith("_scale")}
    return Exported(scales, model.graph, sum(value.dtype == torch.float8_e4m3fn for value in tensors.values()))


def dequantized(graph: onnx.GraphProto, name: str) -> onnx.NodeProto | None:
    """The DequantizeLinear that `name` comes from; None where it comes from another operation."""
    producers = {output: node for node in graph.node for output in node.output}
    while name in producers and producers[name].op_type in PASSED:
        name = producers[name].input[0]
    found = producers.get(name)
    return found if found is not None and found.op_type == "DequantizeLinear" else None


def test_every_gemm_of_codes_is_one_of_its_graph_under_our_scales_in_fp16(exported: Exported) -> None:
    graph = exported.graph
    gemms = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    sides = [[dequantized(graph, name) for name in node.input[:2]] for node in gemms]
    assert exported.gemms == sum(None not in both for both in sides) == 28
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if not tensor.dims}
    written = {stored[side.input[1]].item() for both in sides for side in both if side is not None}
    expected = {name: value for name, value in exported.scales.items() if not name.endswith(("k_scale", "v_scale"))}
    assert written == {float(np.float16(value)) for value in expected.values()}
    exact = {name for name, value in expected.items() if float(np.float16(value)) == value}
    assert expected.keys() - exact == {SMALL}


def test_a_scale_under_2_to_the_minus_17_is_rounded_to_a_multiple_of_2_to_the_minus_24(exported: Exported) -> None:
    stored = [numpy_helper.to_array(tensor) for tensor in exported.graph.initializer if not tensor.dims]
    assert ROUNDED in {value.item() for value in stored if value.dtype == np.float16}
