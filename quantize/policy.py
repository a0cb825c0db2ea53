"""Which matrix products run in FP8: all that ModelOpt's registry knows, but the output head and what the user skips.

The output head stays in BF16 because its error goes straight into the logits and it is a small share of the work. Embeddings and norms
are no matrix products. What stays is listed with its reason; nothing is left out in silence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import InputError
from .scales import Skipped


@dataclass(frozen=True)
class Products:
    """The matrix products of a model: all by name, the output head's name, and those whose class takes no quantizers (name -> class)."""

    names: tuple[str, ...]
    head: str | None
    unknown: dict[str, str]


def select(products: Products, skip: Sequence[str]) -> tuple[list[str], dict[str, Skipped]]:
    """Split `products` into modules to quantize and modules that stay in BF16, with the reasons.

    `skip`: shell patterns over module names. Raises InputError for a pattern that matches nothing, and when nothing is left.
    """
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in products.names):
            raise InputError(f"--skip {pattern}: matches no module; names are like {', '.join(_examples(products.names))}")
    skipped: dict[str, Skipped] = {}
    for name in products.names:
        matching = [pattern for pattern in skip if fnmatchcase(name, pattern)]
        if name == products.head:
            skipped[name] = Skipped(reason="output head: its error would go straight into the logits")
        elif name in products.unknown:
            skipped[name] = Skipped(reason=f"of class {products.unknown[name]}, which ModelOpt's registry does not know")
        elif matching:
            skipped[name] = Skipped(reason=f"asked for: --skip {matching[0]}")
    chosen = [name for name in products.names if name not in skipped]
    if not chosen:
        raise InputError(f"all {len(products.names)} matrix products stay in BF16, so there is nothing to quantize; skip fewer with --skip")
    return chosen, skipped


def _examples(names: Iterable[str]) -> list[str]:
    """One name of each kind, told by its last part."""
    return list({name.rpartition(".")[2]: name for name in names}.values())[:4]
