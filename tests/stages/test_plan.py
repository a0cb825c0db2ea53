"""`fp8q run` begins with a plan: its arithmetic, what stops behind it, and the disk that it asks for."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8q import api
from fp8q.calibrate.model import bf16_gemms
from fp8q.calibrate.model.bf16_gemms import bf16_linear
from fp8q.calibrate.model.memory import weight_bytes
from fp8q.calibrate.model.source import open_source
from fp8q.calibrate.text.evaluation import cut
from fp8q.calibrate.text.image_rows import ImageRow
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.options import PlanOptions, RunOptions
from fp8q.quantize.sensitivity import backward
from fp8q.quantize.weights.gptq import Compensation, compensation
from fp8q.stages import plan as stage
from fp8q.stages import plan_rates
from fp8q.stages import run as running
from fp8q.stages.corpus import Collected, Opening
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.plan import Outlook, Planned, PlannedStage, disk_needed, lines_of, stages_of
from fp8q.stages.plan_rates import GemmSeconds, Rates, gptq_seconds
from fp8q.stages.run import Following
from fp8q.stages.shared.run_images import ImageRows

SMALL: dict[str, Any] = {"samples": 4, "seq_len": 64, "batch_size": 2}
RATES = Rates(
    plain=1.0, observed=2.0, fp32=3.0, reference=1.5, onnx=4.0, scoring=0.25, moments=0.5, scaling=0.01,
    compensated=100.0, pace=2.0, load_seconds=5.0, base_bytes=1000, weight_bytes=200, layer_bytes=30, outside_bytes=50,
    window_bytes=10, parameters=100, numbers=80, inputs=(3, 4), outputs=(5, 6), layers=2, hidden=4, vocabulary=10,
    pass_values=20, seeing=7.0, streamed=False,
)  # fmt: skip


def collected(windows: int, evaluated: int, images: ImageRows | None = None) -> Collected:
    ids = np.zeros((windows, 8), np.int64)
    nothing = np.zeros(evaluated, np.int64)
    opening = Opening(bos="never")
    return Collected(ids, nothing, ("a", "b"), [], api.CalibrateOptions(), opening, images=images)


def planned(
    demo_checkpoint: Path,
    moments: bool = False,
    validate: api.ValidateOptions = api.ValidateOptions(),
    prompt: int | None = None,
    server: Any = None,
    images: ImageRows | None = None,
    rates: Rates = RATES,
    **options: Any,
) -> dict[str, PlannedStage]:
    asked = RunOptions(calibrate=api.CalibrateOptions(batch_size=2, server=server, **options), validate=validate)
    evaluation = cut(np.zeros(16, np.int64), "b", 8, 8, prompt=prompt)
    outlook = Outlook(False, moments, False, options.get("keep_moments") is False)
    plan = Planned(open_source(str(demo_checkpoint)), asked, collected(3, 16, images), evaluation, outlook, rates)
    return {stage.name: stage for stage in stages_of(plan)}


def test_times_are_tokens_times_what_a_token_takes(demo_checkpoint: Path) -> None:
    stages = planned(demo_checkpoint)
    begin = 5 + 2 * 1.0  # loaded, and begun at half the pace
    assert stages["calibrate"].seconds == begin + 24 * 2
    assert stages["calibrate"].memory == 1000 + 200 + 2 * 10
    assert stages["scales and checkpoint"].seconds == 2 + 0.8
    assert stages["scales and checkpoint"].disk == 200 - 80
    assert stages["validate"].seconds == 2 * begin + 16 * (1 + 1.5) + 2 * 14 * 0.25  # bf16 and reference; 14 are scored
    assert stages["search of a form"].if_needed
    with_moments = planned(demo_checkpoint, moments=True, weight_rounding="gptq")
    assert with_moments["calibrate"].seconds == begin + 24 * 2.5
    assert with_moments["calibrate"].disk == 4 * (3 * 3 + 4 * 4)
    assert with_moments["scales and checkpoint"].seconds == 2 + 0.8 + 100
    assert "costliest weights" in planned(demo_checkpoint, bf16_weights=0.03)


def test_gptq_rounds_for_the_choice_of_the_costliest_weights_and_not_again(demo_checkpoint: Path) -> None:
    nearest = planned(demo_checkpoint, bf16_weights=0.03)
    by_gptq = planned(demo_checkpoint, moments=True, weight_rounding="gptq", bf16_weights=0.03)
    choice, checkpoint = by_gptq["costliest weights"], by_gptq["scales and checkpoint"]
    assert choice.seconds == nearest["costliest weights"].seconds + 100
    assert (choice.disk, choice.freed) == (120 + 80, 120)
    assert checkpoint.seconds == nearest["scales and checkpoint"].seconds
    assert checkpoint.freed == 80
    in_blocks = planned(
        demo_checkpoint, moments=True, weight_rounding="gptq", bf16_weights=0.03, form=("block",), activation_terms=1
    )
    assert in_blocks["costliest weights"] == nearest["costliest weights"]


def test_the_memory_of_validating_is_that_of_the_reference_and_of_scoring(demo_checkpoint: Path) -> None:
    """The reference holds codes in BF16 beside their file, and of 8 positions the logits are scored."""
    logits = 4 * 8 * open_source(str(demo_checkpoint)).text_config.vocab_size
    scored = 1000 + 4 * logits
    assert planned(demo_checkpoint)["validate"].memory == scored + 200 + 120
    alone = api.ValidateOptions(runtimes=("bf16",))
    assert planned(demo_checkpoint, validate=alone)["validate"].memory == scored + 200
    wide = api.ValidateOptions(runtimes=("bf16", "fp32"))
    assert planned(demo_checkpoint, validate=wide)["validate"].memory == scored + 4 * 100


def test_a_model_beyond_memory_is_planned_by_its_parts(demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder layer is in memory while it measures; what is in none is rounded and scored too. Nothing is decoded."""
    monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device: 100)
    stages = planned(demo_checkpoint, rates=replace(RATES, streamed=True))
    assert stages["calibrate"].memory == 1000 + 30 + 2 * 10
    assert stages["scales and checkpoint"].memory == 1000 + 50
    logits = 4 * 8 * open_source(str(demo_checkpoint)).text_config.vocab_size
    assert stages["validate"].memory == 1000 + 50 + 4 * logits
    assert (stages["report"].memory, stages["report"].seconds) == (1000, 2 * 8)


