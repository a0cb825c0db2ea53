"""The report of the small run of conftest: what it says, and that it says it alone (no network, no other file)."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.core.errors import BackendError
from fp8q.core.files import write_document
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.quantize.scales.decisions import Scales, Skipped
from fp8q.validate.accuracy import bootstrap
from fp8q.validate.report import curves, plots, report, tables
from fp8q.validate.report.accuracy_rows import AccuracyRow
from fp8q.validate.report.drawings import drawings, no_outlier, report_plots
from fp8q.validate.report.rows import EngineRow, ModuleRow, module_rows

VOID = {"meta", "wbr", "path", "rect", "use", "br"}


class Page(HTMLParser):
    """Every tag and text of a page, and whether tags are closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.open: list[str] = []
        self.unclosed: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.unclosed.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in {"style", "script"}:
            self.text += data


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_page_refers_to_nothing_outside_itself(evaluated_run: Run) -> None:
    text = report.render(evaluated_run)
    page = Page(text)
    assert page.open == page.unclosed == []
    references = {
        value
        for _, name, value in page.attributes
        if name in {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}
    }
    assert all(value is not None and value.startswith("#") for value in references)
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    assert "@import" not in text
    outside = set(re.findall(r"[a-z]+://[^\"'\s<)]+", text))
    # names of namespaces, not addresses
    assert outside == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    policy = next(
        value
        for tag, name, value in page.attributes
        if (tag, name) == ("meta", "content") and value and value.startswith("default-src")
    )
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert not {tag for tag, _, _ in page.attributes} & {"iframe", "link", "object", "embed", "img", "base"}


def test_the_page_names_every_module_every_runtime_and_the_protocol(evaluated_run: Run) -> None:
    text = words(Page(report.render(evaluated_run)).text)
    for row in module_rows(evaluated_run):
        assert row.module in text
        assert row.reason is None or row.reason in text
    for shown in (
        "bf16",
        "reference",
        "630 tokens of held-out.txt",
        "windows of 64 tokens every 64",
        "--samples lowered from 512 to 2: the text has no more",
    ):
        assert shown in text


def test_each_module_is_drawn_with_the_histogram_of_the_tensor_it_reads(evaluated_run: Run) -> None:
    text, tensors = report.render(evaluated_run), load_statistics(evaluated_run).tensors
    found = re.findall(
        r'<tr><td data-value="[^"]*">(.*?)</td>\s*<td class="spark">.*?<path d="([^"]+)"',
        text[text.index('class="sortable"') :],
        re.DOTALL,
    )
    rows = {name.replace("<wbr>", ""): path for name, path in found}
    for row in module_rows(evaluated_run):
        if row.scale is not None:
            name = row.module + (" (cache)" if row.kind == "cache" else "")
            assert rows.pop(name) == curves.sparkline(tensors[str(row.tensor)].histogram, row.scale)
    assert rows == {}


def test_what_has_not_been_run_is_named_with_its_command(calibrated_run: Run) -> None:
    text = words(Page(report.render(calibrated_run)).text)
    assert (
        "5 of 7 GEMMs run in FP8, keys and values are cached in FP8. What that costs has not been evaluated yet."
    ) in text
    assert f"Not evaluated yet: run fp8q validate {calibrated_run.root}." in text
    assert f"No engine yet: run fp8q build-engine {calibrated_run.root}." in text
    assert f"fp8q sensitivity {calibrated_run.root} does." in text
    assert " RUN" not in text
    assert "positions" not in report_plots(calibrated_run)


def test_a_run_in_which_nothing_is_fp8_has_a_report_too(calibrated_run: Run) -> None:
    head = Skipped(reason="left out by --skip *")
    with RunWriter(calibrated_run).stage("quantize", {}, {}) as log:
        write_document(calibrated_run.scales, Scales(weights={}, activations={}, skipped={"lm_head": head}))
        log.outputs.append(calibrated_run.scales)
    text = words(Page(report.render(calibrated_run)).text)
    assert "0 of 1 GEMMs run in FP8. What that costs" in text
    assert "None: every module stays in BF16." in text
    assert report_plots(calibrated_run) == {}


def test_names_from_files_are_text_and_never_markup(calibrated_run: Run) -> None:
    text = report.render(calibrated_run)
    assert "<title>&lt;tiny&gt; &amp; small in FP8</title>" in text
    assert "<tiny>" not in text


def test_equal_runs_make_equal_pages(evaluated_run: Run) -> None:
    assert report.render(evaluated_run) == report.render(evaluated_run)


