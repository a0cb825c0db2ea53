"""`fp8q doctor RUN` on the demo: quiet where it is healthy, and the very module named where one was damaged."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from culprits import rescale_outliers, saturating_k, scale_too_small
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.api import CalibrateOptions, DoctorOptions
from fp8q.core.run import Run

Fp8q = Callable[..., Any]
CHECKS = {
    "saturation", "scale", "underflow", "inverse_scale", "amax_jumps", "norm_inputs", "attention_logits",
    "cache_tokens", "product_errors", "hidden_states", "loops", "cache_served",
}  # fmt: skip
DAMAGED, LAYER = "model.layers.2.mlp.gate_proj", "model.layers.2"
GROUP = {DAMAGED, "model.layers.2.mlp.up_proj"}
ATTENTION = "model.layers.2.self_attn"


@pytest.fixture
def copied(demo_run: Run, tmp_path: Path) -> Run:
    """The demo's run, to damage."""
    return Run(
        Path(shutil.copytree(demo_run.root, tmp_path / "run", ignore=shutil.ignore_patterns("engines", "triton")))
    )


def examined(fp8q: Fp8q, run: Run, code: int) -> list[dict[str, Any]]:
    result = fp8q("doctor", run.root, "--windows", "2", "--json")
    assert result.code == code, result.err
    found: list[dict[str, Any]] = json.loads(result.out)["checks"]
    assert {check["check"] for check in found} == CHECKS
    assert all({"check", "verdict", "module", "value", "remedy"} <= check.keys() for check in found)
    return found


