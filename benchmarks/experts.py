"""An `If` an expert, as `fp8q export` writes them, beside all experts as one batched product: one layer of a mixture.

    python benchmarks/experts.py [--experts 8 64 128] [--deep 8x8 16x8 32x8 1x64 1x128 1x256]
        [--keep --save experts]

A random Qwen3-MoE of one layer (width 512, experts of 256, 8 of them a token; 2 of 8), calibrated and exported; then
the same graph in which the branches are one product [experts, tokens, in] × [experts, in, out] for each of gate, up and
down. TensorRT-RTX builds both for sm89: seconds, bytes, kernels, products on FP8 codes, and how often a program waits
for a number from the device. ONNX Runtime runs both, one thread: a decode step and a prompt. What a decode step reads
of the experts' weights follows from the routing. Both forms have to give the same logits, at most positions, since a
code on a midpoint may fall either way. Last, how long building takes with the number of branches in all, in processor
time too, which others on the machine change little: models of one layer and of several, as narrow as can be. `--keep`
measures the shapes that are named, and leaves the others as the saved result has them, with the commit that they are
of. Prints one JSON line.
"""

import json
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from result import RESULTS, arguments, described, publish
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fp8q import api
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.export.engine.build import Job, build
from fp8q.export.engine.plan import read_plan
from fp8q.export.engine.profiles import profiles
from fp8q.quantize.reading.run_checkpoint import stored_arrays, tensor_files
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.loop.cache import BLOCK

DEMO = Path(__file__).resolve().parent.parent / "examples" / "demo"
WIDTH, INNER, PROMPT, PAST, REPEATS = 512, 256, 128, 64, 9
EXPERTS = "model.layers.0.mlp.experts"
#: Largest difference of logits between the two forms in FP32, in the median of positions.
LIMIT = 1e-5
#: Width, width of an expert, of models with many branches.
NARROW = (128, 64)
#: Their layers and the experts of each: up to as many branches as `export` takes, in many layers and in one.
DEEP = ["8x8", "16x8", "32x8", "1x64", "1x128", "1x256"]


def chosen(experts: int) -> int:
    """How many of them a token goes to."""
    return 8 if experts > 8 else 2


