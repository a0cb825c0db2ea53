"""The README's ways, as `benchmarks/first_evening.py` reads and follows them."""

import shlex
from pathlib import Path

import pytest
from first_evening import MOST_COMMANDS, NAMES, PAGE, command, lines_of

from fp8q.cli import commands

from ..conftest import ROOT

TWO = """
<!-- way here -->

```sh
fp8q run MODEL --out RUN  # all of it
docker run -p 8000:8000 \\
  image
```
"""


def test_a_way_is_the_lines_of_its_block_without_comments() -> None:
    assert lines_of("here", TWO) == ["fp8q run MODEL --out RUN", "docker run -p 8000:8000    image"]
    with pytest.raises(ValueError, match=r"^README.md: has no block `<!-- way there -->`, only \['here'\]$"):
        lines_of("there", TWO)


def test_placeholders_are_filled_and_what_stands_in_has_its_reason() -> None:
    asked = command(".venv/bin/fp8q compare RUN --url http://localhost:8000", 8123)
    assert asked.run_as == ".venv/bin/fp8q compare runs/mine --url http://localhost:8123"
    assert asked.stand_ins == ()
    assert command("vllm serve RUN/model", 8123).run_as.startswith("vllm serve runs/mine/model --dtype bfloat16 ")
    assert command("vllm serve RUN/model", 8123).stand_ins == ("vLLM's CPU build serves",)
    alone = command(".venv/bin/fp8q run MODEL --data TEXT --out RUN --preset exact --for vllm", 8123)
    assert alone.run_as.endswith(" --out runs/mine --preset fast --for vllm")
    assert alone.stand_ins == ("one code: vLLM's CPU build refuses weights alone",)
    python, script, *words = shlex.split(command("docker run x", 8123).run_as)
    assert (Path(python).parent.name, Path(script).name) == ("bin", "tritonserver.py")
    assert words == ["runs/mine/triton", "--port", "8123"]


@pytest.mark.parametrize(("way", "server"), [("vllm", "vllm serve RUN/model"), ("triton", "docker run --rm ")])
def test_each_way_of_the_readme_has_few_commands_a_server_and_an_answer(way: str, server: str) -> None:
    lines = lines_of(way, (ROOT / PAGE).read_text(encoding="utf-8"))
    assert len(lines) <= MOST_COMMANDS
    assert [line for line in lines if command(line, 8000).health] == [line for line in lines if line.startswith(server)]
    assert lines[-1].startswith((".venv/bin/fp8q compare RUN ", "curl -f "))


def test_the_quicker_way_begins_with_the_installation_and_runs_on_the_model_that_is_named() -> None:
    lines = lines_of("quicker", (ROOT / PAGE).read_text(encoding="utf-8"))
    assert [line.split()[0] for line in lines] == ["python3", ".venv/bin/pip", ".venv/bin/fp8q", ".venv/bin/fp8q"]
    asked = command(lines[-1], 8000, NAMES | {"MODEL": "models/mine", "TEXT": "text.txt"})
    assert asked.run_as == (".venv/bin/fp8q compare models/mine --model runs/fp8 --data text.txt --out runs/compared")


def test_a_server_that_computes_something_else_is_no_answer() -> None:
    assert command(".venv/bin/fp8q compare RUN --url http://localhost:8000", 8000).statuses == (0,)
    assert command(".venv/bin/fp8q compare MODEL --model FP8 --data TEXT --out OUT", 8000).statuses == (0, 3)


@pytest.mark.parametrize("way", ["vllm", "triton"])
def test_commands_of_the_readme_are_read_by_the_command_line(way: str) -> None:
    for line in lines_of(way, (ROOT / PAGE).read_text(encoding="utf-8")):
        program, *words = shlex.split(command(line, 8000).run_as)
        if program.endswith("/fp8q"):
            _, bound, *_ = commands.app.parse_args(words, exit_on_error=False, print_error=False)
            assert "Path('runs/mine')" in str(bound.arguments)
