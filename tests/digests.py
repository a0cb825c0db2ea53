"""Write runs and conversions of small checkpoints, and print the SHA-256 of each file in them.

Whoever moves code without changing what it computes runs this before and after:

    python tests/digests.py before.json
    python tests/digests.py after.json --against before.json    # exit status 1 where a file differs

The demo gets its graph too. The other architectures need `../shared/checkpoints` and are left out without it.
`run.json` is not compared: it has seconds and versions.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from fp8q.api import calibrate, convert

ROOT = Path(__file__).resolve().parent.parent
#: Relative to `ROOT`: a run records the names that it was given.
DEMO = Path("examples/demo/checkpoint")
TEXT = Path("examples/demo/calibration.txt")
CHECKPOINTS = Path("../shared/checkpoints")
ARCHITECTURES = ("llama", "qwen2", "gemma", "opt", "mixtral", "gpt2", "stories260k")
#: Options of a calibration, by the name of the run.
RUNS: Mapping[str, Mapping[str, Any]] = {
    "one": {},
    "two-fp8-cache": {"form": ("two",), "kv_cache": "fp8", "weight_rounding": "gptq"},
    "tail-kv-skip": {"form": ("tail:16", "*q_proj=bf16"), "kv_cache": "fp8", "kv_skip": ("*1*",)},
    "dynamic-and-block": {"form": ("dynamic", "*down_proj=block")},
    "block": {"form": ("block",)},
    "layer-by-layer": {"weight_rounding": "sequential"},
    "by-gradients": {
        "weight_rounding": "gptq",
        "weigh_first_token": True,
        "weigh_outputs": 8,
        "bf16_weights": 0.03,
        "stream": True,
    },
    "alone-by-tensor": {"form": ("bf16", "*down_proj=one"), "weight_scale": "tensor"},
}
#: Options of `convert`, by the name of the checkpoint that it writes.
CONVERSIONS: Mapping[str, Mapping[str, Any]] = {"dynamic": {}, "block": {"form": "block"}}


def models() -> Iterator[Path]:
    """The demo, and the other architectures where they are there."""
    yield DEMO
    yield from (CHECKPOINTS / name for name in ARCHITECTURES if (CHECKPOINTS / name).is_dir())


def written(folder: Path) -> dict[str, str]:
    """Map each file in `folder` to its SHA-256 in hexadecimal."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "run.json")
    return {str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() for path in files}


def digests(folder: Path) -> dict[str, dict[str, str]]:
    """Write every run and conversion into `folder`, one after the other; return their digests, or the error's text."""
    result: dict[str, dict[str, str]] = {}
    for model in models():
        name = "demo" if model == DEMO else model.name
        for run, options in RUNS.items():
            graph = name == "demo" and run != "block" and not run.startswith("dynamic")
            result[f"{name} {run}"] = _made(
                folder / "run",
                lambda out, model=model, options=options, graph=graph: calibrate(
                    model, TEXT, out, samples=4, seq_len=64, graph=graph, **options
                ),
            )
        for form, options in CONVERSIONS.items():
            result[f"{name} convert {form}"] = _made(
                folder / "converted", lambda out, model=model, options=options: convert(model, out, **options)
            )
        print(name, file=sys.stderr)
    return result


def _made(out: Path, make: Any) -> dict[str, str]:
    try:
        make(out)
        return written(out)
    except Exception as error:  # a form that an architecture refuses: the refusal is what is compared
        return {"error": f"{type(error).__name__}: {error}".replace(str(out), "OUT").replace(str(ROOT), "ROOT")}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def differences(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each file whose digests differ, or that one side lacks."""
    return [
        f"{run}: {file}: {before.get(run, {}).get(file, 'absent')} before, {after.get(run, {}).get(file, 'absent')} now"
        for run in {**before, **after}
        for file in {**before.get(run, {}), **after.get(run, {})}
        if before.get(run, {}).get(file) != after.get(run, {}).get(file)
    ]


def main() -> int:
    """Write the digests, and compare them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the file that the digests are written to")
    parser.add_argument("--against", type=Path, help="digests of before")
    arguments = parser.parse_args()
    out, against = arguments.out.absolute(), arguments.against and arguments.against.absolute()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        after = digests(Path(folder))
    out.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    changed = differences(json.loads(against.read_text(encoding="utf-8")), after) if against else []
    print("\n".join(changed) or f"{sum(map(len, after.values()))} files of {len(after)} outputs")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
