"""What cannot end in a verdict is told before any work, with the option that mends it."""

import numpy as np
import pytest

from fp8q.calibrate.text.evaluation import cut, evenly_spaced
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.options import ValidateOptions, VerdictLimits
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.validate import behind_a_prompt, check_enough

NO_VERDICT = "no interval, so that this cannot end in a verdict that passes: 10 do"


@pytest.mark.parametrize(
    ("windows", "context", "most", "said"),
    [
        (12, 64, None, None),
        (12, 64, 9 * 63, f"9 windows give {NO_VERDICT}; --max-tokens 630 takes enough"),
        (9, 64, None, f"9 windows give {NO_VERDICT}; --context 57 cuts more"),
        (1, 64, None, f"1 window gives {NO_VERDICT}; give a longer text by --data"),
    ],
)
def test_too_few_windows_are_noted_with_what_helps(
    windows: int, context: int, most: int | None, said: str | None
) -> None:
    tokens = cut(np.arange(windows * context, dtype=np.int64), "a text", context, context)
    notes = Notes(SILENT)
    tokens = evenly_spaced(tokens, most) if most else tokens
    check_enough(tokens, VerdictLimits(), notes)
    assert notes.lines == ([said] if said else [])
    if said:
        with pytest.raises(InputError) as error:
            check_enough(tokens, VerdictLimits(max_kl=0.01), notes)
        assert str(error.value) == f"--max-kl 0.01: {said}"
    else:
        check_enough(tokens, VerdictLimits(max_kl=0.01), notes)


@pytest.mark.parametrize(
    ("prompt", "tail", "expected"),
    [
        (None, 0, (None, None)),  # whole windows
        (None, 64, (307, 2050)),  # ten windows of 205
        (448, 64, (448, 2048)),  # 32 windows of 64: once all of the text, 3 h 27 min for 1 h 3 min
        (448, 0, (448, 2048)),
        (128, 64, (128, 3840)),  # ten windows of 384
        (510, 64, (510, 128)),  # 64 windows of two: a prompt costs as well, and 32,768 tokens are 64 windows
        (512, 64, (512, None)),  # refused later: nothing is left to decode
    ],
)
def test_a_cpu_decodes_few_tokens_whatever_the_prompt(
    prompt: int | None, tail: int, expected: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8q.stages.validate.device", lambda: "cpu")
    served = behind_a_prompt(ValidateOptions(as_served=prompt), 512, tail)
    assert (served.as_served, served.max_tokens) == expected
    asked = behind_a_prompt(ValidateOptions(as_served=prompt, max_tokens=9_999), 512, tail)
    assert asked.max_tokens == 9_999


def test_a_gpu_decodes_all_behind_half_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.stages.validate.device", lambda: "cuda")
    served = behind_a_prompt(ValidateOptions(), 512, 64)
    assert (served.as_served, served.max_tokens) == (256, None)
