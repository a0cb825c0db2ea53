"""`fp8q merge` as its users meet it: parts of one text become that text measured at once, other texts are added, and
what cannot be is refused in a line.
"""

import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.measure.moments import load_moments
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError
from fp8q.core.files import sha256_file
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, ScaleOptions
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages import merge as merge_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.corpus import load_tokens
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources

Measure = Callable[..., Run]


@pytest.fixture(scope="module")
def part(demo_checkpoint: Path, demo_texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Measure:
    """`part(0, 2)`: a run that measured these of the five batches; `text` is calibrated on, what is held out is always
    the same.
    """
    folder, made = tmp_path_factory.mktemp("parts"), dict[tuple[object, ...], Run]()
    texts = {name: folder / f"{name}.txt" for name in ("one", "two", "held-out")}
    for number, path in enumerate(texts.values()):
        begin, size = number * 40_000, 10_000 if path.stem == "held-out" else 40_000
        path.write_text(
            demo_texts.calibration.read_text(encoding="utf-8")[begin : begin + size],
            encoding="utf-8",
        )

    def measure(first: int, end: int, text: str = "one", batch_size: int = 2, rounding: Any = "nearest") -> Run:
        key = (first, end, text, batch_size, rounding)
        if key not in made:
            options = CalibrateOptions(
                samples=9, seq_len=64, batch_size=batch_size, batches=(first, end), weight_rounding=rounding
            )
            out = folder / "-".join(map(str, key))
            made[key] = api.calibrate(str(demo_checkpoint), str(texts[text]), out, str(texts["held-out"]), options)
        return made[key]

    return measure


def merged(out: Path, checkpoint: Path, *runs: Run) -> Run:
    """The stages `corpus` and `measure` of the runs added."""
    run = Run(out)
    merge_stage.write_merged(
        run, open_source(str(checkpoint)), merge_stage.add([run.root for run in runs], out), Notes(SILENT)
    )
    return run


def written(run: Run) -> bytes:
    return b"".join(
        path.read_bytes() for path in (run.statistics, run.statistics_json, run.calibration, run.evaluation)
    )


def test_parts_of_a_text_in_any_order_and_groups_are_the_text_measured_at_once(
    part: Measure, demo_checkpoint: Path, tmp_path: Path
) -> None:
    whole, parts = part(0, 5), [part(0, 2), part(2, 3), part(3, 5)]
    assert written(merged(tmp_path / "a", demo_checkpoint, *parts)) == written(whole)
    some = merged(tmp_path / "b", demo_checkpoint, parts[2], parts[0])
    assert written(merged(tmp_path / "c", demo_checkpoint, some, parts[1])) == written(whole)
    assert load_statistics(part(2, 3)).batches_measured == {2}


def test_other_texts_are_put_one_after_the_other(part: Measure, demo_checkpoint: Path, tmp_path: Path) -> None:
    one, two = part(0, 5), part(0, 5, text="two")
    both = merged(tmp_path / "a", demo_checkpoint, one, two)
    assert written(both) == written(merged(tmp_path / "b", demo_checkpoint, two, one))
    corpus = load_statistics(both).record.corpus
    ordered = sorted((one, two), key=lambda run: load_statistics(run).record.corpus.fingerprint)
    assert corpus.parts == [load_statistics(run).record.corpus for run in ordered]
    np.testing.assert_array_equal(
        load_tokens(both, both.calibration), np.concatenate([load_tokens(run, run.calibration) for run in ordered])
    )
    assert both.evaluation.read_bytes() == one.evaluation.read_bytes()  # the same tokens, held out of both


def test_parts_in_two_terms_have_the_scales_and_codes_of_the_text_measured_at_once(
    part: Measure, demo_checkpoint: Path, tmp_path: Path
) -> None:
    source = open_source(str(demo_checkpoint))
    whole = Run(Path(shutil.copytree(part(0, 5).root, tmp_path / "whole")))
    added = merged(tmp_path / "merged", demo_checkpoint, part(0, 2), part(2, 3), part(3, 5))
    options = ScaleOptions(kv_cache="fp8", two_terms=("*.v_proj",), tail=("*.down_proj",), exact_tail=16)
    for run in (whole, added):
        quantize_stage.quantize(run, source, sources.gemms_of(source), options, Notes(SILENT))
    assert added.scales.read_bytes() == whole.scales.read_bytes()
    (weights,) = whole.model.glob("*.safetensors")
    assert (added.model / weights.name).read_bytes() == weights.read_bytes()
    told = json.loads(added.scales.read_text(encoding="utf-8"))["activations"]
    assert {name.rpartition(".")[2] for name, scale in told.items() if scale["terms"] == 2} == {
        "q_proj", "k_proj", "v_proj", "down_proj",
    }  # fmt: skip
    assert {name.rpartition(".")[2]: scale.get("tail") for name, scale in told.items()}["down_proj"] == 16


def inputs_of(checkpoint: Path, ids: Any, module: str) -> torch.Tensor:
    """The inputs of `module` for windows `ids`, as transformers' own model computes them, float64 [tokens, width]."""
    model, taken = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16), list[torch.Tensor]()
    model.get_submodule(module).register_forward_pre_hook(lambda _, arguments: taken.append(arguments[0]))
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(ids))
    return taken[0].flatten(0, -2).double()


