"""How long `fp8q convert` takes beside `cp` of the same bytes, proof included: at most 3 times, in at most 1 GB.

    python benchmarks/convert.py [--layers 14] [--threads 2] [--folder DIR]

Makes a checkpoint of the 8 B Llama's shape (`synthetic`: 14 layers are 8.2 GB), then copies it with `cp -r` and
converts it in both forms, in turn, each in a process of its own and from a page cache that may hold the source;
processor time is of all threads. Neither waits for the disk at its end but where it says so: convert syncs each file,
`cp` does not, and `cp_sync` is both. The ceiling is one quantizing pass in memory: amax, quotient and code of as many
values, in the same number of threads, nothing read or written. Prints one JSON line; exit status 1 when a limit is not
met.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from result import arguments, described, publish
from synthetic import anonymous_bytes, write_checkpoint

from fp8q.quantize.codes.encoding import round_quotients
from fp8q.quantize.conversion.coding import CHUNK, part_scales

LIMIT_RATIO, LIMIT_BYTES = 3.0, 1e9
SAMPLING_SECONDS = 0.05
COLUMNS = 4096


def measured(
    command: list[str], after: Callable[[], object] = lambda: None, good: Sequence[int] = (0,)
) -> dict[str, float]:
    """Run a command: its seconds, with what comes `after`, processor seconds and peak of anonymous memory; `good`: the
    exit statuses that it may end with.
    """
    before, began, peak = resource.getrusage(resource.RUSAGE_CHILDREN), monotonic(), 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            try:
                process.wait(SAMPLING_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    if process.returncode not in good:
        raise SystemExit(f"{' '.join(command)} failed with exit status {process.returncode}")
    after()
    seconds, used = monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(seconds, 2), "processor_seconds": round(processor, 2), "peak_anonymous_bytes": float(peak)
    }  # fmt: skip


def ceiling(values: int, threads: int) -> float:
    """Seconds of one quantizing pass over as many values in memory, a scale for each row."""
    rows = 512
    weight = torch.empty(rows, COLUMNS, dtype=torch.bfloat16).normal_(std=0.02)

    def once(_: int) -> None:
        scales = torch.from_numpy(part_scales("weight", weight, blocks=None))
        high = CHUNK // COLUMNS
        for top in range(0, rows, high):
            round_quotients(weight[top : top + high].float().div_(scales[top : top + high]))

    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        began = monotonic()
        list(pool.map(once, range(max(1, values // weight.numel()))))
        return monotonic() - began


def main() -> int:
    """Measure, print, and say by the exit status whether the limits were met."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the checkpoint and its copies are made for the time")
    options = parser.parse_args()
    head = described("convert")
    measurements: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        source, out = folder / "source", folder / "out"
        size = write_checkpoint(source, options.layers)
        os.sync()
        convert = [sys.executable, "-m", "fp8q", "convert", str(source), "--threads", str(options.threads)]
        ways: dict[str, tuple[list[str], Callable[[], object]]] = {
            "cp": (["cp", "-r", str(source), str(out)], lambda: None),
            "dynamic": ([*convert, "--out", str(out)], lambda: None),
            "block": ([*convert, "--out", str(out), "--form", "block"], lambda: None),
            "cp_sync": (["cp", "-r", str(source), str(out)], os.sync),
        }
        for name, (command, after) in ways.items():
            print(f"{name} …", file=sys.stderr)
            measurements[name] = measured(command, after)
            print(measurements[name], file=sys.stderr)
            shutil.rmtree(out)
            os.sync()
    measurements |= {"bytes": size, "ceiling_seconds": round(ceiling(size // 2, options.threads), 2)}
    ratio = max(measurements[form]["seconds"] for form in ("dynamic", "block")) / measurements["cp"]["seconds"]
    peak = max(measurements[form]["peak_anonymous_bytes"] for form in ("dynamic", "block"))
    passed = ratio <= LIMIT_RATIO and peak <= LIMIT_BYTES
    limits = {"limit_ratio": LIMIT_RATIO, "ratio": round(ratio, 2), "limit_bytes": LIMIT_BYTES, "peak_bytes": peak}
    return publish(head, {**measurements, **limits, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