def test_the_parts_of_a_model_are_its_layers_and_what_is_in_none(demo_checkpoint: Path) -> None:
    source = open_source(str(demo_checkpoint))
    layer, outside = plan_rates.part_bytes(source)
    assert outside + source.text_config.num_hidden_layers * layer == weight_bytes(source)
    assert outside > 2 * source.text_config.hidden_size * source.text_config.vocab_size


def test_rows_with_images_take_the_time_of_the_part_that_sees_too(demo_checkpoint: Path) -> None:
    """Two rows of 20 tokens calibrate; one of 5 is evaluated by whole models: BF16 and the reference, loaded again."""
    calibrated, evaluated = (ImageRow(where="row", messages=[], images=[], tokens=tokens) for tokens in (20, 5))
    rows = ImageRows(calibration=[calibrated, calibrated], evaluation=[evaluated])
    stages, without = planned(demo_checkpoint, images=rows), planned(demo_checkpoint)
    assert stages["calibrate"].seconds - without["calibrate"].seconds == 40 * (2 + 7)
    begin = 5 + 2 * 1.0
    added = 2 * begin + 5 * (1 + 1.5 + 2 * (0.25 + 7))
    assert stages["validate"].seconds - without["validate"].seconds == added
    by_layer = planned(demo_checkpoint, images=rows, validate=api.ValidateOptions(stream=True))
    assert by_layer["validate"].seconds == without["validate"].seconds


