"""A notebook, executed inside a run by the interpreter that runs fp8q."""

import os
import signal
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from ...core.errors import BackendError
from ...core.undo import scratch, undoing


def execute(notebook: Path, directory: Path, parameters: Mapping[str, str | list[str]]) -> str:
    """Execute `notebook` in `directory` with `parameters`, and return it with its outputs, as JSON text.

    The kernel is the running interpreter, whatever kernels the user has installed under the name `python3`; it reads no
    IPython start-up files of the user, and communicates over sockets in a temporary directory, not over TCP. Paths and
    times that papermill records are removed, so that the result does not depend on the run's place. Raises BackendError
    when no kernel starts.
    """
    import nbformat
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from jupyter_core.utils import ensure_event_loop

    def executed(private: Path, groups: list[int]) -> Any:
        try:
            return papermill.execute_notebook(
                notebook,
                None,
                parameters,
                kernel_name="python3",
                progress_bar=False,
                cwd=directory,
                kernel_manager_class=own_kernel(private, groups),
                extra_arguments=[f"--ipython-dir={private}"],
            )
        finally:
            ensure_event_loop().close()  # this thread's, which nbclient made and leaves open

    groups: list[int] = []
    # Signals stay ours: in the main thread nbclient would put handlers of its own in their place, and leave Python's.
    with scratch() as private, ThreadPoolExecutor(1, "notebook") as pool, undoing(lambda: end_groups(groups)):
        try:
            done = pool.submit(executed, private, groups).result()
        except (NoSuchKernel, RuntimeError) as error:
            raise BackendError(
                "",
                f"no Jupyter kernel starts to execute the report ({error})",
                "install one with `pip install 'fp8q[report]'`",
            ) from error
    for part in (done, *done.cells):
        part.metadata.pop("papermill", None)
        part.metadata.pop("execution", None)
    return f"{nbformat.writes(done)}\n"  # type: ignore[no-untyped-call]  # typed, but this one


def own_kernel(private: Path, groups: list[int]) -> type:
    """The manager of a kernel that is the running interpreter's own, keeps its files in `private`, and says nothing;
    `groups` takes the process group that it leads.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class OwnKernel(AsyncKernelManager):
        def __init__(self, **traits: Any) -> None:
            kernels = KernelSpecManager(kernel_dirs=[])
            super().__init__(
                kernel_spec_manager=kernels, transport="ipc", connection_file=f"{private}/kernel.json", **traits
            )

        async def _async_launch_kernel(self, kernel_cmd: list[str], **kw: Any) -> None:
            await super()._async_launch_kernel(kernel_cmd, **kw, stdout=DEVNULL, stderr=DEVNULL)
            groups.append(self.provisioner.pid)  # type: ignore[union-attr]  # it is a local one

    return OwnKernel


def end_groups(groups: list[int]) -> None:
    """Kill these process groups."""
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
