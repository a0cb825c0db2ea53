"""BF16 and INT8 beside FP8: the same graph in three precisions, run by others than the code that wrote it, built, and
validated in one table.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.core.errors import GateError, InputError
from fp8q.core.files import read_document
from fp8q.core.run import Run
from fp8q.export.engine.info import engines_of, load_engines
from fp8q.options import Baseline, Precision
from fp8q.quantize.reading.run_checkpoint import checkpoint_of
from fp8q.quantize.scales.decisions import Scales, load_scales
from fp8q.stages.corpus import load_tokens
from fp8q.validate.bench.document import Bench, footprint, with_both
from fp8q.validate.report.accuracy_rows import accuracy_rows
from fp8q.validate.report.report import summary_sentences
from fp8q.validate.report.rows import engine_rows, module_rows, size_rows

pytestmark = pytest.mark.slow

MODULES = 7
RUNTIMES = ("bf16", "reference", "onnxruntime", "onnxruntime-bf16", "onnxruntime-int8")


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Callable[..., Path], demo_texts: Any,
    keeping_graphs: Any,
) -> Run:  # fmt: skip
    """A Llama of one layer, calibrated and exported in all three precisions."""
    folder = tmp_path_factory.mktemp("baselines")
    model = random_checkpoint(
        folder / "model", "LlamaConfig", {"num_hidden_layers": 1, "num_key_value_heads": 2, "tie_word_embeddings": True}
    )
    texts = [folder / "calibration.txt", folder / "evaluation.txt"]
    for path, source in zip(texts, (demo_texts.calibration, demo_texts.evaluation), strict=True):
        path.write_text(source.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    options = api.CalibrateOptions(samples=16, seq_len=64, kv_cache="fp8")
    with keeping_graphs():
        made = api.calibrate(str(model), str(texts[0]), folder / "run", str(texts[1]), options)
        for precision in ("bf16", "int8"):
            api.export(made.root, api.ExportOptions(precision=precision))
    return made


@pytest.fixture
def copied(run: Run, tmp_path: Path) -> Run:
    """A copy of the run that a test may change."""
    return Run(Path(shutil.copytree(run.root, tmp_path / "run")))


@pytest.fixture(scope="module")
def ids(run: Run) -> np.ndarray:
    return load_tokens(run, run.evaluation)[: 2 * 24].reshape(2, 24)


def feeds(ids: np.ndarray) -> dict[str, np.ndarray]:
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    past = np.zeros((0, 64, 32), np.float32)
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": positions,
        "logits_indices": positions,
        "past_key_values.0.key": past,
        "past_key_values.0.value": past,
    }


def on_onnxruntime(graph: Path, ids: np.ndarray, fusions: bool = False) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "0" if fusions else "1")
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logits"], feeds(ids))[0])


def source_model(run: Run) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(run.record().model["path"], dtype=torch.float32)


class Int8Linear(torch.nn.Module):
    """The oracle: integers multiplied as integers, scaled once."""

    def __init__(self, weights: dict[str, np.ndarray], module: str):
        super().__init__()
        self.weight, self.scale = (
            weights[f"{module}.weight"].astype(np.int64),
            weights[f"{module}.weight_scale"][:, 0].astype(np.float64),
        )
        self.input_scale = weights[f"{module}.input_scale"][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = np.clip(np.rint(x.numpy() / self.input_scale), -128, 127).astype(np.int64)
        return torch.from_numpy(((codes @ self.weight.T) * (float(self.input_scale) * self.scale)).astype(np.float32))


@pytest.fixture(scope="module")
def expected(run: Run, ids: np.ndarray) -> np.ndarray:
    """Logits of the source in FP32, its GEMMs in integers."""
    weights = load_file(checkpoint_of(run, "int8") / "model-00001-of-00001.safetensors")
    model = source_model(run)
    for name in load_scales(run).fp8_gemms:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Int8Linear(weights, name))
    with torch.inference_mode():
        return np.asarray(model(input_ids=torch.from_numpy(ids)).logits)


def agreement(logits: np.ndarray, expected: np.ndarray) -> float:
    """Share of positions whose logits agree: a code that rounds the other way changes those after it."""
    return float((np.abs(logits - expected).max(-1) < 1e-4).mean())


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_graph_is_standard_onnx_beside_its_weights(run: Run, precision: Baseline) -> None:
    for name in ("model.onnx", "model.fp32.onnx"):
        path = checkpoint_of(run, precision) / name
        onnx.checker.check_model(path)
        graph = onnx.load(path, load_external_data=False).graph
        kinds = [node.op_type for node in graph.node]
        assert {"bf16": (0, 0), "int8": (4, 11)}[precision] == (
            kinds.count("QuantizeLinear"),
            kinds.count("DequantizeLinear"),
        )
        modules = {node.name.removesuffix(".matmul") for node in graph.node if node.name.endswith(".matmul")}
        assert modules == {*load_scales(run).fp8_gemms, "lm_head"}
        types = {
            tensor.name.rpartition(".")[0]: tensor.data_type
            for tensor in graph.initializer
            if tensor.name.endswith(".weight")
        }
        wanted = onnx.TensorProto.INT8 if precision == "int8" else onnx.TensorProto.BFLOAT16
        assert {types.pop(module) for module in load_scales(run).fp8_gemms} == {wanted}
        assert set(types.values()) == {onnx.TensorProto.BFLOAT16}


def test_int8_is_what_integers_make_of_it(run: Run, ids: np.ndarray, expected: np.ndarray) -> None:
    graph = checkpoint_of(run, "int8") / "model.fp32.onnx"
    assert agreement(on_onnxruntime(graph, ids), expected) > 0.9
    (by_onnx,) = ReferenceEvaluator(onnx.load(graph)).run(["logits"], feeds(ids))
    assert agreement(np.asarray(by_onnx), expected) > 0.9


def test_onnx_runtimes_own_fusions_compute_the_same_int8(run: Run, ids: np.ndarray, expected: np.ndarray) -> None:
    graph = checkpoint_of(run, "int8") / "model.fp32.onnx"
    fused = on_onnxruntime(graph, ids, fusions=True)
    assert agreement(fused, expected) > 0.9
    assert agreement(fused, on_onnxruntime(graph, ids)) > 0.9


def test_bf16_is_the_source(run: Run, ids: np.ndarray) -> None:
    with torch.inference_mode():
        expected = np.asarray(source_model(run)(input_ids=torch.from_numpy(ids)).logits)
    np.testing.assert_allclose(on_onnxruntime(checkpoint_of(run, "bf16") / "model.fp32.onnx", ids), expected, atol=1e-4)


def test_int8_scales_follow_from_the_same_statistics(run: Run) -> None:
    int8, fp8 = read_document(checkpoint_of(run, "int8") / "scales.json", Scales), load_scales(run)
    assert int8.format == "int8"
    assert int8.weights.keys() == fp8.weights.keys()
    assert not int8.kv_cache
    for module, scale in int8.activations.items():
        assert scale.amax == fp8.activations[module].amax
        assert scale.amax / 127 <= scale.scale < scale.amax / 127 * 1.008
        assert scale.saturation == 0
        assert int8.weights[module].method == "amax"


def test_engines_of_all_precisions_say_what_they_run(copied: Run) -> None:
    graphs: dict[Precision, str] = {
        "int8": "../../baselines/int8/model.onnx",
        "bf16": "../../baselines/bf16/model.onnx",
        "fp8": "../model/model.onnx",
    }
    for precision, graph in graphs.items():
        options = api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=64, precision=precision)
        (engine,) = api.build_engine(copied.root, options)
        assert engine.evidence == "plan"
        assert f"--onnx={graph} " in (engines_of(copied, precision) / "sm89.sh").read_text()
    assert (copied.engines / "int8" / "sm89.plan").is_file()
    assert [load_engines(copied, precision)[0].ran for precision in ("fp8", "bf16", "int8")] == [
        None,
        {"bf16 × bf16 -> bf16": MODULES + 1},
        {"int8 × int8 -> fp32": MODULES, "bf16 × bf16 -> bf16": 1},
    ]
    rows = engine_rows(copied)
    assert [(row.precision, row.promised_products, row.fp8_products) for row in rows] == [
        ("fp8", 7, 7),
        ("bf16", None, None),
        ("int8", None, None),
    ]
    assert rows[2].ran == "7 int8 × int8 -> fp32, 1 bf16 × bf16 -> bf16"
    assert [row.path for row in size_rows(copied) if row.what.endswith("engine for sm89")] == [
        f"engines/{kind}sm89.plan" for kind in ("", "bf16/", "int8/")
    ]


def test_all_precisions_stand_in_one_table_and_the_gate_is_for_fp8_alone(copied: Run) -> None:
    accuracy = api.validate(copied.root, options=api.ValidateOptions(RUNTIMES, max_ppl_increase=0.5))
    assert list(accuracy.runtimes) == list(RUNTIMES)
    kl = {name: runtime.kl_mean_nats or 0.0 for name, runtime in accuracy.runtimes.items()}
    assert 0 < kl["onnxruntime-bf16"] < min(kl["onnxruntime"], kl["onnxruntime-int8"])
    rows = accuracy_rows(copied)
    assert {row.runtime for row in rows} == set(RUNTIMES)
    said = summary_sentences(rows, module_rows(copied), [])
    assert "onnxruntime-int8" not in said
    with pytest.raises(GateError) as gate:
        api.validate(copied.root, options=api.ValidateOptions(RUNTIMES, max_ppl_increase=0.0))
    assert "int8" not in str(gate.value)


def test_finished_work_is_not_done_again_and_int8_goes_stale_with_the_scales(copied: Run, keeping_graphs: Any) -> None:
    before = (copied.baselines / "int8" / "model.onnx").stat().st_mtime_ns
    api.export(copied.root, api.ExportOptions(precision="int8"))
    assert (copied.baselines / "int8" / "model.onnx").stat().st_mtime_ns == before
    api.scales(copied.root, api.RescaleOptions(clip=api.Clipping("percentile", 99.0)))
    with pytest.raises(InputError) as error:
        api.validate(copied.root, options=api.ValidateOptions(("bf16", "onnxruntime-int8")))
    assert str(error.value) == (
        f"{copied.root}/baselines/int8: was made of other statistics or scales than the run has now; run `fp8q export "
        f"{copied.root} --precision int8` again"
    )
    api.validate(copied.root, options=api.ValidateOptions(("bf16", "onnxruntime-bf16")))
    with keeping_graphs():
        api.export(copied.root, api.ExportOptions(precision="int8"))
    int8 = read_document(checkpoint_of(copied, "int8") / "scales.json", Scales)
    assert {scale.method for scale in int8.activations.values()} == {"percentile"}
    assert all(0 < scale.saturation <= 0.01 for scale in int8.activations.values())


def test_what_is_missing_is_said_before_any_work(
    copied: Run, tmp_path: Path, move_source: Callable[[Run, Path], None]
) -> None:
    shutil.rmtree(copied.baselines)
    for call in (
        lambda: api.validate(copied.root, options=api.ValidateOptions(("bf16", "onnxruntime-int8"))),
        lambda: api.build_engine(copied.root, api.EngineOptions(precision="int8")),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert str(error.value) == (
            f"{copied.root}/baselines/int8: is missing; `fp8q export {copied.root} --precision int8` writes it, "
            "run that first"
        )
    move_source(copied, tmp_path / "gone")
    with pytest.raises(InputError) as error:
        api.export(copied.root, api.ExportOptions(precision="bf16"))
    assert str(error.value) == (
        f"{tmp_path}/gone: the model that {copied.root} was made of is no longer there; put it back, or calibrate again"
    )
    assert not copied.baselines.exists()


def test_a_run_without_its_checkpoint_says_so(copied: Run) -> None:
    shutil.rmtree(copied.model)
    engine = api.EngineOptions(runtime="tensorrt-rtx")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("", lambda: api.export(copied.root)),
        ("", lambda: api.export(copied.root, api.ExportOptions(attention="fp8"))),
        ("", lambda: api.build_engine(copied.root, engine)),
        ("/config.json", lambda: api.build_engine(copied.root, replace(engine, precision="int8"))),
        ("", lambda: api.validate(copied.root)),
        ("", lambda: api.triton(copied.root)),
    ]
    for name, call in calls:
        with pytest.raises(InputError) as error:
            call()
        assert str(error.value) == f"{copied.model}{name}: is missing; `fp8q calibrate` writes it, run that first"


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "config.json"])
def test_an_export_that_is_done_looks_at_its_checkpoint_all_the_same(copied: Run, name: str) -> None:
    file = copied.model / name
    os.truncate(file, 100)
    with pytest.raises(InputError) as error:
        api.export(copied.root)
    assert str(error.value) == (
        f"{file}: is not the file that `fp8q calibrate` wrote (its SHA-256 differs from run.json); restore it, or "
        "delete it and run `fp8q calibrate` again"
    )
    file.unlink()
    with pytest.raises(InputError) as error:
        api.export(copied.root)
    assert str(error.value) == f"{file}: is missing; `fp8q calibrate` writes it, run that first"


def test_the_compute_type_is_for_the_fp8_graph() -> None:
    with pytest.raises(InputError) as error:
        api.ExportOptions("fp16", "int8")
    assert (
        str(error.value)
        == "--dtype fp16: is for the FP8 graph, and --precision int8 computes in BF16; leave one of them out"
    )


def test_all_precisions_and_another_run_are_measured_beside_each_other(
    copied: Run, tmp_path: Path, fp8q: Callable[..., Any]
) -> None:
    other = Path(shutil.copytree(copied.root, tmp_path / "other"))
    plot = tmp_path / "bench.svg"
    found = fp8q(
        "bench", copied.root, "--against", other, "--batch-sizes", "1,2", "--prompt-lengths", "9,4", "--tokens", 3,
        "--rounds", 2, "--memory", 0.001, "--gpu-hour-price", 2, "--plot", plot, "--json",
    )  # fmt: skip
    assert found.code == 0, found.err
    names = ["bf16", "int8", "fp8", f"fp8 {other}"]
    told = json.loads(found.out)
    assert [(row["batch"], row["prompt"], row["variant"]) for row in told["rows"]] == [
        (batch, prompt, name) for batch in (1, 2) for prompt in (4, 9) for name in names
    ]
    for row in told["rows"]:
        assert 0 < row["ttft_ms"] < row["latency_ms"]
        assert 0 < row["itl_p50_ms"] <= row["itl_p95_ms"] <= row["itl_p99_ms"]
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * 3 / row["latency_ms"] * 1e3)
        assert row["cost_per_million_tokens"] == pytest.approx(2 / 3600 / row["tokens_per_second"] * 1e6)
        assert (row["improvement"], row["joules_per_token"]) == (None, None)
    assert told["protocol"]["emulated"]
    assert "FP8 is emulated here" in found.err
    # 122,880 weights of GEMMs, 896 channels, a head of 2048 × 128, a cache of 128 values a position; the rest: three
    # norms, and four bytes for each of seven inputs and two of the cache
    steps = {"bf16": 2 * 122_880 + 524_288 + 12 * 256, "int8": 122_880 + 4 * 896 + 524_288 + 12 * 256}
    steps |= {"fp8": steps["int8"] - 12 * 128, names[3]: steps["int8"] - 12 * 128}
    stored = {"bf16": 770_816, "int8": 651_556 - 8, "fp8": 651_556, names[3]: 651_556}
    for row in told["capacity"]:
        name = row["variant"]
        assert (row["weight_bytes"], row["step_bytes"]) == (stored[name], steps[name])
        assert row["improvement"] == pytest.approx(steps["bf16"] / steps[name])
        assert row["largest_batch"] == {
            form: (1_000_000 - stored[name]) // (12 * taken) for form, taken in (("bf16", 256), ("fp8", 128))
        }
    assert read_document(copied.bench, Bench).rows[0].variant == "bf16"
    assert "bench" in copied.record().stages
    assert plot.read_text().startswith("<svg")
    assert "prompts of 9 tokens" in plot.read_text()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--plot", "bench.png"], 2, "--plot bench.png: is no name of an SVG file; give one that ends in .svg"),
        (
            ["--prompt-lengths", "128"],
            2,
            "--prompt-lengths 128: is, with --tokens 64, more than 128, the model's positions; ask for less of either",
        ),
        (
            ["--batch-sizes", "1,2.5"],
            2,
            "--batch-sizes 1,2.5: is no list of whole numbers from 1 to 2,147,483,647; give one such as 1,8",
        ),
        (["--tokens", "1"], 2, "--tokens 1: must be at least 2"),
        (["--memory", "0"], 2, "--memory 0.0: must be above 0, and finite"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_nothing_written(
    run: Run, fp8q: Callable[..., Any], options: list[str], code: int, message: str
) -> None:
    assert fp8q("bench", run.root, *options).complaint(code) == message
    assert not run.bench.exists()


def test_a_run_without_graphs_is_not_measured(copied: Run, fp8q: Callable[..., Any]) -> None:
    copied.onnx_fp32.unlink()
    assert fp8q("bench", copied.root).complaint() == (
        f"{copied.onnx_fp32}: is missing; `fp8q export {copied.root}` writes it, run that first"
    )


def test_bf16_is_computed_beside_a_model_that_is_measured_alone(copied: Run) -> None:
    bf16, int8, fp8 = ((name, footprint(copied, name, 2048)) for name in ("bf16", "int8", "fp8"))
    assert with_both([fp8], copied, 2048) == with_both([bf16], copied, 2048) == [bf16, fp8]
    assert with_both([bf16, int8, fp8], copied, 2048) == [bf16, int8, fp8]


def test_a_serving_host_without_torch_measures_too(copied: Run, base_install: Callable[..., Any]) -> None:
    shown = base_install("bench", copied.root, "--tokens", "3", "--rounds", "1", "--prompt-lengths", "8")
    assert shown.returncode == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()[3:9]] == ["bf16", "int8", "fp8"] * 2
