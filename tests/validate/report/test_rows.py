"""The rows of a run and how they read, against a run whose numbers can be worked out by hand (conftest)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fp8q.core import columns
from fp8q.core.columns import Cell, Column, Table
from fp8q.core.errors import InputError
from fp8q.core.files import sha256_file, write_document
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.export.engine.info import EngineInfo
from fp8q.export.engine.profiles import profiles
from fp8q.quantize.scales.decisions import HeldOutError, load_scales
from fp8q.validate.accuracy.decision import interval_text
from fp8q.validate.report import tables
from fp8q.validate.report.accuracy_rows import AccuracyRow, accuracy_rows
from fp8q.validate.report.rows import ModuleRow, engine_rows, fact_rows, module_rows, size_rows, stage_rows

MODULES = ["model.layers.0.q", "model.layers.0.k", "model.layers.0.down", "model.layers.1.q", "model.layers.1.k"]
CACHES = ["model.layers.0.k", "model.layers.0.v", "model.layers.1.k", "model.layers.1.v"]


def row_of(run: Run, module: str, kind: str = "product") -> ModuleRow:
    return next(row for row in module_rows(run) if (row.module, row.kind) == (module, kind))


def test_every_product_has_a_row_fp8_first_then_those_in_bf16_then_the_cache(calibrated_run: Run) -> None:
    rows = module_rows(calibrated_run)
    assert [row.module for row in rows] == [*MODULES, "lm_head", "model.layers.1.down", *CACHES]
    assert [row.kind for row in rows] == ["product"] * 7 + ["cache"] * 4


def test_a_module_row_says_what_its_scale_does_to_the_values_it_was_chosen_for(calibrated_run: Run) -> None:
    row = row_of(calibrated_run, "model.layers.0.q")
    assert (row.amax, row.clip, row.scale) == (448, 448, 1)  # the values: 448, three times 1, four times 2^-11
    assert (row.saturation, row.underflow) == (0, 0.5)
    assert row.sqnr_db == pytest.approx(10 * np.log10((448**2 + 3 + 4 * 2**-22) / (4 * 2**-22)), abs=1e-9)
    assert row.samples == 8
    assert row_of(calibrated_run, "model.layers.1.q").scale == 2  # its input is twice as large


def test_members_of_a_group_repeat_the_scale_of_the_tensor_they_share(calibrated_run: Run) -> None:
    q, k = row_of(calibrated_run, "model.layers.0.q"), row_of(calibrated_run, "model.layers.0.k")
    assert q.tensor == k.tensor == "model.layers.0.q.input"
    assert (q.scale, q.sqnr_db) == (k.scale, k.sqnr_db)
    assert q.weight_sqnr_db != k.weight_sqnr_db


def test_what_stays_in_bf16_says_why_and_has_no_scale(calibrated_run: Run) -> None:
    head, down = row_of(calibrated_run, "lm_head"), row_of(calibrated_run, "model.layers.1.down")
    assert head == ModuleRow("lm_head", "product", reason="output head: its error would go straight into the logits")
    assert (down.reason, down.samples, down.scale) == ("NaN in 1 of 2 input values", 2, None)
    assert down.value is not None
    assert np.isnan(down.value)


@pytest.mark.parametrize(
    ("module", "kind", "layer", "last"),
    [
        ("model.layers.12.mlp.down_proj", "product", 12, "down_proj"),
        ("transformer.h.3.attn.c_attn", "product", 3, "c_attn"),
        ("lm_head", "product", None, "lm_head"),
        ("model.layers.2.self_attn.k", "cache", 2, "k cache"),
    ],
)
def test_a_row_knows_its_layer_and_its_kind(module: str, kind: str, layer: int | None, last: str) -> None:
    row = ModuleRow(module, "cache" if kind == "cache" else "product")
    assert (row.layer, row.kind_of_module) == (layer, last)


def test_experts_show_how_their_weights_were_rounded_and_judged(
    calibrated_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = ["rounded", "over nearest", "held-out tokens"]
    plain = tables.module_table(module_rows(calibrated_run))
    assert not {column.title for column in plain.columns} & {*titles}
    scales = load_scales(calibrated_run)
    judged = {"q": ("gptq", HeldOutError(tokens=128, over_nearest=0.434)), "k": ("nearest", HeldOutError(tokens=9))}
    for name, (rounding, error) in judged.items():
        weight = scales.weights[f"model.layers.0.{name}"]
        changed = weight.model_copy(update={"rounding": rounding, "held_out": error})
        scales.weights[f"model.layers.0.{name}"] = changed
    monkeypatch.setattr("fp8q.validate.report.rows.load_scales", lambda _: scales)
    table = tables.module_table(module_rows(calibrated_run))
    places = [[column.title for column in table.columns].index(title) for title in titles]
    texts = [[cells[place].text for place in places] for cells in table.cells()[:3]]
    assert texts == [["gptq", "0.43", "128"], ["nearest", "", "9"], ["", "", ""]]


def test_rows_of_a_stage_that_has_not_run_are_none(calibrated_run: Run) -> None:
    assert accuracy_rows(calibrated_run) == []
    assert engine_rows(calibrated_run) == []


def test_a_run_without_scales_is_refused_with_the_command_that_writes_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(InputError) as refused:
        module_rows(run)
    assert str(refused.value) == (
        f"{tmp_path}: is no fp8q run (there is no run.json); make one with `fp8q calibrate MODEL --data TEXT "
        f"--out {tmp_path}`"
    )


def test_scales_that_were_changed_are_refused(calibrated_run: Run) -> None:
    calibrated_run.scales.write_text(calibrated_run.scales.read_text().replace('"scale": 1.0', '"scale": 2.0'))
    with pytest.raises(InputError) as refused:
        module_rows(calibrated_run)
    assert str(refused.value) == (
        f"{calibrated_run.scales}: is not the file that `fp8q calibrate` wrote (its SHA-256 differs from run.json); "
        "restore it, or delete it and run `fp8q calibrate` again"
    )


def test_accuracy_rows_repeat_the_file_and_add_the_interval(evaluated_run: Run) -> None:
    base, fp8 = accuracy_rows(evaluated_run)
    assert base == AccuracyRow("bf16", perplexity=base.perplexity, nll_nats=base.nll_nats)
    assert fp8.runtime == "reference"
    assert fp8.perplexity / base.perplexity - 1 == pytest.approx(fp8.perplexity_increase)
    assert fp8.increase_low is not None
    assert fp8.increase_high is not None
    assert fp8.perplexity_increase is not None
    assert fp8.increase_low < fp8.perplexity_increase < fp8.increase_high
    assert fp8.windows == 10


def test_the_bf16_size_is_two_bytes_a_parameter_read_from_the_headers(calibrated_run: Run) -> None:
    rows = size_rows(calibrated_run)
    parameters = 5 * (16 * 32 + 16)  # five FP8 GEMMs of 16 outputs and 32 inputs, each with a bias
    assert [row.what for row in rows] == ["weights in BF16", "FP8 checkpoint"]
    assert rows[0].bytes == 2 * parameters
    assert rows[1].bytes == sum(path.stat().st_size for path in calibrated_run.model.iterdir())
    assert rows[1].share_of_bf16 == pytest.approx(rows[1].bytes / rows[0].bytes)


def with_engines(run: Run, *engines: EngineInfo, inputs: dict[str, str] | None = None) -> Run:
    with RunWriter(run).stage("build-engine", inputs or {}, {}) as log:
        for engine in engines:
            write_document(run.engines / f"{engine.target}.json", engine)
            log.outputs.append(run.engines / f"{engine.target}.json")
    return run


def engine(target: str, evidence: str = "plan", wide: tuple[str, ...] = ()) -> EngineInfo:
    return EngineInfo.model_validate(
        {
            "runtime": "tensorrt-rtx",
            "version": "1.7.1",
            "target": target,
            "bytes": 4224,
            "promised_products": 5,
            "fp8_products": 5 - len(wide),
            "wide_products": list(wide),
            "evidence": evidence,
            "profiles": list(profiles(8, 64)),
            "build_seconds": 2.5,
        }
    )


def test_engine_rows_say_what_was_promised_and_found(calibrated_run: Run) -> None:
    rows = engine_rows(with_engines(calibrated_run, engine("sm120", wide=("model.layers.0.q",)), engine("sm89")))
    assert [(row.target, row.promised_products, row.fp8_products, row.wide) for row in rows] == [
        ("sm89", 5, 5, ()),
        ("sm120", 5, 4, ("model.layers.0.q",)),
    ]
    assert [row.share_of_bf16 for row in size_rows(calibrated_run)[2:]] == [0.8, 0.8]  # 4,224 of 5,280 bytes


def test_what_an_unreadable_engine_runs_is_none_not_zero(calibrated_run: Run) -> None:
    (row,) = engine_rows(with_engines(calibrated_run, engine("sm89", "unknown", tuple(MODULES))))
    assert (row.fp8_products, row.wide, row.evidence) == (None, (), "unknown")


def test_an_engine_that_was_built_from_other_files_is_outdated_and_nothing_is_said_of_it(calibrated_run: Run) -> None:
    run = with_engines(calibrated_run, engine("sm89"), inputs={"scales.json": sha256_file(calibrated_run.scales)})
    assert [row.evidence for row in engine_rows(run)] == ["plan"]
    record = json.loads(run.record_file.read_text())
    record["stages"]["quantize"]["outputs"]["scales.json"] = "chosen again"
    run.record_file.write_text(json.dumps(record))
    (row,) = engine_rows(run)
    assert (row.evidence, row.promised_products, row.fp8_products, row.wide, row.bytes) == (
        "outdated",
        None,
        None,
        (),
        4224,
    )


def test_stages_come_in_the_order_of_work_with_their_notes_and_without_the_report(evaluated_run: Run) -> None:
    with RunWriter(evaluated_run).stage("report", {}, {}):
        pass
    rows = stage_rows(evaluated_run)
    assert [row.stage for row in rows] == ["measure", "quantize", "validate"]
    assert rows[0].notes == ("--samples lowered from 512 to 2: the text has no more",)
    assert all(row.peak_memory_bytes > 1 << 20 for row in rows)


def test_facts_name_model_data_choices_and_versions(calibrated_run: Run) -> None:
    facts = {row.what: row.value for row in fact_rows(calibrated_run)}
    assert facts["model"] == "<tiny> & small (LlamaForCausalLM)"
    assert facts["its tokens"] == "128 in windows of 64, batches of 1"
    assert facts["weights"] == "E4M3, a scale per output channel, by amax"
    assert facts["KV cache"] == "E4M3, K and V a scale each per layer"
    assert facts["libraries"].startswith("fp8q 0.2.0, torch 2.")


def test_rows_are_read_without_torch_and_without_matplotlib(evaluated_run: Run) -> None:
    code = f"""
