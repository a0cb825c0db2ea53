"""Errors as values: their parts, how they are rendered, copied and pickled."""

import copy
import pickle
from pathlib import Path

import pytest

from fp8q.calibrate.ranks.heartbeat import RankError, RankFailure
from fp8q.core.errors import BackendError, Fp8qError, GateError, InputError, NoGraphError, UnfinishedError
from fp8q.export.graph.trace import UntraceableError


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (("--seq-len 0", "must be at least 1", "give more"), "--seq-len 0: must be at least 1; give more"),
        (("--seq-len 0", "must be at least 1"), "--seq-len 0: must be at least 1"),
        (("", "nothing was said", "give --prompt"), "nothing was said; give --prompt"),
        (("", "nothing was said"), "nothing was said"),
    ],
)
def test_an_error_is_rendered_as_one_line_without_its_empty_parts(parts: tuple[str, ...], line: str) -> None:
    assert str(InputError(*parts)) == line


def test_an_error_has_its_parts_as_fields() -> None:
    error = InputError(Path("run/scales.json"), "is missing", "calibrate again")
    assert (error.subject, error.fault, error.remedy) == ("run/scales.json", "is missing", "calibrate again")


def test_the_exit_code_is_of_the_class() -> None:
    kinds = (Fp8qError, InputError, GateError, BackendError, UnfinishedError)
    assert [kind("a", "b").exit_code for kind in kinds] == [1, 2, 3, 4, 4]


def test_the_path_of_the_run_is_put_into_commands_alone() -> None:
    error = InputError("RUN is set", "`fp8q export RUN` wrote it to RUN", "`fp8q scales RUN --kv-cache off`")
    error.fill_run(Path("a run"))
    assert str(error) == "RUN is set: `fp8q export 'a run'` wrote it to RUN; `fp8q scales 'a run' --kv-cache off`"
    error.fill_run(Path("another"))
    assert error.remedy == "`fp8q scales 'a run' --kv-cache off`"


@pytest.mark.parametrize(
    "error",
    [
        InputError(Path("x"), "is missing", "make it"),
        GateError("x", "is more", "ask for less"),
        UntraceableError("torch.export fails"),
        RankError(RankFailure(rank=1, name="rank 1", code=3, message="it broke")),
        NoGraphError(Path("run"), "its cache slides"),
    ],
)
def test_copies_keep_class_parts_and_exit_code(error: Fp8qError) -> None:
    for made in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (type(made), str(made), made.exit_code) == (type(error), str(error), error.exit_code)
        assert vars(made) == vars(error)


def test_a_rank_that_said_nothing_is_the_fault_itself() -> None:
    error = RankError(RankFailure(rank=1, name="rank 1"))
    assert (error.subject, error.remedy) == ("", "the same command goes on from what is finished")
    assert str(error) == (
        "rank 1 died without a word (killed, out of memory, or its machine is gone); what started it has its exit "
        "code; the same command goes on from what is finished"
    )


def test_a_run_without_a_graph_is_told_what_runs_its_checkpoint() -> None:
    error = NoGraphError(Path("a run"), "its cache slides")
    assert str(error) == (
        "a run: has no ONNX graph, since its cache slides; `fp8q generate 'a run' --runtime reference` runs its "
        "checkpoint, and a run/model/README.md says what else does"
    )
