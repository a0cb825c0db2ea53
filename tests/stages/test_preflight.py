"""Options that later stages would refuse are refused before anything is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fp8q import api
from fp8q.core.errors import Fp8qError, InputError
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.stages.preflight import nothing_left

if TYPE_CHECKING:
    from tests.conftest import Texts


@pytest.fixture
def refused(demo_checkpoint: Path, demo_texts: "Texts", tmp_path: Path) -> Callable[..., str]:
    """The error of `api.run` for these options, before it has made its directory; `model`: another than the demo."""

    def run(model: Path = demo_checkpoint, out: Path = tmp_path / "run", **options: Any) -> str:
        small = {"calibrate": api.CalibrateOptions(samples=2, seq_len=64)}
        text = tmp_path / "text.txt"
        text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:9000], encoding="utf-8")
        with pytest.raises(Fp8qError) as error:
            api.run(str(model), str(text), out, None, api.RunOptions(**(small | options)))
        assert not out.exists()
        return str(error.value)

    return run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": api.EngineOptions(targets=("sm75",))}, "--target sm75: cannot do FP8"),
        (
            {"engine": api.EngineOptions(runtime="tensorrt-rtx", targets=("sm90",))},
            (
                "--target sm90: Hopper is none of TensorRT-RTX's GPUs (sm89, sm120, sm121); TensorRT builds for it, on "
                "that GPU: install it there with `pip install 'fp8q[tensorrt]'`, and run `fp8q build-engine {out} "
                "--runtime tensorrt`"
            ),
        ),
        ({"engine": api.EngineOptions(max_seq_len=513)}, "--max-seq-len 513: is more than 512, the model's positions"),
        ({"engine": api.EngineOptions(max_prompt=600)}, "--max-prompt 600: is more than --max-seq-len 512"),
        ({"engine": api.EngineOptions(precision="int8")}, "{out}: has no graph in int8, which is made of a finished"),
        ({"validate": api.ValidateOptions(context=513)}, "--context 513: is more than 512, the model's positions"),
        ({"validate": api.ValidateOptions(stride=65)}, "--stride 65: must lie between 1 and the context, 64"),
        ({"validate": api.ValidateOptions(context=512)}, "{text}: has "),
        ({"validate": api.ValidateOptions(runtimes=("bf16", "onnxruntime-bf16"))}, "{out}: has no graph in bf16"),
        (
            {"validate": api.ValidateOptions(runtimes=("reference",), max_ppl_increase=0.01)},
            "--max-ppl-increase 1%: needs bf16 and an FP8 runtime to compare, and the runtimes are reference; add",
        ),
        (
            {"validate": api.ValidateOptions(runtimes=("bf16", "onnxruntime"), accumulator="two-level")},
            "--accumulator two-level: is of the runtime reference, and the runtimes are bf16, onnxruntime; add ",
        ),
        (
            {"validate": api.ValidateOptions(max_kl=0.01)},
            "--max-kl 0.01: 4 windows give no interval, so that this cannot end in a verdict that passes: 10 do; give ",
        ),
        (
            {"validate": api.ValidateOptions(max_kl=0.01, context=16, max_tokens=100)},
            (
                "--max-kl 0.01: 6 windows give no interval, so that this cannot end in a verdict that passes: 10 do; "
                "--max-tokens 150 takes enough"
            ),
        ),
        (
            {
                "calibrate": api.CalibrateOptions(samples=2, seq_len=64, form=("*.down_proj=tail:8",)),
                "validate": api.ValidateOptions(max_kl=0.01, max_tokens=150),
            },
            "--max-kl 0.01: 4 windows give no interval, so that this cannot end in a verdict that passes: 10 do; ",
        ),
        ({"export": api.ExportOptions(precision="bf16")}, "--precision bf16: is made of a finished run; calibrate"),
    ],
)
def test_options_of_later_stages_are_refused_before_the_first(
    refused: Callable[..., str], tmp_path: Path, options: dict[str, object], said: str
) -> None:
    assert refused(**options).startswith(said.format(out=tmp_path / "run", text=tmp_path / "text.txt"))


def test_a_place_where_no_directory_can_be_made(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refused(out=tmp_path / "file" / "a" / "run") == (
        f"{tmp_path}/file/a/run: cannot be made, since {tmp_path}/file is no directory; name another with --out"
    )


def test_a_model_that_runs_on_no_two_tokens_is_refused(
    demo_checkpoint: Path, refused: Callable[..., str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_checkpoint, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"layer_types": ["none"] * 4}), encoding="utf-8")
    assert refused(model=model).startswith(f"{model}/config.json: does not make a ")


@pytest.mark.parametrize("there", [False, True])
def test_a_refusal_while_statistics_are_made_leaves_nothing(tmp_path: Path, there: bool) -> None:
    run = Run(tmp_path / "run")
    if there:
        run.root.mkdir()
        (run.root / ".lock").touch()

    def stages() -> None:
        with nothing_left(run), RunWriter(run).stage("corpus", {}, {}) as log:
            run.calibration.write_bytes(b"tokens")
            (run.root / ".measure.work").mkdir()
            log.outputs.append(run.calibration)
            raise InputError("", "no")

    with pytest.raises(InputError, match="^no$"):
        stages()
    assert run.root.exists() is there
    assert [path.name for path in tmp_path.rglob("*")] == (["run", ".lock"] if there else [])


def test_what_a_finished_stage_left_before_stays(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with RunWriter(run).stage("corpus", {}, {}) as log:
        run.calibration.write_bytes(b"tokens")
        log.outputs.append(run.calibration)
    with pytest.raises(InputError), nothing_left(run):
        raise InputError("", "no")
    assert run.calibration.read_bytes() == b"tokens"
