"""The findings that `fp8q lint --json` prints."""

import json
from collections.abc import Callable
from typing import Any

Fp8q = Callable[..., Any]


def findings(result: Any) -> list[tuple[str, str, str | None]]:
    assert result.out.count("\n") == 1
    return [(finding["rule"], finding["node"], finding["module"]) for finding in json.loads(result.out)["findings"]]