def blamed(found: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Check -> the modules that it calls bad."""
    bad: dict[str, set[str]] = {}
    for check in found:
        if check["verdict"] == "bad":
            bad.setdefault(check["check"], set()).add(check["module"])
    return bad


def test_a_healthy_run_is_quiet_and_nothing_is_written(fp8q: Fp8q, demo_run: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in demo_run.root.rglob("*") if path.is_file()}
    found = examined(fp8q, demo_run, 0)
    assert blamed(found) == {}
    verdicts = {check["check"]: check["verdict"] for check in found}
    assert {verdicts[name] for name in CHECKS - {"loops"}} == {"good"}
    assert verdicts["loops"] in ("good", "watch")
    hidden = next(check for check in found if check["check"] == "hidden_states")
    assert [at["module"] for at in hidden["by_depth"]] == [f"model.layers.{layer}" for layer in range(4)]
    assert 0.005 < hidden["by_depth"][0]["value"] < hidden["by_depth"][3]["value"] < 0.1
    assert {path: path.stat().st_mtime_ns for path in demo_run.root.rglob("*") if path.is_file()} == before


def test_a_scale_ten_times_too_small_is_found(fp8q: Fp8q, copied: Run) -> None:
    assert set(scale_too_small(copied, DAMAGED)) == GROUP
    bad = blamed(examined(fp8q, copied, 3))
    assert bad["saturation"] == bad["scale"] == {DAMAGED}
    assert bad["product_errors"] == GROUP
    assert bad.keys() == {"saturation", "scale", "product_errors"} | (bad.keys() & {"hidden_states"})


def test_a_saturating_cache_is_found_and_the_remedy_repairs_it(fp8q: Fp8q, copied: Run, keeping_graphs: Any) -> None:
    assert saturating_k(copied, ATTENTION) == f"{ATTENTION}.k"
    result = fp8q("doctor", copied.root, "--windows", "2")
    assert result.code == 3
    assert "By depth" in result.out
    assert f"bad: {LAYER}: `fp8q scales {copied.root} --kv-skip {ATTENTION}`" in result.out
    assert f"`rm {copied.root}/scales.json`, then `fp8q scales {copied.root}`" in result.err
    bad = blamed(examined(fp8q, copied, 3))
    assert bad["saturation"] == bad["scale"] == {f"{ATTENTION}.k"}
    assert bad.get("hidden_states", {LAYER}) == {LAYER}
    copied.scales.unlink()
    with keeping_graphs():
        assert fp8q("scales", copied.root).code == 0
    assert blamed(examined(fp8q, copied, 0)) == {}


@pytest.mark.slow
def test_outlier_channels_are_found(
    fp8q: Fp8q, demo_checkpoint: Path, demo_texts: Any, keeping_graphs: Any, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    assert set(rescale_outliers(demo_checkpoint, damaged, DAMAGED)) == GROUP
    ids = torch.arange(64)[None] * 7
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (demo_checkpoint, damaged)]
    with torch.inference_mode():
        assert torch.equal(*(model(input_ids=ids).logits for model in models))
    options = CalibrateOptions(samples=8, seq_len=128, batch_size=2, kv_cache="fp8")
    with keeping_graphs():
        run = api.calibrate(
            str(damaged), str(demo_texts.calibration), tmp_path / "run", str(demo_texts.evaluation), options
        )
    bad = blamed(examined(fp8q, run, 3))
    assert set().union(*bad.values()) <= GROUP | {LAYER}
    assert bad["product_errors"] == GROUP
    assert bad["underflow"] == {DAMAGED}
    remedies = {check["remedy"] for check in api.doctor(run.root, DoctorOptions(1)).model_dump()["checks"]}
    assert f"`fp8q scales {run.root} --two-terms {DAMAGED}`" in remedies


def test_only_a_norms_readers_can_be_given_outliers(demo_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model.layers.0.mlp.down_proj: does not read a norm's output$"):
        rescale_outliers(demo_checkpoint, tmp_path / "damaged", "model.layers.0.mlp.down_proj")


def test_gemmas_norms_which_add_one_grow_outliers_too(shared_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    damaged, norm = tmp_path / "damaged", "model.layers.1.input_layernorm.weight"
    rescale_outliers(shared_checkpoint("gemma"), damaged, "model.layers.1.self_attn.q_proj", channel=7)
    before, after = (load_file(path / "model.safetensors")[norm] for path in (shared_checkpoint("gemma"), damaged))
    assert 1 + float(after[7]) == pytest.approx(2**18 * (1 + float(before[7])), rel=2**-8)
    assert torch.equal(after[:7], before[:7])


def test_opts_norms_which_have_a_bias_and_run_on_no_meta_device_grow_outliers_too(
    shared_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    damaged, layer = tmp_path / "damaged", "model.decoder.layers.1"
    readers = rescale_outliers(shared_checkpoint("opt"), damaged, f"{layer}.fc1")
    assert readers == [f"{layer}.fc1"]
    before, after = (load_file(path / "model.safetensors") for path in (shared_checkpoint("opt"), damaged))
    for part in ("weight", "bias"):
        norm = f"{layer}.final_layer_norm.{part}"
        assert float(after[norm][7]) == 2**18 * float(before[norm][7])
    assert torch.equal(after[f"{layer}.fc1.weight"][:, 7] * 2**18, before[f"{layer}.fc1.weight"][:, 7])


def test_without_the_source_what_needs_the_model_is_unknown(
    fp8q: Fp8q, copied: Run, move_source: Callable[[Run, Path], None], tmp_path: Path
) -> None:
    move_source(copied, tmp_path / "gone")
    found = {check["check"]: check for check in examined(fp8q, copied, 0)}
    unknown = {name for name, check in found.items() if check["verdict"] == "unknown"}
    assert unknown == {"norm_inputs", "attention_logits", "cache_tokens", "product_errors", "hidden_states", "loops"}
    assert found["loops"]["value"] is None
    assert found["loops"]["remedy"] == f"put the model back at {tmp_path / 'gone'}, or calibrate again"
    assert found["saturation"]["verdict"] == "good"


def test_a_serving_host_is_told_what_its_files_tell(base_install: Callable[..., Any], demo_run: Run) -> None:
    shown = base_install("doctor", demo_run.root, "--json")
    assert shown.returncode == 0, shown.stderr
    checks = json.loads(shown.stdout)["checks"]
    remedy = next(check["remedy"] for check in checks if check["check"] == "hidden_states")
    assert remedy == "`pip install 'fp8q[calibrate]'`"


def test_windows_are_of_a_run(fp8q: Fp8q) -> None:
    assert fp8q("doctor", "--windows", "3").complaint() == (
        "--windows 3: is for a RUN, and none is given; name one, or leave this out"
    )


def test_a_changed_checkpoint_is_refused(fp8q: Fp8q, copied: Run) -> None:
    shard = next(copied.model.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes() + b"\0")
    assert "is not the file that `fp8q calibrate` wrote" in fp8q("doctor", copied.root).complaint()


@pytest.mark.usefixtures("quick_work_shown")
def test_what_runs_is_said_before_it_does_and_no_windows_run_no_model(
    fp8q: Fp8q, demo_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models once ran for nine minutes unannounced."""
    shown = fp8q("doctor", demo_run.root, "--windows", "2").err
    said = re.search(
        r"doctor: runs BF16 and FP8 on 2 windows \(512 tokens\), then lets each write 96 tokens after 16 prompts"
        r"(; some [\w. ]+ here, by the time of calibrating)?; --windows 0 runs no model, and checks the files alone\n",
        shown,
    )
    assert said is not None, shown
    assert said.start() < shown.index("Running BF16 and FP8")
    monkeypatch.setattr("fp8q.stages.doctor._run", lambda *_: pytest.fail("a model was run"))
    result = fp8q("doctor", demo_run.root, "--windows", "0", "--json")
    found = json.loads(result.out)
    assert (result.code, found["windows"], found["tokens"]) == (0, 0, 0)
    unknown = [check for check in found["checks"] if check["verdict"] == "unknown"]
    assert {check["said"] for check in unknown} == {"not measured: --windows 0 runs no model"}
    assert {check["remedy"] for check in unknown} == {None}, "it was asked for"
    assert "loops" in {check["check"] for check in unknown}
