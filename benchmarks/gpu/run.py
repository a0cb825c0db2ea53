"""What only an FP8 GPU can answer, by parts of at most eight minutes each; docs/gpu.md says what they ask.

    python benchmarks/gpu/run.py [--part NAME …] [--run RUN] [--vllm PYTHON] [--seconds N] [--out FILE]
    python benchmarks/gpu/run.py --dry-run [--part NAME …]

Needs PyTorch 2.11 or later with CUDA; what else a part needs and does not find is named under `skipped`. Prints tables
and writes one JSON of GPU, driver, versions, commit and parts, by default `benchmarks/results/gpu_<name>.json`, to
which each further part is added. `--run`: a run; without, the demo is calibrated first where a part needs one.
`--dry-run` goes through the same code on the CPU with tiny sizes: no figure in it means anything, JSON and tables say
so, and it is written only where `--out` says. Exit status 1 where a part failed.
"""

import argparse
import json
import platform
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = ("numerics", "products", "plugin", "calibration", "rounding", "decoder", "engines", "serve")
DRY = "DRY RUN on a CPU with tiny sizes: no figure here means anything"
#: What must agree for parts to stand in one file.
HEAD = ("benchmark", "dry_run", "commit", "gpu", "versions")


class MergeError(ValueError):
    """A file of results that these do not belong to."""


def gpu(dry: bool) -> dict[str, Any]:
    """The GPU, as JSON has it."""
    import torch

    if dry:
        return {"name": f"none: {platform.processor() or 'a CPU'}", "driver": None, "capability": None, "cuda": None}
    import pynvml

    pynvml.nvmlInit()
    about = torch.cuda.get_device_properties(0)
    return {
        "name": about.name,
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "capability": f"sm{about.major}{about.minor}",
        "cuda": torch.version.cuda,
        "memory_bytes": about.total_memory,
        "multiprocessors": about.multi_processor_count,
        "l2_bytes": about.L2_cache_size,
    }


def head(dry: bool) -> dict[str, Any]:
    """What stands beside the parts."""
    from importlib import metadata

    import torch
    from result import described

    found = described("gpu") | {"dry_run": dry, "gpu": gpu(dry)}
    found["versions"]["torch"] = torch.__version__
    for name in ("triton", "transformer-engine", "tensorrt", "tensorrt-rtx", "onnxruntime-gpu", "vllm"):
        try:
            found["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found["versions"][name] = None
    return found


def merged(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The parts of both, of `new` where both have one; raises MergeError where they were measured on something else."""
    if old is None:
        return new
    for name in HEAD:
        if old.get(name) != new[name]:
            raise MergeError(f"{name} was {old.get(name)} and is {new[name]}; give another --out, or remove the file")
    return {**old, **new, "parts": {**old["parts"], **new["parts"]}}


def completed(found: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Add what follows from the parts: their seconds together, the targets that were missed, and the options so far."""
    parts = found["parts"]
    lines = [
        f"{name}: {each['target']}: {each['found']:.4g} ({each['asked']} {each['limit']:g})"
        for name, part in parts.items()
        for each in part["targets"]
        if each["met"] is False
    ]
    took = round(sum(part["seconds"] for part in parts.values()), 1)
    known = {**found.get("options", {}), **options}
    return {**found, "took_seconds": took, "options": known, "passed": not lines, "missed": lines}


def measured(name: str, setting: Any) -> dict[str, Any]:
    """One part, which fails alone."""
    import time

    from gpu.timing import Part

    part, error = Part(strict=setting.dry), None
    begun = setting.begun = time.monotonic()
    try:
        import_module(f"gpu.{name}").measure(setting, part)
    except Exception as raised:  # noqa: BLE001  # the other parts are still to be measured
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    return told(part, time.monotonic() - begun, error)


def told(part: Any, seconds: float, error: str | None) -> dict[str, Any]:
    """A part as JSON has it."""
    from dataclasses import asdict

    return {"seconds": round(seconds, 1), "error": error, **asdict(part)}


def show(name: str, part: dict[str, Any], dry: bool) -> None:
    """Print a part's tables."""
    from gpu.timing import shown

    print(f"\n== {name} ({part['seconds']} s)" + (f"  {DRY}" if dry else ""))
    for title, rows in part["tables"].items():
        print(f"\n{title}\n{shown(rows)}")
    if part["targets"]:
        print(f"\ntargets\n{shown(part['targets'])}")
    for what, why in part["skipped"].items():
        print(f"skipped: {what}: {why}")
    for each in part["left_out"]:
        print(
            f"left out: {each['step']}: {each['left_s']} s are left, and by {each['by']} it takes {each['estimated_s']}"
        )
    if part["error"]:
        print(f"failed: {part['error']}")


def file_of(found: dict[str, Any]) -> Path:
    """Where a GPU's results lie."""
    from result import RESULTS

    name = re.sub(r"[^a-z0-9]+", "_", found["gpu"]["name"].lower()).strip("_")
    return RESULTS / f"gpu_{name}.json"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    here = Path(__file__).resolve()
    sys.path[:0] = [str(here.parents[1]), str(here.parents[2] / "integrations" / "vllm")]  # as in the tests
    from gpu.timing import LIMIT_S, Setting

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="this part alone; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="the same code on the CPU with tiny sizes")
    parser.add_argument("--run", type=Path, help="a run; of the demo, but for the part serve")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="the interpreter that has vLLM, for the part serve")
    parser.add_argument(
        "--seconds", type=float, metavar="N", default=LIMIT_S, help="seconds of each part (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the JSON goes, or is added to")
    options = parser.parse_args(words)
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --dry-run goes through the same code on the CPU")
    import ran

    from fp8q.core.files import replacing

    found = head(options.dry_run)
    out = options.out or (None if options.dry_run else file_of(found))
    old = json.loads(out.read_text(encoding="utf-8")) if out and out.is_file() else None
    try:
        merged(old, {**found, "parts": {}})
    except MergeError as error:
        parser.error(f"{out}: {error}")
    found["parts"] = {}

    def write(name: str, part: dict[str, Any]) -> None:
        """Keep a part, after each of them and within those that go on: what comes may take the GPU down."""
        found["parts"][name] = part
        if out:
            text = json.dumps(completed(merged(old, found), ran.options()), indent=1, ensure_ascii=False) + "\n"
            with replacing(out) as partial:
                partial.write_text(text, encoding="utf-8")

    for name in options.part or PARTS:
        earlier = old["parts"].get(name, {}).get("tables", {}) if old else {}
        setting = Setting(options.dry_run, options.run, vllm=options.vllm, earlier=earlier, limit_s=options.seconds)
        setting.keep = lambda part, name=name: write(name, told(part, 0.0, "it was ended before its end"))  # type: ignore[misc]
        write(name, measured(name, setting))
        show(name, found["parts"][name], options.dry_run)
    return 1 if any(part["error"] for part in found["parts"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
