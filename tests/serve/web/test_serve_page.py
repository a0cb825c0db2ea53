"""The page at `/`, in a browser: Debian's chromium without a window, where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from fp8q.api import GenerateOptions, compare_answers
from tests.serve.web.started_server import SECONDS, Thread, in_thread

if TYPE_CHECKING:
    from fp8q.core.run import Run

PROMPT = "def read_file(path):\n    "


@pytest.fixture(scope="module")
def server(demo_run: Run) -> Iterator[Thread]:
    with in_thread(demo_run.root, name="demo", bf16=True) as found:
        yield found


def wait(browser: Any, script: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, SECONDS, 0.05).until(lambda driver: driver.execute_script(f"return {script}"))


def open_page(browser: Any, server: Thread) -> None:
    browser.get(server.server.url)
    wait(browser, "models.length === 2")


def ask(browser: Any, prompt: str, tokens: int) -> None:
    for name, value in (("prompt", prompt), ("max_tokens", str(tokens))):
        field = browser.find_element("id", name)
        field.clear()
        field.send_keys(value)
    browser.find_element("id", "go").click()
    wait(browser, "!halting && document.querySelectorAll('pre').length > 0")


def test_fp8_and_bf16_stand_side_by_side_with_the_token_where_they_part(
    server: Thread, browser: Any, demo_run: Run
) -> None:
    open_page(browser, server)
    ask(browser, PROMPT, 48)
    expected = compare_answers(demo_run.root, PROMPT, GenerateOptions(max_tokens=48))
    shown = browser.execute_script("return [...document.querySelectorAll('pre')].map(each => each.textContent)")
    assert shown == [expected.fp8.text, expected.bf16.text]
    note = browser.execute_script("return document.querySelector('.note').textContent")
    marked = browser.execute_script("return [...document.querySelectorAll('mark')].map(each => each.textContent)")
    if expected.parts_at is None:
        assert (note, marked) == ("FP8 and BF16 give the same 48 tokens.", [])
    else:
        assert note.startswith(f"They differ from token {expected.parts_at + 1}: FP8 ")
        assert marked == [expected.fp8_token, expected.bf16_token]
    assert browser.get_log("browser") == []


def test_text_is_never_markup_and_a_refusal_is_shown(server: Thread, browser: Any) -> None:
    open_page(browser, server)
    browser.find_element("id", "chat").click()
    ask(browser, "<img src=x onerror=alert(1)>", 4)
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert (
        browser.execute_script("return document.querySelector('.said').textContent") == "<img src=x onerror=alert(1)>"
    )
    assert "its tokenizer has no chat template" in browser.execute_script(
        "return document.querySelector('.note.wrong').textContent"
    )
    assert browser.execute_script("return messages.length") == 0