@pytest.mark.slow
def test_second_moments_of_parts_are_added_and_gptq_rounds_by_them(
    part: Measure, demo_checkpoint: Path, without_graphs: Any, tmp_path: Path
) -> None:
    """The sums of both parts are those of all inputs; GPTQ's codes are those of such sums, whichever run is first."""
    parts = [part(0, 2, rounding="gptq"), part(2, 5, rounding="gptq")]
    options = ScaleOptions(weight_rounding="gptq")
    with without_graphs():
        one, other = (
            api.merge([run.root for run in runs], tmp_path / name, options=options)
            for name, runs in (("one", parts), ("other", parts[::-1]))
        )
    module = "model.layers.1.mlp.down_proj"
    x = inputs_of(demo_checkpoint, load_tokens(one, one.calibration), module)
    moments = load_moments(one.moments, module)
    assert (moments.double() - x.T @ x).norm() < 5e-3 * (x.T @ x).norm()  # of sums in BF16, on other processors
    weights, again = (load_file(next(run.model.glob("*.safetensors"))) for run in (one, other))
    assert all(torch.equal(weights[name].view(torch.uint8), again[name].view(torch.uint8)) for name in weights)
    assert {weight.rounding for weight in load_scales(one).weights.values()} == {"gptq"}
    assert run_again(one, parts, options)


def run_again(run: Run, parts: list[Run], options: ScaleOptions) -> bool:
    """Merge once more; tell whether that left all files as they are."""
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*") if path.is_file() and path.name != ".lock"}
    api.merge([part.root for part in parts], run.root, options=options, export_options=api.ExportOptions(graph=False))
    return all(path.stat().st_mtime_ns == at for path, at in before.items() if path.name != "run.json")


def test_gptq_of_parts_without_second_moments_is_refused(part: Measure, tmp_path: Path) -> None:
    parts = [part(0, 2, rounding="gptq").root, part(2, 5).root]
    with pytest.raises(InputError) as refused:
        api.merge(parts, tmp_path / "out", options=ScaleOptions(weight_rounding="gptq"))
    assert str(refused.value) == (
        f"{parts[1]}: was measured without second moments, which --weight-rounding gptq needs; measure it again with "
        "--weight-rounding gptq, or merge without it"
    )
    assert not (tmp_path / "out").exists()
    weighed = ScaleOptions(weight_rounding="gptq", weigh_first_token=True)
    with pytest.raises(InputError) as refused:
        api.merge(parts, tmp_path / "out", options=weighed)
    assert str(refused.value) == (
        "--weigh-first-token: runs the model; use it with `fp8q calibrate` or `fp8q scales`, or leave it out"
    )


@pytest.mark.slow
def test_a_merged_run_is_a_run_like_any_other_and_merging_again_does_nothing(
    part: Measure, keeping_graphs: Any, tmp_path: Path
) -> None:
    options = ScaleOptions(kv_cache="fp8", clip=api.Clipping("mse"))
    with keeping_graphs():  # the demo's: no scale is in it
        run = api.merge([part(0, 2).root, part(2, 5).root], tmp_path / "run", options=options)
    assert list(run.record().stages) == ["corpus", "measure", "quantize", "export"]
    assert run.record().stages["measure"].options["runs"] == [str(part(0, 2).root), str(part(2, 5).root)]
    before = {path: path.stat().st_mtime_ns for path in run.root.rglob("*") if path.is_file() and path.name != ".lock"}
    api.merge([part(2, 5).root, part(0, 2).root], run.root, options=options)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    shown = api.inspect(run.root).modules
    assert len(shown) == 4 * 7 + 1 + 8
    assert {scale.method for scale in load_scales(run).activations.values()} == {"mse"}
    assert not any(run.is_stale(stage) for stage in run.record().stages)
    accuracy = api.validate(run.root, options=api.ValidateOptions(runtimes=("bf16", "reference")))
    assert abs(accuracy.runtimes["reference"].perplexity_increase or 1) < 0.02


