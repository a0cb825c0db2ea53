"""Options from a TOML file, and the file that repeats a command."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from inspect import BoundArguments
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8q.cli import config, launch
from fp8q.cli.arguments import RunTexts
from fp8q.options import (
    METHODS,
    PRESETS,
    RUNTIMES,
    CalibrateOptions,
    Clipping,
    EngineOptions,
    ExportOptions,
    KvCache,
    PlanOptions,
    RunOptions,
    ValidateOptions,
)

Fp8q = Callable[..., Any]
MINIMAL = ["m", "--data", "t.txt", "--out", "r"]


def understood(*words: object) -> dict[str, Any]:
    """What a command is called with; the options of --config and --print-config themselves left out."""
    _, given, _ = launch.understand([str(word) for word in words])
    return in_the_command(given)


def in_the_command(given: BoundArguments) -> dict[str, Any]:
    """The arguments of a command by their names; texts, and the options of a whole run, are several in one."""
    found = {name: value for name, value in given.arguments.items() if name != "common"}
    for name, value in tuple(found.items()):
        if isinstance(value, (RunTexts, RunOptions)):
            found |= {field.name: getattr(value, field.name) for field in fields(value)}
            del found[name]
    found.pop("triton", None)  # no argument of the command line
    return found


def file_of(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "options.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_file_gives_arguments_and_options_with_paths_relative_to_itself(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "odd=1.txt").touch()
    file = file_of(
        tmp_path,
        """
        model = "model"
        data = ["a.txt=2", "../b.jsonl", "odd=1.txt", "wikitext:wikitext-2-raw-v1=0.5", "/c.txt"]
        out = "runs/one"
        kv-cache = "fp8"
        skip = "*.down_proj"
        samples = 24
        stream = false
        target = ["sm89", "sm120"]
        min-fp8-share = "96%"
        runtimes = ["bf16", "reference"]
        max-ppl-increase = 0.01
        """,
    )
    assert understood("run", "--config", file) == {
        "model": f"{tmp_path}/model",
        "data": [
            f"{tmp_path}/a.txt=2",
            f"{tmp_path}/../b.jsonl",
            f"{tmp_path}/odd=1.txt",
            "wikitext:wikitext-2-raw-v1=0.5",
            "/c.txt",
        ],
        "out": tmp_path / "runs" / "one",
        "eval_data": None,
        "preset": None,
        "calibrate": CalibrateOptions(kv_cache="fp8", skip=("*.down_proj",), samples=24, stream=False),
        "export": ExportOptions(),
        "engine": EngineOptions(targets=("sm89", "sm120"), min_fp8_share=0.96),
        "validate": ValidateOptions(("bf16", "reference"), max_ppl_increase=0.01),
        "planning": PlanOptions(),
        "form_named": False,
    }


def test_what_the_command_line_gives_goes_before_the_file(tmp_path: Path) -> None:
    file = file_of(tmp_path, 'model = "/m"\ndata = ["a.txt", "b.txt"]\nout = "r"\nskip = ["a"]\nstream = true\n')
    given = understood("calibrate", "--data", "c.txt", "--skip", "b", "--no-stream", "--config", file)
    assert (given["model"], given["data"], given["out"]) == ("/m", ["c.txt"], tmp_path / "r")
    assert given["options"] == CalibrateOptions(skip=("b",), stream=False)


def test_a_name_that_lies_in_the_working_directory_alone_is_not_taken_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    file = file_of(tmp_path, 'model = "model"\ndata = "text"\nout = "r"\n')
    assert understood("calibrate", "--config", file)["model"] == f"{tmp_path}/model"
    assert understood("calibrate", "--config", file)["data"] == ["text"]


def test_the_home_directory_is_known_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    file = file_of(tmp_path, 'model = "~/m"\ndata = ["~/t.txt=2", "~nobody-at-all/t.txt"]\nout = "~nobody-at-all/r"\n')
    given = understood("calibrate", "--config", file)
    assert given["model"] == f"{tmp_path}/home/m"
    assert given["data"] == [f"{tmp_path}/home/t.txt=2", f"{tmp_path}/~nobody-at-all/t.txt"]
    assert given["out"] == tmp_path / "~nobody-at-all" / "r"


def test_an_empty_array_takes_back_what_the_run_skips(tmp_path: Path) -> None:
    given = understood("scales", "run", "--config", file_of(tmp_path, "skip = []\n"))
    assert given["options"].explicit == {"skip": (), "clip": Clipping()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampels = 3", "sampels: is no option of `fp8q calibrate`; did you mean samples?"),
        ("seq_len = 3", "seq_len: is no option of `fp8q calibrate`; did you mean seq-len?"),
        (
            "zzz = 1",
            "zzz: is no option of `fp8q calibrate`; it takes model, data, out, eval-data, preset, for, method, ",
        ),
        ("json = true", "json: is no option of `fp8q calibrate`; did you mean vision?"),
        ("[calibrate]\nsamples = 3", "calibrate: is no option of `fp8q calibrate`; "),
        ('samples = "3"', 'samples: must be a whole number, and is "3"'),
        ("samples = 3.0", "samples: must be a whole number, and is 3.0"),
        ("samples = true", "samples: must be a whole number, and is true"),
        ('stream = "no"', 'stream: must be true or false, and is "no"'),
        ('percentile = "99"', 'percentile: must be a number, and is "99"'),
        ("kv-cache = 8", "kv-cache: must be a text in quotes, and is 8"),
        ('model = ["m"]', 'model: must be a text in quotes, and is ["m"]'),
        ("out = 1979-05-27", 'out: must be a path in quotes, and is "1979-05-27"'),
        ("skip = [1]", "skip: must be a text in quotes, or an array of such, and is [1]"),
        (f"skip = [1, '{'x' * 99}']", f'skip: must be a text in quotes, or an array of such, and is [1, "{"x" * 55}…'),
        ("batches = [0.5, 8]", "batches: must be a whole number, or an array of such, or as on the command line, and "),
        ('out = "a\\u0000b"', "--out: holds a NUL, which no name or path has; take it out"),
        ("samples =", "is no TOML (Invalid value (at end of document)); mend it there"),
        (f"samples = {'[' * 5000}", "is no TOML (maximum recursion depth exceeded); mend it there"),
    ],
)
def test_a_file_that_does_not_fit_is_one_line_that_names_key_and_file(
    fp8q: Fp8q, tmp_path: Path, text: str, message: str
) -> None:
    file = file_of(tmp_path, text)
    assert fp8q("calibrate", *MINIMAL, "--config", file).complaint().startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("samples = 0", "--samples 0: must be at least 1"),
        (
            "batches = [8, 8]",
            "--batches 8:8: holds no batch; the first is 0, and the end is not one of them, as in 0:8",
        ),
        ('batches = "all"', "--batches all: is no interval; give the first batch and the one after the last, as in "),
        ("interval = 2", "--interval 2: is for --method delayed, and the method is amax; choose that one, or leave "),
        (f"percentile = {'9' * 400}", "--percentile inf: must lie in (0, 100]"),
        ('kv-cache = "fp4"', 'Invalid value "fp4" for --kv-cache from '),
    ],
)
def test_values_are_held_to_the_same_rules_as_on_the_command_line(
    fp8q: Fp8q, tmp_path: Path, text: str, message: str
) -> None:
    file = file_of(tmp_path, text)
    assert fp8q("calibrate", *MINIMAL, "--config", file).complaint().startswith(message)


def test_a_file_that_is_none_is_not_waited_for(fp8q: Fp8q, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "pipe"):
        assert fp8q("validate", "run", "--config", path).complaint() == (
            f"--config {path}: there is no such file; give a TOML file, such as --print-config writes"
        )
    (tmp_path / "bytes").write_bytes(b"\xff")
    assert fp8q("validate", "run", "--config", tmp_path / "bytes").complaint() == (
        f"{tmp_path}/bytes: is no TOML ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte); "
        "mend it there"
    )
    long = "x" * 300
    assert fp8q("validate", "run", "--config", long).complaint() == (
        f"--config {long}: cannot be read (File name too long); give a file that can"
    )


def test_the_file_that_repeats_a_command_says_what_was_left_to_a_default(fp8q: Fp8q, tmp_path: Path) -> None:
    result = fp8q("export", tmp_path / "run", "--dtype", "fp16", "--print-config")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].startswith("# What `fp8q export --config FILE` repeats, as fp8q ")
    stated = ['dtype = "fp16"', 'precision = "fp8"', 'attention = "wide"', 'apply-scales = "dq"', 'logits = "asked"']
    assert lines[1:] == [f'run = "{tmp_path}/run"', *stated]
    lines = fp8q("scales", tmp_path / "run", "--skip", "", "--kv-cache", "v", "--print-config").out.splitlines()
    assert lines[2:4] == ['method = "amax"', "# percentile: for --method percentile"]
    assert lines[lines.index("# weight-method: as the run has it") :] == [  # behind the options of clips
        "# weight-method: as the run has it",
        "# weight-scale: as the run has it",
        "# layout: as the run has it",
        'kv-cache = "v"',
        "# kv-scale: as the run has it",
        "# kv-skip: as the run has it",
        "skip = []",
        "# only: as the run has it",
        "# vision: as the run has it",
        "# bf16-weights: as the run has it",
        "# q-scale: as the run has it",
        "# weight-rounding: as the run has it",
        "# weigh-first-token: as the run has it",
        "# weigh-outputs: as the run has it",
        "# form: as the run has it",
        "# block-scale-grid: as the run has it",
        "# activation-terms: as the run has it",
        "# exact-tail: as the run has it",
        "# two-terms: as the run has it",
        "# tail: as the run has it",
        "# bf16-input: as the run has it",
        "# inherit: as the run has it",
        "# min-expert-tokens: as the run has it",
    ]
    assert not (tmp_path / "run").exists()


def test_a_place_that_is_no_unicode_is_not_written(fp8q: Fp8q, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "\udcff").mkdir()
    monkeypatch.chdir(tmp_path / "\udcff")
    line = fp8q("export", "run", "--print-config").complaint()
    assert line == f"RUN '{tmp_path}/\\udcff/run': is no Unicode, which TOML is written in; give another"


COUNTS = st.none() | st.integers(1, 2**31 - 1)
#: No command line has a NUL in it, and no file of options may.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)


@st.composite
def words(draw: st.DrawFn) -> list[str]:
    """A command line of `fp8q run`, its values drawn from all that each option takes."""
    found = ["run", draw(st.sampled_from(["m", "./m", "/m", "org/name"]))]
    one = {
        "out": draw(TEXTS),
        "data": draw(st.sampled_from(["t.txt", "/t.txt=0.5", "org/name:part:split=3"])),
        "method": draw(st.sampled_from([method for method in METHODS if method != "delayed"])),
        "margin": draw(st.integers(-16, 16)),
        "kv-cache": draw(st.sampled_from(get_args(KvCache))),
        "samples": draw(COUNTS),
        "seed": draw(st.none() | st.integers(0, 2**70)),
        "revision": draw(st.none() | TEXTS),
        "min-fp8-share": draw(st.none() | st.floats(0, 1) | st.integers(0, 100).map(lambda share: f"{share}%")),
        "max-ppl-increase": draw(st.none() | st.floats(0, 1e300).map(lambda share: f"{share}%")),
        "runtimes": draw(st.none() | st.lists(st.sampled_from([*RUNTIMES]), min_size=1).map(",".join)),
        "context": draw(COUNTS),
    }
    found += [f"--{name}={value}" for name, value in one.items() if value is not None]
    for name in ("skip", "only", "vision", "target"):
        found += [f"--{name}={value}" for value in draw(st.lists(TEXTS, max_size=3))]
    return found + draw(st.lists(st.sampled_from(["--stream", "--no-stream", "--chat-template"]), max_size=2))


@given(words())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_printed_file_repeats_the_command_exactly(tmp_path: Path, words: list[str]) -> None:
    _, given, arguments = launch.understand(words)
    file = file_of(tmp_path, config.written(arguments["run"], given, "run"))
    _, again, arguments = launch.understand(["run", "--config", str(file)])
    assert config.written(arguments["run"], again, "run") == file.read_text(encoding="utf-8")
    first, second = in_the_command(given), in_the_command(again)
    for options in ("calibrate", "export", "engine", "validate"):
        assert second[options] == first[options]
    assert second["out"] == Path.cwd() / first["out"]
    assert tomllib.loads(file.read_text(encoding="utf-8"))["data"] == second["data"]


def test_a_file_repeats_where_the_command_was_not_started(tmp_path: Path, demo_checkpoint: Path) -> None:
    """In two processes: `fp8q run … --print-config > FILE`, and the file read in another directory."""
    model, text = os.path.relpath(demo_checkpoint), os.path.relpath(demo_checkpoint.parent / "calibration.txt")
    program = [sys.executable, "-m", "fp8q"]
    asked = [*program, "run", model, "--data", f"{text}=2", "--out", "r", "--samples", "8", "--print-config"]
    printed = subprocess.run(asked, capture_output=True, text=True, check=True)
    file = file_of(tmp_path, printed.stdout)
    again = subprocess.run(
        [*program, "run", "--config", file.name, "--print-config"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (again.returncode, again.stderr, again.stdout) == (0, "", printed.stdout)
    assert tomllib.loads(again.stdout)["data"] == [f"{demo_checkpoint.parent}/calibration.txt=2"]


def test_the_example_of_the_documentation_is_the_file_of_the_demo() -> None:
    root = Path(__file__).resolve().parents[2]
    example = root / "examples" / "demo" / "run.toml"
    given = understood("run", "--config", example)
    assert given["calibrate"] == CalibrateOptions(kv_cache="fp8", skip=("*.down_proj",))
    assert given["engine"] == EngineOptions(targets=("sm89",), min_fp8_share=1.0)
    assert given["validate"] == ValidateOptions(max_ppl_increase=0.05)
    assert (given["model"], given["eval_data"]) == (f"{example.parent}/checkpoint", f"{example.parent}/evaluation.txt")
    shown = [line.strip() for line in (root / "docs" / "options.md").read_text(encoding="utf-8").splitlines()]
    assert {line for line in example.read_text().splitlines() if line and line[0] != "#"} <= set(shown)


def test_a_command_runs_from_a_file_alone(fp8q: Fp8q, tmp_path: Path) -> None:
    file = file_of(tmp_path, 'path = "graph.onnx"\n')
    assert str(tmp_path / "graph.onnx") in fp8q("lint", "--config", file).complaint()


@pytest.mark.parametrize("command", ["run", "calibrate"])
def test_a_preset_fills_what_neither_the_command_line_nor_a_file_gives(tmp_path: Path, command: str) -> None:
    name = "calibrate" if command == "run" else "options"

    def chosen(*more: object) -> tuple[object, str]:
        options = understood(command, "m", "--data", "a.txt", "--out", "r", *more)[name]
        return options.activation_terms, options.weight_rounding

    assert chosen() == (1, "nearest")
    assert chosen("--preset", "exact") == ("tail", "gptq")
    assert chosen("--preset", "fast") == (1, "gptq")
    assert chosen("--preset", "exact", "--weight-rounding", "nearest") == ("tail", "nearest")
    assert chosen("--preset", "exact", "--for", "vllm") == ("bf16", "gptq")
    assert chosen("--preset", "exact", "--no-graph") == ("bf16", "gptq")
    assert chosen("--preset", "exact", "--no-graph", "--for", "vllm-plugin") == ("tail", "gptq")
    assert chosen("--preset", "exact", "--graph") == ("tail", "gptq")
    without = file_of(tmp_path, 'preset = "exact"\ngraph = false\n')
    assert chosen("--config", without) == ("bf16", "gptq")
    assert chosen("--config", file_of(tmp_path, 'preset = "exact"\nfor = "sglang"\n')) == ("bf16", "gptq")
    file = file_of(tmp_path, 'preset = "exact"\nweight-rounding = "nearest"\n')
    assert chosen("--config", file) == ("tail", "nearest")
    assert chosen("--config", file_of(tmp_path, 'activation-terms = "tail"\n')) == ("tail", "nearest")
    assert chosen("--config", file_of(tmp_path, "activation-terms = 2\n")) == (2, "nearest")


def test_presets_are_options_of_calibration() -> None:
    for name, chosen in PRESETS.items():
        assert CalibrateOptions(**chosen) != CalibrateOptions(), name
