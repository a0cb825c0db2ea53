"""Read prompts for `fp8q generate` and show its text: prompts from an option or standard input, text as it comes.

A model may write anything, so on a terminal its text passes `terminal_text`, which leaves lines and tabs and removes
what moves the cursor. To a pipe it goes unchanged.
"""

import json
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import api
from ..core.errors import InputError, visible
from ..options import GenerateOptions

if TYPE_CHECKING:
    from ..serve.loop.request import GeneratedAnswer
    from ..stages.generate import Comparison
    from .console import Terminal


def show_answers(
    speak: "Terminal", run: Path, prompt: str | None, options: GenerateOptions, modes: tuple[bool, bool], as_json: bool
) -> None:
    """Do what `fp8q generate` is asked; `modes`: whether as a chat, whether FP8 and BF16 are compared."""
    chat, compare = modes
    if chat and compare:
        raise InputError("--compare", "holds one answer against another, and --chat has many", "leave one of them out")
    if chat:
        converse(run, prompt, options, as_json)
    elif compare:
        compared(speak, run, typed_prompt(prompt), options, as_json)
    else:
        answer = api.generate(run, typed_prompt(prompt), options, silent if as_json else stream)
        end_answer(answer_document(answer) if as_json else None)


def typed_prompt(prompt: str | None) -> str:
    """The prompt: the option's, or all of standard input less the end of its last line."""
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        sys.stderr.write("type the prompt; Ctrl-D on a line of its own ends it\n")
    return read_standard_input(sys.stdin.buffer.read()).removesuffix("\n")


def read_standard_input(content: bytes) -> str:
    """Standard input as text."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InputError("standard input", f"is no text in UTF-8 ({error})", "write it so") from None


def terminal_text(text: str) -> str:
    """Text of a model as a terminal may have it."""
    return "".join(part if part in "\n\t" else visible(part) for part in text)


def stream(text: str) -> None:
    """Write a piece of an answer at once."""
    if text:
        sys.stdout.write(terminal_text(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def silent(text: str) -> None:
    """Write nothing: the answer comes as JSON, in the end."""


def end_answer(document: dict[str, Any] | None) -> None:
    """End the answer: its line, or the JSON object."""
    sys.stdout.write("\n" if document is None else json.dumps(document) + "\n")
    sys.stdout.flush()


def answer_document(answer: "GeneratedAnswer") -> dict[str, Any]:
    """An answer for programs."""
    return {"text": answer.text, "tokens": list(answer.tokens), "finish_reason": answer.finish_reason}


def converse(run: Path, prompt: str | None, options: GenerateOptions, as_json: bool) -> None:
    """Hold a conversation: what is said comes from `prompt` first, then line by line from standard input."""
    chat = api.chat(run, options)
    write: Callable[[str], None] = silent if as_json else stream
    answer = None
    for text in lines(prompt):
        answer = chat.ask(text, write)
        if not as_json:
            end_answer(None)
    if answer is None:
        raise InputError("", "nothing was said", "give --prompt, or lines on standard input")
    if as_json:
        end_answer({"messages": chat.messages} | answer_document(answer))


def lines(prompt: str | None) -> Iterator[str]:
    """Yield the user's messages: the prompt, and each line of standard input that is not empty, up to its end."""
    if prompt is not None:
        yield prompt
        if not sys.stdin.isatty():
            return
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        if text := read_standard_input(line).strip():
            yield text


def compared(speak: "Terminal", run: Path, prompt: str, options: GenerateOptions, as_json: bool) -> None:
    """Let FP8 and BF16 answer, and show both."""
    comparison = api.compare_answers(run, prompt, options)
    if as_json:
        end_answer(
            answer_document(comparison.fp8)
            | {"bf16": answer_document(comparison.bf16), "parts_at": comparison.parts_at}
        )
    else:
        draw_side_by_side(speak, comparison)


def draw_side_by_side(speak: "Terminal", comparison: "Comparison") -> None:
    """Show what two answers have in common, and from there on both, side by side."""
    stream(comparison.common)
    end_answer(None)
    if comparison.parts_at is None:
        speak.note(f"FP8 and BF16 give the same {len(comparison.fp8.tokens)} tokens")
        return
    rest = [
        answer.text[len(comparison.common) :].expandtabs(4).split("\n") for answer in (comparison.fp8, comparison.bf16)
    ]
    ours, theirs = (json.dumps(token, ensure_ascii=False) for token in (comparison.fp8_token, comparison.bf16_token))
    speak.say(f"They differ from token {comparison.parts_at + 1}: FP8 {ours}, BF16 {theirs}")
    speak.table("Then", ("FP8", "BF16"), list(zip_longest(*rest, fillvalue="")))
