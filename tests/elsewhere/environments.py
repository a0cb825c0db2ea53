"""Environments of their own for what takes the output: vLLM and lm-eval want other versions than fp8q, or more.

Each lies on top of the environment that runs the tests, as `.venv/vllm` and `.venv/lm-eval`, and holds only what that
one does not bring, or brings in another version; torch, 750 MB of it, is not there twice. `vllm.txt` and `lm-eval.txt`
list it, exact versions, and of it only what is imported here. It is installed without what it says it depends on: so
vLLM takes 0.7 GB and not 3.5, and torchvision, torchaudio and torchcodec, whose builds do not match torch's, are not
there at all.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[1] / ".venv"
INSTALL_S = 300


class UnavailableError(RuntimeError):
    """The packages cannot be installed here."""


def environment(name: str) -> Path:
    """The `bin` of the environment of `name`.txt, installed where it is not there or the list changed.

    Raises UnavailableError where there is no package index, or no wheel for this platform or Python.
    """
    home, wanted = HOME / name, HERE / f"{name}.txt"
    stamp, key = home / "installed", hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()
    home.parent.mkdir(exist_ok=True)
    with home.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.is_file() or stamp.read_text() != key:
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home, symlinks=True)
            below = sysconfig.get_paths()["purelib"]
            (site_packages(home) / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
            pip(home, "install", "--no-deps", "--only-binary", ":all:", "--requirement", str(wanted))
            stamp.write_text(key)
    return home / "bin"


def site_packages(home: Path) -> Path:
    """Where the packages of the environment at `home` are."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(home)}))


def pip(home: Path, *words: str) -> None:
    """Run pip for the environment at `home`, with what `make PIP_ARGS=…` hands on; raises UnavailableError with its
    last line.
    """
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "--quiet", *words]
    command += ["--disable-pip-version-check", *os.environ.get("PIP_ARGS", "").split()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"pip took more than {INSTALL_S} s") from None
    if done.returncode:
        raise UnavailableError(f"pip: {(done.stderr.strip().splitlines() or ['failed and said nothing'])[-1]}")
