"""`fp8q generate` on the counting model; on the demo, where it needs torch, in test_local.py."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from fp8q.cli.answers import draw_side_by_side, terminal_text
from fp8q.cli.console import Terminal
from fp8q.options import GenerateOptions
from fp8q.serve.local import generation
from fp8q.serve.loop.request import GeneratedAnswer
from fp8q.stages.generate import Comparison, parting

if TYPE_CHECKING:
    from pathlib import Path

    from fp8q.core.run import Run

Fp8q = Callable[..., Any]
#: Says each role as a token and each content as it is.
TEMPLATE = (
    "{% for message in messages %}{{ {'user': 't1', 'assistant': 't2'}[message.role] }} {{ message.content }} "
    "{% endfor %}{% if add_generation_prompt %}t2{% endif %}"
)


def say(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Let standard input hold this."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))


def test_an_answer_streams_and_ends_with_its_line(fp8q: Fp8q, counting_run: Run) -> None:
    found = fp8q("generate", counting_run.root, "--prompt", "t3 t1 t4", "--max-tokens", 3)
    assert (found.code, found.out, found.err) == (0, " t1 t2 t6\n", "")


def test_json_is_one_object_and_the_prompt_may_come_from_standard_input(
    fp8q: Fp8q, counting_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, b"t3 t1 t4\n")
    found = fp8q("generate", counting_run.root, "--max-tokens", 9, "--stop", "t6", "--stop", "", "--json")
    assert found.out == '{"text": " t1 t2 ", "tokens": [1, 2, 6], "finish_reason": "stop"}\n'


def test_a_seed_draws_the_same_text_again(fp8q: Fp8q, counting_run: Run) -> None:
    words = ("generate", counting_run.root, "--prompt", "t3", "--max-tokens", 20, "--temperature", 30)
    first, again, other = (fp8q(*words, "--seed", seed, "--top-p", 0.99).out for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--prompt", " "], 2, "the prompt has no tokens; write something to continue"),
        (["--prompt", "t1", "--max-tokens", "0"], 2, "--max-tokens 0: must be at least 1"),
        (["--prompt", "t1", "--temperature", "-1"], 2, "--temperature -1.0: must be 0 or more, and finite"),
        (["--prompt", "t1", "--temperature", "nan"], 2, "--temperature nan: must be 0 or more, and finite"),
        (["--prompt", "t1", "--top-p", "1.5"], 2, "--top-p 1.5: must lie in [0, 1]"),
        (["--prompt", "t1", "--seed", "-1"], 2, "--seed -1: must be at least 0"),
        (
            ["--prompt", "t1", "--stop", "a" * 257],
            2,
            "stop_words are 1, the longest of 257 characters; there may be at most 16, of at most 256 characters",
        ),
        (
            ["--prompt", "t1", "--chat", "--compare"],
            2,
            "--compare: holds one answer against another, and --chat has many; leave one of them out",
        ),
        (
            ["--prompt", "t1", "--compare", "--runtime", "bf16"],
            2,
            "--runtime bf16: is what --compare holds FP8 against; name an FP8 runtime, or leave it out",
        ),
    ],
)
def test_what_cannot_be_is_one_line(fp8q: Fp8q, counting_run: Run, words: list[str], code: int, message: str) -> None:
    found = fp8q("generate", counting_run.root, *words)
    assert (found.code, found.out, found.err) == (code, "", f"fp8q: {message}\n")


def test_standard_input_that_is_no_text_is_refused(
    fp8q: Fp8q, counting_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, b"\xff")
    assert fp8q("generate", counting_run.root).complaint() == (
        "standard input: is no text in UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); "
        "write it so"
    )


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A chat template in a file of its own."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    return tmp_path / "chat.jinja"


def test_a_chat_goes_on_by_the_template_that_is_given(
    fp8q: Fp8q, counting_run: Run, monkeypatch: pytest.MonkeyPatch, template: Path
) -> None:
    say(monkeypatch, b"t4\n\nt7\n")
    found = fp8q("generate", counting_run.root, "--chat", "--template", template, "--max-tokens", 2)
    # t1 t4 t2: 1 + 8 + 6 = 15, which ends the text at once. t1 t4 t2 (nothing) t1 t7 t2: 15 + 1 + 14 + 6 = 36 -> 4,
    # and + 4·1 = 40 -> 8
    assert (found.code, found.out) == (0, "\n t4 t8\n")
    say(monkeypatch, b"")
    found = json.loads(
        fp8q("generate", counting_run.root, "--chat", "--template", template, "--prompt", "t4", "--json").out
    )
    assert found == {
        "messages": [{"role": "user", "content": "t4"}, {"role": "assistant", "content": ""}],
        "text": "", "tokens": [15], "finish_reason": "stop",
    }  # fmt: skip
    say(monkeypatch, b"\n")
    assert fp8q("generate", counting_run.root, "--chat", "--template", template).complaint() == (
        "nothing was said; give --prompt, or lines on standard input"
    )


def test_a_template_that_no_stage_wrote_is_not_obeyed(fp8q: Fp8q, counting_run: Run, template: Path) -> None:
    planted = counting_run.model / "chat_template.jinja"
    planted.write_text(TEMPLATE)
    for words in (("--chat", "--prompt", "t4"), ("--chat", "--prompt", "t4", "--template", template)):
        assert fp8q("generate", counting_run.root, *words).complaint() == (
            f"{planted}: no stage of this run wrote it, and loaders read such a file; delete it (generate and serve "
            "take a chat template with --template)"
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "{file}: there is no such file"),
        (b"\xff", "--template {file}: is no text in UTF-8 ('utf-8' codec can't decode byte 0xff in position 0: "),
    ],
)
def test_a_template_that_does_not_read_is_refused(
    fp8q: Fp8q, counting_run: Run, template: Path, content: bytes | None, message: str
) -> None:
    template.unlink() if content is None else template.write_bytes(content)
    found = fp8q("generate", counting_run.root, "--chat", "--prompt", "t4", "--template", template).complaint()
    assert found.startswith(message.format(file=template))


def test_a_model_without_a_template_holds_no_chat(fp8q: Fp8q, counting_run: Run) -> None:
    assert fp8q("generate", counting_run.root, "--chat", "--prompt", "t1").complaint() == (
        f"{counting_run.model}: its tokenizer has no chat template; give the one that the model was trained with as "
        "--template FILE, or generate without a chat"
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00001-of-00001.safetensors", "model.fp32.onnx"])
def test_files_that_are_not_what_their_stage_wrote_are_refused(fp8q: Fp8q, counting_run: Run, name: str) -> None:
    path = counting_run.model / name
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    line = fp8q("generate", counting_run.root, "--prompt", "t1").complaint()
    assert line.startswith(f"{path}: is not the file that `")
    assert "(its SHA-256 differs from run.json)" in line


def test_a_terminal_is_sent_nothing_that_moves_its_cursor() -> None:
    assert terminal_text("a\n\tb\x1b[2J\u202e é") == "a\n\tb\\x1b[2J\\u202e é"


@pytest.mark.parametrize(
    ("one", "other", "index"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 3), 1), ((), (), None)]
)
def test_two_answers_part_at_the_first_token_that_differs(
    one: tuple[int, ...], other: tuple[int, ...], index: int | None
) -> None:
    assert parting(one, other) == index


def test_options_in_python_are_held_to_the_same_rules() -> None:
    assert GenerateOptions(stop=("a", "")).stop == ("a",)


def test_a_serving_host_generates_without_torch_and_is_told_what_a_chat_needs(
    base_install: Callable[..., Any], counting_run: Run, template: Path
) -> None:
    words = ("generate", counting_run.root, "--prompt", "t3 t1 t4", "--max-tokens", "3")
    found = base_install(*words)
    assert (found.returncode, found.stdout, found.stderr) == (0, " t1 t2 t6\n", "")
    found = base_install(*words, "--chat", "--template", template)
    assert (found.returncode, found.stdout, found.stderr) == (
        4,
        "",
        "fp8q: jinja2 is not installed and a chat template needs it; install it with `pip install 'fp8q[serve]'`\n",
    )


def test_a_comparison_shows_what_is_common_and_then_the_two_side_by_side(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fp8, bf16 = (GeneratedAnswer(text, (1, token, 3), "length", 2) for text, token in (("a b\nc", 7), ("a b d", 8)))
    draw_side_by_side(Terminal(), Comparison(fp8, bf16, 1, "a b", "\n", " d"))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "a b", 'They differ from token 2: FP8 "\\n", BF16 " d"', "Then", "FP8  BF16", "      d", "c", "",
    ]  # fmt: skip
    draw_side_by_side(Terminal(), Comparison(fp8, fp8, None, fp8.text, "", ""))
    shown_again = capsys.readouterr()
    assert (shown_again.out, shown_again.err) == ("a b\nc\n", "FP8 and BF16 give the same 3 tokens\n")


@pytest.mark.parametrize(
    ("gpu", "code", "message"),
    [
        (None, 4, "tensorrt: runs engines on an NVIDIA GPU, and there is none here; use onnxruntime"),
        ("sm90", 2, "{run}/engines: holds no engine; run `fp8q build-engine {run}` first"),
    ],
)
def test_an_engine_needs_a_gpu_and_to_be_built(
    fp8q: Fp8q, counting_run: Run, monkeypatch: pytest.MonkeyPatch, gpu: str | None, code: int, message: str
) -> None:
    monkeypatch.setattr(generation, "gpu_target", lambda: gpu)
    line = fp8q("generate", counting_run.root, "--prompt", "t1", "--runtime", "tensorrt").complaint(code)
    assert line == message.format(run=counting_run.root)
