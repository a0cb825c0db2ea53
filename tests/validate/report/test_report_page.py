"""The report in a browser: its colours and widths, what a click sorts, and that it asks nobody for anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fp8q.validate.accuracy.continuations import Continuation, Continuations
from fp8q.validate.report.report import render
from fp8q.validate.report.verdict import report_verdict
from tests.validate.report.test_run_comparison import other_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8q.core.run import Run


@pytest.fixture
def page(evaluated_run: Run, browser: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The page of the small run beside another, with two continuations."""
    said = [
        Continuation(prompt="if <b>", bf16=" x: y", fp8=" x: z", common=" x: ", parts_at=2),
        Continuation(prompt="for", bf16=" a", fp8=" a", common=" a"),
    ]
    found = Continuations(tokens=3, continuations=said)
    monkeypatch.setattr("fp8q.validate.report.report.report_continuations", lambda run: found)
    evaluated_run.report_html.write_text(render(evaluated_run, [other_of(evaluated_run, 0.01)]), encoding="utf-8")
    browser.get_log("browser")  # what other pages left there
    browser.get(evaluated_run.report_html.as_uri())
    yield browser
    browser.set_window_size(1200, 900)


def texts(page: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent.trim())"
    found: list[str] = page.execute_script(script, selector)
    return found


def test_the_decision_comes_first_in_its_colour_then_what_it_gains_and_what_to_do(
    page: Any, evaluated_run: Run
) -> None:
    headings = texts(page, "h1, .verdict strong, h2, .part")
    assert headings[1:7] == [
        "Acceptable" if report_verdict(evaluated_run).kind == "acceptable" else "Worse",
        "What is gained",
        "What it was measured on",
        "What to do next",
        "For the engineer",
        "Is it still the same model?",
    ]
    assert headings.index("Appendix") < headings.index("What was measured")
    verdict = page.find_element("css selector", ".verdict")
    tones = {"worse": "rgb(201, 87, 0)", "acceptable": "rgb(0, 131, 95)"}
    (kind,) = set(verdict.get_attribute("class").split()) - {"verdict"}
    assert page.execute_script("return getComputedStyle(arguments[0]).borderLeftColor", verdict) == tones[kind]
    assert texts(page, ".steps code")[-1] == f"fp8q triton {evaluated_run.root}"
    assert "fp8q bench" in texts(page, "section .aside")[0]


def test_a_table_wider_than_a_phone_shows_that_it_goes_on(page: Any) -> None:
    page.set_window_size(500, 900)
    script = """return [...document.querySelectorAll(".scroll")].filter(each => each.scrollWidth > each.clientWidth)
        .map(each => [each.tabIndex, getComputedStyle(each).backgroundImage.split("linear-gradient").length - 1])"""
    scrolling = page.execute_script(script)
    assert scrolling
    assert {tuple(each) for each in scrolling} == {(0, 4)}


def test_continuations_stand_side_by_side_and_what_parts_them_is_marked(page: Any) -> None:
    assert texts(page, ".said > .aside") == ["They differ from token 3 on.", "The same to the end."]
    assert texts(page, ".said mark") == ["y", "z", "", ""]
    assert texts(page, ".said pre")[0] == "if <b> x: y"
    colors = "return ['.said pre', '.said mark'].map(each => getComputedStyle(document.querySelector(each)).color)"
    assert len(set(page.execute_script(colors))) == 1  # a difference is no error
    first, second = page.find_elements("css selector", ".said pre")[:2]
    assert first.location["y"] == second.location["y"]
    page.set_window_size(420, 900)
    assert first.location["y"] < second.location["y"]


@pytest.mark.parametrize("width", [1200, 420])
def test_nothing_is_wider_than_the_window_but_what_scrolls(page: Any, width: int) -> None:
    page.set_window_size(width, 900)
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_a_click_sorts_and_nothing_is_asked_for(page: Any) -> None:
    names = "return [...document.querySelector('table.sortable').tBodies[0].rows].map(row => row.cells[0].textContent)"
    before = page.execute_script(names)
    page.execute_script("document.querySelector('table.sortable th').click()")
    assert page.execute_script(names) == sorted(before)
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert page.get_log("browser") == []