import sys
from pathlib import Path
from fp8q.core.run import Run
from fp8q.validate.report import accuracy_rows, rows, tables
run = Run(Path({str(evaluated_run.root)!r}))
made = (rows.module_rows, accuracy_rows.accuracy_rows, rows.size_rows, rows.stage_rows, rows.engine_rows)
print(*(len(rows(run)) for rows in made))
print(sorted({{"torch", "matplotlib", "transformers", "jinja2", "papermill"}} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "11 2 2 3 0\n[]\n"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (columns.share(0), "0"),
        (columns.share(1), "100 %"),
        (columns.share(0.97123), "97.12 %"),
        (columns.share(0.00416), "0.42 %"),
        (columns.share(3e-5), "0.003 %"),
        (columns.share(1e-9), "<0.0001 %"),
        (columns.increase(0.0031), "+0.31 %"),
        (columns.increase(-0.0002), "−0.02 %"),
        (interval_text((-0.001, 0.0031)), "−0.10 to +0.31 %"),
        (columns.decibels(31.54), "31.5"),
        (columns.decibels(float("inf")), "exact"),
        (columns.decibels(-2.04), "−2.0"),
        (columns.magnitude(0.0123456), "0.01235"),
        (columns.nats(0.000213334), "0.000213"),
        (columns.size(0), "0 B"),
        (columns.size(999), "999 B"),
        (columns.size(8_130_000), "8.13 MB"),
        (columns.size(999_700), "1 MB"),
        (columns.size(2.4e12), "2.4 TB"),
        (columns.duration(0.44), "0.4 s"),
        (columns.duration(59.96), "1 min 0 s"),
        (columns.duration(125), "2 min 5 s"),
        (columns.duration(3780), "1 h 3 min"),
    ],
)
def test_quantities_read_as_people_write_them(written: str, text: str) -> None:
    assert written == text