def mixture(folder: Path, experts: int, layers: int = 1, width: int = WIDTH, inner: int = INNER) -> Path:
    """A random checkpoint, with the demo's tokenizer."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": width, "moe_intermediate_size": inner, "num_experts": experts,
        "num_hidden_layers": layers, "num_experts_per_tok": chosen(experts), "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.05)
    torch.nn.Module.to(model, torch.bfloat16).save_pretrained(folder, save_original_format=True)
    (folder / "tokenizer.json").write_bytes((DEMO / "checkpoint" / "tokenizer.json").read_bytes())
    return folder


def batched(run: Run, graph: Path, experts: int) -> Path:
    """`graph` with one product of all experts for each of gate, up and down in the place of the branches."""
    model = onnx.load_model(graph, load_external_data=False)
    last = [node for node in model.graph.node if node.op_type == "If"][-1].output[0]
    kept = [node for node in model.graph.node if not re.match(rf"{re.escape(EXPERTS)}\.\d+\.", node.name)]
    shares = next(node for node in kept if node.name == f"{EXPERTS}.ReduceSum_1").output[0]
    hidden = next(node for node in kept if node.name == "model.layers.0.mlp.Reshape_1").output[0]
    compute = next(value for value in model.graph.value_info if value.name == hidden).type.tensor_type.elem_type
    made = Batched(run, experts, compute, hidden, shares, last)
    at = next(place for place, node in enumerate(kept) if last in node.input)
    del model.graph.node[:]
    model.graph.node.extend([*kept[:at], *made.nodes, *kept[at:]])
    read = {name for node in model.graph.node for name in node.input}
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in read]
    del model.graph.initializer[:]
    model.graph.initializer.extend([*tensors, *made.tensors])
    path = graph.with_name(f"batched.{graph.name}")
    path.write_bytes(model.SerializeToString())
    return path


class Batched:
    """Nodes and tensors of all experts of a layer at once; the scales stand behind the products, since
    DequantizeLinear takes no matrix of them.
    """

    def __init__(self, run: Run, experts: int, compute: int, hidden: str, shares: str, result: str):
        """From `hidden` [tokens, width] and `shares` [tokens, experts] to `result`."""
        self.run, self.experts, self.compute = run, experts, compute
        self.nodes: list[NodeProto] = []
        self.tensors: list[TensorProto] = []
        self.activations = load_scales(run).activations
        self.tensor("one", np.array(1, np.float32))
        wide = self.node("Cast", hidden, to=TensorProto.FLOAT)
        gate, up = (self.product(wide, name) for name in ("gate_proj", "up_proj"))
        inner = self.node("Mul", self.node("Mul", gate, self.node("Sigmoid", gate)), up)
        down = self.product(self.node("Cast", inner, to=TensorProto.FLOAT), "down_proj")
        turned = self.node("Transpose", shares, perm=[1, 0])
        column = self.node("Unsqueeze", turned, self.tensor("last", np.array([2])))
        weighed = self.node("Mul", self.node("Cast", down, to=TensorProto.FLOAT), self.node("Cast", column, to=1))
        total = self.node("ReduceSum", weighed, self.tensor("first", np.array([0])), keepdims=0)
        self.nodes.append(helper.make_node("Cast", [total], [result], name="all.total", to=compute))

    def product(self, x: str, name: str) -> str:
        """`x` float32 [(experts,) tokens, in] by the codes of all experts, in the compute type."""
        modules = [f"{EXPERTS}.{number}.{name}" for number in range(self.experts)]
        inputs = np.array([self.activations[module].scale for module in modules], np.float32)[:, None, None]
        found = stored_arrays(self.run.model, [f"{module}.weight_scale" for module in modules])
        channels = np.stack([found[f"{module}.weight_scale"] for module in modules])[:, None, :]
        self.tensors.append(codes(self.run, modules, f"{name}.codes"))
        scaled = self.node("Div", x, self.tensor(f"{name}.inputs", inputs))
        quantized = self.node("QuantizeLinear", scaled, "one", output_dtype=TensorProto.FLOAT8E4M3FN)
        left = self.node("DequantizeLinear", quantized, "one", output_dtype=TensorProto.FLOAT)
        right = self.node("DequantizeLinear", f"{name}.codes", "one", output_dtype=TensorProto.FLOAT)
        sums = self.node("MatMul", left, self.node("Transpose", right, perm=[0, 2, 1]))
        return self.node(
            "Cast", self.node("Mul", sums, self.tensor(f"{name}.factors", inputs * channels)), to=self.compute
        )

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """A node; returns what it makes."""
        name = f"all.{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [f"{name}.output"], name=name, **attributes))
        return f"{name}.output"

    def tensor(self, name: str, numbers: np.ndarray) -> str:
        """A constant; returns its name."""
        self.tensors.append(numpy_helper.from_array(numbers, name))
        return name


def codes(run: Run, modules: list[str], name: str) -> TensorProto:
    """The codes of `modules`, FP8 [modules, out, in]."""
    where, parts = tensor_files(run.model), []
    for module in modules:
        with safe_open(run.model / where[f"{module}.weight"], "pt") as file:
            parts.append(file.get_tensor(f"{module}.weight").view(torch.uint8).numpy())
    stacked = np.stack(parts)
    return helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, stacked.shape, stacked.tobytes(), raw=True)


def built(graph: Path) -> dict[str, Any]:
    """What TensorRT-RTX makes of a graph."""
    start, worked = time.monotonic(), time.process_time()
    data = bytes(build(graph, Job("tensorrt-rtx", "sm89", profiles(8, 512)), SILENT))
    seconds, work = time.monotonic() - start, time.process_time() - worked
    plan = read_plan(data)
    assert plan is not None, "this version's plans read"
    of_experts = [product for product in plan.profiles[1] if any(_of_experts(node) for node in product.nodes)]
    return {
        "build_seconds": round(seconds, 1),
        "build_processor_seconds": round(work, 1),
        "bytes": len(data),
        "kernels": len(plan.kernels[1]) + len(plan.profiles[1]),
        "products": len(of_experts),
        "fp8_products": sum(product.fp8 for product in of_experts),
        "waits": data.count(b"copy_d2h") // len(plan.profiles),
    }


def _of_experts(node: str) -> bool:
    return node.startswith((EXPERTS, "all."))


def session(graph: Path) -> onnxruntime.InferenceSession:
    """ONNX Runtime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return onnxruntime.InferenceSession(graph, options)


