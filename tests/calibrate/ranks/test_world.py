"""Several processes that measure together: the bytes of one process, and an end with a name when one of them dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q import api
from fp8q.calibrate.measure.histogram import PATTERNS, Histogram
from fp8q.calibrate.measure.statistics import (
    Corpus,
    ModelIdentity,
    Statistics,
    StatisticsRecord,
    TensorStatistics,
    load_statistics,
    save_arrays,
)
from fp8q.calibrate.model.bf16_gemms import bf16_arithmetic
from fp8q.calibrate.ranks.heartbeat import RankError, RankFailure
from fp8q.calibrate.ranks.torchrun import ProcessRank, process_rank
from fp8q.calibrate.ranks.world import World, _check_alike
from fp8q.core.errors import BackendError, InputError
from fp8q.core.files import write_document
from fp8q.core.output_folder import WorkFolder
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.stages.measure import check_batches

from ...mixtures import random_mixture, starve
from ..model.damage import rewrite

#: 21 batches, the last of one window: two ranks share them 11 to 10. The number of threads is that of these tests.
OPTIONS = CalibrateOptions(samples=41, seq_len=128, batch_size=2, batches=(0, 21))
ARGUMENTS = ["--samples", "41", "--seq-len", "128", "--batch-size", "2", "--batches", "0:21"]
HOST = socket.gethostname()


@pytest.fixture(scope="module")
def alone(demo_checkpoint: Path, demo_texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("alone") / "run"
    return api.calibrate(str(demo_checkpoint), str(demo_texts.calibration), out, str(demo_texts.evaluation), OPTIONS)


def command(out: Path, checkpoint: Path, texts: Any) -> list[str]:
    return [
        "calibrate",
        str(checkpoint),
        "--data",
        str(texts.calibration),
        "--eval-data",
        str(texts.evaluation),
        "--out",
        str(out),
        *ARGUMENTS,
    ]


def written(run: Run) -> bytes:
    return run.statistics.read_bytes() + run.statistics_json.read_bytes() + run.calibration.read_bytes()


def start(count: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """`python *arguments` as each of `count` ranks, with nobody to end the others when one dies: as on several
    machines.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments],
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


