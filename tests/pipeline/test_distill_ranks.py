"""Several processes learn the codes of one process; where they cannot, one line says why."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8q import api
from fp8q.calibrate.model.source import open_source
from fp8q.calibrate.ranks.torchrun import ProcessRank
from fp8q.calibrate.ranks.world import World
from fp8q.core.errors import BackendError, InputError
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, DistillOptions, ExportOptions
from fp8q.quantize.learning.document import load_distillation
from fp8q.stages.distill import bytes_a_weight
from fp8q.stages.distill_ranks import check_no_experts, check_ranks

from ..calibrate.ranks.test_world import HOST, start
from ..conftest import Texts

pytestmark = pytest.mark.slow

OPTIONS = DistillOptions(epochs=1.0, learning_rate=0.003)
ARGUMENTS = ["--epochs", "1", "--learning-rate", "0.003"]


@pytest.fixture(scope="module")
def begun(demo_checkpoint: Path, demo_texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 36 windows, 33 to learn from, which fill eight steps of four and leave one over, and 3 held out, which
    two ranks cannot have as many each.
    """
    return api.calibrate(
        str(demo_checkpoint),
        str(demo_texts.calibration),
        tmp_path_factory.mktemp("ranks") / "run",
        str(demo_texts.evaluation),
        CalibrateOptions(samples=36, seq_len=128, activation_terms=2),
        ExportOptions(graph=False),
    )


