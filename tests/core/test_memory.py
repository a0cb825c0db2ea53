"""Blocks that are freed between others go back to the system, where glibc would hold them for later."""

import subprocess
import sys

import pytest

#: 64 tensors of 4 MiB, after one of 8 MiB has raised glibc's limit; every other one is freed. Says how many MiB that
#: gives back.
CHILD = """
import sys
import torch
from fp8q.core.memory import return_freed_blocks

def held():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("RssAnon"))

if sys.argv[1] == "return":
    return_freed_blocks()
torch.ones(2 << 20)
blocks = [torch.ones(1 << 20) for _ in range(64)]
before = held()
blocks = blocks[::2]
print(before - held())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_what_is_freed_between_other_tensors_goes_back_to_the_system() -> None:
    given_back = {
        how: int(subprocess.run([sys.executable, "-c", CHILD, how], check=True, capture_output=True, text=True).stdout)
        for how in ("hold", "return")
    }
    assert given_back["return"] >= 127
    assert given_back["hold"] < 16
