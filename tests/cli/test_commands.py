"""The command line as its users meet it: one line for every wrong input, exit codes, JSON alone on standard output,
nothing left behind.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q import __version__

Fp8q = Callable[..., Any]
MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.fixture
def checkpoint(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the demo checkpoint that a test may spoil."""
    return Path(shutil.copytree(demo_checkpoint, tmp_path / "model"))


def edit_config(checkpoint: Path, **changes: object) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_model_that_is_not_there(fp8q: Fp8q, demo_texts: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    line = fp8q("calibrate", tmp_path / "nowhere", "--data", demo_texts.calibration, "--out", out).complaint()
    assert line == f"{tmp_path}/nowhere: there is no such directory, and it is no hub name either; check the path"
    assert not out.exists()


def test_nan_in_a_weight_names_the_tensor(fp8q: Fp8q, checkpoint: Path, demo_texts: Any, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == torch.bfloat16
    out = tmp_path / "run"
    result = fp8q("calibrate", checkpoint, "--data", demo_texts.calibration, "--out", out)
    assert result.code == 2
    assert "model.layers.1.mlp.up_proj.weight" in result.err.splitlines()[-1]
    assert "NaN" in result.err.splitlines()[-1]
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--seq-len", 4096],
            "--seq-len 4,096: is more than 512, the model's positions; ask for at most that, or leave it out",
        ),
        (["--samples", 0], "--samples 0: must be at least 1"),
        (["--seed", -1], "--seed -1: must be at least 0"),
        (["--data", "more.txt=0"], "--data more.txt=0: its weight is 0; give one above 0, or leave the text out"),
        (
            ["--samples", 8, "--method", "delayed", "--interval", 2],
            "--interval 2: no scale is computed in 1 batches; give a smaller one, or more --samples",
        ),
        (["--percentile", 0], "--percentile 0.0: must lie in (0, 100]"),
        (["--skip", "*.nothing"], "--skip *.nothing: matches no module; names are like "),
        (
            ["--skip", "*"],
            (
                "all 29 GEMMs stay in BF16, so there is nothing to quantize; skip fewer with --skip, or name "
                "more with --only"
            ),
        ),
        (["--only", "*.nothing"], "--only *.nothing: matches no module; names are like "),
        (
            ["--only", "lm_head"],
            (
                "all 29 GEMMs stay in BF16, so there is nothing to quantize; skip fewer with --skip, or name "
                "more with --only"
            ),
        ),
    ],
)
def test_options_that_do_not_fit(
    fp8q: Fp8q, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, options: list[object], message: str
) -> None:
    line = fp8q(
        "calibrate", demo_checkpoint, "--data", demo_texts.calibration, "--out", tmp_path / "run", *options
    ).complaint()
    assert line.startswith(message)
    assert not (tmp_path / "run").exists()


