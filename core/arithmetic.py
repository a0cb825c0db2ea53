"""The arithmetic of a machine, as far as the key of a work folder has it.

Sums in another order have other bits, so what a killed stage left there is of use only where they are made alike.
"""

import json
from collections.abc import Callable

#: The facts of a work folder's key that describe the machine, and the text for each.
_ARITHMETIC: dict[str, Callable[[object], str]] = {
    "threads": lambda count: f"{count} threads",
    "device": lambda name: f"device {str(name).upper()}",
    "bf16_products": lambda name: f"BF16 products computed in {str(name).upper()}",
}


def changed_machine(before: str, wanted: str) -> str:
    """List the facts of the machine that differ between two keys of a work folder, with the values of the first.

    Empty where none differ, or a key does not parse.
    """
    try:
        old, new = ({"bf16_products": "bf16"} | json.loads(key) for key in (before, wanted))
    except (ValueError, TypeError):
        return ""
    return ", ".join(
        tell(old[name]) for name, tell in _ARITHMETIC.items() if name in old and old[name] != new.get(name)
    )
