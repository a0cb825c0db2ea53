"""`fp8q distill` on the demo: what it learns is written, is kept, and is left out where it no longer belongs."""

import json
import logging
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.options import DistillOptions
from fp8q.quantize.learning import training
from fp8q.quantize.learning.document import Distillation, load_distillation
from fp8q.validate.report.drawings import report_plots

from ..conftest import Texts

pytestmark = pytest.mark.slow

OPTIONS = DistillOptions(epochs=2.0, learning_rate=0.003)


def codes_of(run: Run) -> dict[str, torch.Tensor]:
    (shard,) = run.model.glob("*.safetensors")
    return {name: tensor.view(torch.uint8) for name, tensor in load_file(shard).items() if tensor.itemsize == 1}


def values(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float()


@pytest.fixture(scope="module")
def learned(begun: Run) -> tuple[dict[str, torch.Tensor], Distillation]:
    """The codes before, and what was learned."""
    before, found = codes_of(begun), api.distill(begun.root, options=OPTIONS)
    assert isinstance(found, Distillation)
    return before, found


def test_the_checkpoint_has_what_was_best(begun: Run, learned: tuple[dict[str, torch.Tensor], Distillation]) -> None:
    before, found = learned
    assert found.best.step > 0
    assert found.best.kl < 0.97 * found.start.kl
    assert found == load_distillation(begun)
    stored, after = load_file(begun.distilled), codes_of(begun)
    assert before.keys() == after.keys()
    changed = sum(int((values(before[name]) != values(after[name])).sum()) for name in before)
    assert changed / sum(each.numel() for each in before.values()) == pytest.approx(found.changed, rel=1e-6)
    for name, tensor in after.items():
        assert torch.equal(stored[f"{name.removesuffix('.weight')}.codes"].view(torch.uint8), tensor)


def test_scales_stay_as_they_were(begun: Run, learned: tuple[dict[str, torch.Tensor], Distillation]) -> None:
    stored = load_file(begun.distilled)
    (shard,) = begun.model.glob("*.safetensors")
    written = {name: tensor for name, tensor in load_file(shard).items() if name.endswith("weight_scale")}
    assert len(written) == 28
    for name, scale in written.items():
        assert torch.equal(stored[f"{name.removesuffix('.weight_scale')}.scale"], scale.float().flatten())


def test_the_report_draws_what_was_learned(begun: Run, learned: tuple[dict[str, torch.Tensor], Distillation]) -> None:
    picture = report_plots(begun)["learning"]
    assert learned[1].conclusion in picture.caption
    assert "held-out KL, nats" in picture.wide


@pytest.mark.usefixtures("quick_work_shown")
def test_what_is_learned_is_not_learned_again(
    begun: Run, learned: tuple[dict[str, torch.Tensor], Distillation], caplog: pytest.LogCaptureFixture
) -> None:
    record = json.loads(begun.record_file.read_text(encoding="utf-8"))["stages"]
    with caplog.at_level(logging.INFO):
        assert api.distill(begun.root, options=OPTIONS) == learned[1]
    assert "Learning weights" not in caplog.text
    after = json.loads(begun.record_file.read_text(encoding="utf-8"))["stages"]
    for stage in ("distill", "quantize"):
        assert after[stage] == record[stage]


def test_other_scales_leave_it_out_and_say_so(
    begun: Run, learned: tuple[dict[str, torch.Tensor], Distillation], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = Run(Path(shutil.copytree(begun.root, tmp_path / "run")))
    with caplog.at_level(logging.INFO):
        api.scales(copy.root, api.RescaleOptions(weight_method="amax", activation_terms=2))
    assert "distilled.safetensors: was learned from other scales than the run has now, and is left out" in caplog.text
    own = codes_of(copy)
    assert any(not torch.equal(own[name], tensor) for name, tensor in codes_of(begun).items())
    assert not any("distilled" in name for name in json.loads(copy.record_file.read_text())["stages"]["quantize"])


def test_a_model_whose_first_divergence_is_no_number_is_refused(
    begun: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Path(shutil.copytree(begun.root, tmp_path / "run")))
    monkeypatch.setattr(training, "forward_kl", lambda teacher, student: student.sum() * float("nan"))
    with pytest.raises(InputError, match=r"^distill: the loss is nan at step 1 of 18: the model is broken before"):
        api.distill(run.root, options=DistillOptions())
    assert run.record().stages.get("distill") == begun.record().stages.get("distill")  # what was learned before stays
    assert not list(run.root.glob(".distill*"))


def test_a_full_disk_is_named_and_leaves_the_codes_to_begin_with(
    begun: Run, learned: tuple[dict[str, torch.Tensor], Distillation], tmp_path: Path
) -> None:
    """The state of the optimizer, 24 MB, finds no room; torch's writer says so in words of its own."""
    run = Run(Path(shutil.copytree(begun.root, tmp_path / "run")))
    others = {path: path.read_bytes() for path in run.model.iterdir() if path.suffix != ".safetensors"}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (18 << 20, hard))
    try:
        with pytest.raises(InputError) as refused:
            api.distill(run.root, options=replace(OPTIONS, seed=5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(refused.value) == (
        f"{run.root}: a file could not be written to its end; free space there, or name another directory"
    )
    assert not (run.root / ".distill.work").exists()
    assert {path: path.read_bytes() for path in run.model.iterdir() if path.suffix != ".safetensors"} == others
    codes = codes_of(run)
    assert codes.keys() == learned[0].keys()
    assert all(torch.equal(codes[name], tensor) for name, tensor in learned[0].items())


def test_learned_scales_are_in_the_checkpoint(begun: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(begun.root, tmp_path / "run")))
    options = DistillOptions(epochs=4.0, learning_rate=0.01, scales="learned")
    found = api.distill(run.root, options=options)
    assert found.best.kl < 0.99 * found.start.kl
    stored = load_file(run.distilled)
    (shard,), (other,) = run.model.glob("*.safetensors"), begun.model.glob("*.safetensors")
    before, moved = load_file(other), 0
    for name, scale in load_file(shard).items():
        if name.endswith("weight_scale"):
            assert torch.equal(stored[f"{name.removesuffix('.weight_scale')}.scale"], scale.float().flatten())
            assert torch.equal(scale.float(), scale.bfloat16().float())
            moved += int((scale != before[name]).sum())
    assert moved > 100


@pytest.mark.parametrize(
    ("text", "told"),
    [("few words", "of which none can be held out; give text for 10 windows or more with --data"),
     (None, "is in it, or the other way round; learn from other text, or give --allow-overlap")],
    ids=["too little", "the text it is evaluated on"],
)  # fmt: skip
def test_text_that_cannot_serve_is_refused(
    begun: Run, demo_texts: Texts, tmp_path: Path, text: str | None, told: str
) -> None:
    path = demo_texts.evaluation if text is None else tmp_path / "few.txt"
    if text is not None:
        path.write_text(200 * f"{text} ", encoding="utf-8")
    with pytest.raises(InputError) as refused:
        api.distill(begun.root, str(path))
    assert told in str(refused.value)
