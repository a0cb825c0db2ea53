"""The limits of a verdict on accuracy, for `validate`, `run` and the comparison of two checkpoints."""

from dataclasses import dataclass
from typing import Annotated

from .declare import EVALUATION, Options, Unkeyed, increase_rule, nats_rule, option, share_of


@dataclass(frozen=True, kw_only=True)
class VerdictLimits(Options):
    """The limits of the verdict. None of all: the defaults of `validate.accuracy.limits`.

    `max_ppl_increase` and `max_flips` are fractions, and may be given as text, `"1%"`; `max_kl` is in nats a token.
    """

    max_ppl_increase: Annotated[
        float | None,
        option(
            EVALUATION,
            "The largest acceptable rise of perplexity, such as 1% or 0.01. Beyond a limit that is given: exit 3.",
            "SHARE",
            "1%",
            text=increase_rule,
        ),
        Unkeyed("a gate on what is written"),
    ] = None
    max_kl: Annotated[
        float | None,
        option(
            EVALUATION,
            "The largest acceptable KL from BF16, in nats a token.",
            "NATS",
            "that of the same rise, or 10 × BF16's own from fp32",
            text=nats_rule,
        ),
        Unkeyed("a gate on what is written"),
    ] = None
    max_flips: Annotated[
        float | None,
        option(
            EVALUATION,
            "The largest acceptable share of next tokens that differ from BF16's, such as 8% or 0.08.",
            "SHARE",
            "8%, more with a larger limit of KL",
            text=share_of("next tokens", "8% or 0.08"),
        ),
        Unkeyed("a gate on what is written"),
    ] = None

    @property
    def asked(self) -> str | None:
        """The first limit that was asked for, as on the command line; None where none was."""
        if self.max_ppl_increase is not None:
            return f"--max-ppl-increase {100 * self.max_ppl_increase:g}%"
        if self.max_kl is not None:
            return f"--max-kl {self.max_kl:g}"
        if self.max_flips is None:
            return None
        return f"--max-flips {100 * self.max_flips:g}%"