def refused(*arguments: object) -> str:
    """The one line that `fp8q merge` fails with."""
    done = subprocess.run(
        [sys.executable, "-m", "fp8q", "merge", *map(str, arguments)], capture_output=True, text=True, env=os.environ
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    return done.stderr.removeprefix("fp8q: ").rstrip("\n")


def test_what_cannot_be_merged_is_refused_before_anything_is_written(part: Measure, tmp_path: Path) -> None:
    one, out = part(0, 2), tmp_path / "out"

    def message(*runs: Path, into: Path = out) -> str:
        with pytest.raises(api.InputError) as failure:
            api.merge(runs, into)
        assert not out.exists()
        return str(failure.value)

    assert message(one.root) == f"{one.root}: is nothing to add; give two runs or more"
    assert message(one.root, one.root) == f"{one.root}: is given twice; give each run once"
    assert (
        message(one.root, part(2, 5).root, into=one.root)
        == f"{one.root}: is --out itself; give the merged run a directory of its own"
    )
    assert message(one.root, part(0, 5).root).startswith(
        f"{one.root} and {part(0, 5).root}: statistics cannot be added: both measured batch 0 of "
    )
    smaller = part(4, 6, batch_size=1).root
    assert message(one.root, smaller) == (
        f"{one.root} and {smaller}: statistics cannot be added: their corpus batch_size differs (2 and 1); measure "
        "both with the same model and options"
    )


def test_a_model_that_is_elsewhere_is_said_with_an_option_and_must_be_the_same(
    part: Measure, demo_checkpoint: Path, tmp_path: Path
) -> None:
    moved = []
    for number, run in enumerate((part(0, 2), part(2, 5))):
        moved.append(Run(Path(shutil.copytree(run.root, tmp_path / f"moved-{number}"))))
        moved[-1].record_file.write_text(run.record_file.read_text().replace(str(demo_checkpoint), "/elsewhere"))
    first = moved[0].root
    runs = [run.root for run in moved]
    with pytest.raises(
        api.InputError,
        match=rf"^/elsewhere: the model that {first} was made of is not there; say where it is with --model$",
    ):
        api.merge(runs, tmp_path / "out")
    other = Path(shutil.copytree(demo_checkpoint, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    with pytest.raises(
        api.InputError,
        match=rf"^--model {other}: is not the model that {first} was made of \(fingerprint \w{{12}}, not \w{{12}}\); ",
    ):
        api.merge(runs, tmp_path / "out", str(other))
    assert (
        merge_stage.source_of_all(merge_stage.add(runs, tmp_path / "out"), str(demo_checkpoint), SILENT).path
        == demo_checkpoint
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_other_models_and_tokenizers_and_a_truncated_file_are_refused_with_both_values(
    part: Measure, tmp_path: Path
) -> None:
    one = part(0, 2)
    other = Run(Path(shutil.copytree(part(2, 5).root, tmp_path / "other")))
    statistics, record = other.statistics_json.read_text(), other.record_file.read_text()

    def spoil(field: str) -> tuple[str, str]:
        mine = json.loads(statistics)["model"][field]
        other.statistics_json.write_text(statistics.replace(mine, "f" * 64))
        other.record_file.write_text(
            record.replace(
                json.loads(record)["stages"]["measure"]["outputs"]["statistics.json"],
                sha256_file(other.statistics_json),
            )
        )
        return mine, refused(one.root, other.root, "--out", tmp_path / "out")

    for field in ("fingerprint", "tokenizer"):
        mine, line = spoil(field)
        assert line == (
            f"{one.root} and {other.root}: statistics cannot be added: their model {field} differs ({mine} and "
            f"{'f' * 64}); measure both with the same model and options"
        )
    other.statistics_json.write_text(statistics)
    other.record_file.write_text(record)
    other.statistics.write_bytes(other.statistics.read_bytes()[:-8])
    with pytest.raises(
        api.InputError,
        match=(
            rf"^{other.statistics}: is not the file that `fp8q calibrate` wrote \(its SHA-256 differs from "
            r"run.json\); "
        ),
    ):
        api.merge([one.root, other.root], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_part_measured_into_a_finished_run_does_not_pass_for_it(
    part: Measure, demo_run: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    """The scales would be of one text, and what is held out of another."""
    run = Run(Path(shutil.copytree(demo_run.root, tmp_path / "run")))
    options = CalibrateOptions(samples=4, seq_len=64, batch_size=2, batches=(0, 1))
    api.calibrate(str(demo_checkpoint), str(demo_texts.evaluation), run.root, str(demo_texts.calibration), options)
    message = (
        f"{run.root}: holds what --batches 0:1 measured; add it to the other batches' runs with `fp8q merge`, or run "
        "`fp8q calibrate` without --batches"
    )
    for use in (api.validate, api.build_engine, api.triton, api.inspect):
        with pytest.raises(InputError) as refused:
            use(run.root)
        assert str(refused.value) == message


#: The public functions whose path is that of a training log, and no run.
OF_A_TRAINING_LOG = (api.inspect_training, api.report_training)
#: The command line's commands that take a run, and what they are given here beside it.
OF_A_RUN: dict[str, list[str]] = {
    "export": ["--precision", "bf16"],
    "scales": [],
    "build-engine": [],
    "engine": [],
    "validate": [],
    "evaluate": [],
    "triton": [],
    "report": [],
    "inspect": ["--json"],
    "doctor": [],
    "generate": ["--prompt", "Once"],
    "serve": [],
    "bench": [],
    "sensitivity": [],
    "distill": [],
    "tune": [],
    "push": ["--repo", "owner/name"],
}
REPORTS = ("report-continuations", "report-plots", "report-tables", "report-verdict")
#: The public functions that are asked something of a run.
ASKED: dict[Callable[..., Any], tuple[Any, ...]] = {
    api.generate: ("Once",),
    api.compare_answers: ("Once",),
    api.compare: (api.CompareOptions(url="http://127.0.0.1:1"),),
    api.evaluate: (api.EvaluateOptions(("hellaswag",)),),
    api.push: (api.PushOptions("owner/name"),),
}


def refusal_of(run: Run) -> str:
    return (
        f"{run.root}: holds what --batches 0:2 measured; add it to the other batches' runs with `fp8q merge`, or run "
        "`fp8q calibrate` without --batches"
    )


@pytest.mark.parametrize("command", OF_A_RUN)
def test_every_command_that_takes_a_run_says_of_a_part_that_it_is_to_be_merged(
    part: Measure, fp8q: Callable[..., Any], command: str
) -> None:
    run = part(0, 2)
    there = sorted(run.root.iterdir())
    assert fp8q(command, run.root, *OF_A_RUN[command]).complaint() == refusal_of(run)
    assert sorted(run.root.iterdir()) == there


def test_a_graph_is_not_held_against_a_part(part: Measure, demo_run: Run, fp8q: Callable[..., Any]) -> None:
    run = part(0, 2)
    assert fp8q("lint", demo_run.onnx, "--run", run.root).complaint() == refusal_of(run)


def test_every_public_function_that_takes_a_run_opens_it_where_a_part_is_refused(part: Measure) -> None:
    run = part(0, 2)
    functions = [found for name in api.__all__ if inspect.isfunction(found := getattr(api, name))]
    of_a_run = [
        function
        for function in functions
        if next(iter(inspect.signature(function).parameters)) == "path" and function not in OF_A_TRAINING_LOG
    ]
    named = {function.__name__.replace("_", "-") for function in of_a_run}
    assert named == {*OF_A_RUN, "lint", "open-run", *REPORTS, "chat", "compare", "compare-answers", "load"}
    for function in of_a_run:
        if function is not api.lint:
            with pytest.raises(InputError) as refused:
                function(run.root, *ASKED.get(function, ()))
            assert str(refused.value) == refusal_of(run)


def test_short_windows_do_not_hide_that_one_run_held_out_what_another_calibrated_on(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    text = demo_texts.calibration.read_text(encoding="utf-8")
    first, second, other = tmp_path / "first.txt", tmp_path / "second.txt", tmp_path / "other.txt"
    first.write_text(text[:20_000])
    second.write_text(text[40_000:60_000])
    other.write_text(text[80_000:90_000])
    options = CalibrateOptions(samples=16, seq_len=64, batch_size=4, batches=(0, 4))
    runs = [
        api.calibrate(str(demo_checkpoint), str(first), tmp_path / "a", str(other), options),
        api.calibrate(str(demo_checkpoint), str(second), tmp_path / "b", str(first), options),
    ]
    added = merge_stage.add([run.root for run in runs], tmp_path / "merged")
    with pytest.raises(
        InputError, match="of what these runs held out for evaluation was calibrated on by another of them"
    ):
        merge_stage.check_held_out(added, open_source(str(demo_checkpoint)), Notes(SILENT))
