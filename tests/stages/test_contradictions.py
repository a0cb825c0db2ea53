"""Files of a run that parse and contradict themselves are named by whoever reads them, not by an assertion later."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from pydantic import BaseModel

from fp8q.core.errors import InputError
from fp8q.core.files import RESTORE, read_document, reading
from fp8q.core.run import Run
from fp8q.export.engine.info import EngineInfo
from fp8q.quantize.reference.fp8_model import Reference
from fp8q.quantize.reference.linear import CallPositions
from fp8q.quantize.scales.decisions import read_scales
from fp8q.quantize.sensitivity.layerwise import LayerwiseResults
from fp8q.stages.tune import TuneProgress
from fp8q.validate.accuracy.document import AgainstStored
from fp8q.validate.accuracy.session_logits import graph_vocabulary
from fp8q.validate.tuning.document import Tuning
from fp8q.validate.tuning.form_choice import FormChoice

WEIGHT = {"method": "amax", "axis": 0, "channels": 4, "scale_min": 0.5, "scale_max": 0.5, "sqnr_db": 30.0}
INPUT = {
    "method": "amax", "amax": 448.0, "clip": 448.0, "scale": 1.0, "saturation": 0.0, "underflow": 0.0, "sqnr_db": 30.0,
}  # fmt: skip
POINT: dict[str, Any] = {
    "kl_nats": 0.002, "measured": True, "weight_bytes": 1, "cache_bytes": 1, "prefill_flops_ratio": 1.0,
    "weight_rounding": "nearest", "kv_cache": "off", "two_terms": 0, "bf16": 0,
}  # fmt: skip
CHOSEN: dict[str, Any] = POINT | {
    "recipe": {"two_terms": [], "skip": [], "kv_cache": "off", "weight_rounding": "nearest"},
    "predicted_increase": {"increase": 0.0}, "held_out_kl_nats": 0.0, "measured_kl_nats": 0.0,
    "measured_increase": {"increase": 0.0},
}  # fmt: skip
TUNING: dict[str, Any] = {
    "prefer": "memory", "changes": [], "run": POINT, "frontier": [], "rise_over_kl": 1.0, "chosen": CHOSEN,
    "windows": {"rounding": 1, "choosing": 1, "held_out": 1},
}  # fmt: skip
ROW: dict[str, Any] = {
    "form": "one code", "weight_rounding": "nearest", "kl_nats": 0.0, "known": "measured", "weight_bytes": 1,
    "prefill_flops_ratio": 1.0,
}  # fmt: skip
FORMS: dict[str, Any] = {
    "server": "tensorrt", "limit": 0.01, "aim_kl_nats": 0.1, "met": True, "needs_plugin": False, "rows": [ROW],
    "recipe": {"form": [], "skip": [], "weight_rounding": "nearest", "kv_cache": "off"},
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "runtime": "tensorrt", "version": "11", "target": "sm90", "bytes": 1, "promised_products": 0, "fp8_products": 0,
    "wide_products": [], "evidence": "plan", "profiles": [], "build_seconds": 1.0,
}  # fmt: skip


def written(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("scales", "fault"),
    [
        ({"weights": {"up": WEIGHT}}, "has up in weights, and neither in activations nor in bf16_inputs"),
        ({"activations": {"up": INPUT}}, "has the input of up, and not its weight"),
        ({"bf16_inputs": ["up"]}, "has the input of up, and not its weight"),
    ],
)
def test_scales_of_half_a_module(tmp_path: Path, scales: dict[str, object], fault: str) -> None:
    path = written(tmp_path / "scales.json", {"weights": {}, "activations": {}, "skipped": {}} | scales)
    with pytest.raises(InputError) as refused:
        read_scales(path)
    assert str(refused.value) == f"{path}: {fault}; {RESTORE}"


@pytest.mark.parametrize(
    ("kind", "document", "fault"),
    [
        (Tuning, TUNING, "chosen must be null without max_kl or max_ppl_increase"),
        (FormChoice, FORMS, "rows must have one that is chosen"),
        (AgainstStored, {"positions": 1, "top": 1, "runtimes": {}}, "runtimes must have at least 1 items"),
        (EngineInfo, ENGINE, "profiles must have at least 1 items"),
    ],
)
def test_documents_that_lack_what_they_are_of(
    tmp_path: Path, kind: type[BaseModel], document: dict[str, object], fault: str
) -> None:
    path = written(tmp_path / "it.json", document)
    with pytest.raises(InputError) as refused:
        read_document(path, kind)
    assert str(refused.value) == f"{path}: does not read as fp8q's it.json: {fault}; {RESTORE}"


def test_documents_with_it_read(tmp_path: Path) -> None:
    read_document(written(tmp_path / "tune.json", TUNING | {"max_kl": 0.1}), Tuning)
    read_document(written(tmp_path / "tune.json", TUNING | {"chosen": None}), Tuning)
    rows = [ROW, ROW | {"chosen": True}]
    assert read_document(written(tmp_path / "forms.json", FORMS | {"rows": rows}), FormChoice).chosen.chosen


@pytest.mark.parametrize("read", [TuneProgress.of, LayerwiseResults.of])
def test_progress_that_is_damaged(tmp_path: Path, read: Any) -> None:
    path = written(tmp_path / "progress.json", [])
    with pytest.raises(InputError, match="does not read as what a killed call left") as refused:
        read(path)
    assert str(refused.value).startswith(f"{path}: does not read as what a killed call left (")
    assert str(refused.value).endswith("; remove it")


@pytest.mark.parametrize("error", [AssertionError(), StopIteration()])
def test_an_assertion_of_a_reader_is_damage(error: Exception) -> None:
    with pytest.raises(InputError) as refused, reading(Path("a.onnx"), "an ONNX graph"):
        raise error
    assert str(refused.value) == f"a.onnx: does not read as an ONNX graph ({type(error).__name__}); {RESTORE}"


def test_a_graph_without_logits(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [])
    run = Run(tmp_path)
    run.model.mkdir()
    onnx.save_model(helper.make_model(graph), run.onnx)
    with pytest.raises(InputError) as refused:
        graph_vocabulary(run)
    assert str(refused.value) == f"{run.onnx}: does not read as an ONNX graph ('logits'); {RESTORE}"


@pytest.mark.parametrize("module", ["0", "1"])
def test_a_module_that_scales_json_has_and_the_checkpoint_has_not(module: str) -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(InputError) as refused:
        Reference(model, {}, CallPositions()).layer(module)
    assert str(refused.value) == (
        f"{module}: is in FP8 by scales.json, and the checkpoint has no codes of it; {RESTORE}"
    )
