"""What cannot end in a verdict is told before any work, with the option that mends it."""

import numpy as np
import pytest

from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.options import VerdictLimits
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.validate import check_enough
from fp8q.validate.accuracy.perplexity import cut, evenly_spaced

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
