"""Starting a runtime where its driver is missing, too old or out of reach."""

import ctypes
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from fp8q.core.errors import BackendError
from fp8q.export.engine import runtime

FAILS = "pybind11::init(): factory function returned nullptr"


def refusing(logger: object) -> object:
    """As TensorRT's constructors do on a driver that is too old (NVIDIA/TensorRT, issue 2913)."""
    raise TypeError(FAILS)


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(__version__="11.4.0.1", Builder=refusing, Runtime=refusing)
    monkeypatch.setattr(runtime, "import_runtime", lambda name: made)


def machine(monkeypatch: pytest.MonkeyPatch, driver: int | None, packages: tuple[str, ...]) -> None:
    """A machine whose driver says that its newest CUDA is `driver` (12040), and that has these distributions."""

    def get(found: Any) -> int:
        found._obj.value = driver
        return 0

    def library(name: str) -> object:
        if driver is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return SimpleNamespace(cuDriverGetVersion=get)

    def version(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return "11.4.0.1"

    monkeypatch.setattr(ctypes, "CDLL", library)
    monkeypatch.setattr(runtime, "version", version)


OLD = "does not start on this machine's driver, which knows CUDA "


@pytest.mark.parametrize("kind", ["Builder", "Runtime"])
@pytest.mark.parametrize(
    ("driver", "packages", "why"),
    [
        (
            12040,
            ("tensorrt-cu13", "tensorrt-cu13-libs"),
            (
                f"{OLD}12.4: built for CUDA 13 it needs r580 or newer; update the driver, or install what is built for "
                "CUDA 12 (`pip install tensorrt-cu12`)"
            ),
        ),
        (11080, ("tensorrt-cu12-libs",), f"{OLD}11.8: built for CUDA 12 it needs r535 or newer; update the driver"),
        (12040, (), f"{OLD}12.4: CUDA 13 needs r580, CUDA 12 r535 or newer; update the driver"),
        (
            13040,
            ("tensorrt-cu13",),
            (
                "does not start, though this machine's driver knows CUDA 13.4; look with `nvidia-smi` whether it shows "
                "the GPU, and has memory left"
            ),
        ),
        (
            None,
            ("tensorrt-cu13",),
            "does not start, since there is no NVIDIA driver here; install r580 or newer",
        ),
    ],
)
def test_what_a_runtime_lacks_is_said_in_one_line(
    tensorrt: None, monkeypatch: pytest.MonkeyPatch, kind: Any, driver: int | None, packages: tuple[str, ...], why: str
) -> None:
    machine(monkeypatch, driver, packages)
    with pytest.raises(BackendError) as refused:
        runtime.start("tensorrt", kind, None)
    assert str(refused.value) == f"TensorRT 11.4.0.1 {why}"
