"""An option is written once: what its field declares is what every command shows, reads and holds to."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from inspect import BoundArguments
from typing import Annotated, Any

import cyclopts
import pytest
from cyclopts.argument import Argument
from rich.console import Console

from fp8q import api
from fp8q.cli import commands, config, launch
from fp8q.cli.arguments import Common
from fp8q.core.errors import InputError
from fp8q.options import (
    BenchOptions,
    CalibrateOptions,
    Clipping,
    ConvertOptions,
    EngineOptions,
    ExportOptions,
    GenerateOptions,
    History,
    RescaleOptions,
    RunOptions,
    ScaleOptions,
    ServeOptions,
    TritonOptions,
    ValidateOptions,
)
from fp8q.options.declare import SCALES, Options, between, option

Fp8q = Callable[..., Any]
CLASSES = (
    Clipping,
    ScaleOptions,
    CalibrateOptions,
    ExportOptions,
    ValidateOptions,
    GenerateOptions,
    ServeOptions,
    BenchOptions,
    EngineOptions,
    TritonOptions,
    ConvertOptions,
    Common,
)
#: What a command must be given.
WORDS = {
    "run": ["m", "--data", "t", "--out", "r"],
    "calibrate": ["m", "--data", "t", "--out", "r"],
    "convert": ["m", "--out", "d"],
    "merge": ["a", "b", "--out", "r"],
    "lint": ["graph.onnx"],
    "doctor": [],
}
COMMANDS = [name for name in commands.app if not name.startswith("-")]


def arguments_of(command: str) -> Iterator[Argument]:
    for argument in commands.app[command].assemble_argument_collection():
        if argument.parse and argument.name != "*":
            yield argument


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_shows_every_option_with_words_in_its_panel(
    fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(commands.app, "_console", Console(width=1000))  # cyclopts keeps the first one it makes
    panels: dict[str, str] = {}
    for line in fp8q(command, "--help-all").out.splitlines():
        if line.startswith("╭─ "):
            panel = line.removeprefix("╭─ ").split(" ─")[0]
        elif line.startswith("│"):
            panels[panel] = panels.get(panel, "") + line
    for argument in arguments_of(command):
        if not argument.show:
            continue  # an older spelling
        group: cyclopts.Group = argument.parameter.group[0]  # type: ignore[index]
        assert argument.parameter.help
        shown = next(line for line in panels[group.name].split("│") if f" {argument.name} " in line)
        assert argument.parameter.help in shown
        if argument.index is None and argument.field_info.default not in (None, (), False, argument.field_info.empty):
            assert "[default: " in shown


def test_every_field_of_every_option_class_is_an_option_of_a_command() -> None:
    offered = {argument.name for name in COMMANDS for argument in arguments_of(name)}
    for kind in CLASSES:
        for field in fields(kind):
            if not isinstance(field.default, Options):
                assert kind.declared()[field.name].option in offered


def options_of(given: BoundArguments) -> list[Options]:
    """The options that a command is called with, those of a whole run one by one."""
    values = [
        each
        for value in given.arguments.values()
        for each in (vars(value).values() if isinstance(value, RunOptions) else [value])
    ]
    return [value for value in values if isinstance(value, Options)]


def test_whatever_chooses_scales_takes_the_terms_of_activations() -> None:
    offering = {name for name in COMMANDS for argument in arguments_of(name) if argument.name == "--two-terms"}
    assert offering == {"calibrate", "scales", "merge", "run"}
    for name in offering:
        _, given, _ = launch.understand([name, *WORDS.get(name, ["run"]), "--two-terms", "a", "--two-terms", "b*"])
        (made,) = (each for each in options_of(given) if isinstance(each, ScaleOptions))
        assert (made.activation_terms, made.two_terms) == (1, ("a", "b*"))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_defaults_of_the_command_line_are_those_of_the_option_classes(command: str) -> None:
    _, given, _ = launch.understand([command, *WORDS.get(command, ["run"])])
    made = options_of(given)
    assert made == [type(value)() for value in made]
    if command not in ("doctor", "lint"):
        assert made


@pytest.mark.parametrize(
    "function", [api.calibrate, api.merge, api.export, api.scales, api.build_engine, api.validate, api.bench]
)
def test_the_defaults_of_python_are_those_of_the_option_classes(function: Callable[..., Any]) -> None:
    defaults = [parameter.default for parameter in inspect.signature(function).parameters.values()]
    made = [default for default in defaults if isinstance(default, Options)]
    assert made
    assert made == [type(default)() for default in made]


def test_an_option_is_added_in_one_place(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class WithTerms(ScaleOptions):
        terms: Annotated[int, option(SCALES, "Codes for one activation.", "N"), between(1)] = 1

    made: list[WithTerms] = []
    app = cyclopts.App(name="fp8q", help_format="plaintext", result_action="return_value")

    @app.command
    def scales(*, options: WithTerms = WithTerms()) -> None:
        made.append(options)

    monkeypatch.setenv("COLUMNS", "100")
    app(["scales", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "│ --terms N Codes for one activation. [default: 1] │" in shown
    app(["scales", "--terms", "2", "--kv-cache", "v"])
    app(["scales"])
    assert made == [WithTerms(terms=2, kv_cache="v"), WithTerms()]
    with pytest.raises(InputError, match=r"^--terms 0: must be at least 1$"):
        app(["scales", "--terms", "0"], exit_on_error=False)
    assert "terms" in dict(config.entries(app["scales"].assemble_argument_collection()))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (EngineOptions, {"min_fp8_share": "most"}, "--min-fp8-share most: is no share of the GEMMs; give one from "),
        (
            EngineOptions,
            {"min_fp8_share": 1.5},
            "--min-fp8-share 1.5: is no share of the GEMMs; give one from 0 to ",
        ),
        (ValidateOptions, {"max_ppl_increase": "1"}, "--max-ppl-increase 1: is no share; give one such as 1% or 0.01"),
        (ValidateOptions, {"max_ppl_increase": -0.1}, "--max-ppl-increase -0.1: is no share; give one such as 1% or "),
        (
            CalibrateOptions,
            {"batches": "8:0"},
            "--batches 8:0: holds no batch; the first is 0, and the end is not one ",
        ),
        (
            CalibrateOptions,
            {"batches": "all"},
            "--batches all: is no interval; give the first batch and the one after ",
        ),
        (CalibrateOptions, {"samples": 0}, "--samples 0: must be at least 1"),
        (
            CalibrateOptions,
            {"samples": 2**31},
            "--samples 2,147,483,648: is more than 2,147,483,647, the most that a runtime takes",
        ),
        (
            CalibrateOptions,
            {"kv_skip": ("a", "b")},
            (
                "--kv-skip a: the cache of every layer stays in the compute type; give --kv-cache fp8 or v, or "
                "leave it out"
            ),
        ),
        (
            CalibrateOptions,
            {"kv_scale": "head"},
            (
                "--kv-scale head: the cache of every layer stays in the compute type; give --kv-cache fp8 or v, or "
                "leave it out"
            ),
        ),
        (RescaleOptions, {"kv_scale": "channel"}, "--kv-scale channel: is none of tensor, head"),
        (RescaleOptions, {"kv_cache": "fp4"}, "--kv-cache fp4: is none of off, v, fp8"),
        (History, {"interval": 0}, "--interval 0: must be at least 1"),
    ],
)
def test_python_is_told_what_the_command_line_is_told(
    kind: type[Options], given: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError) as raised:
        kind(**given)
    assert str(raised.value).startswith(message)


def test_python_takes_the_texts_that_the_command_line_takes() -> None:
    assert EngineOptions(min_fp8_share="96%").min_fp8_share == 0.96  # type: ignore[arg-type]
    assert ValidateOptions(max_ppl_increase="150%").max_ppl_increase == 1.5  # type: ignore[arg-type]
    assert ValidateOptions(max_ppl_increase=1.5).max_ppl_increase == 1.5
    assert ValidateOptions("bf16, reference").runtimes == ("bf16", "reference")  # type: ignore[arg-type]
    assert CalibrateOptions(batches="0:8").batches == (0, 8)  # type: ignore[arg-type]


def test_what_is_not_given_anew_stays_as_the_run_has_it() -> None:
    before = ScaleOptions(Clipping("mse"), kv_cache="fp8", skip=("a",), only=("b",), weight_rounding="gptq")
    assert RescaleOptions().over(before) == ScaleOptions(
        Clipping(), kv_cache="fp8", skip=("a",), only=("b",), weight_rounding="gptq"
    )
    chosen = RescaleOptions(clip=Clipping("entropy"), kv_cache="off", skip=("",)).over(before)
    assert chosen == ScaleOptions(Clipping("entropy"), only=("b",), weight_rounding="gptq")


def test_layers_left_out_of_the_cache_go_with_it() -> None:
    before = ScaleOptions(kv_cache="fp8", kv_skip=("a",))
    assert RescaleOptions(kv_cache="v").over(before) == ScaleOptions(kv_cache="v", kv_skip=("a",))
    assert RescaleOptions(kv_skip=("b", "c")).over(before) == ScaleOptions(kv_cache="fp8", kv_skip=("b", "c"))
    assert RescaleOptions(kv_skip=("",)).over(before) == ScaleOptions(kv_cache="fp8")
    assert RescaleOptions(kv_cache="off").over(before) == ScaleOptions()


def test_scales_of_heads_go_with_the_cache() -> None:
    before = ScaleOptions(kv_cache="fp8", kv_scale="head")
    assert RescaleOptions(kv_cache="v").over(before) == ScaleOptions(kv_cache="v", kv_scale="head")
    assert RescaleOptions(kv_scale="tensor").over(before) == ScaleOptions(kv_cache="fp8")
    assert RescaleOptions(kv_cache="off").over(before) == ScaleOptions()


def test_of_an_option_given_twice_the_last_counts() -> None:
    _, given, _ = launch.understand(["build-engine", "run", "--max-batch", "2", "--max-batch", "4"])
    assert given.arguments["options"] == EngineOptions(max_batch=4)
