"""`fp8q engine` on the demo's engines, and on engines that were built to deceive: each is of the demo's own graph with
one thing changed.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q.core.files import sha256_file
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.export.engine.build import Job, build
from fp8q.export.engine.profiles import profiles
from fp8q.quantize.scales.decisions import load_scales

from ...graphs import changed_engine
from .deceiving_graphs import (
    DOWN,
    LAYER,
    Change,
    all_in_bf16,
    layers_exchanged,
    no_activation_quantized,
    one_pair_removed,
    other_codes,
    scales_in_bf16,
    unchanged,
)
from .engine_views import Fp8q, shown

Built = Callable[..., Path]
TARGETS = ("sm89", "sm120")


pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'fp8q[tensorrt-rtx]'")


@pytest.fixture(scope="session")
def built(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """`built(change, "sm89")`: the engine of the demo's graph with a change, in the demo's own profiles; each is built
    once.
    """
    made: dict[tuple[str, str], Path] = {}

    def build_changed(change: Change, target: str) -> Path:
        key = (change.__name__, target)
        if key not in made:
            directory, job = tmp_path_factory.mktemp(change.__name__), Job("tensorrt-rtx", target, profiles(8, 256))
            made[key] = changed_engine(demo_run, change, job, directory)
        return made[key]

    return build_changed


@pytest.fixture(scope="session")
def modules(demo_run: Run) -> list[str]:
    return load_scales(demo_run).fp8_gemms


@pytest.mark.parametrize("target", TARGETS)
def test_a_good_engine_shows_every_product_on_fp8_and_passes(
    fp8q: Fp8q, demo_run: Run, built: Built, modules: list[str], target: str
) -> None:
    for plan in (demo_run.engines / f"{target}.plan", built(unchanged, target)):
        code, view, error = shown(fp8q, demo_run, target, plan)
        assert (code, error) == (0, "")
        assert (view["evidence"], view["unknown"], view["promised_products"], view["fp8_products"]) == (
            "plan",
            None,
            28,
            28,
        )
        assert [view[f"{what}_found"] for what in ("codes", "factors", "inputs")] == [28, 28, 28]
        assert (view["codes_missing"], view["differences"], view["narrow"]) == ([], [], [])
        for profile in ("prefill", "decode"):
            products = {
                row["module"]: row for row in view["products"] if row["profile"] == profile and row["module"] in modules
            }
            assert set(products) == set(modules)
            assert {(*row["operands"], row["result"]) for row in products.values()} == {("fp8", "fp8", "fp32")}
            assert all(row["before"] and row["after"] for row in products.values())
        wide = [(row["product"], row["promised"], row["reason"]) for row in view["wide"]]
        assert wide == [
            ("lm_head", False, "bf16 × bf16 -> bf16: output head: its error would go straight into the logits")
        ]


def test_attention_shows_its_kernels_for_prompts(fp8q: Fp8q, demo_run: Run) -> None:
    (view,) = json.loads(fp8q("engine", demo_run.root, "--target", "sm89", "--json").out)["engines"]
    found = [
        (row["profile"], row["module"], row["kernel"], row["operands"], row["result"]) for row in view["attention"]
    ]
    layers = [f"model.layers.{layer}.self_attn" for layer in range(4)]
    assert found == [("prefill", layer, "_gemm_mha_v2", ["bf16"] * 3, "bf16") for layer in layers]


def test_merged_products_name_each_other_and_the_kernel_that_quantizes_their_input(fp8q: Fp8q, demo_run: Run) -> None:
    (view,) = json.loads(fp8q("engine", demo_run.root, "--target", "sm89", "--json").out)["engines"]
    rows = {row["module"]: row for row in view["products"] if row["profile"] == "prefill"}
    gate, up, down = (rows[f"{LAYER}.mlp.{name}"] for name in ("gate_proj", "up_proj", "down_proj"))
    assert (gate["merged"], up["merged"], down["merged"]) == ([up["module"]], [gate["module"]], [])
    assert gate["before"] == up["before"]
    # SiLU, the product of both, and the quantization of what comes of it: one kernel
    assert gate["after"] == up["after"] == down["before"]
    assert "Silu" in down["before"][0]
    assert rows["lm_head"]["before"] == []


def test_people_see_layers_that_run_alike_in_one_row(fp8q: Fp8q, demo_run: Run) -> None:
    result = fp8q("engine", demo_run.root)
    assert (result.code, result.err) == (0, "")
    for target in TARGETS:
        assert (
            f"{target}, tensorrt-rtx 1.7.1.116: 28 of 28 expected GEMMs on FP8 codes on both sides (read from the "
            "engine's plan); 28 multiply the run's codes, 28 have its factors s_x · s_w behind them, 28 its input "
            "scale before them"
        ) in result.out
    assert "model.layers.*.mlp.down_proj (3)" in result.out
    assert "model.layers.*.self_attn (4)" in result.out


@pytest.mark.parametrize("target", TARGETS)
def test_fp8_weights_alone_are_told(fp8q: Fp8q, demo_run: Run, built: Built, modules: list[str], target: str) -> None:
    code, view, error = shown(fp8q, demo_run, target, built(no_activation_quantized, target))
    assert (code, view["evidence"], view["fp8_products"]) == (3, "plan", 0)
    assert view["codes_found"] == 0  # all codes are in it, and the size is that of an FP8 engine: no GEMM takes them
    assert [row["product"] for row in view["wide"] if row["promised"]] == modules
    assert view["wide"][0]["reason"] == (
        "bf16 × bf16 -> bf16 in profile 0; model.onnx has Q/DQ on both sides, so the engine is of another graph, or "
        "the builder chose this"
    )
    assert error.startswith(
        f"fp8q: {target}: 0 of 28 expected GEMMs take FP8 on both sides, less than --min-fp8-share 1; wide: "
        "model.layers.0.self_attn.q_proj, "
    )


@pytest.mark.parametrize("target", TARGETS)
def test_one_removed_pair_is_told_and_named(fp8q: Fp8q, demo_run: Run, built: Built, target: str) -> None:
    code, view, error = shown(fp8q, demo_run, target, built(one_pair_removed, target))
    assert (code, view["fp8_products"], [row["product"] for row in view["wide"]]) == (3, 27, [DOWN, "lm_head"])
    assert f"27 of 28 expected GEMMs take FP8 on both sides, less than --min-fp8-share 1; wide: {DOWN}; " in error
    assert shown(fp8q, demo_run, target, built(one_pair_removed, target), "--min-fp8-share", "96%")[0] == 0


@pytest.mark.parametrize("target", TARGETS)
def test_a_bf16_graph_is_told_and_its_size_would_not_have(fp8q: Fp8q, demo_run: Run, built: Built, target: str) -> None:
    code, view, _ = shown(fp8q, demo_run, target, built(all_in_bf16, target))
    assert (code, view["evidence"], view["fp8_products"], view["codes_found"]) == (3, "plan", 0, 0)
    codes = 4 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 704)  # a byte each in FP8, two in BF16
    more = view["bytes"] - (demo_run.engines / f"{target}.plan").stat().st_size
    # the programs of so small a model outweigh its weights: on the demo the BF16 engine is the smaller one
    assert more < codes / 2


@pytest.mark.parametrize("target", TARGETS)
def test_where_weights_outweigh_the_program_bf16_takes_a_byte_more_for_each(
    engine_of: Callable[..., tuple[Any, bytes]], target: str
) -> None:
    large = {"width": 1024, "hidden": 4096, "heads": 16, "key_value_heads": 16, "fp8_cache": False}
    fp8, bf16 = (len(engine_of(target, fp8=fp8, **large)[1]) for fp8 in (True, False))
    codes = 4 * 1024 * 1024 + 3 * 1024 * 4096
    assert bf16 - fp8 == pytest.approx(codes, rel=0.1)


@pytest.mark.parametrize("target", TARGETS)
def test_scales_in_bf16_are_told(fp8q: Fp8q, demo_run: Run, built: Built, modules: list[str], target: str) -> None:
    code, view, error = shown(fp8q, demo_run, target, built(scales_in_bf16, target))
    assert (code, view["fp8_products"], view["narrow"], view["codes_found"]) == (3, 28, sorted(modules), 0)
    assert error.startswith(
        f"fp8q: {target}: 28 of 28 expected GEMMs take FP8 on both sides and 28 of them answer in less than FP32, "
        "less than --min-fp8-share 1; narrow: model.layers.0.mlp.down_proj, "
    )
    assert shown(fp8q, demo_run, target, built(scales_in_bf16, target), "--min-fp8-share", "0")[0] == 0
    result = fp8q("engine", demo_run.root, "--target", target, "--plan", built(scales_in_bf16, target))
    assert f"{target}: FP8 GEMMs that answer in less than FP32" in result.out
    assert re.search(
        r"model\.layers\.\*\.mlp\.down_proj \(4\) +the weights' scales are per tensor, or narrower than FP32",
        result.out,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_one_other_code_of_the_same_model_is_told(fp8q: Fp8q, demo_run: Run, built: Built, target: str) -> None:
    plan = built(other_codes, target)
    code, view, error = shown(fp8q, demo_run, target, plan)
    assert (code, view["fp8_products"], view["codes_found"], view["codes_missing"]) == (3, 28, 27, [DOWN])
    assert error == (
        f"fp8q: {target}: {plan} is not the engine of this run: {DOWN}: its GEMM multiplies 1 codes of 180224 that "
        "are others, and the run has its own in model.onnx; build it again with `fp8q build-engine`"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_two_layers_that_are_exchanged_are_told(fp8q: Fp8q, demo_run: Run, built: Built, target: str) -> None:
    plan, other = built(layers_exchanged, target), DOWN.replace(".1.", ".2.")
    code, view, error = shown(fp8q, demo_run, target, plan)
    assert (code, view["fp8_products"], view["codes_found"], view["codes_missing"]) == (3, 28, 26, [DOWN, other])
    assert error.startswith(
        f"fp8q: {target}: {plan} is not the engine of this run: {DOWN}: its GEMM multiplies the codes of {other}, "
        "and the run has its own in model.onnx (3 more, --json has all); "
    )


def test_an_engine_of_another_model_is_unknown(
    fp8q: Fp8q, demo_run: Run, engine_of: Callable[..., tuple[Any, bytes]], tmp_path: Path
) -> None:
    plan = tmp_path / "other.plan"
    plan.write_bytes(engine_of("sm89")[1].replace(b"model.layers.", b"other.layers."))
    code, view, error = shown(fp8q, demo_run, "sm89", plan)
    assert (code, view["evidence"], view["fp8_products"], view["codes_found"]) == (3, "unknown", 0, None)
    assert view["unknown"] == "the engine shows no such GEMM in profile 0"
    assert error.startswith(
        f"fp8q: sm89: what {plan} runs cannot be told (the engine shows no such GEMM in profile 0), which does not "
        "meet --min-fp8-share 1; "
    )


@pytest.mark.parametrize("spoil", ["text", "empty", "noise", "half"])
def test_a_plan_that_does_not_read_is_unknown_and_never_passes(
    fp8q: Fp8q, demo_run: Run, tmp_path: Path, spoil: str
) -> None:
    data = (demo_run.engines / "sm89.plan").read_bytes()
    spoilt = {
        "text": data.replace(b"fully_connected={", b"fully_combined_={"),
        "empty": b"",
        "noise": bytes(range(256)) * 99,
        "half": data[: data.find(b"main {")],
    }
    plan = tmp_path / "spoilt.plan"
    plan.write_bytes(spoilt[spoil])
    code, view, error = shown(fp8q, demo_run, "sm89", plan, "--min-fp8-share", "0.01")
    assert (code, view["evidence"], view["unknown"], view["fp8_products"]) == (
        3,
        "unknown",
        "its text does not read",
        0,
    )
    assert error.endswith(
        "cannot be told (its text does not read), which does not meet --min-fp8-share 0.01; build it again with `fp8q "
        "build-engine`"
    )
    assert shown(fp8q, demo_run, "sm89", plan, "--min-fp8-share", "0")[0] == 0


def test_an_engine_with_one_profile_alone_is_unknown(fp8q: Fp8q, demo_run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "one.plan"
    plan.write_bytes(build(demo_run.onnx, Job("tensorrt-rtx", "sm89", profiles(8, 256)[:1]), SILENT))
    _, view, _ = shown(fp8q, demo_run, "sm89", plan)
    assert (view["evidence"], view["unknown"]) == ("unknown", "the engine shows no GEMM of profile 1")


@pytest.mark.parametrize("cut", [1, 1000, 3_000_000])
def test_a_plan_that_is_cut_off_behind_its_text_is_unknown(fp8q: Fp8q, demo_run: Run, tmp_path: Path, cut: int) -> None:
    data = (demo_run.engines / "sm89.plan").read_bytes()
    plan = tmp_path / "cut.plan"
    plan.write_bytes(data[:-cut])
    code, view, error = shown(fp8q, demo_run, "sm89", plan)
    reason = f"it has {len(data) - cut} bytes and states {len(data)}, so it is cut off or of another format"
    assert (code, view["evidence"], view["unknown"], view["fp8_products"]) == (3, "unknown", reason, 0)
    assert f"cannot be told ({reason}), which does not meet --min-fp8-share 1; " in error


def test_a_plan_of_another_target_is_unknown(fp8q: Fp8q, demo_run: Run) -> None:
    for target, other in (TARGETS, TARGETS[::-1]):
        code, view, _ = shown(fp8q, demo_run, target, demo_run.engines / f"{other}.plan")
        assert (code, view["evidence"], view["unknown"], view["fp8_products"]) == (
            3,
            "unknown",
            f"its programs are for {other}",
            0,
        )


def test_a_plan_that_was_put_in_the_place_of_the_runs_own_is_refused(
    fp8q: Fp8q, demo_run: Run, built: Built, tmp_path: Path
) -> None:
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    shutil.copyfile(built(no_activation_quantized, "sm89"), run.engines / "sm89.plan")
    result = fp8q("engine", run.root)
    assert (result.code, result.out) == (2, "")
    assert (
        f"sm89.plan: is not the file that `fp8q build-engine {run.root}` wrote (its SHA-256 differs from run.json)"
        in result.err
    )
    record = json.loads(run.record_file.read_text())  # and where the record was forged as well
    record["stages"]["build-engine"]["outputs"]["engines/sm89.plan"] = sha256_file(run.engines / "sm89.plan")
    run.record_file.write_text(json.dumps(record))
    assert fp8q("engine", run.root).code == 3
