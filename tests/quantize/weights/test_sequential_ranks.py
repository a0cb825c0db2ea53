"""Ranks that round layer by layer: the codes of one process, whichever of them was killed, and what they refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.weights.paired_inputs import GroupInput, InputSums
from tests.calibrate.ranks.test_handed_moments import alone, command, files, gone_on, kill_when_begun
from tests.calibrate.ranks.test_world import start
from tests.mixtures import random_mixture


def test_a_rank_that_waits_adds_its_batches_behind_those_of_the_ranks_before() -> None:
    draw = torch.Generator().manual_seed(0)
    group = GroupInput("a", ("a",), None, True, (8, 4))
    weight = torch.randn(4, 8, generator=draw).bfloat16()
    batches = [(torch.randn(16, 8, generator=draw), torch.randn(16, 4, generator=draw)) for _ in range(3)]
    whole, first, second = (InputSums(group, lambda name: weight, waits=waits) for waits in (False, False, True))
    for number, pair in enumerate(batches):
        for sums in (whole, first if number == 0 else second):
            sums.add(0, pair, pair, pair[0] * 1.01, 16)
    assert not second.halves[0].moments.any()
    second.halves[0].moments.copy_(first.halves[0].moments)
    second.halves[0].lost.copy_(first.halves[0].lost)
    second.add_waiting(0)
    assert torch.equal(second.halves[0].moments, whole.halves[0].moments)
    assert torch.equal(second.halves[0].lost, whole.halves[0].lost)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_write_the_codes_of_one_process(
    ranks: int, shared_checkpoint: Callable[[str], Path], demo_texts: Any, tmp_path: Path
) -> None:
    """Nine windows in five batches: four ranks hand the sums of three even batches and of two odd ones on."""
    checkpoint = shared_checkpoint("qwen2")
    one = alone(checkpoint, demo_texts, tmp_path / "one", "sequential")
    assert {weight.rounding for weight in load_scales(one).weights.values()} == {"sequential"}
    started = start(ranks, *command(checkpoint, demo_texts, tmp_path / "more", "sequential"))
    ended = [rank.communicate(timeout=240) for rank in started]
    assert [rank.returncode for rank in started] == [0] * ranks, ended
    assert files(Run(tmp_path / "more")) == files(one)
    assert not list((tmp_path / "more").glob(".*.work"))


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_rank_ends_all_and_the_same_command_goes_on(
    dead: int, shared_checkpoint: Callable[[str], Path], demo_texts: Any, tmp_path: Path
) -> None:
    """In the second layer, when rank 1 has let go of the codes of the first."""
    checkpoint = shared_checkpoint("llama")
    expected = files(alone(checkpoint, demo_texts, tmp_path / "one", "sequential"))
    run = Run(tmp_path / "two")
    words = command(checkpoint, demo_texts, run.root, "sequential")
    work = run.root / ".quantize.work"
    kill_when_begun(dead, work / "model.layers.1.mlp.down_proj.safetensors", words)
    assert (work / "model.layers.0.mlp.down_proj.safetensors").is_file()
    assert not (work / "rank-1" / "model.layers.0.mlp.down_proj.safetensors").exists()
    assert not run.scales.exists()
    ended = gone_on(words)
    assert "going on at decoder layer" in ended[0][1]
    assert files(run) == expected


@pytest.mark.slow
def test_a_model_with_experts_is_refused_before_it_is_measured(demo_texts: Any, tmp_path: Path) -> None:
    checkpoint = random_mixture(tmp_path / "mixture", "qwen3_moe")
    ranks = start(2, *command(checkpoint, demo_texts, tmp_path / "run", "sequential"))
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [InputError.exit_code] * 2
    assert said[0].splitlines()[-1] == (
        "fp8q: --weight-rounding sequential: the float model and the quantized one route tokens to other experts, and "
        "2 ranks would add them in another order than one process; start one process, or use --weight-rounding gptq"
    )
    assert not (tmp_path / "run").exists()
