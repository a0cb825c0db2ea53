"""Ranks that calibrate for GPTQ: the second moments and codes of one process, whichever of them was killed."""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.options import WeightRounding
from fp8q.quantize.scales.costliest import load_costliest
from tests.calibrate.ranks.test_world import start

from ...mixtures import random_mixture

ARGUMENTS = ["--samples", "9", "--seq-len", "32", "--batch-size", "2", "--no-graph"]


def alone(checkpoint: Path, texts: Any, out: Path, rounding: WeightRounding = "gptq", **more: Any) -> Run:
    """The run of one process, in memory, with `more` options."""
    options = api.CalibrateOptions(samples=9, seq_len=32, batch_size=2, weight_rounding=rounding, stream=False, **more)
    graph = api.ExportOptions(graph=False)
    return api.calibrate(str(checkpoint), str(texts.calibration), out, str(texts.evaluation), options, graph)


def command(checkpoint: Path, texts: Any, out: Path, rounding: WeightRounding = "gptq") -> list[str]:
    data = ["--data", str(texts.calibration), "--eval-data", str(texts.evaluation)]
    rounded = ["--weight-rounding", rounding, "--out", str(out)]
    return ["-m", "fp8q", "calibrate", str(checkpoint), *data, *ARGUMENTS, *rounded]


def files(run: Run) -> dict[str, bytes]:
    """The statistics, second moments, scales and codes of a run."""
    paths = [run.statistics, *run.moments.glob("*"), run.scales, *run.model.glob("*.safetensors")]
    return {str(path.relative_to(run.root)): path.read_bytes() for path in paths}


def kill_when_begun(dead: int, begun: Path, words: list[str]) -> None:
    """Start two ranks, kill one of them once there is the file `begun`, and hold the other to the line it ends with."""
    ranks = start(2, *words)
    while not begun.exists():
        assert [rank.poll() for rank in ranks] == [None, None], ranks[0].communicate()
        time.sleep(0.001)
    ranks[dead].send_signal(signal.SIGKILL)
    _, err = ranks[1 - dead].communicate(timeout=60)
    assert f"fp8q: rank {dead} (process {ranks[dead].pid} on " in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith("; the same command goes on from what is finished")
    ranks[dead].communicate()


def gone_on(words: list[str]) -> list[tuple[str, str]]:
    """Start two ranks again; return what they say when both have ended well."""
    again = start(2, *words)
    ended = [rank.communicate(timeout=240) for rank in again]
    assert [rank.returncode for rank in again] == [0, 0], ended
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_write_the_second_moments_and_codes_of_one_process(ranks: int, demo_texts: Any, tmp_path: Path) -> None:
    """A mixture: some experts get no token of one rank, and tokens are held out of their moments."""
    checkpoint = random_mixture(tmp_path / "mixture", "qwen3_moe")
    expected = files(alone(checkpoint, demo_texts, tmp_path / "one"))
    assert any(name.endswith(".held_out.npy") for name in expected)
    started = start(ranks, *command(checkpoint, demo_texts, tmp_path / "more"))
    ended = [rank.communicate(timeout=180) for rank in started]
    assert [rank.returncode for rank in started] == [0] * ranks, ended
    assert files(Run(tmp_path / "more")) == expected
    assert not list((tmp_path / "more").glob(".*.work"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dead", "begun"),
    [
        (0, ".measure.work/00001.safetensors"),
        (1, ".measure.work/rank-1/00001.safetensors"),
        (1, ".quantize.work/rank-1/moments"),
    ],
)
def test_a_killed_rank_ends_all_and_the_same_command_goes_on(
    dead: int, begun: str, shared_checkpoint: Callable[[str], Path], demo_texts: Any, tmp_path: Path
) -> None:
    """While they measure, or while rank 1 rounds a share of the weights."""
    checkpoint = shared_checkpoint("llama")
    expected = files(alone(checkpoint, demo_texts, tmp_path / "one"))
    run = Run(tmp_path / "two")
    words = command(checkpoint, demo_texts, run.root)
    kill_when_begun(dead, run.root / begun, words)
    ended = gone_on(words)
    assert "going on at decoder layer" in ended[0][1] + ended[1][1] or dead == 1
    assert files(run) == expected


@pytest.mark.slow
def test_ranks_round_once_where_the_loss_of_codes_decides_which_weights_stay(
    shared_checkpoint: Callable[[str], Path], demo_texts: Any, tmp_path: Path
) -> None:
    checkpoint = shared_checkpoint("llama")
    one = alone(checkpoint, demo_texts, tmp_path / "one", bf16_weights=0.2)
    assert load_costliest(one).modules
    words = [*command(checkpoint, demo_texts, tmp_path / "two"), "--bf16-weights", "20%"]
    started = start(2, *words)
    ended = [rank.communicate(timeout=240) for rank in started]
    assert [rank.returncode for rank in started] == [0, 0], ended
    two = Run(tmp_path / "two")
    assert files(two) == files(one)
    assert load_costliest(two).modules == load_costliest(one).modules
    assert not list(two.root.glob(".*.work"))


@pytest.mark.slow
def test_ranks_revise_codes_by_the_gradients_at_outputs_as_one_process_does(
    shared_checkpoint: Callable[[str], Path], demo_texts: Any, tmp_path: Path
) -> None:
    checkpoint = shared_checkpoint("llama")
    of_a_layer = "*.layers.0.*"
    by_gptq = files(alone(checkpoint, demo_texts, tmp_path / "without", only=(of_a_layer,)))
    expected = files(alone(checkpoint, demo_texts, tmp_path / "one", only=(of_a_layer,), weigh_outputs=6))
    assert any(expected[name] != by_gptq[name] for name in expected if name.startswith("model/"))
    words = [*command(checkpoint, demo_texts, tmp_path / "two"), "--only", of_a_layer, "--weigh-outputs", "6"]
    started = start(2, *words)
    ended = [rank.communicate(timeout=240) for rank in started]
    assert [rank.returncode for rank in started] == [0, 0], ended
    assert files(Run(tmp_path / "two")) == expected
    assert not list((tmp_path / "two").glob(".*.work"))