def test_plots_take_their_colours_from_the_page_and_the_page_has_them_all(evaluated_run: Run) -> None:
    text = report.render(evaluated_run)
    for plot in report_plots(evaluated_run).values():
        for narrow in (False, True):
            assert plot.themed(narrow) in text
            assert re.findall(r"#[0-9a-f]{6}\b", plot.themed(narrow)) == []
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    assert used <= set(re.findall(r"(--[\w-]+):", text))


def test_the_report_is_two_files_and_the_notebook_is_executed_and_knows_no_path(evaluated_run: Run) -> None:
    assert report.render_report(evaluated_run, SILENT) == [evaluated_run.report_html, evaluated_run.report_ipynb]
    text = evaluated_run.report_ipynb.read_text(encoding="utf-8")
    assert str(evaluated_run.root) not in text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [output["output_type"] for output in outputs if output["output_type"] == "error"] == []
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert {"text/html", "image/svg+xml"} <= kinds
    assert cells[1]["source"] == ["# Parameters\n", 'RUN = "."\n', "COMPARE = []\n"]
    assert list(evaluated_run.root.glob(".*.partial")) == []


def test_a_missing_extra_is_named_before_anything_is_written(
    calibrated_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "papermill" else object())
    with pytest.raises(BackendError) as refused:
        report.render_report(calibrated_run, SILENT)
    assert (
        str(refused.value)
        == "papermill is not installed and the report needs it; install it with `pip install 'fp8q[report]'`"
    )
    assert not calibrated_run.report_html.exists()


FP8 = [ModuleRow("q", "product", scale=1.0, sqnr_db=31.5)]
BASE = AccuracyRow("bf16", perplexity=8.0, nll_nats=np.log(8))


@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        ([], "What that costs has not been evaluated yet."),
        ([BASE], "What that costs has not been evaluated yet."),
        (
            [BASE, AccuracyRow("reference", 8.02, 2.08, 0.0025)],
            "Perplexity is 8.0000 in BF16 and 8.0200 in FP8.",
        ),
        (
            [
                BASE,
                AccuracyRow("original", 9.0, 2.2, 0.125),
                AccuracyRow("reference", 8.02, 2.08, 0.0025, 0.001, 0.004),
                AccuracyRow("onnxruntime", 8.01, 2.08, 0.00125),
            ],
            "Perplexity is 8.0000 in BF16 and 8.0200 in FP8.",
        ),
    ],
)
def test_the_summary_says_what_fp8_costs_by_the_worst_fp8_runtime(accuracy: list[AccuracyRow], said: str) -> None:
    assert report.summary_sentences(accuracy, FP8, []) == f"1 of 1 GEMMs run in FP8. {said}"


def test_the_summary_is_of_the_runtime_that_the_verdict_is_on() -> None:
    rows = [BASE, AccuracyRow("reference", 8.02, 2.08, 0.0025), AccuracyRow("onnxruntime", 8.01, 2.08, 0.00125)]
    said = report.summary_sentences(rows, FP8, [], "onnxruntime")
    assert said == "1 of 1 GEMMs run in FP8. Perplexity is 8.0000 in BF16 and 8.0100 in FP8."


def engine(target: str, fp8: int | None, wide: tuple[str, ...] = (), unknown: str = "unknown") -> EngineRow:
    return EngineRow("tensorrt-rtx", "1.7", target, 1, 2, fp8, wide, unknown if fp8 is None else "plan", 1.0)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], ""),
        (
            [engine("sm89", 2), engine("sm120", 2)],
            ("Every expected GEMM takes FP8 codes on both sides, on sm89 and sm120; read from the engines themselves."),
        ),
        (
            [engine("sm89", 2), engine("sm120", 1, ("q",))],
            "Some expected GEMMs are not FP8 on both sides on sm120; the table names them.",
        ),
        (
            [engine("sm89", 2), engine("sm120", 1)],
            "Of some expected GEMMs on sm120 TensorRT's inspector does not tell what they run in.",
        ),
        (
            [engine("sm89", None), engine("sm120", 2)],
            "What runs in FP8 cannot be told for sm89: the engine could not be read.",
        ),
        (
            [engine("sm89", None, unknown="outdated"), engine("sm120", None)],
            (
                "What runs in FP8 is not said of sm89: the engine was built from other files than the run has now; run "
                "`fp8q build-engine RUN` again."
            ),
        ),
    ],
)
def test_the_engines_are_praised_only_for_what_was_read_from_them(rows: list[EngineRow], said: str) -> None:
    assert report.engines_sentence(rows) == said


