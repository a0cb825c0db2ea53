"""Decoders written by hand, node by node, as `fp8q export` writes them: what the lint, the builder and the plan reader
are tried on.

They are real graphs (ONNX's checker takes them) with random weights in a safetensors file beside them, small enough
that an engine is built in half a second. Each option spoils or changes one thing.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from fp8q.core.reporter import SILENT
from fp8q.export.engine.build import Job, build
from fp8q.export.engine.profiles import profiles
from fp8q.export.graph.weight_scale_form import in_form
from fp8q.export.onnx_file.names import BLOCK
from fp8q.options import WeightScale

Array = npt.NDArray[np.generic]
NUMPY: dict[int, Any] = {
    TensorProto.BFLOAT16: ml_dtypes.bfloat16,
    TensorProto.FLOAT16: np.float16,
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
}
SAFETENSORS: dict[int, str] = {
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT16: "F16",
    TensorProto.FLOAT: "F32",
    TensorProto.FLOAT8E4M3FN: "F8_E4M3",
}
#: Every activation's scale and every cache's: a number on the BF16 grid.
SCALE = 0.01953125


@dataclass(frozen=True)
class Decoder:
    """What the decoder is like; the defaults are a good graph."""

    layers: int = 1
    width: int = 128
    heads: int = 4
    key_value_heads: int = 2
    head_size: int = 64
    hidden: int = 256
    vocabulary: int = 64
    compute: int = TensorProto.BFLOAT16
    fp8: bool = True
    fp8_inputs: bool = True
    fp8_cache: bool = True
    per_channel: bool = True
    scale_type: int = TensorProto.FLOAT
    bias: bool = False
    plain_attention: bool = False
    transposed: bool = True  # weights are [out, in], as in a Linear; else [in, out], as in a Conv1D
    wide: Sequence[str] = ()  # kept in the compute type
    wide_inputs: Sequence[str] = ()  # FP8 weight, no Q/DQ on the input
    weight_scale: WeightScale = "dq"
    two_terms: bool = False


@dataclass
class Written:
    """A decoder on the disk: its graph, the modules expected on FP8, and the scales that were used."""

    path: Path
    modules: tuple[str, ...]
    input_scales: dict[str, float]
    weight_scales: dict[str, Array]


@dataclass
class Writer:
    """Writes one decoder; nodes are appended in order, tensors collected by name."""

    options: Decoder
    nodes: list[NodeProto] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    stored: dict[str, tuple[Array, int]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def node(self, operator: str, inputs: Sequence[str], name: str = "", output: str = "", **attributes: Any) -> str:
        """Append a node; returns its output."""
        name = name or f"node_{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [output or f"{name}_output"], name=name, **attributes))
        return output or f"{name}_output"

    def ints(self, *values: int, scalar: bool = False) -> str:
        """A constant of int64 in the graph."""
        name = "int" if scalar else "ints"
        name += "".join(f"_{value}" for value in values).replace("-", "minus")
        self.constants[name] = numpy_helper.from_array(np.array(values[0] if scalar else values, np.int64), name)
        return name

    def tensor(self, name: str, values: Array, kind: int) -> str:
        """A tensor of the safetensors file."""
        self.stored[name] = (values.astype(NUMPY[kind]), kind)
        return name

    def scale(self, name: str, values: Array | float) -> str:
        """A scale."""
        return self.tensor(name, np.asarray(values, np.float32), self.options.scale_type)

    def quantize(self, value: str, scale: str, name: str, output: str = "") -> str:
        """QuantizeLinear to E4M3."""
        return self.node("QuantizeLinear", [value, scale], name, output, output_dtype=TensorProto.FLOAT8E4M3FN)

    def dequantize(self, value: str, scale: str, name: str, **attributes: Any) -> str:
        """DequantizeLinear to the compute type."""
        return self.node("DequantizeLinear", [value, scale], name, output_dtype=self.options.compute, **attributes)

    def quantized(self, value: str, name: str) -> str:
        """Q/DQ of an activation, in two terms where they are asked for."""
        scale = self.scale(f"{name}_scale", SCALE)
        if not self.options.two_terms:
            return self.dequantize(self.quantize(value, scale, f"{name}.quantize"), scale, f"{name}.dequantize")
        first = self.dequantize(
            self.quantize(value, scale, f"{name}.first.quantize"), scale, f"{name}.first.dequantize"
        )
        rest = self.node("Mul", [self.node("Sub", [value, first]), self.number(16, self.options.compute)])
        both = self.node("Concat", [value, rest], f"{name}.first.concat", axis=0)
        codes = self.quantize(both, scale, f"{name}.quantize")
        return self.node("DequantizeLinear", [codes, scale], f"{name}.dequantize", output_dtype=TensorProto.FLOAT)

    def number(self, value: float, kind: int) -> str:
        """One number in the graph."""
        name = f"number_{value}_{kind}"
        self.constants[name] = numpy_helper.from_array(np.array(value, NUMPY[kind]), name)
        return name

    def halves(self, module: str, product: str) -> str:
        """The sum of both terms' GEMMs."""
        self.nodes.append(
            helper.make_node("Split", [product], ["", ""], name=f"{module}.halves", axis=0, num_outputs=2)
        )
        self.nodes[-1].output[:] = [f"{module}.halves_first", f"{module}.halves_second"]
        share = self.node("Mul", [f"{module}.halves_second", self.number(1 / 16, TensorProto.FLOAT)])
        total = self.node("Add", [f"{module}.halves_first", share], f"{module}.terms_add")
        return self.node("Cast", [total], to=self.options.compute)

    def linear(self, module: str, value: str, quantized: str, inputs: int, outputs: int) -> str:
        """`value` (or its Q/DQ) times the weight of `module`."""
        options = self.options
        weight = self.random.normal(size=(outputs, inputs)) / np.sqrt(inputs)
        if options.fp8 and module not in options.wide:
            self.modules.append(module)
            scale = (np.abs(weight).max(1, keepdims=True) if options.per_channel else np.abs(weight).max()) / 448
            stored = self.tensor(
                f"{module}.weight",
                (weight / scale) if options.transposed else (weight / scale).T,
                TensorProto.FLOAT8E4M3FN,
            )
            axis = {"axis": 0 if options.transposed else 1} if options.per_channel else {}
            weight_name = self.dequantize(
                stored, self.scale(f"{module}.weight_scale", np.squeeze(scale)), f"{module}.weight.dequantize", **axis
            )
            if options.two_terms:
                next(entry for entry in self.nodes[-1].attribute if entry.name == "output_dtype").i = TensorProto.FLOAT
            value = quantized if module not in options.wide_inputs else value
        else:
            weight_name = self.tensor(f"{module}.weight", weight if options.transposed else weight.T, options.compute)
        if options.transposed:
            weight_name = self.node("Transpose", [weight_name], perm=[1, 0])
        product = self.node("MatMul", [value, weight_name], f"{module}.matmul")
        if options.two_terms and module in self.modules:
            product = self.halves(module, product)
        if not options.bias:
            return product
        return self.node(
            "Add",
            [product, self.tensor(f"{module}.bias", self.random.normal(size=outputs), options.compute)],
            f"{module}.bias_add",
        )

    def group(self, value: str, inputs: int, outputs: dict[str, int]) -> list[str]:
        """Linear layers that read the same tensor, which is quantized once, under the name of the first."""
        first = next((module for module in outputs if module not in self.options.wide), None)
        quantize = first is not None and self.options.fp8 and self.options.fp8_inputs
        quantized = self.quantized(value, f"{first}.input") if quantize else value
        return [self.linear(module, value, quantized, inputs, size) for module, size in outputs.items()]

    def cache(self, attention: str, layer: int, part: str, new: str) -> str:
        """The past and the new keys (or values); the new ones leave the graph."""
        kind = {"k": "key", "v": "value"}[part]
        output = f"new_key_values.{layer}.{kind}"
        rows = self.node("Shape", ["input_ids"], start=0, end=1)
        sizes = [rows, self.ints(self.options.key_value_heads), self.ints(-1), self.ints(self.options.head_size)]
        past = self.node("Reshape", [f"past_key_values.{layer}.{kind}", self.node("Concat", sizes, axis=0)])
        if self.options.fp8_cache:
            scale = self.scale(f"{attention}.{part}_scale", SCALE)
            self.quantize(new, scale, f"{attention}.{part}.quantize", output)
            parts = [
                self.dequantize(past, scale, f"{attention}.{part}.dequantize_past"),
                self.dequantize(output, scale, f"{attention}.{part}.dequantize"),
            ]
        else:
            parts = [past, self.node("Identity", [new], output=output)]
        return self.node("Concat", parts, axis=-2)

    def attention(self, layer: int, value: str, allowed: str) -> str:
        """Grouped-query attention over the past and this step."""
        options, module = self.options, f"model.layers.{layer}.self_attn"
        sizes = {f"{module}.{part}_proj": count * options.head_size for part, count in self.head_counts.items()}
        heads = []
        for projected, count in zip(self.group(value, options.width, sizes), self.head_counts.values(), strict=True):
            split = self.node("Reshape", [projected, self.ints(0, 0, count, options.head_size)])
            heads.append(self.node("Transpose", [split], perm=[0, 2, 1, 3]))
        query, key, values = (
            heads[0],
            self.cache(module, layer, "k", heads[1]),
            self.cache(module, layer, "v", heads[2]),
        )
        if options.plain_attention:
            scores = self.node("MatMul", [query, self.node("Transpose", [key], perm=[0, 1, 3, 2])], f"{module}.scores")
            lowest = f"{module}.lowest"
            self.constants[lowest] = numpy_helper.from_array(np.array(-30000, NUMPY[options.compute]), lowest)
            weights = self.node("Softmax", [self.node("Where", [allowed, scores, lowest])], axis=-1)
            mixed = self.node("MatMul", [weights, values], f"{module}.mixed")
        else:
            mixed = self.node(
                "Attention", [query, key, values, allowed], f"{module}.attention", scale=options.head_size**-0.5
            )
        joined = self.node("Reshape", [self.node("Transpose", [mixed], perm=[0, 2, 1, 3]), self.ints(0, 0, -1)])
        return self.group(joined, options.heads * options.head_size, {f"{module}.o_proj": options.width})[0]

    @property
    def head_counts(self) -> dict[str, int]:
        """Heads of queries, keys and values."""
        return {"q": self.options.heads, "k": self.options.key_value_heads, "v": self.options.key_value_heads}

    def norm(self, value: str, name: str) -> str:
        """RMSNorm."""
        weight = self.tensor(f"{name}.weight", np.ones(self.options.width), self.options.compute)
        return self.node("RMSNormalization", [value, weight], name, axis=-1, epsilon=1e-5)

    def mask(self) -> str:
        """Which key a query may see, slot j of the past holding position j."""
        lengths = [self.node("Shape", [name], start=1, end=2) for name in ("attention_mask", "input_ids")]
        capacity = self.node("Squeeze", [self.node("Sub", lengths)])
        slots = self.node("Range", [self.ints(0, scalar=True), capacity, self.ints(1, scalar=True)])
        rows = self.node("Concat", [self.node("Shape", ["input_ids"], start=0, end=1), self.ints(1)], axis=0)
        positions = self.node("Concat", [self.node("Expand", [slots, rows]), "position_ids"], axis=1)
        keys, queries = (
            self.node("Unsqueeze", [name, self.ints(*axes)])
            for name, axes in ((positions, (1, 2)), ("position_ids", (1, 3)))
        )
        empty = self.node(
            "Equal", [self.node("Unsqueeze", ["attention_mask", self.ints(1, 2)]), self.ints(0, scalar=True)]
        )
        return self.node("And", [self.node("LessOrEqual", [keys, queries]), self.node("Not", [empty])])

    def body(self) -> None:
        """From token ids to logits."""
        options, allowed = self.options, self.mask()
        table = self.tensor(
            "model.embed_tokens.weight", self.random.normal(size=(options.vocabulary, options.width)), options.compute
        )
        value = self.node("Gather", [table, "input_ids"])
        for layer in range(options.layers):
            name = f"model.layers.{layer}"
            value = self.node(
                "Add", [value, self.attention(layer, self.norm(value, f"{name}.input_layernorm"), allowed)]
            )
            up = {f"{name}.mlp.gate_proj": options.hidden, f"{name}.mlp.up_proj": options.hidden}
            gate, lifted = self.group(self.norm(value, f"{name}.post_attention_layernorm"), options.width, up)
            gated = self.node("Mul", [self.node("Mul", [gate, self.node("Sigmoid", [gate])]), lifted])
            value = self.node(
                "Add", [value, self.group(gated, options.hidden, {f"{name}.mlp.down_proj": options.width})[0]]
            )
        head = self.tensor(
            "lm_head.weight", self.random.normal(size=(options.vocabulary, options.width)), options.compute
        )
        self.node(
            "MatMul",
            [self.norm(value, "model.norm"), self.node("Transpose", [head], perm=[1, 0])],
            "lm_head.matmul",
            "logits",
        )

    def interface(self) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
        """The inputs and outputs of a graph that fp8q exports."""
        options, describe = self.options, helper.make_tensor_value_info
        inputs = [
            describe(name, TensorProto.INT64, ["batch", size])
            for name, size in (("input_ids", "seq"), ("attention_mask", "capacity + seq"), ("position_ids", "seq"))
        ]
        outputs = [describe("logits", options.compute, ["batch", "seq", options.vocabulary])]
        kind = TensorProto.FLOAT8E4M3FN if options.fp8_cache else options.compute
        for name in (f"{layer}.{part}" for layer in range(options.layers) for part in ("key", "value")):
            inputs.append(
                describe(
                    f"past_key_values.{name}",
                    kind,
                    [f"{options.key_value_heads}*batch*blocks", BLOCK, options.head_size],
                )
            )
            outputs.append(
                describe(f"new_key_values.{name}", kind, ["batch", options.key_value_heads, "seq", options.head_size])
            )
        return inputs, outputs

    def write(self, directory: Path) -> Written:
        """Write `model.onnx` and `model.safetensors`."""
        options = self.options
        self.body()
        directory.mkdir(parents=True, exist_ok=True)
        offsets = np.cumsum([0, *(values.nbytes for values, _ in self.stored.values())]).tolist()
        entries = {
            name: {"dtype": SAFETENSORS[kind], "shape": list(values.shape), "data_offsets": offsets[index : index + 2]}
            for index, (name, (values, kind)) in enumerate(self.stored.items())
        }
        header = json.dumps(entries).encode()
        data = [struct.pack("<Q", len(header)), header, *(values.tobytes() for values, _ in self.stored.values())]
        (directory / "model.safetensors").write_bytes(b"".join(data))
        external = []
        for index, (name, (values, kind)) in enumerate(self.stored.items()):
            tensor = TensorProto(name=name, data_type=kind, dims=values.shape, data_location=TensorProto.EXTERNAL)
            for key, value in (
                ("location", "model.safetensors"),
                ("offset", 8 + len(header) + offsets[index]),
                ("length", values.nbytes),
            ):
                tensor.external_data.add(key=key, value=str(value))
            external.append(tensor)
        graph = helper.make_graph(self.nodes, "decoder", *self.interface(), [*self.constants.values(), *external])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
        in_form(model, directory, options.weight_scale)
        (directory / "model.onnx").write_bytes(model.SerializeToString())
        weight_scales = {module: self.stored[f"{module}.weight_scale"][0] for module in self.modules}
        return Written(directory / "model.onnx", tuple(self.modules), dict.fromkeys(self.modules, SCALE), weight_scales)


