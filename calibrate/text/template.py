"""Run a tokenizer's chat template in a process of its own that can be killed.

A template is an untrusted program. Jinja's sandbox restricts what it can reach, but not its time and memory: two nested
loops, or `9 ** (9 ** 9)`, which Jinja computes before the template runs, never end, and no signal interrupts a product
of large integers. So it runs in a child process with a limit of memory, which is killed after `START` seconds, plus
`PER_ROW` for every row that it has rendered.

The child runs this file. It is started once for each process that renders, and gets the template with every request.
"""

import atexit
import json
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import cache
from types import SimpleNamespace
from typing import IO, Any, TextIO
from unittest.mock import patch

#: Seconds that a template may take: at first, and more for every row; real ones take some 0.5 ms a row.
START = 20.0
PER_ROW = 0.02
#: Seconds that the child may take to import transformers on a busy machine.
WAKE = 300.0
#: Bytes that the child may allocate after its start, and characters of a rendered row.
MEMORY = 2 << 30
CHARACTERS = 64 << 20
#: The date that templates get: the default of Llama 3.1's template.
DATE = datetime(2024, 7, 26)  # noqa: DTZ001  # a date, in no place's time


class TemplateError(Exception):
    """The template refused a row, or was stopped."""


class Template:
    """One chat template with its special tokens; `render` renders lists of messages as text."""

    def __init__(self, source: str, tokens: dict[str, Any], answering: bool = False):
        """Store the template; nothing runs before the first `render`.

        `answering`: end the text where the model's answer begins, and give the template the true date.
        """
        self.request = {"template": source, "tokens": tokens, "answering": answering}
        self.allowed = START

    def render(self, messages: list[dict[str, Any]]) -> str:
        """Render `messages` as text; raises TemplateError, with the reason, when that fails."""
        child = _child(os.getpid())
        begun = time.monotonic()
        answer = child.asked({**self.request, "messages": messages}, self.allowed)
        self.allowed += PER_ROW - (time.monotonic() - begun)
        if answer is None:
            _child.cache_clear()
            raise TemplateError("it was stopped, since it takes longer than any template does, or crashes")
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])


class Child:
    """The process that renders."""

    def __init__(self) -> None:
        """Start the process, and wait until its imports are done."""
        command = [sys.executable, "-P", __file__]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        atexit.register(self.close)
        if self._line(WAKE) is None:
            raise TemplateError("the process that renders it does not start")

    def asked(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send a `question` and return the answer.

        None when there is no answer within `seconds`; the process is then killed.
        """
        try:
            line_of_json = json.dumps(question, default=str)
        except RecursionError:
            return {"error": "it is nested too deep"}
        try:
            _stream(self.process.stdin).write(line_of_json.encode() + b"\n")
            _stream(self.process.stdin).flush()
            line = self._line(max(seconds, 0.1))
        except OSError:  # it died
            line = None
        if line is None:
            self.close()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _line(self, seconds: float) -> bytes | None:
        end = time.monotonic() + seconds
        parts: list[bytes] = []
        stream = _stream(self.process.stdout)
        while not parts or not parts[-1].endswith(b"\n"):
            ready, _, _ = select.select([stream], [], [], max(end - time.monotonic(), 0))
            part = os.read(stream.fileno(), 1 << 20) if ready else b""
            if not part:
                return None
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Kill the process."""
        atexit.unregister(self.close)
        self.process.kill()
        self.process.communicate()


@cache
def _child(process: int) -> Child:
    """The child of the process with this id: after a fork, the new process starts its own."""
    return Child()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "both are pipes"
    return stream


def render_requests(questions: TextIO, answers: TextIO) -> None:
    """Answer each line of JSON with a line of JSON until the input ends; this runs in the child process."""
    render = _renderer()
    with open("/proc/self/statm") if os.path.exists("/proc/self/statm") else open(os.devnull) as sizes:
        pages = sizes.read().split()
    if pages:
        limit = int(pages[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print("{}", file=answers, flush=True)
    for line in questions:
        asked = json.loads(line)
        try:
            date = datetime.now() if asked["answering"] else DATE  # noqa: DTZ005  # the reader's own
            text = render(
                asked["template"], date, messages=asked["messages"], add_generation_prompt=asked["answering"],
                **asked["tokens"],
            )  # fmt: skip
            if len(text) > CHARACTERS:
                raise ValueError(f"it makes {len(text):,} characters of one row")
            answer = {"text": text}
        except Exception as error:  # noqa: BLE001  # a template is a program, and may raise anything
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


def _renderer() -> Callable[..., str]:
    """Return a function that renders a template: transformers' own, or Jinja alone where transformers is missing."""
    try:
        from transformers.utils import chat_template_utils as transformers_template
    except ImportError:
        return _plain

    def rendered(source: str, date: datetime, messages: list[dict[str, Any]], **variables: Any) -> str:
        # it reads the clock itself, and newer versions accept no function for it
        with patch.object(transformers_template, "datetime", SimpleNamespace(now=lambda: date)):
            return str(transformers_template.render_jinja_template([messages], chat_template=source, **variables)[0][0])

    return rendered


def _plain(source: str, date: datetime, **variables: Any) -> str:
    """Render `source` in Jinja's sandbox, with the extensions that templates expect of transformers.

    These are break and continue, a `tojson` that escapes nothing for HTML, `raise_exception`, and `generation` blocks.
    """
    from jinja2 import TemplateError as Refused
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A tag that renders the text between `generation` and `endgeneration` like any other."""

        tags = {"generation"}  # noqa: RUF012  # Jinja's own declaration

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise Refused(message)

    def as_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    machine = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    machine.filters["tojson"] = as_json
    machine.globals["raise_exception"] = refuse
    known = {"tools": None, "documents": None, "strftime_now": date.strftime}  # as transformers has them
    return str(machine.from_string(source).render(**known, **variables))


if __name__ == "__main__":
    render_requests(sys.stdin, sys.stdout)