def test_a_table_leaves_out_columns_that_apply_to_no_row() -> None:
    rows = [("a", 1.0, None), ("b", None, None)]
    table: Table[tuple[str, float | None, float | None]] = Table(
        "t",
        rows,
        (
            Column("name", lambda row: row[0], numeric=False),
            Column("known", lambda row: row[1], columns.decibels),
            Column("never", lambda row: row[2], columns.decibels),
        ),
        "nothing",
    )
    assert [column.title for column in table.columns] == ["name", "known"]
    assert table.cells() == [
        [Cell("a", "a", False), Cell("1.0", 1.0, True)],
        [Cell("b", "b", False), Cell("", None, True)],
    ]


def test_a_notebook_shows_a_table_as_html_with_its_text_escaped() -> None:
    table = Table("<t>", ["a & b"], (Column[str]("x", str, numeric=False),), "run `x`")
    assert table._repr_html_() == (
        '<table><caption>&lt;t&gt;</caption>\n<thead><tr><th style="text-align:left">x</th></tr></thead>\n'
        '<tbody>\n<tr><td style="text-align:left">a &amp; b</td></tr>\n</tbody></table>'
    )


def test_a_table_without_rows_says_what_to_run() -> None:
    assert tables.engine_table([])._repr_html_() == "<p><b>Engines.</b> No engine yet: run `fp8q build-engine RUN`.</p>"
    assert tables.engine_table([], "its inputs have scales of tokens")._repr_html_() == (
        "<p><b>Engines.</b> None: the run has no ONNX graph, since its inputs have scales of tokens.</p>"
    )


def test_modules_in_fp8_and_in_bf16_make_two_tables(calibrated_run: Run) -> None:
    rows = module_rows(calibrated_run)
    fp8, kept = tables.module_table(rows), tables.bf16_module_table(rows)
    titles = (
        "module", "amax", "clip", "scale", "saturation", "underflow", "terms", "input dB", "best dB", "weight dB",
    )  # fmt: skip
    assert tuple(column.title for column in fp8.columns)[: len(titles)] == titles
    assert [cell.text for cell in fp8.cells()[0]][:6] == ["model.layers.0.q", "448", "448", "1", "0", "50.00 %"]
    assert [[cell.text for cell in row] for row in kept.cells()] == [
        ["lm_head", "output head: its error would go straight into the logits", "", ""],
        ["model.layers.1.down", "NaN in 1 of 2 input values", "nan", "2"],
    ]