def test_the_calibration_text_is_no_evaluation_text(
    fp8q: Fp8q, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    data = demo_texts.calibration
    line = fp8q(
        "calibrate", demo_checkpoint, "--data", data, "--eval-data", data, "--out", tmp_path / "run"
    ).complaint()
    assert "is not apart from the calibration text: 100%" in line


def test_text_shorter_than_a_window(fp8q: Fp8q, demo_checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("def short(): pass")
    out = tmp_path / "run"
    result = fp8q("calibrate", demo_checkpoint, "--data", text, "--out", out)
    assert result.code == 2
    assert "less than one window of 512; give more text or a smaller --seq-len" in result.err.splitlines()[-1]
    assert not out.exists()


def test_a_directory_of_other_things_is_left_alone(
    fp8q: Fp8q, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    (tmp_path / "holiday.jpg").write_text("beach")
    line = fp8q("calibrate", demo_checkpoint, "--data", demo_texts.calibration, "--out", tmp_path).complaint()
    assert (
        line == f"{tmp_path}: is not empty and holds no run.json, so it is no fp8q run; name a new or empty directory"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.jpg"]


@pytest.mark.parametrize("command", ["export", "build-engine", "validate", "bench", "triton", "report", "inspect"])
def test_a_run_that_is_not_there(fp8q: Fp8q, tmp_path: Path, command: str) -> None:
    line = fp8q(command, tmp_path / "run").complaint()
    assert line == (
        f"{tmp_path}/run: there is no such directory; make a run with `fp8q calibrate MODEL --data TEXT --out "
        f"{tmp_path}/run`"
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK is 0 of 2, and MASTER_ADDR is not set; start the ranks with torchrun, or unset RANK",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "x"} | MASTER,
            "WORLD_SIZE is 'x', which is no number; start the ranks with torchrun, or unset RANK",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2"} | MASTER,
            "RANK is 2 of 2, and the last is 1; start the ranks with torchrun, or unset RANK",
        ),
    ],
)
def test_rank_variables_that_make_no_sense_are_one_line(
    fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert fp8q("doctor").complaint() == message


def test_a_text_that_no_file_can_be_called_is_one_line(fp8q: Fp8q, demo_checkpoint: Path, tmp_path: Path) -> None:
    line = fp8q("calibrate", demo_checkpoint, "--data", "x" * 300 + ".txt", "--out", tmp_path / "run").complaint()
    assert line == f"'{'x' * 60}…': is no name that a file can have (File name too long); give another"


def test_without_a_command_the_help_is_all_there_is_to_say(fp8q: Fp8q) -> None:
    result = fp8q()
    assert (result.code, result.err) == (2, "")
    assert "From a Hugging Face checkpoint to a proven FP8 TensorRT engine" in " ".join(result.out.split())


def test_the_version_is_told(fp8q: Fp8q) -> None:
    result = fp8q("--version")
    assert (result.code, result.out, result.err) == (0, f"fp8q {__version__}\n", "")


def test_the_help_says_what_a_default_depends_on(fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(fp8q("calibrate", "--help").out.split())
    assert "Windows to calibrate on. [default: 512, or as many as the text has]" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], 'Unknown command "--nonsense". Available commands: run, calibrate, convert, '),
        (["calibrat"], 'Unknown command "calibrat". Did you mean "calibrate"? Available commands: run, calibrate, '),
        (["export", "run", "--nonsense"], "Unknown option: --nonsense. See `fp8q --help`, or --help after a command."),
        (["validate", "m", "--contxet", "3"], "Unknown option: --contxet. Did you mean --context? See `fp8q --help`"),
        (["validate", "run", "--context", "x"], "--context x: is no whole number; give one such as 8"),
        (["validate", "run", "--context", "3.7"], "--context 3.7: is no whole number; give one such as 8"),
        (["validate", "run", "--context", "none"], "--context none: is no whole number; give one such as 8"),
        (
            ["scales", "run", "--percentile", "x"],
            'Invalid value for --percentile: unable to convert "x" into float. See `fp8q --help`, or --help after a ',
        ),
        (
            ["scales", "run", "--method", "maximum"],
            'Invalid value "maximum" for --method. Choose from: "amax", "percentile", "mse", "entropy", "delayed". See',
        ),
        (["calibrate"], "MODEL is missing; `fp8q calibrate --help` has examples"),
        (["calibrate", "m", "--out", "r"], "--data is missing; `fp8q calibrate --help` has examples"),
        (["calibrate", "m", "--out", "r", "--data"], 'Command "calibrate" parameter --data requires an argument. See'),
        (["quantize", "m"], 'Unknown command "quantize". Did you mean "calibrate"? Available commands: run, '),
        (["run", "m", "--data", "t", "--out", "r", "--batches", "0:8"], "Unknown option: --batches. "),
        (
            ["validate", "run", "--runtimes", "abacus"],
            (
                "--runtimes abacus: abacus is no runtime; choose from bf16, reference, onnxruntime, fp32, original, "
                "onnxruntime-bf16, onnxruntime-int8, tensorrt, tensorrt-bf16, tensorrt-int8, tensorrt-rtx, "
            ),
        ),
        (
            ["validate", "run", "--max-ppl-increase", "much"],
            "--max-ppl-increase much: is no share; give one such as 1% or 0.01",
        ),
        (
            ["validate", "run", "--accumulator", "fp16"],
            'Invalid value "fp16" for --accumulator. Choose from: "fp32", "fp22", "two-level". See `fp8q --help`',
        ),
        (["validate", "run", "--accumulator-windows", "0"], "--accumulator-windows 0: must be at least 1"),
        (
            ["validate", "run", "--accumulator-windows", "few"],
            "--accumulator-windows few: is no whole number; give one",
        ),
        (["build-engine", "run", "--max-batch", "0"], "--max-batch 0: must be at least 1"),
        (
            ["build-engine", "run", "--min-fp8-share", "2"],
            "--min-fp8-share 2: is no share of the GEMMs; give one from 0 to 1, or in percent, such as 96% or 0.96",
        ),
        (
            ["engine", "run", "--min-fp8-share", "101%"],
            (
                "--min-fp8-share 101%: is no share of the GEMMs; give one from 0 to 1, or in percent, such as 96% "
                "or 0.96"
            ),
        ),
        (
            ["run", "model", "--data", "text", "--out", "run", "--min-fp8-share", "most"],
            (
                "--min-fp8-share most: is no share of the GEMMs; give one from 0 to 1, or in percent, such as 96% "
                "or 0.96"
            ),
        ),
        (
            ["build-engine", "run", "--precision", "int8", "--min-fp8-share", "1"],
            (
                "--min-fp8-share 1: is for the FP8 engine, and --precision int8 expects no GEMM in FP8; leave one "
                "of them out"
            ),
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(fp8q: Fp8q, arguments: list[str], message: str) -> None:
    assert fp8q(*arguments).complaint().startswith(message)


def test_doctor_says_what_is_here_as_one_json_object(fp8q: Fp8q) -> None:
    result = fp8q("doctor", "--json")
    assert result.code == 0
    assert result.out.count("\n") == 1
    found = {finding["name"]: finding["version"] for finding in json.loads(result.out)["findings"]}
    assert found["numpy" if "numpy" in found else "onnx"]
    assert found["torch"]


def test_a_fault_of_fp8q_is_one_line_too(fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("fp8q.cli.checklist.examine", fail)
    line = fp8q("doctor").complaint(code=1)
    assert line == (
        "ZeroDivisionError: division by zero (a fault of fp8q: run again with FP8Q_DEBUG=1 and report what it prints)"
    )


def test_an_interrupt_says_nothing_is_kept_where_nothing_is(fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fp8q.cli.checklist.examine", interrupt)
    assert fp8q("doctor").complaint(code=130) == "interrupted"
