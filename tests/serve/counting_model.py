"""A model small enough to follow by hand, in the files and with the graph interface of a real one.

The counting model: tokens t0 … t14 and `</s>` (15); the next token is the sum of all tokens so far, each times 1 + (its
position mod 3), mod 16. It keeps the tokens in its keys and their positions mod 8 in its values, so whatever goes wrong
with the cache, the mask or the positions changes its answer: a past slot whose value is not its own index adds 1001 for
each step it is off.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import TensorProto, parser
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from fp8q.core.files import write_document
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.export.engine.info import EngineInfo
from fp8q.export.engine.profiles import profiles
from fp8q.serve.loop.generate import Generator
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.serve.loop.text import Vocabulary

END = 15
WEIGHTS = "model-00001-of-00001.safetensors"
GRAPH = """
<ir_version: 10, opset_import: ["" : 21]>
counting (int64[batch, seq] input_ids, int64[batch, total] attention_mask, int64[batch, seq] position_ids, ASKED
          KEYS[batch, 2, capacity, 4] past_key, VALUES[batch, 2, capacity, 4] past_value)
      => (float[batch, SCORED, 16] logits, KEYS[batch, 2, seq, 4] new_key, VALUES[batch, 2, seq, 4] new_value)
{
    one = Constant<value = float {1.0}> ()
    zero = Constant<value_int = 0> ()
    step = Constant<value_int = 1> ()
    three = Constant<value_int = 3> ()
    eight = Constant<value_int = 8> ()
    sixteen = Constant<value = float {16.0}> ()
    fault = Constant<value = float {1001.0}> ()
    inner = Constant<value_ints = [1, 3]> ()
    last = Constant<value_ints = [2]> ()
    middle = Constant<value_ints = [1]> ()
    heads = Constant<value_ints = [1, 2, 1, 4]> ()

    tokens = Cast<to = 1> (input_ids)
    marks_int = Mod (position_ids, eight)
    marks = Cast<to = 1> (marks_int)
    tokens_4d = Unsqueeze (tokens, inner)
    marks_4d = Unsqueeze (marks, inner)
    key = Expand (tokens_4d, heads)
    value = Expand (marks_4d, heads)
    STORE

    past_tokens = ReduceMean<keepdims = 0> (past_key_values, inner)
    past_marks = ReduceMean<keepdims = 0> (past_value_values, inner)
    past_shape = Shape (past_tokens)
    capacity_1d = Shape<start = 1> (past_tokens)
    capacity_0d = Squeeze (capacity_1d)
    slots_1d = Range (zero, capacity_0d, step)
    slots = Expand (slots_1d, past_shape)
    key_positions = Concat<axis = 1> (slots, position_ids)
    all_tokens = Concat<axis = 1> (past_tokens, tokens)
    all_marks = Concat<axis = 1> (past_marks, marks)

    queries = Unsqueeze (position_ids, last)
    keys = Unsqueeze (key_positions, middle)
    causal = LessOrEqual (keys, queries)
    filled_2d = Cast<to = 9> (attention_mask)
    filled = Unsqueeze (filled_2d, middle)
    allowed_bool = And (causal, filled)
    allowed = Cast<to = 1> (allowed_bool)

    weight_int = Mod (key_positions, three)
    weight_0 = Cast<to = 1> (weight_int)
    weight = Add (weight_0, one)
    weighted = Mul (all_tokens, weight)
    due_int = Mod (key_positions, eight)
    due = Cast<to = 1> (due_int)
    off_signed = Sub (all_marks, due)
    off = Abs (off_signed)
    penalty = Mul (off, fault)
    terms_2d = Add (weighted, penalty)
    terms = Unsqueeze (terms_2d, last)
    total_sum = MatMul (allowed, terms)
    remainder = Mod<fmod = 1> (total_sum, sixteen)
    distance = Sub (vocabulary, remainder)
    square = Mul (distance, distance)
    LOGITS
}
"""
#: What becomes of the logits of all positions: those that are asked for, or all.
ASKED = {
    "ASKED": "int64[batch, scored] logits_indices,", "SCORED": "scored",
    "LOGITS": """negated = Neg (square)
    asked = Unsqueeze (logits_indices, last)
    logits = GatherND<batch_dims = 1> (negated, asked)""",
}  # fmt: skip
ALL = {"ASKED": "", "SCORED": "seq", "LOGITS": "logits = Neg (square)"}
#: What is done with keys and values, as numbers or as codes.
PLAIN = """
    new_PART = Identity (PART)
    past_PART_values = Identity (past_PART)
"""
FP8 = """
    new_PART = QuantizeLinear<output_dtype = 17> (PART, one)
    past_PART_values = DequantizeLinear (past_PART, one)