def test_a_report_takes_the_time_of_what_both_models_continue(demo_checkpoint: Path) -> None:
    """Three prompts of 32 tokens, and 47 steps behind each, of 33 tokens' time; both models are in memory."""
    report = planned(demo_checkpoint)["report"]
    assert report.seconds == 2 * 8 + 2 * 5 + 3 * (32 + 33 * 47) * (1 + 1.5)
    assert report.memory == 1000 + 200 + 120


def test_the_disk_of_a_stage_has_all_its_files(demo_checkpoint: Path) -> None:
    """24 tokens calibrate, 8 windows of 8 are predicted, hidden states have 4 numbers, and the checkpoint 120 bytes."""
    assert planned(demo_checkpoint, weight_rounding="sequential")["scales and checkpoint"].disk == (
        120 + 4 * 4 * 24 * 4 + 80
    )
    costliest = planned(demo_checkpoint, bf16_weights=0.03)
    assert (costliest["costliest weights"].disk, costliest["costliest weights"].freed) == (120, 120)
    assert costliest["scales and checkpoint"].freed == 0
    assert RATES.backward_bytes(64, by_layer=True) == 4 * (2 + 3) * 64 * 4
    assert RATES.backward_bytes(64, by_layer=False) == 0
    stages = planned(demo_checkpoint)
    search, logits = stages["search of a form"], stages["validate"].spare
    assert logits == 2 * 14 * open_source(str(demo_checkpoint)).text_config.vocab_size
    assert (search.disk, search.freed) == (120 + 4 * (3 * 3 + 4 * 4) + 80 + logits, 120 + 80 + logits)


def test_outputs_take_their_moments_for_good_and_the_time_of_revising_codes(demo_checkpoint: Path) -> None:
    """H_O of 5 and 6 channels, half of it in a layer; two of three windows go forward and back."""
    asked: dict[str, Any] = {"moments": True, "weight_rounding": "gptq"}
    without = planned(demo_checkpoint, **asked)
    stages = planned(demo_checkpoint, weigh_outputs=2, rates=replace(RATES, layer_bytes=10**6), **asked)
    moments = 4 * (5 * 5 + 6 * 6)
    gathered = stages["gradients at outputs"]
    assert gathered.seconds == 5 + 2 * 1.0 + 4 * 2 * 8 * RATES.fp32
    assert (gathered.disk - moments, gathered.disk - gathered.freed) == (RATES.backward_bytes(16, True), moments)
    assert gathered.memory == 1000 + 2 * 10**6 + moments / 2
    revising = stages["scales and checkpoint"].seconds - without["scales and checkpoint"].seconds
    assert revising == pytest.approx(2 * 3.4e-6 * 80)
    assert "gradients at outputs" not in planned(demo_checkpoint, weigh_outputs=2, form=("block",), **asked)


