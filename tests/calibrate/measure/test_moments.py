"""Second moments: the sum over all tokens, of each distinct tensor, in files."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gpu.waits import host_waits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fp8q.calibrate.measure import moments
from fp8q.calibrate.measure.moments import (
    SecondMoments,
    add_matmul,
    add_moments,
    gathering,
    load_moments,
    moments_file,
)
from fp8q.calibrate.model.memory import has_room
from fp8q.core.run import Run


def test_batches_add_up_to_the_moments_of_all_tokens(tmp_path: Path) -> None:
    x = torch.randn(3, 5, 7, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moments = SecondMoments(tmp_path)
    for batch in x:
        moments.add("layer", batch)
    assert moments.close() == ["layer"]
    tokens = x.double().flatten(0, -2)
    np.testing.assert_allclose(
        load_moments(tmp_path, "layer").numpy(), (tokens.T @ tokens).numpy(), rtol=1e-5, atol=1e-4
    )


def test_first_tokens_of_windows_are_added_as_often_as_their_weight(tmp_path: Path) -> None:
    x = torch.tensor([[[1.0, 2.0], [5.0, 7.0]], [[3.0, 0.0], [0.0, 1.0]]])
    moments = SecondMoments(tmp_path, first_apart=True)
    for windows in x.split(1):
        moments.add("a", windows)
        moments.add("flat", windows[0])  # no windows are told there
    moments.close()
    every = [[1 + 9 + 25, 2 + 35], [2 + 35, 4 + 49 + 1]]
    assert load_moments(tmp_path, "a").tolist() == load_moments(tmp_path, "flat").tolist() == every
    assert load_moments(tmp_path, "flat", first=4.0).tolist() == every
    weighed = [[4 * (1 + 9) + 25, 4 * 2 + 35], [4 * 2 + 35, 4 * 4 + 49 + 1]]
    assert load_moments(tmp_path, "a", first=4.0).tolist() == weighed
    assert load_moments(tmp_path, "a", first=0.0).tolist() == [[25, 35], [35, 49 + 1]]
    left = 2 / (2 + 3 * 2)  # two tokens behind the first ones, and three that are uncorrelated for each of two channels
    shrunk = [[4 * (1 + 9) + 25, 4 * 2 + left * 35], [4 * 2 + left * 35, 4 * 4 + 49 + 1]]
    assert load_moments(tmp_path, "a", first=4.0, window=2).tolist() == shrunk
    assert load_moments(tmp_path, "flat", first=4.0, window=2).tolist() == every


def test_large_sums_leave_memory_once_a_batch_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of them is lost."""
    monkeypatch.setattr(moments, "MAPPED_BYTES", 0)
    x, names, store = torch.randn(64, 2048), [*"abcdefgh"], SecondMoments(tmp_path)
    mapped = mapped_bytes()
    for name in 2 * names:
        store.add(name, x)
    grown = mapped_bytes() - mapped
    store.close()
    size = moments_file(tmp_path, "a").stat().st_size
    assert grown < 2 * size, "all eight are 8 times as much"
    for name in names:
        torch.testing.assert_close(load_moments(tmp_path, name), 2 * x.T @ x)


def mapped_bytes() -> int:
    """The bytes of files in this process's memory."""
    _, _, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(shared) * os.sysconf("SC_PAGE_SIZE")