"""
NAMES = {
    "past_key": "past_key_values.0.key", "past_value": "past_key_values.0.value",
    "new_key": "new_key_values.0.key", "new_value": "new_key_values.0.value",
}  # fmt: skip


def counting_graph(cache: str, asks: bool) -> onnx.ModelProto:
    """The graph without its initializer, `vocabulary` [0, 1, … 15]."""
    stored = {part: part[0] in {"off": "", "v": "v", "fp8": "kv"}[cache] for part in ("key", "value")}
    text = GRAPH.replace(
        "STORE", "".join((FP8 if fp8 else PLAIN).replace("PART", part) for part, fp8 in stored.items())
    )
    for word, meaning in (ASKED if asks else ALL).items():
        text = text.replace(word, meaning)
    for part, fp8 in stored.items():
        text = text.replace(f"{part.upper()}S", "float8e4m3fn" if fp8 else "float")
    model = parser.parse_model(text)
    for value in (*model.graph.input, *model.graph.output):
        value.name = NAMES.get(value.name, value.name)
        if value.name == "attention_mask":
            value.type.tensor_type.shape.dim[1].dim_param = "capacity + seq"
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [NAMES.get(name, name) for name in names]
    return model


def write_counting_model(
    directory: Path, cache: str, positions: int, asks: bool = True, tokenizer: Tokenizer | None = None
) -> None:
    """Write what a run's `model/` holds for serving; `asks`: its graph is asked for logits; `tokenizer`: another than
    that of its own words.
    """
    directory.mkdir(parents=True)
    values = np.arange(16, dtype=np.float32)
    save_file({"vocabulary": values}, directory / WEIGHTS)
    (header,) = struct.unpack("<Q", (directory / WEIGHTS).read_bytes()[:8])
    model = counting_graph(cache, asks)
    tensor = model.graph.initializer.add(
        name="vocabulary", data_type=TensorProto.FLOAT, dims=[16], data_location=TensorProto.EXTERNAL
    )
    for key, value in {"location": WEIGHTS, "offset": 8 + header, "length": 64}.items():
        tensor.external_data.add(key=key, value=str(value))
    onnx.save(model, directory / "model.fp32.onnx")
    (directory / "config.json").write_text(
        json.dumps({"max_position_embeddings": positions, "eos_token_id": 3, "model_type": "counting"})
    )
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    if tokenizer is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (tokenizer or words_tokenizer()).save(str(directory / "tokenizer.json"))


def words_tokenizer() -> Tokenizer:
    """The words t0 … t14 and `</s>`."""
    words = {f"t{i}": i for i in range(END)} | {"</s>": END}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@dataclass(frozen=True)
class CountingModel:
    """The counting model on disk, and what it must answer."""

    directory: Path
    cache: str
    positions: int

    def session(self) -> OnnxRuntimeSession:
        return OnnxRuntimeSession(self.directory / "model.fp32.onnx", threads=1)

    def generator(self, max_batch: int = 8) -> Generator:
        return Generator(self.session(), Vocabulary.read(self.directory), max_batch)

    def next_token(self, ids: list[int]) -> int:
        return sum(token * (1 + position % 3) for position, token in enumerate(ids)) % 16

    def answer(self, prompt: str, max_tokens: int) -> list[int]:
        """The tokens of the greedy answer, computed without cache, batch or graph; the last may be `</s>`."""
        ids = [int(word[1:]) for word in prompt.split()]
        produced: list[int] = []
        while len(produced) < max_tokens and len(ids) < self.positions and END not in produced:
            produced.append(self.next_token(ids))
            ids.append(produced[-1])
        return produced

    def text(self, tokens: list[int]) -> str:
        return "".join(f" t{token}" for token in tokens if token != END)


#: `scales.json` of a model without GEMMs, which the counting model is.
NO_SCALES = '{"weights": {}, "activations": {}, "skipped": {}}'


def make_counting_run(root: Path, positions: int, tokenizer: Tokenizer | None = None) -> Run:
    """A run at `root` whose checkpoint is the counting model with an FP8 cache, recorded as the stages that write one
    record it.
    """
    run = Run(root)
    model = {"name": "someone/Counting Model", "fingerprint": "0"}
    with RunWriter(run).stage("quantize", {}, {}, model) as log:
        write_counting_model(run.model, "fp8", positions, tokenizer=tokenizer)
        run.scales.write_text(NO_SCALES, encoding="utf-8")
        log.outputs += [run.scales, *(path for path in sorted(run.model.iterdir()) if path != run.onnx_fp32)]
    with RunWriter(run).stage("export", {}, {}) as log:
        log.outputs.append(run.onnx_fp32)
    return run


#: The first bytes of a plan as TensorRT 10.16.1.11 writes them, and some more.
PLAN = b"ftrt" + bytes(20) + bytes([10, 16, 1, 11]) + bytes(100)


def record_engine(
    run: Run, version: str = "10.16.1.11", runtime: Literal["tensorrt", "tensorrt-rtx"] = "tensorrt"
) -> None:
    """Record an engine for sm90, of up to 4 rows of up to 32 tokens, that is no more than its first bytes."""
    graph = {"model/model.onnx": run.record().stages["export"].outputs["model/model.onnx"]}
    with RunWriter(run).stage("build-engine", graph, {"runtime": runtime}) as log:
        run.engines.mkdir(exist_ok=True)
        plan, described = (run.engines / f"sm90.{kind}" for kind in ("plan", "json"))
        plan.write_bytes(PLAN)
        info = EngineInfo(
            runtime=runtime, version=version, target="sm90", bytes=len(PLAN), promised_products=1, fp8_products=1,
            wide_products=[], evidence="inspector", profiles=list(profiles(4, 32)), build_seconds=1.0,
        )  # fmt: skip
        write_document(described, info)
        log.outputs += [plan, described]


def make_wide_run(root: Path) -> Run:
    """A run like `counting_run` whose cache is not in FP8, with both graphs (the same one), and no engine."""
    run = Run(root)
    with RunWriter(run).stage("quantize", {}, {}, {"name": "someone/counting", "fingerprint": "0"}) as log:
        write_counting_model(run.model, "off", positions=40)
        run.scales.write_text(NO_SCALES, encoding="utf-8")
        log.outputs += [run.scales, *(path for path in sorted(run.model.iterdir()) if path != run.onnx_fp32)]
    with RunWriter(run).stage("export", {}, {}) as log:
        run.onnx.write_bytes(run.onnx_fp32.read_bytes())
        log.outputs += [run.onnx, run.onnx_fp32]
    return run
