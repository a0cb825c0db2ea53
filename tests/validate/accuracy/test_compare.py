"""Runtimes one after the other: hand-made logits with known answers, chunks, and what happens when one fails."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from loaded_runtimes import compare_runtimes

from fp8q.calibrate.text.evaluation import cut
from fp8q.core.errors import BackendError
from fp8q.core.reporter import SILENT
from fp8q.validate.accuracy import compare as comparing
from fp8q.validate.accuracy.compare import (
    Forward,
    Outcome,
    Turns,
    compare_in_turn,
    lasting_runtimes,
    summarize_tokens,
)
from fp8q.validate.accuracy.divergence import NLL, TokenValues, kl_from

VOCABULARY = 8
IDS = np.random.default_rng(3).integers(0, VOCABULARY, 120)
EVALUATION = cut(IDS, "text", 6, 6)  # 20 windows, 100 tokens scored


@pytest.fixture(autouse=True)
def light(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is collected but where that is what is tested: after a hundred other tests it takes seconds a time."""
    if "memory" not in request.node.name:
        monkeypatch.setattr(comparing, "release_memory", lambda: None)


def table(seed: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * spread


def bigram(logits: torch.Tensor) -> Forward:
    return lambda ids: logits[torch.from_numpy(ids)]


def rank_of(ranks: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]) -> Forward:
    """Logits that fall by one with each token from `ranks(ids)` [windows, context] on, round the vocabulary."""

    def forward(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        first = torch.from_numpy(ranks(ids))[..., None]
        return -((torch.arange(VOCABULARY) - first) % VOCABULARY).float()

    return forward


def next_of(ids: npt.NDArray[np.int64], shift: int) -> npt.NDArray[np.int64]:
    """At each position the token `shift` places on (its own at the window's end)."""
    return np.concatenate([ids[:, shift:], ids[:, ids.shape[1] - shift :]], axis=1)


def nll_at(rank: int) -> float:
    """The loss of the token of that rank under logits 0, -1, -2 …"""
    return rank + float(np.log(np.exp(-np.arange(VOCABULARY)).sum()))


def test_a_token_is_scored_by_the_logits_before_it_and_by_no_other() -> None:
    """Who knows the next token loses what the likeliest costs; who is a place late or early does not."""
    runtimes = {"bf16": rank_of(lambda ids: next_of(ids, 1)), "late": rank_of(lambda ids: next_of(ids, 0))}
    found, nll = compare_runtimes(EVALUATION, runtimes, VOCABULARY, SILENT)
    assert found.runtimes["bf16"].nll_nats == pytest.approx(nll_at(0))
    ranks = (EVALUATION.ids[:, 1:] - EVALUATION.ids[:, :-1]) % VOCABULARY
    np.testing.assert_allclose(nll["late"][:, 1:], nll_at(0) + ranks, rtol=1e-6)
    assert found.runtimes["late"].nll_nats > nll_at(1)


@pytest.mark.parametrize("stride", [1, 2, 6])
def test_that_is_so_with_any_stride(stride: int) -> None:
    evaluation = cut(IDS, "text", 6, stride)
    found, nll = compare_runtimes(evaluation, {"bf16": rank_of(lambda ids: next_of(ids, 1))}, VOCABULARY, SILENT)
    assert found.runtimes["bf16"].nll_nats == pytest.approx(nll_at(0))
    np.testing.assert_array_equal(~np.isnan(nll["bf16"]), evaluation.scored)


def test_agreement_is_the_share_that_agrees() -> None:
    """A runtime whose order begins one token later in even positions: there the likeliest differs, and four of the five
    likeliest are the same. The scored tokens of a window of six follow positions 0 to 4: three even, two odd.
    """

    def half(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        later: npt.NDArray[np.int64] = ids + (np.arange(ids.shape[1]) % 2 == 0)
        return later

    found, _ = compare_runtimes(
        EVALUATION, {"bf16": rank_of(lambda ids: ids), "other": rank_of(half)}, VOCABULARY, SILENT
    )
    assert found.runtimes["other"].top1_agreement == pytest.approx(2 / 5)
    assert found.runtimes["other"].top5_agreement == pytest.approx((3 * 4 / 5 + 2) / 5)
    opposite = {"bf16": rank_of(lambda ids: ids), "other": rank_of(lambda ids: ids + 4)}
    found, _ = compare_runtimes(EVALUATION, opposite, VOCABULARY, SILENT)
    assert found.runtimes["other"].top1_agreement == 0
    assert found.runtimes["other"].top5_agreement == pytest.approx(2 / 5)


def test_one_token_in_a_hundred_has_a_kl_beyond_the_99th_percentile() -> None:
    """KL 0 to 100 at 101 tokens: 99 is exceeded by one of them, the mean is 50."""
    found: TokenValues = {
        NLL: np.zeros(101, np.float32),
        kl_from("bf16"): np.random.default_rng(1).permutation(101).astype(np.float32),
    }
    summary = summarize_tokens(found, None)
    assert summary.kl_p99_nats == pytest.approx(99)
    assert summary.kl_mean_nats == pytest.approx(50)


def test_the_distance_from_fp32_is_that_of_each_and_the_baselines_own() -> None:
    """KL of distributions over two tokens, by hand: the yardstick on the left."""
    evaluation = cut(np.zeros(8, np.int64), "text", 4, 4)
    shares = {"fp32": 1 / 2, "bf16": 1 / 4, "reference": 1 / 8}

    def forward(share: float) -> Forward:
        return lambda ids: torch.log(torch.tensor([share, 1 - share])).expand(*ids.shape, 2)

    def divergence(p: float, q: float) -> float:
        return float(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))

    found = compare_runtimes(evaluation, {name: forward(share) for name, share in shares.items()}, 2, SILENT)[
        0
    ].runtimes
    for name in ("bf16", "reference"):
        assert found[name].kl_fp32_nats == pytest.approx(divergence(1 / 2, shares[name]), rel=1e-5)
    for name in ("fp32", "reference"):
        assert found[name].kl_mean_nats == pytest.approx(divergence(1 / 4, shares[name]), rel=1e-5)
    assert (found["fp32"].kl_fp32_nats, found["bf16"].kl_mean_nats) == (None, None)
    assert found["fp32"].perplexity_increase == pytest.approx(0.5 - 1)  # 2 where BF16 has 4


def runtimes() -> dict[str, Forward]:
    base = table(0)
    return {
        "bf16": lambda ids: base.bfloat16()[torch.from_numpy(ids)],
        "reference": bigram(base + table(1, 0.1)),
        "fp32": bigram(base),
    }


def openers_of(made: dict[str, Forward], calls: list[str] | None = None) -> dict[str, comparing.Opener]:
    """What loads the runtimes, whose names are added to `calls`."""

    def opener(name: str) -> comparing.Opener:
        def load() -> Forward:
            if calls is not None:
                calls.append(name)
            return made[name]

        return load

    return {name: opener(name) for name in made}


def in_turn(folder: Path, made: dict[str, Forward], calls: list[str] | None = None) -> Outcome:
    return compare_in_turn(Turns(EVALUATION, openers_of(made, calls), VOCABULARY, folder / "work"), SILENT)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`small(n)`: batches of two windows, and chunks of `n` batches."""

    def chunks(batches: int) -> None:
        window = 4 * 6 * VOCABULARY
        monkeypatch.setattr(comparing, "LOGITS_BYTES", 2 * window)
        monkeypatch.setattr(comparing, "DISK_SHARE", 1.0)
        free = type("Usage", (), {"free": 2 * batches * 2 * window})  # two runtimes leave their logits
        monkeypatch.setattr("shutil.disk_usage", lambda folder: free)

    return chunks


def test_the_numbers_do_not_depend_on_the_chunks(small: Callable[[int], None], tmp_path: Path) -> None:
    found = dict[int, Outcome]()
    for batches in (100, 3, 1, 0):
        small(batches)
        folder, calls = tmp_path / str(batches), list[str]()
        folder.mkdir()
        found[batches] = in_turn(folder, runtimes(), calls)
        chunks = {100: 1, 3: 4, 1: 10, 0: 20}[batches]
        assert calls == ["bf16", "fp32", "reference"] * chunks  # the order of their turns
        assert found[batches].accuracy == found[100].accuracy
        for name, nll in found[batches].nll.items():
            np.testing.assert_array_equal(nll, found[100].nll[name])
        assert not [*folder.glob("work/*.logits")]
    assert list(found[1].accuracy.runtimes) == ["bf16", "reference", "fp32"]  # as they were asked for


def in_forms(folder: Path, lasting: Path, calls: list[str]) -> list[Outcome]:
    """Two forms of one run, with what the float model gives in `lasting`."""
    outcomes = []
    for number, seed in enumerate((1, 2)):
        made = runtimes() | {"reference": bigram(table(0) + table(seed, 0.1))}
        turns = Turns(EVALUATION, openers_of(made, calls), VOCABULARY, folder / f"form {number}", lasting=lasting)
        outcomes.append(compare_in_turn(turns, SILENT))
    return outcomes


def test_the_float_model_runs_once_for_two_forms_whose_numbers_are_those_of_each_alone(
    small: Callable[[int], None], tmp_path: Path
) -> None:
    small(100)
    calls: list[str] = []
    (lasting := tmp_path / "lasting").mkdir()
    assert lasting_runtimes(lasting) == set()
    outcomes = in_forms(tmp_path, lasting, calls)
    assert calls == ["bf16", "fp32", "reference", "reference"]
    assert lasting_runtimes(lasting) == {"bf16", "fp32"}
    for number, (outcome, seed) in enumerate(zip(outcomes, (1, 2), strict=True)):
        (alone := tmp_path / f"alone {number}").mkdir()
        expected = in_turn(alone, runtimes() | {"reference": bigram(table(0) + table(seed, 0.1))})
        assert outcome.accuracy == expected.accuracy
        for name, nll in expected.nll.items():
            np.testing.assert_array_equal(outcome.nll[name], nll)
        assert not [*(tmp_path / f"form {number}").glob("*bf16*")]
        assert not [*(tmp_path / f"form {number}").glob("*.logits")]


def test_a_text_of_several_chunks_keeps_no_logits_of_the_float_model(
    small: Callable[[int], None], tmp_path: Path
) -> None:
    """They would take more than a tenth of the disk: the float model runs again for them, and its results stay."""
    small(3)
    calls: list[str] = []
    (lasting := tmp_path / "lasting").mkdir()
    first, second = in_forms(tmp_path, lasting, calls)
    assert calls == ["bf16", "fp32", "reference"] * 8
    assert not [*lasting.glob("*.logits")]
    assert lasting_runtimes(lasting) == set()
    assert first.accuracy.runtimes["bf16"] == second.accuracy.runtimes["bf16"]
    assert first.accuracy.runtimes["reference"] != second.accuracy.runtimes["reference"]


def test_what_lasts_in_other_chunks_than_those_of_a_call_that_goes_on_is_left_alone(
    small: Callable[[int], None], tmp_path: Path
) -> None:
    small(100)
    calls: list[str] = []
    (lasting := tmp_path / "lasting").mkdir()
    in_forms(tmp_path, lasting, calls)
    before = {path.name: path.stat().st_mtime_ns for path in lasting.iterdir()}
    (going_on := tmp_path / "going on").mkdir()
    (going_on / "windows").write_text("6", encoding="utf-8")
    calls.clear()
    turns = Turns(EVALUATION, openers_of(runtimes(), calls), VOCABULARY, going_on, lasting=lasting)
    compare_in_turn(turns, SILENT)
    assert calls == ["bf16", "fp32", "reference"] * 4
    assert {path.name: path.stat().st_mtime_ns for path in lasting.iterdir()} == before


def test_what_is_kept_is_what_was_computed_and_at_most_what_was_meant(
    small: Callable[[int], None], tmp_path: Path
) -> None:
    small(3)
    made, sizes = runtimes(), list[int]()
    reference = made["reference"]

    def watching(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        sizes.append(sum(path.stat().st_size for path in tmp_path.glob("work/*.logits")))
        return reference(ids)

    in_turn(tmp_path, made | {"reference": watching})
    rows = 3 * 2 * 5 * VOCABULARY  # of a chunk, scored positions
    assert max(sizes) == rows * (2 + 4)  # BF16 and FP32
    assert [path.name for path in tmp_path.glob("work/*.logits")] == []


def test_a_killed_call_goes_on_at_the_next_turn(small: Callable[[int], None], tmp_path: Path) -> None:
    small(4)  # chunks of eight windows: 8, 8, 4
    whole = in_turn(tmp_path, runtimes())
    made, seen = runtimes(), list[int]()
    reference = made["reference"]

    def killed(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        seen.append(len(ids))
        if len(seen) == 6:  # within the second chunk
            raise KeyboardInterrupt
        return reference(ids)

    again = tmp_path / "again"
    again.mkdir()
    with pytest.raises(KeyboardInterrupt):
        in_turn(again, made | {"reference": killed})
    calls = list[str]()
    small(100)  # the disk has more room by now
    resumed = in_turn(again, runtimes(), calls)
    assert calls == ["reference", "bf16", "fp32", "reference"]
    assert resumed.accuracy == whole.accuracy
    assert in_turn(again, runtimes(), calls).accuracy == whole.accuracy
    assert len(calls) == 4  # nothing is left to run


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory"), MemoryError(), BackendError("", "the session died")]
)
def test_a_runtime_that_fails_half_way_leaves_the_others_alone(
    small: Callable[[int], None], tmp_path: Path, error: Exception
) -> None:
    small(4)
    whole, made, seen = in_turn(tmp_path, runtimes()), runtimes(), list[int]()

    def failing(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        seen.append(len(ids))
        if len(seen) == 6:
            raise error
        return made["reference"](ids)

    again = tmp_path / "again"
    again.mkdir()
    found = in_turn(again, made | {"reference": failing})
    said = str(error) or "MemoryError"
    assert found.failed == {"reference": f"reference: failed at window 11 to 12 of 20 ({said})"}
    assert found.accuracy.runtimes == {name: whole.accuracy.runtimes[name] for name in ("bf16", "fp32")}
    assert found.nll.keys() == {"bf16", "fp32"}
    calls = list[str]()
    assert in_turn(again, made, calls).accuracy == whole.accuracy
    assert calls == ["bf16", "fp32", "reference"] * 2  # the first chunk was done


@pytest.mark.parametrize("yardstick", ["bf16", "fp32"])
def test_what_others_are_compared_with_may_fail_and_is_made_up_for(tmp_path: Path, yardstick: str) -> None:
    def failing(ids: npt.NDArray[np.int64]) -> torch.Tensor:
        raise MemoryError

    found = in_turn(tmp_path, runtimes() | {yardstick: failing})
    others = {"bf16", "fp32", "reference"} - {yardstick}
    assert (set(found.failed), set(found.nll)) == ({yardstick}, others)
    field = {"bf16": "kl_mean_nats", "fp32": "kl_fp32_nats"}
    assert getattr(found.accuracy.runtimes["reference"], field.pop(yardstick)) is None
    assert getattr(found.accuracy.runtimes["reference"], *field.values()) is not None
    again = in_turn(tmp_path, runtimes())
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    assert (again.accuracy, again.failed) == (in_turn(fresh, runtimes()).accuracy, {})


def test_a_runtime_that_does_not_load_is_told(tmp_path: Path) -> None:
    def opener() -> Forward:
        raise RuntimeError("no\nmemory")

    found = compare_in_turn(Turns(EVALUATION, {"fp32": opener}, VOCABULARY, tmp_path / "work"), SILENT)
    assert found.failed == {"fp32": "fp32: cannot be loaded (no memory)"}
    with pytest.raises(BackendError, match=r"^bf16: failed at window 1 to 20 of 20 \(CUDA error\)$"):
        compare_runtimes(EVALUATION, {"bf16": failing_forward}, VOCABULARY, SILENT)


def failing_forward(ids: npt.NDArray[np.int64]) -> torch.Tensor:
    raise RuntimeError("CUDA error")


def test_a_fault_of_ours_is_no_failure_of_a_runtime(tmp_path: Path) -> None:
    def opener() -> Forward:
        raise TypeError("a fault")

    with pytest.raises(TypeError, match="^a fault$"):
        compare_in_turn(Turns(EVALUATION, {"bf16": opener}, VOCABULARY, tmp_path / "work"), SILENT)


def test_one_runtime_is_in_memory_at_a_time(small: Callable[[int], None], tmp_path: Path) -> None:
    alive, most = set[str](), list[int]()

    class Loaded:
        def __init__(self, name: str) -> None:
            self.name, self.itself = name, self  # as models are: in a circle
            alive.add(name)
            most.append(len(alive))

        def __call__(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
            return table(0)[torch.from_numpy(ids)]

        def __del__(self) -> None:
            alive.discard(self.name)

    small(4)
    openers = {name: (lambda name=name: Loaded(name)) for name in ("bf16", "fp32", "reference")}
    compare_in_turn(Turns(EVALUATION, openers, VOCABULARY, tmp_path / "work"), SILENT)
    assert most == [1] * 9
    assert alive == set()


def test_a_tenth_of_the_free_disk_holds_the_logits_of_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = 4 * 6 * VOCABULARY
    monkeypatch.setattr(comparing, "LOGITS_BYTES", 2 * window)
    # whole batches; half of the disk for one batch, and one window in any case
    for free, windows in ((10 * 7 * window, 6), (10 * 20 * window, 20), (4 * window, 2), (2 * window, 1), (1, 1)):
        monkeypatch.setattr("shutil.disk_usage", lambda folder, free=free: type("U", (), {"free": free}))
        folder = tmp_path / str(free)
        folder.mkdir()
        turns = Turns(EVALUATION, {"bf16": failing_forward}, VOCABULARY, folder)  # type: ignore[dict-item]
        assert turns.chunk == windows
