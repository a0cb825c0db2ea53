"""Environments beside the repository's own, for programs of others that the tests start: each in `.venv`, made where it
is not there or what it was made from changed.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

HOME = Path(__file__).resolve().parents[4] / ".venv"
INSTALL_S = 300


class UnavailableError(RuntimeError):
    """What is to be started cannot be installed here, or does not start."""


def kept_environment(home: Path, made_of: object, fill: Callable[[Path], None]) -> Path:
    """The virtual environment at `home`, which `fill` has filled with `made_of`; by one process, and others wait.

    Raises UnavailableError where `home` is a link to an environment of something else: what the link leads to belongs
    to others, who would lose theirs.
    """
    home.parent.mkdir(exist_ok=True)
    with home.with_name(f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted, stamp = hashlib.sha256(repr([made_of, sys.version]).encode()).hexdigest(), home / "installed"
        if not stamp.is_file() or stamp.read_text() != wanted:
            if home.is_symlink():
                raise UnavailableError(f"{home}: is a link to an environment of other packages; remove the link")
            shutil.rmtree(home, ignore_errors=True)
            venv.create(home, symlinks=True)
            fill(home)
            stamp.write_text(wanted)
    return home


def pip(*words: str) -> None:
    """Run pip, wheels only, with what `make PIP_ARGS=…` hands on; raises UnavailableError with its last line."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words, "--only-binary", ":all:"]
    try:
        done = subprocess.run(
            command + os.environ.get("PIP_ARGS", "").split(), capture_output=True, text=True, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"pip took more than {INSTALL_S} s") from None
    if done.returncode:
        raise UnavailableError(f"pip: {(done.stderr.strip().splitlines() or ['failed and said nothing'])[-1]}")


def pip_for(home: Path, *words: str) -> None:
    """Install into the environment at `home`."""
    pip("--python", str(home / "bin" / "python"), "install", *words)
