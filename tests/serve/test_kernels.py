"""The kernels of the loop: Triton's interpreter runs their source on a CPU, and `ptxas` assembles what is compiled."""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from fp8q.serve import kernels
from fp8q.serve.loop.cache import CacheLayout
from fp8q.serve.loop.cuda import CudaError, CudaFaultError
from fp8q.serve.loop.device import BrokenDeviceError, Function
from fp8q.serve.loop.device_kernels import LINE_HALVES, PTX, SUMMARIZE, THREADS, TILE, WORDS, load_kernels
from fp8q.serve.loop.sampling import BLOCK
from tests.serve.host_engine import HostDevice
from tests.stand_in.kernels import entries, run_kernel

#: GPUs that fp8q serves on.
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
LAYOUT = CacheLayout(("0.key", "0.value"), ((2, 64), (2, 64)), (np.dtype(np.uint8),) * 2)


def tensor(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Memory at an address."""
    size = count * torch.empty((), dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


class InterpretedDevice(HostDevice):
    """A device whose kernels are Triton's source, run by its interpreter."""

    def launch(self, function: Function, grid: tuple[int, int], threads: int, arguments: Sequence[Any]) -> None:
        name, _ = self.loaded[function]
        self.launched.append(name)
        values = [argument.value for argument in arguments[:-2]]
        self.queue.append(lambda: self.interpret(name, grid, values))

    @np.errstate(invalid="ignore", over="ignore")  # of logits that are no numbers, and of the lowest one
    def interpret(self, name: str, grid: tuple[int, int], values: list[int]) -> None:
        if name == "scatter":
            new_at, past_at, slots_at, words, row, _line, _past_line, new_tensor, past_tensor = values
            tensors = grid[1]
            kernels.scatter[grid](
                tensor(new_at, torch.int32, (tensors - 1) * new_tensor + words),
                tensor(past_at, torch.int32, tensors * past_tensor),
                tensor(slots_at, torch.int64, words // row),
                *values[3:],
                WORDS,
            )
        elif name == "gather_blocks":
            logits_at, pairs_at, out_at, row, block = values
            pairs = tensor(pairs_at, torch.int32, 2 * grid[0])
            logits = tensor(logits_at, torch.int16, row * (int(pairs[::2].max()) + 1))
            out = tensor(out_at, torch.int16, grid[0] * block)
            kernels.gather_blocks[grid](logits, pairs, out, row, block, LINE_HALVES)
        else:
            (kind,) = [kind for kind, kernel in SUMMARIZE.items() if kernel == name]
            dtype = {"uint16": torch.int16, "float16": torch.float16, "float32": torch.float32}[kind]
            logits_at, inverses_at, *summary, vocabulary, blocks = values
            count = grid[1] * blocks
            types = (torch.float32, torch.float32, torch.int32)
            made = [tensor(address, each, count) for address, each in zip(summary, types, strict=True)]
            kernels.summarize[grid](
                tensor(logits_at, dtype, grid[1] * vocabulary),
                tensor(inverses_at, torch.float32, grid[1]),
                *made, vocabulary, blocks, kind == "uint16", TILE, BLOCK,
            )  # fmt: skip


def test_the_example_that_is_tried_on_every_gpu_passes_in_triton_s_interpreter() -> None:
    """It holds every kernel, of every type of logits, against NumPy."""
    device = InterpretedDevice()
    assert load_kernels(device, LAYOUT) is not None
    assert set(device.launched) == {"scatter", "gather_blocks", *SUMMARIZE.values()}
    device.wait()
    assert device.memory == {}


@given(st.integers(1, 3), st.integers(1, 200), st.sampled_from([*SUMMARIZE]), st.integers(0, 2**32 - 1), st.booleans())
def test_summaries_are_those_of_numpy(rows: int, vocabulary: int, kind: str, seed: int, forbidden: bool) -> None:
    """The stand-in of a GPU makes them by NumPy; logits are few values, of which many are alike and some forbidden."""
    random = np.random.default_rng(seed)
    values = random.integers(-6, 6, (rows, vocabulary)).astype(np.float32)
    if forbidden:
        values[random.random(values.shape) < 0.7] = -np.inf
        values[random.random(values.shape) < 0.2] = np.finfo(np.float32).min if kind != "float16" else -6e4
    dtype = np.dtype(kind)
    logits = (values.view(np.uint32) >> 16).astype(dtype) if dtype == np.uint16 else values.astype(dtype)
    inverses, blocks = np.array([1.0, 0.5, 4.0][:rows], np.float32), -(-vocabulary // BLOCK)
    grid, name, found = (-(-blocks // TILE), rows), SUMMARIZE[kind], list[list[np.ndarray]]()
    for interpreted in (True, False):
        summary = [np.full(rows * blocks, 7, kind) for kind in (np.float32, np.float32, np.int32)]
        arguments = [*(array.ctypes.data for array in (logits, inverses, *summary)), vocabulary, blocks]
        if interpreted:
            InterpretedDevice().interpret(name, grid, arguments)
        else:
            run_kernel(name, grid, [*arguments, 0, 0], lambda address, size: True)
        found.append(summary)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_a_kernel_that_answers_otherwise_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(HostDevice):
        wrong = "scatter"

        def launch(self, function: Function, grid: tuple[int, int], threads: int, arguments: Sequence[Any]) -> None:
            if self.loaded[function][0] != self.wrong:
                super().launch(function, grid, threads, arguments)

    said = []
    for Wrong.wrong in ("scatter", "summarize_bf16", "gather_blocks"):
        assert load_kernels(Wrong(), LAYOUT) is None
        said.append(caplog.messages[-1])
    assert said == [
        f"the kernels that choose tokens on the GPU are not used ({name} gives something else than it should); all "
        "logits go to the host, which is slower"
        for name in ("scatter", "summarize_bf16", "gather_blocks")
    ]


def test_a_captured_kernel_that_does_nothing_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """A step's first run, uncaptured, would have stored the same keys and values already."""

    class Forgetful(HostDevice):
        def captured(self, work: Callable[[], None]) -> Callable[[], None]:
            return lambda: None

    assert load_kernels(Forgetful(), LAYOUT) is None
    assert "(scatter gives something else than it should)" in caplog.messages[0]


def test_a_kernel_that_fails_on_the_gpu_is_an_error() -> None:
    """The context is lost with it, so that nothing else would work either."""

    class Faulty(HostDevice):
        def launch(self, function: Function, grid: tuple[int, int], threads: int, arguments: Sequence[Any]) -> None:
            raise CudaFaultError("cuStreamSynchronize failed with 700 (an illegal memory access was encountered)")

    with pytest.raises(BrokenDeviceError, match="^cuStreamSynchronize failed with 700"):
        load_kernels(Faulty(), LAYOUT)


def test_a_cache_of_broken_words_is_written_by_copies(caplog: pytest.LogCaptureFixture) -> None:
    narrow = CacheLayout(("0.key",), ((2, 6),), (np.dtype(np.uint8),))
    assert load_kernels(HostDevice(), narrow) is None
    assert "(a head of the cache has 6 bytes, which are no whole words)" in caplog.messages[0]


def test_an_error_of_the_driver_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(device: HostDevice, image: bytes, names: Sequence[str]) -> None:
        raise CudaError("cuModuleLoadData failed with 218")

    monkeypatch.setattr(HostDevice, "load", refused)
    assert load_kernels(HostDevice(), LAYOUT) is None
    assert "(cuModuleLoadData failed with 218)" in caplog.messages[0]


@pytest.mark.parametrize("target", TARGETS)
def test_the_compiled_kernels_assemble_for_every_gpu(target: str, tmp_path: Path) -> None:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    done = subprocess.run(
        [assembler, f"-arch={target}", "-v", PTX, "-o", tmp_path / "made.cubin"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"entry function '(\w+)'", done.stderr)) == {"scatter", "gather_blocks", *SUMMARIZE.values()}
    assert set(re.findall(r"(\d+) bytes spill", done.stderr)) == {"0"}


def test_the_compiled_kernels_have_the_parameters_that_they_are_launched_with() -> None:
    found = {name: len(kinds) for name, kinds in entries(PTX.read_bytes()).items()}
    expected = {"scatter": kernels.SCATTER, "gather_blocks": kernels.GATHER}
    expected |= {name: {"logits_at": ""} | kernels.SUMMARIZED for name in SUMMARIZE.values()}
    assert found == {name: len(types) + 2 for name, types in expected.items()}
    assert PTX.read_text(encoding="utf-8").count(f".reqntid {THREADS}") == len(found)


def test_the_compiled_kernels_are_those_of_the_source() -> None:
    """By the version of Triton that compiled them; another writes other PTX."""
    written = PTX.read_text(encoding="utf-8")
    (version,) = re.findall(r"^// fp8q.serve.kernels, compiled by Triton (\S+)$", written, re.MULTILINE)
    if version != triton.__version__:
        pytest.skip(f"they were compiled by Triton {version}, and this is {triton.__version__}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    code = "from fp8q.serve import kernels; print(kernels.compiled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == written.partition("\n")[2].strip()
    assert "/" not in written.partition("\n")[2], "it has no comments, and no path"
