"""The numbers of a runtime that ran where BF16 does not: held against what the run keeps of it."""

from typing import Any

from ...core.columns import share
from ..accuracy.document import RuntimeAccuracy


def stored_numbers(found: RuntimeAccuracy) -> dict[str, Any]:
    """The fields of a runtime's row that come from what the run keeps of BF16, or of the first that it keeps; empty for
    a runtime that ran beside the others.
    """
    if not found.stored:
        return {}
    name = "bf16" if "bf16" in found.stored.runtimes else next(iter(found.stored.runtimes))
    distance = found.stored.runtimes[name]
    where = f"the {found.stored.top} likeliest tokens at {found.stored.positions:,} positions"
    return {
        "kl_least_nats": distance.kl_nats.mean,
        "top1_agreement": distance.top1_agreement,
        "stored": f"held against what the run keeps of {name}, {where}; all others have {share(distance.rest)} of the "
        "probability there, and KL is at least what is shown",
    }