@pytest.fixture(scope="module")
def alone(begun: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What one process learns, of as many threads as each of the ranks."""
    run = copy(begun, tmp_path_factory.mktemp("alone") / "run")
    subprocess.run(
        [sys.executable, "-m", "fp8q", "distill", str(run.root), *ARGUMENTS],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    return run


def copy(run: Run, root: Path) -> Run:
    return Run(Path(shutil.copytree(run.root, root)))


def learned(run: Run) -> dict[str, torch.Tensor]:
    return {
        name: tensor.view(torch.uint8) for name, tensor in load_file(run.distilled).items() if name.endswith(".codes")
    }


def hold_to(alone: Run, run: Run) -> None:
    """Hold what ranks learned to what one process did.

    Gradients and factors are sums of the same terms, which FP32 adds in another order: a millionth of them. A weight
    that comes to lie in the very middle between two codes may fall to the other side, which moves the divergence, a
    mean over the same windows, as little: one code of 2,949,120 was measured, with whole models and with shared ones.
    """
    one, many = load_distillation(alone), load_distillation(run)
    assert [moment.step for moment in many.moments] == [moment.step for moment in one.moments]
    for each, other in zip(one.moments, many.moments, strict=True):
        assert other.kl == pytest.approx(each.kl, rel=1e-5)
    assert many.best.kl < 0.98 * many.start.kl
    wanted, found = learned(alone), learned(run)
    differing = sum(int((wanted[name] != found[name]).sum()) for name in wanted)
    total = sum(each.numel() for each in wanted.values())
    assert differing < 1e-3 * one.changed * total


def test_two_ranks_of_torchrun_learn_the_codes_of_one_process_and_one_of_them_speaks(
    begun: Run, alone: Run, tmp_path: Path
) -> None:
    run = copy(begun, tmp_path / "run")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fp8q"]
    done = subprocess.run(
        [*torchrun, "distill", str(run.root), *ARGUMENTS, "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == load_distillation(run).model_dump(mode="json")
    assert done.stderr.count("the held-out KL fell from") == 1
    hold_to(alone, run)


def test_a_killed_rank_ends_the_other_in_a_line_and_both_go_on_from_there(
    begun: Run, alone: Run, tmp_path: Path
) -> None:
    run = copy(begun, tmp_path / "run")
    ranks = start(2, "-m", "fp8q", "distill", str(run.root), *ARGUMENTS)
    while not (run.root / ".distill.work" / "attempt-0" / "checkpoint-3" / "trainer_state.json").exists():
        assert [rank.poll() for rank in ranks] == [None, None], ranks[0].communicate()
        time.sleep(0.01)
    ranks[1].kill()
    out, err = ranks[0].communicate(timeout=60)
    ranks[1].communicate()
    assert (ranks[0].returncode, out) == (BackendError.exit_code, "")
    assert err.splitlines()[-1] == (
        f"fp8q: rank 1 (process {ranks[1].pid} on {HOST}) died without a word (killed, out of memory, or its machine "
        "is gone); what started it has its exit code; the same command goes on from what is finished"
    )
    assert not run.distillation.exists()
    again = start(2, "-m", "fp8q", "distill", str(run.root), *ARGUMENTS)
    said = [rank.communicate(timeout=300) for rank in again]
    assert [rank.returncode for rank in again] == [0, 0], said
    assert said[1] == ("", "")
    assert "; about " in said[0][1]
    hold_to(alone, run)


def test_ranks_that_share_the_models_learn_the_codes_of_one_process_killed_or_not(
    begun: Run, alone: Run, tmp_path: Path
) -> None:
    run = copy(begun, tmp_path / "run")
    work = run.root / ".distill.work" / "attempt-0"
    ranks = start(2, "-m", "fp8q", "distill", str(run.root), *ARGUMENTS, "--shard")
    while not (work / "checkpoint-3" / "trainer_state.json").exists():
        assert [rank.poll() for rank in ranks] == [None, None], ranks[0].communicate()
        time.sleep(0.01)
    ranks[0].kill()
    out, err = ranks[1].communicate(timeout=60)
    ranks[0].communicate()
    assert (ranks[1].returncode, out) == (BackendError.exit_code, "")
    assert "died without a word" in err.splitlines()[-1]
    parts = [load_file(work / "checkpoint-3" / f"rank-{rank}-of-2-model.safetensors") for rank in range(2)]
    assert [sum(each.numel() for each in part.values()) for part in parts] == [
        sum(each.numel() for each in learned(alone).values()) // 2
    ] * 2
    again = start(2, "-m", "fp8q", "distill", str(run.root), *ARGUMENTS, "--shard")
    said = [rank.communicate(timeout=300) for rank in again]
    assert [rank.returncode for rank in again] == [0, 0], said
    assert said[1] == ("", "")
    hold_to(alone, run)


def test_windows_that_ranks_cannot_share_are_refused_in_a_line(begun: Run) -> None:
    ranks = start(2, "-m", "fp8q", "distill", str(begun.root), "--batch-size", "3")
    (out, err), (others, silence) = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [InputError.exit_code] * 2
    assert (out, others, silence) == ("", "", "")
    assert err == (
        "fp8q: --batch-size 3: is the number of windows a step of all 2 ranks, which cannot have as many each; give a "
        "multiple of 2\n"
    )


def test_a_launcher_that_would_split_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_ranks(OPTIONS, World(ProcessRank(0, 2)))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    check_ranks(OPTIONS, World(ProcessRank(0, 2)))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(InputError) as refused:
        check_ranks(OPTIONS, World(ProcessRank(0, 2)))
    assert str(refused.value) == (
        "ACCELERATE_USE_FSDP is set: fp8q shares a model between ranks itself, by torch's FSDP2; unset it, start the "
        "ranks with torchrun, and give --shard"
    )


def test_models_are_shared_between_several_ranks_only_and_in_one_training() -> None:
    check_ranks(DistillOptions(shard=True), World(ProcessRank(0, 2)))
    with pytest.raises(InputError) as refused:
        check_ranks(DistillOptions(shard=True), World())
    assert str(refused.value) == (
        "--shard: shares the models between the ranks of torchrun, and this is one process; start it with torchrun "
        "--nproc-per-node N -m fp8q distill"
    )
    with pytest.raises(InputError) as refused:
        DistillOptions(shard=True, watch=10)
    assert str(refused.value) == (
        "--watch 10: is for whole models, of which --shard has a part on each rank; leave one out"
    )
    with pytest.raises(InputError) as refused:
        DistillOptions(shard=True, stream=True)
    assert str(refused.value) == (
        "--stream: learns layer by layer in one process, and --shard shares both models between several; leave one out"
    )
    with pytest.raises(InputError) as refused:
        DistillOptions(shard=True, train="adapter")
    assert str(refused.value) == (
        "--shard: is for --train weights, and this is --train adapter; choose that one, or leave this out"
    )


def test_a_model_with_experts_is_not_shared(shared_checkpoint: Callable[[str], Path]) -> None:
    source = open_source(str(shared_checkpoint("mixtral")))
    with pytest.raises(InputError) as refused:
        check_no_experts(source)
    assert str(refused.value) == (
        f"--shard: {source.name} has experts, and tokens of one rank may reach others than those of the next; leave "
        "--shard out, or learn layer by layer with --stream in one process"
    )


def test_what_a_rank_needs_falls_with_their_number_until_loading_takes_the_most() -> None:
    """20 bytes a weight are shared, and one is not; loading takes 5, and the teacher's share of 4."""
    assert [bytes_a_weight(DistillOptions(shard=True), World(ProcessRank(0, ranks))) for ranks in (2, 4, 8)] == [
        11.0, 6.0, 5.5,
    ]  # fmt: skip
    assert bytes_a_weight(OPTIONS, World(ProcessRank(0, 8))) == 26
