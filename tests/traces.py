"""Graphs that were traced before are taken from a cache that outlives the session.

Tracing takes ten seconds or more a graph, nearly all of it in torch's exporter, and its result follows from the sources
of the rooms below `stages`, the versions of the libraries, the plan of the graph, and the checkpoint's config.json and
headers: no weight (docs/decisions/0008). All of these are in the key, so an unchanged tree traces nothing twice, in
this session or in the next; a changed one begins with an empty cache. `pipeline/test_stamped.py` and whoever exports
without `keeping_graphs` hold that graphs follow from these alone.
"""

import fcntl
import functools
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fp8q.core.reporter import Reporter
    from fp8q.export.modules.graph_model import GraphPlan

ROOT = Path(__file__).resolve().parent.parent
#: The rooms whose sources a graph can follow from, and the libraries.
SOURCES = ("core", "options", "calibrate", "quantize", "export")
LIBRARIES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript")
DAY_S = 24 * 3600


def make_once(shared: Path, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` in `shared`, filled by `make`, in this process or in another: whoever comes first fills it, and
    the others wait.
    """
    folder, done = shared / name, shared / f"{name}.done"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a process that failed
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


@functools.cache
def code_digest() -> str:
    """A digest of all code that traces: the project's sources, and the versions of Python and the libraries."""
    digest = sha256(platform.python_version().encode())
    for library in LIBRARIES:
        digest.update(f"{library} {metadata.version(library)}\n".encode())
    for path in sorted(path for room in SOURCES for path in (ROOT / room).rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:32]


def cache_of(config: pytest.Config) -> Path:
    """The folder of this code's graphs in pytest's cache; folders that got no graph for a day are removed."""
    graphs = Path(config.cache.mkdir("graphs"))
    current = graphs / code_digest()
    current.mkdir(exist_ok=True)
    for folder in graphs.iterdir():
        if folder != current and folder.stat().st_mtime < time.time() - DAY_S:
            shutil.rmtree(folder, ignore_errors=True)
    return current


def key_of(directory: Path, plan: "GraphPlan") -> str:
    """A digest of all that the graphs of the checkpoint in `directory` follow from, apart from the code."""
    from fp8q.quantize.reading.run_checkpoint import ADAPTERS
    from fp8q.stages.shared.model_files import layout

    planned = [sorted(value) if isinstance(value, frozenset) else value for value in vars(plan).values()]
    follows = {name: content for name, content in layout(directory).items() if plan.adapter or ADAPTERS not in name}
    return sha256(repr([follows, planned]).encode()).hexdigest()


@contextmanager
def kept_in(cache: Path) -> Iterator[None]:
    """Let every export within take its graphs from `cache`, and put there those that it traces."""
    from fp8q.export.graph import trace

    traced = trace.export_graphs
    if getattr(traced, "cached", False):  # another `with` is around this one
        yield
        return

    def export_graphs(directory: Path, plan: "GraphPlan", report: "Reporter") -> list[Path]:
        stored = make_once(
            cache,
            key_of(directory, plan),
            lambda folder: [shutil.copy(path, folder) for path in traced(directory, plan, report)],
        )
        return [Path(shutil.copy(path, directory)) for path in sorted(stored.iterdir(), reverse=True)]

    export_graphs.cached = True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "export_graphs", export_graphs)
        yield
