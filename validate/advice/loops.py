"""Detect loops in greedy text: often the first sign of a damaged model, and common in small or poor ones.

BF16 and FP8 continue the same beginnings of calibration text. Their texts differ from the first near tie on, and either
may then fall into a loop by chance. One loop of FP8 alone therefore means little: the verdict is a sign test over the
prompts after which exactly one of the two loops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb

import torch
from transformers import DynamicCache, PreTrainedModel

from .checkup import Verdict
from .criteria import ANSWER, CHANCE

#: The longest period of a loop, how often at least it is repeated, and the tokens that it fills at least.
LONGEST_PERIOD = 16
FEWEST_TURNS = 4
FEWEST_TOKENS = 24


def loop_length(tokens: Sequence[int]) -> int:
    """The period of the loop that `tokens` end in, 0 for none: the last part repeats itself `FEWEST_TURNS` times at
    least, over `FEWEST_TOKENS` tokens at least.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        same = 0
        while same + period < len(tokens) and tokens[-1 - same] == tokens[-1 - same - period]:
            same += 1
        if same + period >= max(FEWEST_TURNS * period, FEWEST_TOKENS):
            return period
    return 0


def greedy(
    model: PreTrainedModel, new_cache: Callable[[], DynamicCache], prompts: torch.Tensor, tokens: int = ANSWER
) -> list[list[int]]:
    """Generate `tokens` tokens greedily after each of `prompts` int64 [prompts, seq]; an end of text does not stop."""
    cache = new_cache()
    input_ids = prompts
    steps: list[torch.Tensor] = []
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(input_ids=input_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            input_ids = logits[:, -1].argmax(-1, keepdim=True)
            steps.append(input_ids)
    return [list(map(int, row)) for row in torch.cat(steps, 1).tolist()]


@dataclass(frozen=True)
class Loops:
    """The number of prompts after which only FP8 ends in a loop, only BF16 does, and both do; and of all prompts."""

    fp8: int
    bf16: int
    both: int
    prompts: int

    @classmethod
    def from_answers(cls, fp8: Sequence[Sequence[int]], bf16: Sequence[Sequence[int]]) -> "Loops":
        """Count the loops in the answers of both to the same prompts."""
        pairs = [(loop_length(mine) > 0, loop_length(theirs) > 0) for mine, theirs in zip(fp8, bf16, strict=True)]
        return cls(pairs.count((True, False)), pairs.count((False, True)), pairs.count((True, True)), len(pairs))

    @property
    def chance(self) -> float:
        """The probability that FP8 loops alone so often, where only one does, if both were equally likely to."""
        either = self.fp8 + self.bf16
        return float(sum(comb(either, k) for k in range(self.fp8, either + 1)) / 2**either)

    @property
    def verdict(self) -> Verdict:
        """Bad where FP8 loops more than chance has it, to be watched where anything loops."""
        if self.fp8 and self.chance < CHANCE:
            return "bad"
        return "watch" if self.fp8 or self.both else "good"