@pytest.fixture
def decoder(tmp_path: Path) -> Callable[..., Written]:
    """`decoder(bias=True, …)`: write a decoder with these options (those of `Decoder`), by default into the test's own
    directory.
    """
    return lambda directory=tmp_path / "model", **options: Writer(Decoder(**options)).write(directory)


@pytest.fixture
def edited() -> Callable[..., None]:
    """`edited(path, change)`: change the model in an ONNX file, its external data left as they are."""

    def edit(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
        model = onnx.load_model(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())

    return edit


@pytest.fixture(scope="session")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Written, bytes]]:
    """`engine_of("sm89", max_batch=1, bias=True, …)`: a decoder and its TensorRT-RTX engine, with the profiles of
    `fp8q build-engine`; each is built once.
    """
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")
    built: dict[str, tuple[Written, bytes]] = {}

    def engine(target: str, max_batch: int = 4, **options: object) -> tuple[Written, bytes]:
        key = f"{target} {max_batch} {options}"
        if key not in built:
            written = Writer(Decoder(**options)).write(tmp_path_factory.mktemp("engine"))  # type: ignore[arg-type]
            job = Job("tensorrt-rtx", target, profiles(max_batch, 128))
            built[key] = (written, bytes(build(written.path, job, SILENT)))
        return built[key]

    return engine
