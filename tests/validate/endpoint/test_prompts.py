"""Which positions of a run's windows a server is judged by, and how to have more of them."""

import numpy as np
import pytest

from fp8q.calibrate.text.evaluation import Protocol
from fp8q.validate.accuracy.top_logits import TopTokens
from fp8q.validate.endpoint.prompts import NOTHING_MORE, compared_positions, more_positions, prompts_of


def kept(windows: int, context: int, prompt: int, positions: int) -> TopTokens:
    """A run's stored positions: of each window so many behind the prompt."""
    mask = np.zeros((windows, context), np.bool_)
    mask[:, prompt : prompt + positions] = True
    return TopTokens(np.arange(windows), np.ones((windows, context), np.int64), mask, {}, {})


def protocol(tokens: int, of_tokens: int | None, context: int = 512, prompt: int | None = 448) -> Protocol:
    return Protocol(
        dataset="text", sha256="0", tokens=tokens, of_tokens=of_tokens, context=context, stride=context, prompt=prompt
    )


def test_of_a_run_with_a_tail_half_of_it_is_compared_and_that_is_said() -> None:
    """19 windows of 448 tokens and 64 behind them: 19 x 480 are sent, 19 x 32 compared."""
    prompts = prompts_of(kept(19, 512, 448, 64), 64, None, None)
    assert (sum(len(prompt.ids) for prompt in prompts), sum(len(prompt.rows) for prompt in prompts)) == (9120, 608)
    assert compared_positions(prompts, 64, 608) == (
        "the last 32 of each, half of the run's tail of 64: a server that reads a prompt computes those before in "
        "another form than they were validated in"
    )


def test_of_other_runs_the_kept_positions_are_compared() -> None:
    prompts = prompts_of(kept(2, 512, 256, 256), None, None, None)
    assert compared_positions(prompts, None, 512) == "the last 256 of each, of which the run keeps the likeliest tokens"
    assert compared_positions(prompts, None, 16) == (
        "the last 256 of each, of which the run keeps the likeliest tokens; 16 of these 512, since each takes a request"
    )


@pytest.mark.parametrize(
    ("told", "tops", "tail", "remedy"),
    [
        # 146 windows are there, and 4,096 positions are 128 windows of the 32 that half a tail compares
        (protocol(19 * 64, 146 * 64), kept(19, 512, 448, 64), 64,
         "`fp8q validate RUN --as-served 480 --max-tokens 4096` keeps positions of 128 windows for 19"),
        (protocol(19 * 64, 40 * 64), kept(19, 512, 448, 64), 64,
         "`fp8q validate RUN --as-served 480 --max-tokens 1280` keeps positions of 40 windows for 19"),
        # 4 of 30 windows of 512 were evaluated; 16 of 256 positions are 4,096
        (protocol(4 * 512, 30 * 512, prompt=None), kept(4, 512, 256, 256), None,
         "`fp8q validate RUN --max-tokens 8192` keeps positions of 16 windows for 4"),
        (protocol(19 * 64, None), kept(19, 512, 448, 64), 64, "validate on a longer text, by --data TEXT"),
        (protocol(16 * 512, None, prompt=None), kept(16, 512, 256, 256), None, NOTHING_MORE),
    ],
)  # fmt: skip
def test_the_remedy_is_a_command_that_keeps_more_windows(
    told: Protocol, tops: TopTokens, tail: int | None, remedy: str
) -> None:
    assert more_positions(told, tops, tail, "RUN") == remedy
