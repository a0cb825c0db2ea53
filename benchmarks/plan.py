"""How well `fp8q run` plans: planned over real minutes, memory and disk of each stage.

    python benchmarks/plan.py [MODEL=CALIBRATION,EVALUATION …] [--windows 16] [--samples 64] [--context 512]
        [--form FORM]

Runs each model for vLLM, without a graph (the demo with its graphs and engines too), notes the plan that the run begins
with, and divides it by what `run.json` and the directory say. With `--form` there is no search of one, which takes most
of an hour of a 1.5B. A machine that does nothing else: the plan is of the minute in which it is made. Prints one JSON
line; exit status 1 where the sum of a run is not within 1.5 times, either way.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

from models import ModelTexts, model_arguments, small_models
from result import described, publish

from fp8q import api
from fp8q.core.run import Run
from fp8q.stages import run as running
from fp8q.stages.plan import PlannedStage

LIMIT = 1.5
#: The stages of the record that a planned one stands for.
REAL = {
    "calibrate": ("measure",),
    "costliest weights": ("costliest",),
    "first tokens": ("first-tokens",),
    "scales and checkpoint": ("quantize",),
    "graphs": ("export",),
    "engines": ("build-engine",),
    "validate": ("validate",),
    "search of a form": ("forms",),
    "report": ("continue", "report"),
}


def planned_and_made(texts: ModelTexts, folder: Path, asked: api.RunOptions) -> tuple[list[PlannedStage], Run]:
    """Run all stages of a model; return the plan that the run began with, and the run."""
    plans: list[list[PlannedStage]] = []
    following: Any = running
    plan_of = following.plan_of

    def noting(*args: Any, **kwargs: Any) -> list[PlannedStage]:
        plans.append(plan_of(*args, **kwargs))
        return plans[-1]

    following.plan_of = noting
    try:
        run = api.run(texts.directory, texts.data, folder / "run", texts.eval_data, asked)
    finally:
        following.plan_of = plan_of
    return plans[0], run


def compared(plan: list[PlannedStage], run: Run) -> dict[str, Any]:
    """Divide the plan by what was recorded, by stage and in all."""
    record = run.record().stages
    rows: dict[str, dict[str, float]] = {}
    planned_seconds = 0.0
    real_seconds = 0.0
    for stage in plan:
        real = [record[name] for name in REAL[stage.name] if name in record]
        if not real:
            continue
        seconds = sum(done.seconds for done in real)
        planned_seconds += stage.seconds
        real_seconds += seconds
        peak = max(done.peak_memory_bytes for done in real)
        rows[stage.name] = {
            "seconds": round(seconds, 1),
            "seconds_ratio": stage.seconds / seconds,
            "peak_memory_bytes": peak,
            "memory_ratio": stage.memory / peak,
        }
    disk = sum(path.stat().st_size for path in run.root.rglob("*") if path.is_file())
    leaving = sum(stage.disk - stage.freed for stage in plan if stage.name in rows)
    highest = max(row["peak_memory_bytes"] for row in rows.values())
    ratios = {
        "seconds": planned_seconds / real_seconds,
        "memory": max(stage.memory for stage in plan if stage.name in rows) / highest,
        "disk": leaving / disk,
    }
    return {"stages": rows, "ratios": ratios}


def main() -> int:
    """Run, compare, print."""
    parser = model_arguments(__doc__, windows=16, samples=64)
    parser.add_argument("--form", action="append", default=[], help="of all modules, or PATTERN=FORM")
    options = parser.parse_args()
    head = described("plan")
    results = {}
    for texts in options.models or small_models("demo"):
        asked = api.RunOptions(
            calibrate=api.CalibrateOptions(samples=options.samples, seq_len=options.context, form=tuple(options.form)),
            export=api.ExportOptions(graph=texts.name == "demo"),
        )
        with tempfile.TemporaryDirectory() as folder:
            results[texts.name] = compared(*planned_and_made(texts, Path(folder), asked))
    ratios = [ratio for result in results.values() for ratio in result["ratios"].values()]
    passed = all(1 / LIMIT <= ratio <= LIMIT for ratio in ratios)
    return publish(head, {"results": results, "limit": LIMIT, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