@pytest.mark.slow
def test_two_ranks_of_torchrun_write_the_bytes_of_one_process_and_one_of_them_speaks(
    alone: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fp8q"]
    run = Run(tmp_path / "run")
    done = subprocess.run(
        [*torchrun, *command(run.root, demo_checkpoint, demo_texts), "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert written(run) == written(alone)
    assert [row["stage"] for row in json.loads(done.stdout)["stages"]] == ["corpus", "measure"]
    assert done.stderr.count("measuring on 2 ranks of") == done.stderr.count("`fp8q merge` adds them") == 1
    measured = run.record().stages["measure"]
    assert measured.notes == [f"measuring on 2 ranks of {HOST} (CPU), 1 thread each (OMP_NUM_THREADS)"]
    where = {"device": "CPU", "threads": 1, "ranks": 2, "hosts": [HOST]}
    assert measured.machine == where | bf16_arithmetic("cpu")
    assert {path.name for path in run.root.iterdir()} == {path.name for path in alone.root.iterdir()}


@pytest.mark.slow
def test_two_ranks_of_which_each_misses_an_expert_write_the_bytes_of_one_process(
    demo_texts: Any, tmp_path: Path
) -> None:
    path = random_mixture(tmp_path / "mixture", "qwen3_moe")
    rewrite(path, starve)
    options = CalibrateOptions(samples=8, seq_len=16, batch_size=2, batches=(0, 4))
    one = api.calibrate(str(path), str(demo_texts.calibration), tmp_path / "one", str(demo_texts.evaluation), options)
    sizes = ["--samples", "8", "--seq-len", "16", "--batch-size", "2", "--batches", "0:4"]
    texts = ["--data", str(demo_texts.calibration), "--eval-data", str(demo_texts.evaluation)]
    ranks = start(2, "-m", "fp8q", "calibrate", str(path), *texts, *sizes, "--out", str(tmp_path / "two"))
    ended = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ended
    assert written(Run(tmp_path / "two")) == written(one)
    assert load_statistics(one).tensors["model.layers.0.mlp.experts.2.down_proj.input"].histogram.samples == 0


def killed(dead: int, run: Run, arguments: list[str]) -> None:
    """Start two ranks, kill one of them once it has hidden states to go on from, and hold the other to the line it ends
    with.
    """
    ranks = start(2, *arguments)
    folder = run.root / ".measure.work" / ("rank-1" if dead else "")
    while not (folder / "00000.safetensors").exists():
        assert [rank.poll() for rank in ranks] == [None, None], ranks[0].communicate()
        time.sleep(0.001)
    ranks[dead].send_signal(signal.SIGKILL)
    since = time.monotonic()
    out, err = ranks[1 - dead].communicate(timeout=60)
    assert time.monotonic() - since < 30
    assert (ranks[1 - dead].returncode, out) == (BackendError.exit_code, "")
    assert err.splitlines()[-1] == (
        f"fp8q: rank {dead} (process {ranks[dead].pid} on {HOST}) died without a word (killed, out of memory, or its "
        "machine is gone); "
        "what started it has its exit code; the same command goes on from what is finished"
    )
    ranks[dead].communicate()


@pytest.mark.slow
def test_the_first_rank_killed_fails_the_other_with_its_name(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    killed(0, run, ["-m", "fp8q", *command(run.root, demo_checkpoint, demo_texts), "--stream"])
    assert not run.statistics.exists()


@pytest.mark.slow
def test_another_rank_killed_fails_the_first_with_its_name_and_both_go_on_from_there(
    alone: Run, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    arguments = ["-m", "fp8q", *command(run.root, demo_checkpoint, demo_texts), "--stream"]
    killed(1, run, arguments)
    assert not run.statistics.exists()
    assert (run.root / ".measure.work" / "rank-1" / "00000.safetensors").is_file()
    again = start(2, *arguments)
    said = [rank.communicate(timeout=120) for rank in again]
    assert [rank.returncode for rank in again] == [0, 0], said
    assert said[1] == ("", "")
    assert written(run) == written(alone)
    assert ".measure.work" not in {path.name for path in run.root.iterdir()}


#: A rank adds what is in its file; of three ranks the second fails then, while the others are busy.
CHILD = """
import sys, time
from pathlib import Path
from fp8q.calibrate.ranks.heartbeat import RankError
from fp8q.calibrate.ranks.world import joined_ranks
from fp8q.calibrate.measure.statistics import Statistics, StatisticsRecord, load_arrays, save_arrays
from fp8q.core.errors import InputError
from fp8q.core.files import read_document
folder = Path(sys.argv[1])
try:
    with joined_ranks() as world:
        record = read_document(folder / f"{world.rank}.json", StatisticsRecord)
        total = world.added(Statistics(record, *load_arrays(folder / f"{world.rank}.safetensors")))
        save_arrays(folder / f"added-{world.rank}.safetensors", total.tensors, total.weights)
        print([member["rank"] for member in world.gathered({"rank": world.rank})], total.record.tokens)
        if world.rank == 1:
            raise InputError("", "the disk\\nis full")
        try:
            time.sleep(60)
        except Exception:
            print("what ends a rank was taken for an error of what it does")
except (InputError, RankError) as error:
    print(type(error).__name__, error.exit_code, error)
"""


@pytest.mark.slow
def test_what_ranks_add_is_what_merging_adds_and_a_failure_reaches_all_with_its_cause(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    corpus = Corpus(name="random", fingerprint="0", windows=3, seq_len=1, batch_size=1)
    record = StatisticsRecord(
        model=ModelIdentity(name="m", architecture="A", fingerprint="0"), corpus=corpus, tokens=7, groups={"a": ["a"]}
    )
    parts = []
    for rank in range(3):
        counts = random.integers(0, 3, PATTERNS) * (random.random(PATTERNS) < 0.01)
        amax = np.full(3, np.nan, np.float32)
        amax[rank] = rank
        # NaN of many kinds and infinity among them
        channels = (random.integers(0, PATTERNS, 50).astype(np.uint32) << 16).view(np.float32)
        tensors = {"a.input": TensorStatistics(Histogram.from_dense(counts), amax, channels)}
        parts.append(Statistics(record, tensors, {"a": np.ones(2, np.float32)}))
        save_arrays(tmp_path / f"{rank}.safetensors", tensors, parts[-1].weights)
        write_document(tmp_path / f"{rank}.json", record)
    ranks = start(3, "-c", CHILD, str(tmp_path))
    said = [rank.communicate(timeout=60) for rank in ranks]
    failure = f"rank 1 (process {ranks[1].pid} on {HOST}): the disk is full"
    for rank, (out, err) in enumerate(said):
        assert (
            out.splitlines() == ["[0, 1, 2] 21", "InputError 2 the disk", "is full"]
            if rank == 1
            else ["[0, 1, 2] 21", f"RankError 2 {failure}"]
        ), err
    total = reduce(Statistics.merge, parts)
    save_arrays(tmp_path / "merged.safetensors", total.tensors, total.weights)
    assert {(tmp_path / f"added-{rank}.safetensors").read_bytes() for rank in range(3)} == {
        (tmp_path / "merged.safetensors").read_bytes()
    }


def test_a_rank_with_a_directory_of_its_own_leaves_nothing_in_it(tmp_path: Path) -> None:
    """On a machine that does not share the run, where the disk is full, and where all went well."""
    run = Run(tmp_path / "other-machine" / "run")
    with pytest.raises(InputError), WorkFolder(run.root, "measure", 3).opened({}):
        raise InputError("", "no room")
    assert not run.root.exists()
    with WorkFolder(run.root, "measure", 3).opened({}) as folder:
        assert folder == run.root / ".measure.work" / "rank-3"
    WorkFolder(run.root, "measure", 3).leave()
    assert not run.root.exists()
    with WorkFolder(run.root, "measure", 2).opened({}), WorkFolder(run.root, "measure", 3).opened({}):
        WorkFolder(run.root, "measure", 3).leave()
    assert [path.name for path in (run.root / ".measure.work").iterdir()] == ["rank-2"]


def test_a_place_is_told_by_the_variables_of_torchrun() -> None:
    meeting = {"MASTER_ADDR": "node-a", "MASTER_PORT": "29500"}
    assert (
        process_rank({})
        == process_rank({"WORLD_SIZE": "4"})
        == process_rank({"RANK": "0", "WORLD_SIZE": "1"})
        == ProcessRank(0, 1, 0, 1)
    )
    assert process_rank(
        meeting | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    ) == ProcessRank(5, 8, 1, 4)
    with pytest.raises(
        InputError, match=r"^RANK is 1 of 2, and MASTER_PORT is not set; start the ranks with torchrun, or unset RANK$"
    ):
        process_rank({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-a"})


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        (
            {},
            6,
            (
                "6 ranks and 5 batches: 1 of the ranks would have nothing to measure; start at most 5, or ask for more "
                "--samples or a smaller --batch-size than 2"
            ),
        ),
        (
            {"batches": (1, 3)},
            4,
            "4 ranks and 2 batches: 2 of the ranks would have nothing to measure; start at most 2, ",
        ),
        ({"batches": (1, 6)}, 1, "--batches 1:6: 9 windows make 5 batches of 2; end at 5, or ask for more --samples"),
        (
            {"weight_rounding": "gptq", "stream": False},
            2,
            (
                "--no-stream: 2 ranks hand second moments on after each decoder layer; leave it out, or start one "
                "process"
            ),
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused_with_the_numbers(
    options: dict[str, Any], ranks: int, message: str
) -> None:
    with pytest.raises(InputError) as refused:
        check_batches(CalibrateOptions(batch_size=2, **options), 9, World(ProcessRank(0, ranks)))
    assert str(refused.value).startswith(message)


def test_a_command_for_one_process_is_refused_to_several() -> None:
    (first, *_) = ranks = start(2, "-m", "fp8q", "inspect", "run")
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert first.returncode == 2
    assert (
        said
        == [
            (
                "",
                (
                    "fp8q: fp8q inspect: is the work of one process, and 2 ranks were started; run it without "
                    "torchrun, "
                    "or unset RANK\n"
                ),
            )
        ]
        * 2
    )


def test_batches_are_shared_out_once_each() -> None:
    shares = [World(ProcessRank(rank, 3)).share(range(2, 10)) for rank in range(3)]
    assert shares == [[2, 5, 8], [3, 6, 9], [4, 7]]


def test_ranks_that_would_round_differently_are_refused_by_name() -> None:
    members = [
        {"name": f"rank {rank} on node-{rank}", "alike": {"torch": "2.13.0", "threads": threads}}
        for rank, threads in enumerate((8, 8, 1))
    ]
    with pytest.raises(InputError) as refused:
        _check_alike(members)
    assert str(refused.value) == (
        "rank 2 on node-2: its threads is 1, and rank 0's is 8: their sums would round differently; set "
        "OMP_NUM_THREADS to the same number for all"
    )


def test_the_error_of_another_rank_has_its_exit_code() -> None:
    assert RankError(RankFailure(rank=1, name="rank 1", message="no space", code=2)).exit_code == 2
    assert RankError(RankFailure(rank=1, name="rank 1")).exit_code == 4
