"""A tensor whose loss is to be located, and the change to it; needs no torch."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["weight", "activation", "kv_cache"]
#: What a site's KL is predicted for: as the run has it, and an activation in two terms.
AS_IT_IS, TWO_TERMS = "as_it_is", "two_terms"
#: Site -> variant -> nats.
Predicted = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Site:
    """A tensor of `kind`: the weight of `module`, the input of `module` and the others of `members`, which receive the
    same one, or the cache tensor `module` (`<attention>.k` or `.v`).
    """

    module: str
    kind: Kind
    members: tuple[str, ...]

    @property
    def key(self) -> str:
        """Its name in files."""
        return f"{self.kind}:{self.module}"
