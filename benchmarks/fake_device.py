"""A device that no machine has, behind PyTorch's FakeTensorMode: its tensors have shapes and no numbers.

An operation that mixes it with the host raises, and so does a decision that depends on numbers: what runs here mixes no
devices and waits for none. PyTorch's own `cuda` cannot be used so without a GPU. What starts work on the device is
counted, with the bytes that it reads and writes and the floating-point operations of products and factors. Memory in
use follows from the lives of tensors; libraries' work space is not in it.

fp8q's kernels stand here as one operator each, which reads and writes what the kernel does.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar
from unittest import mock
from weakref import finalize

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from fp8q.quantize.weights import gptq, mse

T = TypeVar("T")
DEVICE = "npu"
#: Operators that allocate or look at memory, and start nothing.
STARTS_NOTHING = ("empty", "empty_strided", "empty_like", "new_empty", "detach", "set_", "resize_", "lift_fresh")


class Present(_DummyPrivateUse1Hook, _DummyBackendModule):
    """Whether the device is there, for C++ and Python: in a block of `fake_device` alone. What is registered stays as
    long as the process, and torch would ask it for its random numbers wherever it asks "the accelerator".
    """

    there = False

    def is_available(self) -> bool:
        """Return whether a block is open."""
        return self.there

    def has_primary_context(self, dev_id: int) -> bool:
        """Return whether a block is open."""
        return self.there

    def device_count(self) -> int:
        """Return 1 in a block and 0 outside."""
        return int(self.there)


@cache
def registered() -> Present:
    """Register the device, once a process."""
    present = Present()
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=present, hook=present)
    return present


def operations(name: str, shapes: list[torch.Size]) -> int:
    """Floating-point operations of a product, a factor or a solution with it; 0 for others, which memory bounds."""
    if name in ("mm", "mv", "matmul"):
        rows = shapes[1].numel() // shapes[1][0]  # of a matrix, or 1 of a vector
        return 2 * shapes[0].numel() * rows
    if name in ("addmm", "addmm_"):
        return 2 * shapes[1].numel() * shapes[2][1]
    if name == "linalg_cholesky_ex":
        return shapes[0][0] ** 3 // 3
    if name == "linalg_solve_triangular":
        return int(shapes[0][0] * shapes[1].numel())
    if name == "cholesky_solve":
        return int(2 * shapes[1][0] * shapes[0].numel())
    return 0


class Counted(TorchDispatchMode):
    """Counts of what started on the device in the block: `launches` by operator's name, `bytes` read and written,
    `flop` by the type of numbers; `held` and `peak`: bytes of memory.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.flop: Counter[str] = Counter()
        self.bytes = self.held = self.peak = 0
        self._uses: Counter[int] = Counter()

    @property
    def started(self) -> int:
        """All launches."""
        return self.launches.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and count it."""
        out = func(*args, **(kwargs or {}))
        taken = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        there = [x for x in (*taken, *made) if x.device.type == DEVICE]
        for tensor in made:
            self.hold(tensor)
        name = func._schema.name.partition("::")[2]
        if there and not func.is_view and name not in STARTS_NOTHING and any(x.numel() for x in made):
            self.add(name, there, operations(name, [x.shape for x in taken]))
        return out

    def add(self, name: str, tensors: list[torch.Tensor], flop: int = 0) -> None:
        """Count a launch that reads or writes `tensors`."""
        self.launches[name] += 1
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if flop:
            self.flop[str(tensors[0].dtype).removeprefix("torch.")] += flop

    def hold(self, tensor: torch.Tensor) -> None:
        """Count the memory of a tensor on the device, once for all its views, for as long as one of them lives."""
        if tensor.device.type != DEVICE:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not self._uses[key]:
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
        self._uses[key] += 1
        finalize(tensor, self._release, key, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self._uses[key] -= 1
        if not self._uses[key]:
            self.held -= size

    def kernel(self, *tensors: torch.Tensor, name: str) -> None:
        """Count one of fp8q's kernels."""
        self.add(name, [*tensors])


@contextmanager
def fake_device(kernels: bool = True) -> Iterator[Counted]:
    """Let tensors be made on `DEVICE` in this block, and count what starts there; `kernels`: Triton's are there."""
    table = mse.error_table()
    present = registered()
    counted = Counted()

    def launched(device: torch.device, kernel: Callable[[], T], operations: Callable[[], T]) -> T:
        return kernel() if kernels else operations()

    def triton_round(left: torch.Tensor, values: torch.Tensor, factor: torch.Tensor, shares: torch.Tensor) -> None:
        counted.kernel(left, left, values, factor, shares, name="round_block")

    def triton_descend(
        values: torch.Tensor, gradient: torch.Tensor, moments: torch.Tensor, steps: torch.Tensor
    ) -> torch.Tensor:
        moved = torch.empty_like(values)
        counted.kernel(values, values, gradient, moved, moments, steps, name="descend_block")
        return moved

    names = {name: tensor.shape for name, tensor in vars(table).items()}
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = mse.ErrorTable(**{name: torch.empty(shape, device=DEVICE) for name, shape in names.items()})
        stand_ins = mock.Mock(triton_round=triton_round, triton_descend=triton_descend)
        with (
            mock.patch.object(gptq, "launched", launched),
            mock.patch.object(mse, "error_table", return_value=there),
            mock.patch.object(gptq, "block_kernels", return_value=stand_ins),
            mock.patch.object(present, "there", True),
            torch.inference_mode(),
            counted,
        ):
            yield counted


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor on the device."""
    return torch.empty(shape, dtype=dtype, device=DEVICE)
