"""Copy tensors between memory and a GPU while it computes.

A copy from ordinary memory makes the host wait, and the GPU idles while a tensor is read from disk. On a GPU a thread
reads the tensor into pinned memory, and from there it is copied on a stream of its own; the stream that computes waits
for the copy, and the host does not. Written back, a tensor is copied on that stream once it is computed, and the thread
hands it on. On a CPU there is nothing to copy, and everything happens when it is asked for.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

#: Gives a tensor when it is needed.
Coming = Callable[[], torch.Tensor]


class Copies(Protocol):
    """Copies from and to one device."""

    #: Whether copies run while the device computes.
    ahead: bool

    def to_device(self, read: Coming) -> Coming:
        """Begin to read a tensor and to copy it to the device; the result gives it there."""

    def to_memory(self, tensor: torch.Tensor, write: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        """Begin to copy a computed tensor to memory and to `write` it; the result waits until that is done, and raises
        its error.
        """


class DirectCopies:
    """Copies at the moment at which they are asked for."""

    ahead = False

    def __init__(self, device: str):
        """Copy to `device`."""
        self.device = device

    def to_device(self, read: Coming) -> Coming:
        """Return a function that reads the tensor and copies it."""
        return lambda: read().to(self.device, copy=True)

    def to_memory(self, tensor: torch.Tensor, write: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        """Write the tensor."""
        write(tensor)
        return lambda: None


class GpuCopies:
    """Copies on a stream of their own, through pinned memory, by two threads: one that waits for a result does not keep
    the other from reading.
    """

    ahead = True

    def __init__(self, device: str):
        """Make the stream on the GPU `device`."""
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="fp8q-copy")

    def to_device(self, read: Coming) -> Coming:
        """Begin to read and copy a tensor."""

        def copy() -> tuple[torch.Tensor, torch.cuda.Event]:
            pinned = read().pin_memory()
            with torch.cuda.stream(self._stream):
                tensor = pinned.to(self.device, non_blocking=True)
                return tensor, self._stream.record_event()

        coming = self._threads.submit(copy)

        def take() -> torch.Tensor:
            tensor, copied = coming.result()
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(copied)
            tensor.record_stream(computing)
            return tensor

        return take

    def to_memory(self, tensor: torch.Tensor, write: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        """Begin to copy a tensor when what was queued before has computed it."""
        computed = torch.cuda.current_stream(self.device).record_event()

        def copy() -> None:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(computed)
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
                copied = self._stream.record_event()
            copied.synchronize()
            write(pinned)

        return self._threads.submit(copy).result


def copies_of(device: str) -> Copies:
    """The copies from and to `device`."""
    if device.startswith("cuda"):
        return GpuCopies(device)
    return DirectCopies(device)
