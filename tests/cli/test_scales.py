"""`fp8q scales` and `fp8q inspect` as their users meet them: a finished run, other choices, one line for every wrong
input.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from safetensors.torch import load_file

from fp8q.core.files import sha256_file
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.shared.model_files import carry_graphs

Fp8q = Callable[..., Any]


def edit_config(checkpoint: Path, **changes: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_scales_are_chosen_again_from_the_statistics_and_what_is_not_asked_for_stays(
    fp8q: Fp8q, demo_run: Run, tmp_path: Path
) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    before, graph, measured = load_scales(run), run.onnx.read_bytes(), run.record().stages["measure"]
    result = fp8q("scales", run.root, "--method", "percentile", "--percentile", "99.9", "--margin", "-1", "--json")
    assert result.code == 0, result.err
    after = load_scales(run)
    assert after.activations.keys() == before.activations.keys()
    assert after.kv_cache.keys() == before.kv_cache.keys()
    assert {scale.method for scale in (after.activations | after.kv_cache).values()} == {"percentile"}
    assert all(after.activations[name].scale < before.activations[name].scale / 2 for name in before.activations)
    assert run.record().stages["measure"] == measured
    assert run.onnx.read_bytes() == graph  # it holds no scale: only what it points at has changed
    stored = {
        name: float(tensor)
        for name, tensor in load_file(next(run.model.glob("*.safetensors"))).items()
        if name.endswith("input_scale")
    }
    assert stored == {f"{name}.input_scale": scale.scale for name, scale in after.activations.items()}


def test_what_was_skipped_is_taken_back_by_an_empty_pattern(
    fp8q: Fp8q, demo_run: Run, without_graphs: Any, tmp_path: Path
) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    everything = load_scales(run).weights.keys()
    with without_graphs():
        assert fp8q("scales", run.root, "--skip", "*.down_proj", "--only", "*.mlp.*").code == 0
        assert {name.rsplit(".", 1)[1] for name in load_scales(run).weights} == {"gate_proj", "up_proj"}
        assert fp8q("scales", run.root, "--skip", "").code == 0
        assert {name.rsplit(".", 1)[1] for name in load_scales(run).weights} == {"gate_proj", "up_proj", "down_proj"}
        assert fp8q("scales", run.root, "--only", "").code == 0
    assert load_scales(run).weights.keys() == everything


def test_a_graph_of_another_layout_is_not_gone_on_with(demo_run: Run, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(demo_run.model, checkpoint, ignore=shutil.ignore_patterns("*.onnx"))
    carry_graphs(demo_run, checkpoint)
    assert (checkpoint / "model.onnx").read_bytes() == demo_run.onnx.read_bytes()
    (checkpoint / "model.onnx").unlink()
    edit_config(checkpoint, dtype="float16")
    carry_graphs(demo_run, checkpoint)
    assert not (checkpoint / "model.onnx").exists()


def test_a_graph_of_a_damaged_checkpoint_is_not_gone_on_with(demo_run: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    (shard,) = run.model.glob("model-*.safetensors")
    shard.write_bytes(shard.read_bytes()[:1000])
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(demo_run.model, checkpoint, ignore=shutil.ignore_patterns("*.onnx"))
    carry_graphs(run, checkpoint)
    assert not (checkpoint / "model.onnx").exists()


def test_a_graph_that_another_hand_recorded_is_exported_anew(
    fp8q: Fp8q, demo_run: Run, keeping_graphs: Any, tmp_path: Path
) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    graph, digest = run.onnx.read_bytes(), sha256_file(run.onnx)
    model = onnx.load_model_from_string(graph)
    model.graph.node.reverse()
    run.onnx.write_bytes(model.SerializeToString())
    run.record_file.write_text(run.record_file.read_text().replace(digest, sha256_file(run.onnx)))
    with keeping_graphs():  # the demo's, for the asking
        result = fp8q("scales", run.root, "--margin", "1")
    assert result.code == 0, result.err
    assert run.onnx.read_bytes() == graph


def test_inspect_ranks_what_stands_out_and_simulates_a_history(fp8q: Fp8q, demo_run: Run) -> None:
    result = fp8q("inspect", demo_run.root, "--delayed", "--amax-history-len", 2, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert list(found) == ["modules", "bf16_cache", "findings", "delayed", "certificate"]
    assert found["bf16_cache"] == []
    severities = [finding["severity"] for finding in found["findings"]]
    assert severities == sorted(severities, reverse=True)
    shares = [row["saturated"] for row in found["delayed"]]
    assert shares == sorted(shares, reverse=True)
    # three batches of eight windows, the first without a history
    assert {row["batches"] for row in found["delayed"]} == {2}
    assert all(row["sqnr_best_db"] >= row["sqnr_db"] for row in found["modules"] if "scale" in row)


def test_inspect_shows_what_fp8_would_do_to_a_cache_in_bf16(
    fp8q: Fp8q, demo_run: Run, keeping_graphs: Any, tmp_path: Path
) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    with keeping_graphs():
        assert fp8q("scales", run.root, "--kv-cache", "v").code == 0
    rows = json.loads(fp8q("inspect", run.root, "--json").out)["bf16_cache"]
    assert {row["tensor"]: row["scale"] for row in rows} == {
        name: scale.scale for name, scale in load_scales(demo_run).kv_cache.items() if name.endswith(".k")
    }
    assert "Cache in BF16, as it would be in FP8" in fp8q("inspect", run.root).out


def test_inspect_measures_other_text_against_the_chosen_scales(
    fp8q: Fp8q, demo_run: Run, demo_texts: Any, tmp_path: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x = 1")
    assert (
        fp8q("inspect", demo_run.root, "--against", short)
        .complaint(after_notes=True)
        .startswith(f"--against {short}: has ")
    )
    result = fp8q("inspect", demo_run.root, "--against", demo_texts.calibration, "--json")
    rows = json.loads(result.out)["against"]
    assert len(rows) == 4 * 4 + 2 * 4
    assert all(row["amax"] > 0 for row in rows)
    assert all((row["saturation"] > 0) == (row["amax_over_clip"] > 1) for row in rows)


@pytest.mark.parametrize(
    "option", [["--margin", 3], ["--interval", 3], ["--amax-history-len", 2], ["--amax-compute-algo", "most_recent"]]
)
def test_inspect_takes_no_history_that_it_does_not_simulate(fp8q: Fp8q, tmp_path: Path, option: list[object]) -> None:
    line = fp8q("inspect", tmp_path, *option).complaint()
    assert line == f"{option[0]} {option[1]}: is for --delayed, which is not given; add it, or leave this out"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--margin", 99], "--margin 99: must lie between -16 and 16; the scale is multiplied by 2 to this power"),
        (["--method", "delayed", "--interval", 0], "--interval 0: must be at least 1"),
        (
            ["--method", "delayed", "--interval", 900],
            "--interval 900: no scale is computed in 3 batches; give a smaller one, or more --samples",
        ),
        (
            ["--percentile", 50],
            "--percentile 50.0: is for --method percentile, and the method is amax; choose that one, or leave this out",
        ),
        (["--skip", "*.nothing"], "--skip *.nothing: matches no module; names are like "),
        (["--only", "*.nothing"], "--only *.nothing: matches no module; names are like "),
        (
            ["--kv-skip", "*.nothing"],
            (
                "--kv-skip *.nothing: matches no attention module; names are like model.layers.0.self_attn, "
                "model.layers.1.self_attn"
            ),
        ),
        (
            ["--kv-skip", "*.0.*", "--kv-skip", "*.self_attn"],
            "--kv-skip *.0.* *.self_attn: matches the cache of all 4 layers; give --kv-cache off, or skip fewer",
        ),
        (
            ["--kv-cache", "off", "--kv-skip", "*.0.*"],
            (
                "--kv-skip *.0.*: the cache of every layer stays in the compute type; give --kv-cache fp8 or v, "
                "or leave it out"
            ),
        ),
        (["--two-terms", "*.nothing"], "--two-terms *.nothing: matches no module; names are like "),
        (
            ["--activation-terms", 2, "--two-terms", "*.q_proj"],
            (
                "--two-terms *.q_proj: --activation-terms 2 takes two for every module; leave one of them out, or give "
                "--activation-terms 1"
            ),
        ),
    ],
)
def test_scales_that_cannot_be_chosen(fp8q: Fp8q, demo_run: Run, options: list[object], message: str) -> None:
    record = demo_run.record_file.read_bytes()
    result = fp8q("scales", demo_run.root, *options)
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines()[-1].startswith(f"fp8q: {message}")
    assert demo_run.record_file.read_bytes() == record
