"""Adapters beside an FP8 base, the whole way: measured with each on, one graph an adapter over one copy of the weights,
proven by the reference, and served by name; and one merged, whose checkpoint is the merged model's.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open

from fp8q import api
from fp8q.calibrate.checkpoint.adapter import open_adapter
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.export.engine.info import load_engines
from fp8q.options import SourceOptions
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.serve.web.server import Server
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.corpus import load_tokens
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared.sources import gemms_of, opened, source_of
from fp8q.validate.accuracy.document import load_accuracy, load_token_losses
from fp8q.validate.report.rows import fact_rows
from tests.noise import check_one_model

from ..command_result import Result
from ..conftest import KeepingGraphs, MadeOnce, Texts
from ..stand_in.driver import Driver
from ..stand_in.runtime import machine

pytestmark = pytest.mark.slow

Fp8q = Callable[..., Result]
#: What the two adapters are of: those of the second are outside the groups of attention.
TARGETS = {"style": ["q_proj", "v_proj", "down_proj"], "code": ["gate_proj", "o_proj"]}


def without_graphs(model: str, texts: list[Path], folder: Path) -> None:
    """The run `merged`, as far as its checkpoint: a graph of it is a graph of any checkpoint."""
    options, notes, run = api.CalibrateOptions(samples=8, seq_len=128), Notes(SILENT), Run(folder / "merged")
    source = opened(model, SourceOptions(adapter=(folder / "style",)))
    data, held_out = map(str, texts)
    collected = corpus_stage.collect(source, load_tokenizer(source), data, held_out, options, notes)
    corpus_stage.write_corpus(run, source, collected, notes)
    measure_stage.measure(run, source, options, notes)
    quantize_stage.quantize(run, source, gemms_of(source, options), options, notes)


@pytest.fixture(scope="module")
def folder(
    made_once: MadeOnce, keeping_graphs: KeepingGraphs, made_adapter: Callable[..., Path], demo_checkpoint: Path,
    demo_texts: Texts, tmp_path_factory: pytest.TempPathFactory,
) -> Path:  # fmt: skip
    """Two adapters; `beside`, a run of the demo with the first beside it, whose third layer is not traced but made from
    the second; `merged`, one with it merged.
    """

    def make(folder: Path) -> None:
        for seed, (name, targets) in enumerate(TARGETS.items()):
            size = 0.05 * (1 + 10 * seed)
            made_adapter(demo_checkpoint, folder / name, size, seed, r=4, lora_alpha=6, target_modules=targets)
        texts = [folder / "calibration.txt", folder / "evaluation.txt"]
        for path, source in zip(texts, (demo_texts.calibration, demo_texts.evaluation), strict=True):
            path.write_text(source.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
        beside = api.CalibrateOptions(samples=8, seq_len=128, adapter=(folder / "style",), adapter_mode="beside")
        with keeping_graphs():
            api.calibrate(str(demo_checkpoint), str(texts[0]), folder / "beside", str(texts[1]), beside)
        without_graphs(str(demo_checkpoint), texts, folder)
        api.validate(folder / "beside")
        api.build_engine(folder / "beside", api.EngineOptions("tensorrt-rtx", ("sm89",), 2, 128, adapter="style"))

    return Path(shutil.copytree(made_once("adapters", make), tmp_path_factory.mktemp("adapters") / "made"))


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run(folder / "beside")


@pytest.fixture(scope="module")
def windows(run: Run) -> np.ndarray:
    return load_tokens(run, run.evaluation)[: 4 * 128].reshape(4, 128)


def logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    return found


def test_the_weights_are_the_bases_and_the_adapter_is_as_peft_wrote_it(run: Run, folder: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (run.model / "adapters" / "style" / name).read_bytes() == (folder / "style" / name).read_bytes()
    with safe_open(next(run.model.glob("model-*.safetensors")), "pt") as opened:
        assert not any("lora" in name for name in set(opened.keys()))
        code = opened.get_tensor("model.layers.0.self_attn.q_proj.weight").float()
        scale = opened.get_tensor("model.layers.0.self_attn.q_proj.weight_scale")
    base = source_of(run).weights().tensor("model.layers.0.self_attn.q_proj.weight").float()
    assert float((code * scale - base).norm() / base.norm()) < 0.04
    added = open_adapter(folder / "style").added("model.layers.0.self_attn.q_proj")
    assert float(added.norm() / base.norm()) > 0.05


def test_the_statistics_are_of_the_base_and_of_it_with_the_adapter_on(run: Run, folder: Path) -> None:
    both, merged = (load_statistics(Run(folder / name)) for name in ("beside", "merged"))
    assert both.record.model.adapters == {"style": open_adapter(folder / "style").fingerprint}
    assert both.record.tokens == 2 * merged.record.tokens == 2 * 8 * 128
    assert merged.record.model.adapters is None
    first = "model.layers.0.self_attn.q_proj.input"  # nothing adapted comes before it
    assert np.array_equal(2 * merged.tensors[first].histogram.counts, both.tensors[first].histogram.counts)


def test_the_graph_with_the_adapter_computes_what_the_reference_computes(
    two_implementations: ModuleType, run: Run, windows: np.ndarray
) -> None:
    runtime = two_implementations.OnnxWithCodes(run.model, graph="model.style.fp32.onnx")
    loaded = load_reference(run.model, "exact", torch.float32, adapter="style")
    left, right = runtime(windows), two_implementations.run_reference(loaded, windows)
    first, differing, codes = two_implementations.first_difference(left.codes, right.codes, windows.shape)
    clean = np.arange(windows.shape[1]) < first[:, None]
    assert clean.sum() > 0
    assert np.abs(left.logits - right.logits).max(-1)[clean].max() <= 1e-4
    assert differing / codes < 0.1  # without the adapter it is 0.08: the first that differs spreads
    alone = load_reference(run.model, "exact", torch.float32)
    assert np.abs(logits(alone.model, windows) - right.logits).max() > 0.5


def test_one_copy_of_the_weights_serves_both_graphs(run: Run) -> None:
    places: dict[str, set[str]] = {}
    for name in ("model.onnx", "model.style.onnx"):
        graph = onnx.load_model(run.model / name, load_external_data=False).graph
        for tensor in graph.initializer:
            places.setdefault(name, set()).update(
                entry.value for entry in tensor.external_data if entry.key == "location"
            )
        held = {tensor.name: tensor for tensor in graph.initializer if tensor.name.endswith("lora_A.weight")}
        assert len(held) == (0 if name == "model.onnx" else 4 * 3)
    shard = "model-00001-of-00001.safetensors"
    assert places == {
        "model.onnx": {shard},
        "model.style.onnx": {shard, "adapters/style/adapter_model.safetensors"},
    }


def test_the_engine_with_the_adapter_has_every_promised_product_in_fp8(run: Run) -> None:
    (info,) = load_engines(run, "fp8", "style")
    assert info.evidence == "plan"
    assert (info.promised_products, info.fp8_products, info.wide_products) == (28, 28, [])
    assert (run.root / "engines" / "adapters" / "style" / "sm89.plan").is_file()


def test_fp8_with_the_adapter_is_held_against_bf16_with_it(run: Run, windows: np.ndarray) -> None:
    accuracy = load_accuracy(run)
    assert accuracy.adapters is not None
    assert set(accuracy.adapters) == {"style"}
    found = accuracy.adapters["style"]
    assert set(found) == set(accuracy.runtimes) == {"bf16", "reference", "onnxruntime"}
    assert found["bf16"].perplexity != accuracy.runtimes["bf16"].perplexity
    for name in ("reference", "onnxruntime"):
        assert 0 < (found[name].kl_mean_nats or 0) < 0.05


def test_merged_it_is_the_reference_of_the_merged_weights(folder: Path, windows: np.ndarray) -> None:
    run = Run(folder / "merged")
    source = source_of(run)
    assert source.merged is not None
    with safe_open(next(run.model.glob("model-*.safetensors")), "pt") as opened:
        scale = opened.get_tensor("model.layers.0.self_attn.q_proj.weight_scale")
        code = opened.get_tensor("model.layers.0.self_attn.q_proj.weight").float()
    wanted = source.weights().tensor("model.layers.0.self_attn.q_proj.weight").float()
    assert float((code * scale - wanted).norm() / wanted.norm()) < 0.04
    merged, beside = (
        load_reference(run.model, "exact", torch.float32),
        load_reference(folder / "beside" / "model", "exact", torch.float32, adapter="style"),
    )
    one, other = logits(merged.model, windows), logits(beside.model, windows)
    assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.99


def test_the_card_says_so(folder: Path) -> None:
    beside, merged = ((folder / name / "model" / "README.md").read_text("utf-8") for name in ("beside", "merged"))
    assert "**With adapters beside it**: `style` in `adapters/`" in beside
    assert "--max-lora-rank 4 \\\n        --lora-modules style=path/to/this/directory/adapters/style\n" in beside
    assert "**With an adapter**: the PEFT LoRA adapter `style` (SHA-256 " in merged


def test_the_report_names_it(run: Run, folder: Path) -> None:
    beside, merged = ({row.what: row.value for row in fact_rows(each)} for each in (run, Run(folder / "merged")))
    assert beside["adapters"] == "style, beside the model"
    assert merged["adapter"] == "style, merged into the weights"
    shown = [row.runtime for row in api.report_tables(run.root)["accuracy"].rows]
    assert shown[-3:] == ["bf16 with style", "reference with style", "onnxruntime with style"]


def test_text_with_the_adapter_and_without(run: Run, fp8q: Fp8q) -> None:
    asked = ("generate", run.root, "--prompt", "def f(", "--max-tokens", 8, "--json")
    texts = [json.loads(fp8q(*asked, *more).out)["tokens"] for more in ((), ("--adapter", "style"))]
    assert len(texts[0]) == len(texts[1]) == 8
    same = json.loads(fp8q(*asked, "--adapter", "style", "--runtime", "reference").out)["tokens"]
    assert same[0] == texts[1][0]


def test_it_is_served_beside_the_base_under_its_name(run: Run) -> None:
    served: list[list[str]] = []

    def ready(server: Server) -> None:
        served.append([model.name for model in server.serving.models])
        server.stop()

    assert api.serve(run.root, api.ServeOptions(port=0, adapter=("style",)), ready) == 0
    assert served == [["demo", "style"]]
    with pytest.raises(api.InputError, match=r"^--adapter style: the model itself is served as style; give it another"):
        api.serve(run.root, api.ServeOptions(port=0, name="style", adapter=("style",)), ready)


def test_what_is_not_there_is_named(run: Run, folder: Path, fp8q: Fp8q) -> None:
    assert fp8q("generate", run.root, "--prompt", "x", "--adapter", "code").complaint() == (
        f"--adapter code: is not beside the model in {run.root} (there are style); name another, or leave it out"
    )
    merged = folder / "merged"
    whence = Run(merged).record().model["adapter"]
    assert fp8q("build-engine", merged, "--adapter", "style").complaint() == (
        f"--adapter style: is not beside the model in {merged} ({whence} is merged into its weights); "
        "name another, or leave it out"
    )
    assert fp8q("export", run.root, "--attention", "fp8").complaint() == (
        "--attention fp8: queries are measured without the adapter style beside the model; leave it out, or merge the "
        "adapter"
    )
    assert fp8q("merge", run.root, merged, "--out", folder / "sum").complaint() == (
        f"{run.root}: was measured with the adapter style beside the model, and such runs are not added; calibrate "
        "with all of the text, and each --adapter, in one run"
    )


def test_the_repository_says_that_it_serves_the_base_alone(run: Run, tmp_path: Path, fp8q: Fp8q) -> None:
    told = fp8q("triton", run.root, "--out", tmp_path / "repository")
    assert told.code == 0
    assert "the Triton repository serves the base alone, without style beside it" in told.err


def test_scales_chosen_again_keep_the_adapter_and_the_graphs(run: Run, tmp_path: Path, fp8q: Fp8q) -> None:
    copy = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    before = (copy.model / "model.style.onnx").read_bytes()
    assert fp8q("scales", copy.root, "--method", "mse").code == 0
    assert (copy.model / "model.style.onnx").read_bytes() == before
    assert (copy.model / "adapters" / "style" / "adapter_config.json").is_file()
    assert fp8q("lint", copy.model / "model.style.onnx").code == 0


def test_an_adapter_that_was_changed_is_another_run(folder: Path, tmp_path: Path, fp8q: Fp8q) -> None:
    merged = Run(Path(shutil.copytree(folder / "merged", tmp_path / "merged")))
    moved = Path(shutil.copytree(folder / "code", tmp_path / "adapter"))
    record = json.loads(merged.record_file.read_text())
    record["model"]["adapter"] = str(moved)
    merged.record_file.write_text(json.dumps(record))
    assert "is no longer the model that" in fp8q("scales", merged.root, "--method", "mse").complaint()
    shutil.rmtree(moved)
    assert fp8q("scales", merged.root, "--method", "mse").complaint() == (
        f"{moved}: the adapter that was merged is no longer there; put it back, or calibrate again"
    )


def test_codes_are_not_merged_into(run: Run, folder: Path, tmp_path: Path, fp8q: Fp8q) -> None:
    asked = ("calibrate", run.model, "--data", folder / "calibration.txt", "--out", tmp_path / "run")
    assert fp8q(*asked, "--adapter", folder / "style").complaint(after_notes=True) == (
        f"--adapter {folder / 'style'}: merging would change the FP8 codes of {run.model}; keep them with "
        "--adapter-mode beside, or give the checkpoint they were made from, in BF16"
    )
    assert fp8q(*asked, "--adapter-mode", "beside").complaint() == (
        "--adapter-mode beside: there is no --adapter; give one, or leave it out"
    )


@pytest.mark.filterwarnings("ignore:Use Deprecated in TensorRT-RTX 1.2:DeprecationWarning")
def test_engines_are_validated_with_the_adapter_they_were_built_with(run: Run, tmp_path: Path, fp8q: Fp8q) -> None:
    """On a stand-in for the GPU: against what the run keeps of the others with the adapter on, and beside BF16."""
    copied, sizes = Run(Path(shutil.copytree(run.root, tmp_path / "run"))), ("--max-batch", "2", "--max-seq-len", "128")
    before, record = load_accuracy(copied), json.loads(copied.record_file.read_text(encoding="utf-8"))
    del record["stages"]["build-engine --adapter style"]
    copied.record_file.write_text(json.dumps(record), encoding="utf-8")
    validating = ("validate", copied.root, "--runtimes", "tensorrt-rtx")
    with machine(Driver(), "tensorrt_rtx") as host:
        assert fp8q("build-engine", copied.root, *sizes).code == 0
        host.knows(copied.engines / "sm89.plan", copied.onnx_fp32)
        alone = fp8q(*validating)
        assert alone.code == 0, alone.err
        assert "tensorrt-rtx: left out with style, with which no engine was built; `fp8q build-engine " in alone.err
        assert fp8q("build-engine", copied.root, "--adapter", "style", *sizes).code == 0
        host.knows(copied.engines / "adapters" / "style" / "sm89.plan", copied.model / "model.style.fp32.onnx")
        both = fp8q(*validating)
        assert both.code == 0, both.err
        after = load_accuracy(copied)
        assert after.adapters is not None
        assert before.adapters is not None
        ours = after.adapters["style"]["tensorrt-rtx"]
        check_one_model(load_token_losses(copied, "style"), "tensorrt-rtx", "onnxruntime")
        assert ours.perplexity != pytest.approx(after.runtimes["tensorrt-rtx"].perplexity, rel=1e-3)
        assert ours.stored is not None
        assert {*ours.stored.runtimes} == {*before.adapters["style"]}
        assert after.adapters["style"].keys() - {"tensorrt-rtx"} == before.adapters["style"].keys()
        again = fp8q("validate", copied.root, "--runtimes", "bf16,tensorrt-rtx")
        assert again.code == 0, again.err
    beside = load_accuracy(copied).adapters
    assert beside is not None
    assert beside["style"]["tensorrt-rtx"].perplexity == pytest.approx(ours.perplexity, rel=1e-6)
    assert beside["style"]["tensorrt-rtx"].kl_mean_nats is not None