def test_what_comes_after_closing_begins_anew(tmp_path: Path) -> None:
    moments = SecondMoments(tmp_path)
    for _ in range(2):
        moments.add("layer", torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
        assert moments.close() == ["layer"]
    assert load_moments(tmp_path, "layer").tolist() == [[1, 2], [2, 5]]


def test_the_run_s_folder_holds_what_was_added_up_and_nothing_older(tmp_path: Path) -> None:
    run, work = Run(tmp_path), tmp_path / "work"
    for name, folder in (("old", None), ("new", work)):
        with gathering(run, True, folder) as moments:
            assert moments is not None
            moments.add(name, torch.ones(1, 3, 2))
        assert {path.name for path in run.moments.iterdir()} == {f"{name}.npy", f"{name}.first.npy"}
    assert {path.name for path in work.iterdir()} == {"new.npy", "new.first.npy"}
    with gathering(run, False) as moments:
        assert moments is None
    assert not run.moments.exists()


def test_a_full_disk_is_an_error_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left on device"):
        SecondMoments(tmp_path).add("layer", torch.ones(1, 4))
    assert moments_file(tmp_path, "layer") == tmp_path / "layer.npy"


def test_on_a_gpu_batches_are_added_there_and_copied_once_when_the_layer_ends(tmp_path: Path) -> None:
    """Counted on the meta device, which stands for it."""
    moments = SecondMoments(tmp_path)
    with host_waits() as counted:
        for _ in range(3):
            moments.add("layer", torch.ones(2, 5, 16, device="meta"))
        assert (counted.waits, counted.to_memory) == (0, 0)
        moments.close()
    assert (counted.waits, counted.to_memory) == (1, 4 * 16 * 16)


class Dispatched(TorchDispatchMode):
    """Records each operation, with the types of the tensors that it takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((str(func), [x.dtype for x in args if isinstance(x, torch.Tensor)]))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("held", ["cuda", "cpu"])
def test_on_a_gpu_16_bit_inputs_are_multiplied_as_they_are_and_added_up_in_fp32(held: str) -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    with FakeTensorMode():
        total, x = torch.zeros(8, 8, device=held), torch.ones(5, 8, device="cuda", dtype=bf16)
        with Dispatched() as dispatched:
            add_matmul(total, x, x)
            add_matmul(total, x.float(), x.float())
    gemms = [call for call in dispatched.calls if "mm" in call[0]]
    assert gemms[0] == ("aten.mm.dtype", [bf16, bf16])
    assert gemms[1] == (("aten.addmm_.default", [fp32] * 3) if held == "cuda" else ("aten.mm.default", [fp32] * 2))
    added = [types for name, types in dispatched.calls if name == "aten.add_.Tensor"]
    assert added == [[fp32, fp32]] * (1 if held == "cuda" else 2)


def test_inputs_stay_of_16_bits_where_a_gpu_has_units_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The units are named here, since no GPU is."""
    seen = list[torch.dtype]()

    def add(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        seen.append(left.dtype)

    monkeypatch.setattr("fp8q.calibrate.measure.moments.add_matmul", add)
    for exact in (False, True):
        monkeypatch.setattr("fp8q.calibrate.measure.moments.has_exact_units", lambda x, exact=exact: exact)
        SecondMoments(tmp_path / str(exact)).add("layer", torch.ones(2, 3, 4, dtype=torch.bfloat16))
    assert seen == [torch.float32, torch.bfloat16]


def test_on_a_gpu_first_tokens_stay_there_while_batches_come(tmp_path: Path) -> None:
    moments = SecondMoments(tmp_path, first_apart=True)
    with host_waits() as counted:
        for _ in range(3):
            moments.add("layer", torch.ones(2, 5, 16, device="meta"))
        assert (counted.waits, counted.to_memory) == (0, 0)


def test_on_a_gpu_without_room_each_batch_is_added_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.calibrate.measure.moments.has_room", lambda device, size: False)
    moments = SecondMoments(tmp_path)
    with host_waits() as counted:
        for _ in range(3):
            moments.add("layer", torch.ones(2, 5, 16, device="meta"))
    assert (counted.waits, counted.to_memory) == (3, 3 * 4 * 16 * 16)


@pytest.mark.parametrize(("free", "fits"), [(24, True), (23, False)])
def test_a_fifth_of_a_gpu_stays_free(free: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    assert has_room(torch.device("cuda"), 8 << 30) is fits


def test_parts_are_added_in_order_and_their_tokens_follow_one_another(tmp_path: Path) -> None:
    """1 + 2⁻²⁴ is rounded away in FP32, and three of them are not where the sum is rounded once; the second part lacks
    an expert.
    """
    half = 2.0**-24
    one = np.eye(1, dtype=np.float32)
    small = np.full((2, 2), half, np.float32)
    parts: list[dict[str, npt.NDArray[Any]]] = [
        {"a.npy": np.ones((2, 2), np.float32), "a.first.npy": np.array([[1, 2]], np.int16), "e.npy": one},
        {"a.npy": small, "a.first.npy": np.array([[3, 4]], np.int16)},
        {"a.npy": small, "e.npy": one, "e.held_out.npy": np.ones((3, 1), np.int16)},
    ]
    folders = [tmp_path / str(number) for number in range(3)]
    for folder, files in zip(folders, parts, strict=True):
        folder.mkdir()
        for name, array in files.items():
            np.save(folder / name, array)
    (out := tmp_path / "out").mkdir()
    add_moments(folders, out)
    found = {path.name: np.load(path).tolist() for path in out.iterdir()}
    assert found == {
        "a.npy": [[1 + 2 * half] * 2] * 2, "a.first.npy": [[1, 2], [3, 4]], "e.npy": [[2.0]],
        "e.held_out.npy": [[1]] * 3,
    }  # fmt: skip
