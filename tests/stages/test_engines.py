"""The runtimes of `fp8q validate` that run engines, and the windows that an engine takes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8q.calibrate.text.evaluation import cut
from fp8q.core.errors import InputError
from fp8q.export.engine.info import EngineInfo
from fp8q.export.engine.profiles import profiles
from fp8q.options import NOT_SERVED, RUNTIMES, ValidateOptions
from fp8q.stages.shared.engines import EngineHere


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("onnxruntime", ("onnxruntime", "fp8")),
        ("onnxruntime-int8", ("onnxruntime", "int8")),
        ("tensorrt", ("tensorrt", "fp8")),
        ("tensorrt-bf16", ("tensorrt", "bf16")),
        ("tensorrt-rtx", ("tensorrt-rtx", "fp8")),
        ("tensorrt-rtx-int8", ("tensorrt-rtx", "int8")),
    ],
)
def test_a_runtimes_name_ends_in_its_precision(name: str, parts: tuple[str, str]) -> None:
    assert (RUNTIMES[name].library, RUNTIMES[name].precision) == parts
    assert (name in NOT_SERVED) == (parts[1] != "fp8")


def test_engines_are_of_the_runtimes_that_run_them() -> None:
    options = ValidateOptions(("bf16", "tensorrt-rtx", "onnxruntime-int8", "tensorrt-bf16"))
    assert (options.engines, options.baselines) == (("tensorrt-rtx", "tensorrt-bf16"), ("int8",))
    assert ValidateOptions().engines == ()


def engine(**changes: Any) -> EngineHere:
    known = {
        "runtime": "tensorrt", "version": "11.4.0.1", "target": "sm90", "bytes": 1, "promised_products": 1,
        "fp8_products": 1, "wide_products": [], "evidence": "inspector", "build_seconds": 1.0,
    }  # fmt: skip
    return EngineHere("tensorrt", {}, EngineInfo.model_validate(known | {"profiles": profiles(4, 64, 32)} | changes))


def test_windows_and_prompts_that_an_engine_does_not_take_are_refused_before_anything_runs() -> None:
    text = np.arange(256)
    engine().check_windows(cut(text, "text", 64, 64, prompt=32))
    with pytest.raises(InputError) as longer:
        engine().check_windows(cut(text, "text", 128, 128))
    assert str(longer.value) == (
        "--runtimes tensorrt: its engine has room for 64 positions, and a window has 128; give --context 64, or build "
        "it with --max-seq-len 128"
    )
    with pytest.raises(InputError) as prompt:
        replace(engine(), name="tensorrt-rtx").check_windows(cut(text, "text", 64, 64, prompt=33))
    assert str(prompt.value) == (
        "--as-served 33: the engine of tensorrt-rtx takes 32 tokens in a call; give at most that, or build it with "
        "--max-prompt 33"
    )