def feeds(runtime: onnxruntime.InferenceSession) -> dict[str, dict[str, np.ndarray]]:
    """A decode step behind a past, and a prompt."""
    random = np.random.default_rng(0)
    found = {}
    for phase, seq, past in (("decode", 1, PAST), ("prefill", PROMPT, 0)):
        feed = {
            "input_ids": random.integers(2, 2000, (1, seq)),
            "attention_mask": np.ones((1, past + seq), np.int64),
            "position_ids": np.arange(past, past + seq)[None],
            "logits_indices": np.arange(seq)[None],
        }
        heads = {value.name.removeprefix("new_"): value.shape[1] for value in runtime.get_outputs()[1:]}
        for value in runtime.get_inputs()[len(feed) :]:
            blocks = heads[value.name.removeprefix("past_")] * past // BLOCK
            feed[value.name] = random.normal(size=(blocks, BLOCK, value.shape[-1])).astype(np.float32)
        found[phase] = feed
    return found


def ran(graphs: dict[str, Path]) -> tuple[dict[str, dict[str, float]], float]:
    """Form -> phase -> median milliseconds of ONNX Runtime, the forms in turn; and the median over positions
    of the largest difference of logits.
    """
    runtimes = {form: session(path) for form, path in graphs.items()}
    given = feeds(next(iter(runtimes.values())))
    times: dict[str, dict[str, list[float]]] = {form: {phase: [] for phase in given} for form in runtimes}
    differences: list[float] = []
    for phase, feed in given.items():
        for repeat in range(REPEATS + 1):
            logits = []
            for form, runtime in runtimes.items():
                start = time.process_time()
                logits.append(runtime.run(["logits"], feed)[0])
                times[form][phase] += [1e3 * (time.process_time() - start)] if repeat else []
        differences += np.abs(logits[0] - logits[1]).max(-1).ravel().tolist()
    medians = {
        form: {f"{phase}_ms": round(statistics.median(each), 2) for phase, each in phases.items()}
        for form, phases in times.items()
    }
    return medians, statistics.median(differences)


def measure(experts: int, folder: Path) -> dict[str, Any]:
    """Both forms with so many experts."""
    model = mixture(folder / "model", experts)
    options = api.CalibrateOptions(samples=8, seq_len=256)
    run = api.calibrate(str(model), str(DEMO / "calibration.txt"), folder / "run", options=options)
    exported = {"branches": (run.onnx, run.onnx_fp32)}
    exported["batched"] = (batched(run, run.onnx, experts), batched(run, run.onnx_fp32, experts))
    times, difference = ran({form: fp32 for form, (_, fp32) in exported.items()})
    return {
        "chosen": chosen(experts),
        "median_difference": difference,
        "expert_megabytes": round(3 * WIDTH * INNER * experts / 1e6, 1),
        "read_of_them": {"branches": chosen(experts) / experts, "batched": 1.0},
        "forms": {form: built(bf16) | times[form] for form, (bf16, _) in exported.items()},
    }


def deep(layers: int, experts: int, folder: Path) -> dict[str, Any]:
    """What the branches of all layers cost to build."""
    options = api.CalibrateOptions(samples=4, seq_len=64)
    model = mixture(folder / "model", experts, layers, *NARROW)
    run = api.calibrate(str(model), str(DEMO / "calibration.txt"), folder / "run", options=options)
    return {"branches": layers * experts} | {
        name: figure
        for name, figure in built(run.onnx).items()
        if not name.endswith("products")  # of one layer
    }


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--deep", nargs="*", default=DEEP, metavar="LAYERSxEXPERTS")
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 64, 128])
    parser.add_argument("--keep", action="store_true", help="keep the saved result's other shapes; needs --save")
    given = parser.parse_args()
    head = described("experts")
    before = json.loads((RESULTS / f"{given.save}.json").read_text(encoding="utf-8")) if given.keep else {}
    results = dict(before.get("results", {}))
    for experts in given.experts:
        with tempfile.TemporaryDirectory() as folder:
            results[f"{experts}"] = measure(experts, Path(folder))
    depths = dict(before.get("deep", {}))
    for shape in given.deep:
        with tempfile.TemporaryDirectory() as folder:
            layers, each = map(int, shape.split("x"))
            depths[shape] = deep(layers, each, Path(folder))
    passed = all(each["median_difference"] < LIMIT for each in results.values())
    anew = [*map(str, given.experts), *given.deep]
    earlier = before.get("kept", [])
    earlier = earlier if isinstance(earlier, list) else [earlier]
    kept = {"kept": [*earlier, {"commit": before["commit"], "not": anew}]} if given.keep else {}
    return publish(head, {**kept, "results": results, "deep": depths, "passed": passed}, given.save)


if __name__ == "__main__":
    sys.exit(main())