def test_every_kind_of_number_behind_the_plots_is_drawn_for_the_noisiest_tensor(evaluated_run: Run) -> None:
    rows, tensors = module_rows(evaluated_run), load_statistics(evaluated_run).tensors
    worst = plots.noisiest([row for row in rows if row.sqnr_db is not None])
    assert worst.sqnr_db == min(row.sqnr_db for row in rows if row.sqnr_db is not None)
    found = drawings(evaluated_run)
    assert list(found.plots) == ["positions"]
    assert found.remarks["histogram"] == (
        f"Of the noisiest tensor, {worst.tensor}, rounding makes 100 % of the error, and another scale would mend "
        "nothing."
    )
    assert found.remarks["layers"].startswith("No layer stands out: the signal to noise of every input and weight is ")
    caption = plots.histogram_plot(worst, tensors[str(worst.tensor)].histogram).caption
    assert caption.startswith(
        f"{worst.tensor}, {worst.sqnr_db:.1f} dB. Grey: the share of its "
        f"{tensors[str(worst.tensor)].histogram.samples:,} values"
    )
    assert caption.endswith("Nothing saturates; nothing rounds to zero; rounding makes 100 %.")


def test_a_layer_that_stands_out_is_drawn() -> None:
    like = [ModuleRow(f"layers.{i}.q", "product", scale=1.0, sqnr_db=31.5, weight_sqnr_db=31.0) for i in range(4)]
    assert no_outlier(like) == (
        "No layer stands out: the signal to noise of every input and weight is 31.0 to 31.5 dB, and rounding to three "
        "mantissa bits alone leaves 32.2 dB."
    )
    assert no_outlier([*like, ModuleRow("layers.4.q", "product", scale=1.0, sqnr_db=29.4)]) == ""
    assert no_outlier([ModuleRow("layers.0.q", "product", scale=1.0, sqnr_db=29.1)]) == ""
    assert no_outlier([]) == ""


def test_a_curve_along_the_window_averages_windows_and_leaves_out_what_was_not_scored() -> None:
    nan = float("nan")
    nll = np.array([[nan, 1, 2, 4], [nan, nan, 4, 8]], np.float32)
    curve = curves.along_window(nll, 2)
    assert curve.position.tolist() == [0.5, 2.5]
    assert curve.mean.tolist() == [1, 4.5]
    assert np.isnan(curve.low[0])  # one window is no spread
    # the windows' means are 3 and 6
    assert (curve.low[1], curve.high[1]) == pytest.approx((4.5 - 2 * 1.5, 4.5 + 2 * 1.5))


def test_the_interval_of_the_increase_is_that_of_drawing_windows_again() -> None:
    base = np.array([[np.nan, 2, 2], [np.nan, 1, 3]] * 5, np.float32)
    same = bootstrap.increase_interval(base, base + np.float32(0.25))
    assert same == pytest.approx((np.expm1(0.25), np.expm1(0.25)))
    assert bootstrap.increase_interval(base[:9], base[:9]) == (None, None)


def quantile_of_halves(draws: int, share: float) -> int:
    """The least k that so many fair coins of `draws` fall short of, or meet, with that share."""
    total = 0.0
    for k in range(draws + 1):
        total += math.comb(draws, k) / 2**draws
        if total >= share:
            return k
    raise AssertionError


def test_the_interval_holds_95_in_100_and_not_90() -> None:
    """Half of 400 windows lose 0.1 nats a token and half lose none: what is drawn again is a number of coins."""
    base = np.zeros((400, 3), np.float32)
    other = base + np.where(np.arange(400) % 2, np.float32(0.1), np.float32(0))[:, None]
    low, high = bootstrap.increase_interval(base, other)
    assert low is not None
    assert high is not None
    found = [400 * math.log1p(end) / 0.1 for end in (low, high)]
    for end, share in zip(found, (0.025, 0.975), strict=True):
        assert end == pytest.approx(quantile_of_halves(400, share), abs=1.2)  # of 2,000 draws: √(pq/n)/density = 0.6
    narrower = [quantile_of_halves(400, share) for share in (0.05, 0.95)]  # an interval of 90 % would end there
    assert found[0] < narrower[0] - 1.2
    assert found[1] > narrower[1] + 1.2


def test_what_is_too_short_for_an_interval_says_so() -> None:
    short = AccuracyRow("reference", 8.02, 2.08, 0.0025, windows=4)
    assert tables.without_interval(AccuracyRow("reference", 8.02, 2.08, 0.0025, windows=1)) == (
        "too short for an interval: 1 window; give 10"
    )
    table = tables.accuracy_table([BASE, short, AccuracyRow("onnxruntime", 8.02, 2.08, 0.0025, windows=4)])
    assert table.note == "reference, onnxruntime: too short for an interval: 4 windows; give 10"
    assert table.note in table._repr_html_()


def test_the_packaged_notebook_and_template_are_where_the_report_looks_for_them() -> None:
    assert report.NOTEBOOK.is_file()
    template = Path(str(report.page_template("report.html.j2").filename))
    assert template.parent == Path(report.__file__).parent
