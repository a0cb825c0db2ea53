"""Layers for multi-token prediction, of which transformers makes no modules, reach `model/` as they were."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.utils import match_name
from safetensors.torch import load_file

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.quantize.lint.check import checkpoint_findings
from fp8q.quantize.reference.fp8_model import load_reference

from ..conftest import Texts, WithoutGraphs
from ..mixtures import DRAFTING, random_drafting, random_ernie
from ..quantize.reading.fp8_checkpoints import fine_grained

pytestmark = pytest.mark.slow

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def calibrated(tmp_path: Path, demo_texts: Texts, without_graphs: WithoutGraphs) -> Callable[[Path], Run]:
    def calibrate(path: Path) -> Run:
        text = tmp_path / "text.txt"
        text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:8_000], encoding="utf-8")
        options = CalibrateOptions(samples=8, seq_len=64, batch_size=4)
        with without_graphs():
            return api.calibrate(str(path), str(text), tmp_path / "run", None, options)

    return calibrate


def of_mtp(file: Path, name: str) -> Tensors:
    start = "mtp." if name == "exaone_moe" else DRAFTING[name][2]
    return {key: tensor for key, tensor in load_file(file).items() if key.startswith(start)}


def ignored(run: Run, module: str) -> bool:
    config = json.loads((run.model / "config.json").read_text(encoding="utf-8"))
    return any(match_name(module, entry) for entry in config["quantization_config"]["ignore"])


@pytest.mark.parametrize("name", DRAFTING)
def test_they_are_written_as_they_were_and_left_out_of_quantization(
    name: str, tmp_path: Path, calibrated: Callable[[Path], Run]
) -> None:
    path = random_drafting(tmp_path / name, name)
    before = of_mtp(path / "model.safetensors", name)
    run = calibrated(path)
    (file,) = run.model.glob("model-*.safetensors")
    after = of_mtp(file, name)
    assert len(before) == len(after) > 20
    assert all(torch.equal(after[key], tensor.bfloat16()) for key, tensor in before.items())
    modules = {key.removesuffix(".weight") for key, tensor in before.items() if tensor.dim() == 2}
    assert sum(".experts." in module for module in modules) == 4 * 3
    assert all(ignored(run, module) for module in modules)
    assert not any(ignored(run, f"model.layers.1.{part}") for part in ("self_attn.q_proj", "mlp.experts.0.up_proj"))
    source, written = (json.loads((each / "config.json").read_text()) for each in (path, run.model))
    assert written.get("num_nextn_predict_layers") == source.get("num_nextn_predict_layers")
    notes = [note for note in notes_of(run) if "multi-token" in note]
    named = "mtp" if name == "exaone_moe" else "model.layers.2"
    told = "multi-token prediction, which calibration does not run; it stays in BF16, for servers that draft by it"
    assert notes == [f"{named}: {told}"]
    assert "**Multi-token prediction**" in (run.model / "README.md").read_text(encoding="utf-8")
    assert checkpoint_findings(run.model)[1] == []
    with torch.inference_mode():
        logits = load_reference(run.model, "fast", torch.bfloat16).model(input_ids=torch.arange(8)[None]).logits
    assert torch.isfinite(logits).all()


def test_vllm_leaves_out_what_it_has_under_another_name(tmp_path: Path, calibrated: Callable[[Path], Run]) -> None:
    """ERNIE 4.5's `model.mtp_block.0` is a layer after the last one in vLLM."""
    run = calibrated(random_ernie(tmp_path / "ernie"))
    for module in ("model.mtp_block.0.mlp.up_proj", "model.layers.2.mlp.up_proj", "model.mtp_linear_proj.0"):
        assert ignored(run, module)
    assert not ignored(run, "model.layers.1.mlp.up_proj")


def test_those_in_fp8_are_dequantized(tmp_path: Path, calibrated: Callable[[Path], Run]) -> None:
    """As DeepSeek's own file has layer 61: codes with a scale for each block."""
    path = fine_grained(random_drafting(tmp_path / "bf16", "glm4_moe"), tmp_path / "fp8")
    run = calibrated(path)
    given, (file,) = of_mtp(path / "model.safetensors", "glm4_moe"), run.model.glob("model-*.safetensors")
    written = of_mtp(file, "glm4_moe")
    coded = [key for key, tensor in given.items() if tensor.dtype == torch.float8_e4m3fn]
    assert len(coded) == 4 + 4 * 3 + 3 + 1  # attention, experts, the shared expert, `eh_proj`
    assert not any(key.endswith("weight_scale_inv") for key in written)
    for key in coded:
        (scale,) = given[f"{key}_scale_inv"].reshape(-1).tolist()
        assert torch.equal(written[key], (given[key].float() * scale).bfloat16())
    assert any("it stays in BF16, dequantized from the source's FP8" in note for note in notes_of(run))
    assert checkpoint_findings(run.model)[1] == []


def notes_of(run: Run) -> list[str]:
    return list(run.record().stages["quantize"].notes)


def test_a_count_without_its_layers_is_a_note(tmp_path: Path, calibrated: Callable[[Path], Run]) -> None:
    """The source has none either: transformers writes the count by itself."""
    run = calibrated(random_drafting(tmp_path / "glm4_moe", "glm4_moe", drafts=False))
    (found,) = checkpoint_findings(run.model)[1]
    assert (found.rule, found.severity, found.node) == ("C128", "note", "config.json")