def test_a_pass_back_takes_the_memory_of_its_tensors(demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 1,024 tokens, each of 20 values and their gradients; layer by layer the head's 4 · 10 and logits."""
    of_codes, of_weights, logits = 4 * 200 + 2 * 4 * 1024 * 20, 2 * 200 + 2 * 4 * 1024 * 20, 4 * 4 * 10 + 8 * 1024 * 10
    asked: dict[str, Any] = {"bf16_weights": 0.03, "weigh_first_token": True, "weight_rounding": "gptq"}
    stages = planned(demo_checkpoint, moments=True, **asked)
    taken = [stages[name].memory - 1000 for name in ("costliest weights", "first tokens", "search of a form")]
    assert taken == [of_codes, of_weights, of_codes]
    monkeypatch.setattr(backward, "WHOLE_BYTES", 0)
    stages = planned(demo_checkpoint, moments=True, **asked)
    taken = [stages[name].memory - 1000 for name in ("costliest weights", "first tokens", "search of a form")]
    assert taken == [logits, logits, logits]


def test_a_search_measures_again_where_no_moments_were_gathered_and_rounds_twice(demo_checkpoint: Path) -> None:
    """It weighs first tokens of 16 windows where that was not done, in 3 passes."""
    begin = 5 + 2 * 1.0
    without, with_moments = (planned(demo_checkpoint, moments=known)["search of a form"] for known in (False, True))
    assert without.seconds - with_moments.seconds == pytest.approx(begin + 24 * 2.5)
    weighed = planned(demo_checkpoint, moments=True, weigh_first_token=True, weight_rounding="gptq")["search of a form"]
    assert with_moments.seconds - weighed.seconds == pytest.approx(begin + 3 * 16 * 8 * RATES.fp32)
    assert without.seconds > 2 * RATES.compensated


def test_moments_that_are_spent_take_a_layers_room_and_that_of_the_codes(demo_checkpoint: Path) -> None:
    """Two layers of 4 · (9 + 16) bytes together, and 80 codes until the checkpoint of 120 bytes has them."""
    stages = planned(demo_checkpoint, moments=True, weight_rounding="gptq", stream=True, keep_moments=False)
    calibrating, writing = stages["calibrate"], stages["scales and checkpoint"]
    assert (calibrating.disk, calibrating.freed) == (50 + 80, 50)
    assert (writing.disk, writing.freed) == (120, 80)
    assert disk_needed([calibrating, writing]) == 80 + 120


def test_a_search_evaluates_the_float_model_again_for_other_windows_alone(demo_checkpoint: Path) -> None:
    """Eight windows of prediction, four candidates, and the form that is chosen: by BF16 too where it has a tail."""
    with_tail, without = (planned(demo_checkpoint, server=name)["search of a form"] for name in ("tensorrt", "vllm"))
    begin = 5 + 2 * 1.0
    assert with_tail.seconds - without.seconds == pytest.approx(begin + 16 * 1.0 + 14 * 0.25)


def test_a_validation_by_layers_counts_its_hidden_states(demo_checkpoint: Path) -> None:
    """Two runtimes in BF16 have two files of 16 tokens of 4 numbers each; logits are stored where there is room."""
    streamed = planned(demo_checkpoint, validate=api.ValidateOptions(stream=True))["validate"]
    whole = planned(demo_checkpoint, validate=api.ValidateOptions(stream=False))["validate"]
    assert whole.disk == whole.spare == whole.freed
    assert streamed.disk - whole.disk == 2 * 2 * 16 * 4 * 2
    assert (streamed.spare, streamed.freed) == (whole.spare, streamed.disk)
    served = planned(demo_checkpoint, prompt=4, validate=api.ValidateOptions())["validate"]
    assert served.disk == served.spare


def test_the_disk_of_all_is_the_most_at_a_time() -> None:
    first = PlannedStage("a", 1, 1, 10, "", freed=8)
    second = PlannedStage("b", 1, 1, 7, "", freed=2)
    assert disk_needed([first, second]) == 10
    assert disk_needed([second, first]) == 5 + 10
    assert disk_needed([]) == 0


def test_what_is_not_certain_is_left_out_of_all() -> None:
    stages = [PlannedStage("a", 90, 2e9, 1e9, "--x"), PlannedStage("b", 60, 3e9, 0, "", if_needed=True)]
    assert [*lines_of(stages)] == [
        "plan: a: 1 min 30 s, 2 GB of memory, 1 GB of disk; --x",
        "plan: b: 1 min 0 s, 3 GB of memory, 0 B of disk, if one code an activation loses too much",
        "plan: all: 1 min 30 s, 2 GB of memory, 1 GB of disk, by a few tokens and GEMMs that were measured here",
    ]


def test_gptq_is_measured_on_as_many_rows_as_a_weight_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input takes a time of its own, on 64 rows most of it: so a number took five times as long as on 512."""
    clock = iter((2.0, 3.0, 10.0))
    squared = (10 - 3) / (512**2 * (512 - 64))
    one = 3 / 512 - squared * 512 * 64
    monkeypatch.setattr(plan_rates, "seconds", lambda work: next(clock))
    assert gptq_seconds([(100, 10), (50, 20)], [10, 20]) == pytest.approx(
        2 / 512**3 * (10**3 + 20**3) + one * (10 + 20) + squared * (100 * 10**2 + 50 * 20**2)
    )


@pytest.mark.parametrize(("width", "measured"), [(20, 512), (1536, 1536), (8960, 2048)])
def test_gptq_is_measured_about_as_wide_as_it_will_be(
    width: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 512 inputs an operation took three times as long as on 8,960: a search of 46 minutes was planned at 114."""
    widths: list[int] = []

    def noted(moments: torch.Tensor) -> Compensation:
        widths.append(len(moments))
        return compensation(torch.eye(8))

    monkeypatch.setattr(plan_rates, "compensation", noted)
    monkeypatch.setattr(plan_rates, "seconds", lambda work: 1.0)
    gptq_seconds([(4, width)], [width])
    assert widths == [measured]


def test_gemms_are_measured_as_the_model_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without BF16 units torch takes three times as long as the model does: a validation was planned at a seventh."""
    monkeypatch.setattr(bf16_gemms, "has_bf16_units", lambda: False)
    computed: list[int] = []

    def noted(x: torch.Tensor, *given: Any) -> torch.Tensor:
        computed.append(x.numel())
        return bf16_linear(x, *given)

    monkeypatch.setattr(bf16_gemms, "bf16_linear", noted)
    GemmSeconds.of((96, 32), "cpu", moments=False)
    calls = 3  # of the weight, and of its codes
    assert computed == [plan_rates.GEMM_TOKENS * 32] * (2 * calls)


def test_plan_writes_nothing_and_ends_well(demo_checkpoint: Path, demo_texts: Any, tmp_path: Path) -> None:
    listening = Notes(SILENT)
    texts = str(demo_texts.calibration), tmp_path / "run", str(demo_texts.evaluation)
    asked = RunOptions(calibrate=api.CalibrateOptions(**SMALL), planning=PlanOptions(plan=True))
    api.run(str(demo_checkpoint), *texts, asked, listening)
    assert not (tmp_path / "run").exists()
    lines = [line for line in listening.lines if line.startswith("plan: ")]
    assert [line.split(":")[1].strip() for line in lines] == [
        "calibrate", "scales and checkpoint", "graphs", "engines", "validate", "search of a form", "report", "all",
    ]  # fmt: skip


def test_a_disk_without_room_for_all_stages_is_refused_first(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    monkeypatch.setattr(stage, "measured_rates", lambda *_, **__: RATES_OF_MUCH)
    texts = str(demo_texts.calibration), tmp_path / "run", str(demo_texts.evaluation)
    asked = RunOptions(calibrate=api.CalibrateOptions(**SMALL), export=api.ExportOptions(graph=False))
    with pytest.raises(InputError) as refused:
        api.run(str(demo_checkpoint), *texts, asked)
    assert str(refused.value) == (
        f"{tmp_path / 'run'}: has 1 MB free, and the stages take 2 MB, most of it scales and checkpoint (2 MB); free "
        "some, or name another with --out, or change --weight-rounding"
    )
    assert not (tmp_path / "run").exists()


RATES_OF_MUCH = Rates(**{**vars(RATES), "weight_bytes": 2_000_080})


def test_a_cpu_evaluates_a_larger_model_no_longer_than_it_calibrates(
    demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 windows of 8 tokens calibrate: two runtimes evaluate 256 tokens each, of the 700 that 100 windows score."""
    source = open_source(str(demo_checkpoint))
    listening = Notes(SILENT)
    of = collected(64, 800)
    asked = RunOptions(export=api.ExportOptions(graph=False))

    def fitted(options: RunOptions) -> int | None:
        following = Following(options, Notes(listening), graph=False)
        following.check_fit(source, of)
        return following.options.validate.max_tokens

    assert fitted(asked) is None  # the demo is small
    monkeypatch.setattr(running, "SMALL_BYTES", 0)
    assert fitted(asked) == 256
    (line,) = listening.lines
    assert line == (
        "--max-tokens: 256 tokens are evaluated, so that it takes no longer than calibrating on a CPU: the interval is "
        "some 1.7 times as wide as by default; --max-tokens 700 takes that"
    )
    assert fitted(RunOptions(validate=api.ValidateOptions(max_tokens=700))) == 700
