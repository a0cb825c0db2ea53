"""What a case may not do: end without a line, with a traceback or not at all, leave things behind, or accept silently.

Silent acceptance is exit 0 with another result than the same command has in the unchanged world, while nothing that the
run records of its making (fingerprints, options, notes) and nothing that was said is another.
"""

import json
import os
import stat
import unicodedata
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from case import GENERATE, ON_CHECKPOINTS, ON_HOSTILE, ON_LEARNED, Case
from workers import SMALL_FILE, Ended

#: Exit codes of whatever is foreseen; with a closed or full output, 1 too.
GOOD, FORESEEN = 0, (0, 2, 3, 4)
LONGEST = 1600
#: A file that this judge reads has fewer bytes.
LARGEST = 64 << 20
TRACES = ("Traceback (most recent call last)", "terminate called", "Fatal Python error", "panicked at", "core dumped",
          "Exception ignored in")  # fmt: skip
#: What of a stage's record is told of its making, rather than of its outcome or its moment.
TOLD = ("inputs", "options", "notes", "version")

Snapshot = dict[str, tuple[int, int, int, int]]


#: What a record that was mutated makes its reader here raise.
NO_RECORD = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
#: Commands that write no file, and print what they read of a run.
ON_ITSELF = (
    ("inspect", "run", "--json"), ("engine", "run", "--json"), *GENERATE,
    *(argv for argv, _ in ON_LEARNED if argv[0] in ("inspect", "generate")),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What a command made (file, or "stdout" -> SHA-256), and what it and the run's record say of how."""

    made: dict[str, str]
    told: str


@dataclass(frozen=True)
class Verdict:
    """A fault: of which kind, and what was seen."""

    kind: str
    seen: str


def snapshot(folder: Path) -> Snapshot:
    """Every path below `folder`, and what it is: mode, size, time of the last change, inode."""
    found: Snapshot = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
        moment = 0 if stat.S_ISDIR(status.st_mode) else status.st_mtime_ns
        found[str(path.relative_to(folder))] = (status.st_mode, size, moment, status.st_ino)
    return found


def judge(case: Case, before: Snapshot, end: Ended, base: Result | None) -> list[Verdict]:
    """Every fault of a case that has ended, `before` the world as it was."""
    faults = of_process(end) + of_words(case, end)
    faults += of_leftovers(case, before, end)
    if end.code == GOOD and not case.start:
        said = end.err.strip()
        if case.must_be_said and not said:
            faults.append(Verdict("silent", "the text is not what it is taken for, and nothing is said"))
        if base is not None and not faults:
            faults += of_result(case, before, end, base)
    return faults


def of_process(end: Ended) -> list[Verdict]:
    """Hangs, traces of a stack, codes that nothing foresees, processes left."""
    faults = []
    if end.hung:
        faults.append(Verdict("hang", f"{end.seconds:.0f} s: {end.err[:1200]}"))
    elif end.code < 0 or end.code == 99:
        faults.append(Verdict("died", f"signal {-end.code}: {end.err[-300:]}"))
    found = next((trace for trace in TRACES if trace in end.err), None)
    if found:
        faults.append(Verdict("traceback", end.err[-600:]))
    if end.orphans and not end.hung:
        faults.append(Verdict("leftover", "a process of its group still ran"))
    return faults


def of_words(case: Case, end: Ended) -> list[Verdict]:
    """The exit code, and the one line that goes with it."""
    faults: list[Verdict] = []
    if end.hung or end.code < 0:
        return faults
    output = bool(case.start & {"closed stdout", "closed all", "full stdout", "closed stderr"})
    # standard output is a file here, and what a note said before it was full may stand on the other
    output |= "small files" in case.start and end.code == 1 and len(end.out.encode()) >= SMALL_FILE
    if end.code not in FORESEEN and not (output and end.code == 1):
        faults.append(Verdict(f"exit {end.code}", end.err[-400:]))
    lines = end.err.splitlines()
    said = [line for line in lines if line.startswith("fp8q: ")]
    if end.code != GOOD and not output and (len(said) != 1 or lines[-1] != said[0]):
        faults.append(Verdict("line", f"{len(said)} lines of fp8q's: {end.err[-500:]!r}"))
    if any(len(line) > LONGEST for line in said):
        faults.append(Verdict("line", f"{max(map(len, said)):,} characters: {said[0][:200]!r}"))
    # a model may write anything, and to a pipe it goes as it is
    printed = end.err if case.argv[0] == "generate" and "--json" not in case.argv else end.err + end.out
    control = {char for char in printed if unicodedata.category(char) == "Cc"} - {"\n"}
    if control:
        faults.append(Verdict("control", f"{sorted(control)} in {(end.err + end.out)[-300:]!r}"))
    as_json = "--json" in case.argv and "--print-config" not in case.argv  # which shows the command, and does nothing
    if end.code == GOOD and as_json and not case.start and not is_object(end.out):
        faults.append(Verdict("json", end.out[:300]))
    return faults


def is_object(text: str) -> bool:
    """Whether `text` is one line, and one JSON object."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return text.count("\n") == 1 and isinstance(json.loads(text, parse_constant=refuse), dict)
    except ValueError:
        return False


def of_leftovers(case: Case, before: Snapshot, end: Ended) -> list[Verdict]:
    """Whatever is there that was not, and is no file of a run; and what was there and has changed."""
    after = snapshot(case.folder)
    temporary = case.folder.with_name(case.folder.name + ".tmp")
    left = [f"TMPDIR/{path}" for path in snapshot(temporary)]
    place = run_folder(case)
    if case.argv[0] == "triton" and "--out" in case.argv and end.code == 0 and place is not None:
        in_temporary = [Verdict("leftover", ", ".join(left[:5]))] if left else []
        return in_temporary + _of_repository(case, place, before, after)
    recorded = outputs(case.folder / place) if place else set[str]()
    existed = place is not None and any(name == place or name.startswith(f"{place}/") for name in before)
    for name in sorted(after.keys() - before.keys()):
        inside = place is not None and (name == place or name.startswith(f"{place}/"))
        unknown = stat.S_ISREG(after[name][0]) and name.removeprefix(f"{place}/") not in recorded
        if is_work(name) and end.code == 4:  # something that is missing or failed: the next call goes on with it
            continue
        if case.argv[0] == "evaluate" and name.startswith(f"{place}/answers/"):  # of the models that have answered
            continue
        if not inside or (end.code == 2 and not existed) or is_work(name) or unknown:
            left.append(name)
    changed = [
        name
        for name in sorted(after.keys() & before.keys())
        if after[name] != before[name] and not stat.S_ISDIR(after[name][0])
        and not (place is not None and name.startswith(f"{place}/"))
    ]  # fmt: skip
    gone = [name for name in sorted(before.keys() - after.keys()) if not (place and name.startswith(f"{place}/"))]
    faults = [Verdict("leftover", ", ".join(left[:5]))] if left else []
    if changed or gone:
        faults.append(Verdict("changed", ", ".join([*changed, *gone][:5])))
    return faults


def _of_repository(case: Case, place: str, before: Snapshot, after: Snapshot) -> list[Verdict]:
    """What is neither in the repository that `fp8q triton RUN --out PLACE` wrote nor in its run."""
    named = tuple(f"{folder}/" for folder in (place, case.base[1]))
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    others = [name for name in changed if name not in (place, case.base[1]) and not name.startswith(named)]
    return [Verdict("changed", ", ".join(others[:5]))] if others else []


def run_folder(case: Case) -> str | None:
    """The run that the case writes, as a path from its folder; None where it has none there."""
    if case.out is None:
        return None
    found = Path(case.folder, case.out)
    try:
        return str(found.resolve().relative_to(case.folder.resolve())) if found.name else None
    except (ValueError, OSError, RuntimeError):
        return None


def is_work(name: str) -> bool:
    """Whether a path is one that only a killed process leaves."""
    return any(part.endswith((".partial", ".work")) for part in Path(name).parts)


def content(path: Path) -> bytes:
    """The bytes of a file, or none: what a case put there may be a pipe, a device, or larger than memory."""
    if not path.is_file() or not os.access(path, os.R_OK):
        return b""
    return path.read_bytes() if path.stat().st_size < LARGEST else b""


def read_json(path: Path) -> Any:
    """What is in a JSON file; raises one of `NO_RECORD` where it is none."""
    return json.loads(content(path))


def outputs(run: Path) -> set[str]:
    """The files that a run's record knows, the record's own, and the model card, which the record leaves out."""
    own = {"run.json", ".lock", "model/README.md"}
    try:
        if (run / "comparison.json").is_file():  # of two checkpoints
            return {"comparison.json", "tokens.npz", "report.html", ".lock"}
        if (run / "config.json").is_file():  # a converted checkpoint, without a record of its files
            return {str(path.relative_to(run)) for path in run.rglob("*") if not path.name.startswith(".")}
        stages = read_json(run / "run.json")["stages"]
        return {name for stage in stages.values() for name in stage["outputs"]} | own
    except NO_RECORD:
        return own


def result(case: Case, before: Snapshot, end: Ended) -> Result:
    """What the command made, and what is told of how."""
    place = run_folder(case)
    made: dict[str, str] = {}
    told: dict[str, Any] = {"said": sorted(line for line in end.err.splitlines() if " in " not in line)}
    if place and (case.folder / place).is_dir():
        run = case.folder / place
        for path in sorted(run.rglob("*")):
            name = str(path.relative_to(case.folder))
            status = path.lstat()
            fresh = before.get(name, (0, 0, 0, 0))[1:] != (status.st_size, status.st_mtime_ns, status.st_ino)
            if stat.S_ISREG(status.st_mode) and fresh and is_result(path):
                made[name] = sha256(content(path)).hexdigest()
        told |= record_told(run, case)
    if case.base in ON_ITSELF:
        told["asked"] = [*case.argv, case.typed]  # what is shown follows from what was asked, which is recorded nowhere
        told["record"] = content(case.folder / case.base[1] / "run.json").decode("utf-8", "replace")
        made["stdout"] = sha256(end.out.replace(str(case.folder), "").encode()).hexdigest()
    if case.base in (*ON_CHECKPOINTS, *ON_HOSTILE):
        told["asked"] = [*case.argv, case.what if "comparison.json" in case.what else ""]
        if case.base[0] == "lint":  # which shows what it reads
            told["asked"].append(case.what)
        if case.base[0] == "convert":  # records nothing of its source
            told["source"] = {path.name: sha256(content(path)).hexdigest() for path in sources(case)}
        else:
            made["stdout"] = sha256(end.out.encode()).hexdigest()
    return Result(made, json.dumps(told, sort_keys=True).replace(str(case.folder), ""))


def sources(case: Case) -> list[Path]:
    """The files that a conversion reads."""
    return [*sorted((case.folder / case.base[1]).iterdir()), case.folder / "options" / "rules.toml"]


def is_result(path: Path) -> bool:
    """Whether a file is a result by itself: statistics, scales, weights, graphs, tokens, accuracy."""
    return path.suffix in (".safetensors", ".onnx", ".npz") or path.name in ("scales.json", "accuracy.json")


def record_told(run: Path, case: Case) -> dict[str, Any]:
    """What run.json and statistics.json tell of the model, the text and the options."""
    told: dict[str, Any] = {}
    try:
        record = read_json(run / "run.json")
        told["model"] = record["model"]
        told["stages"] = {name: {key: stage[key] for key in TOLD} for name, stage in record["stages"].items()}
        statistics = read_json(run / "statistics.json")
        told["measured"] = [statistics["model"], statistics["corpus"]]
        told["limit"] = read_json(run / "accuracy.json")["verdict"]["limit"]  # of the verdict in that file
    except NO_RECORD:
        return told | compared_told(run)
    return told


def compared_told(run: Path) -> dict[str, Any]:
    """What comparison.json tells of two checkpoints and the text."""
    try:
        comparison = read_json(run / "comparison.json")
        return {name: comparison[name] for name in ("original", "candidate", "protocol")}
    except NO_RECORD:
        return {}


def of_result(case: Case, before: Snapshot, end: Ended, base: Result) -> list[Verdict]:
    """Silent acceptance."""
    found = result(case, before, end)
    differing = sorted(name for name in found.made.keys() & base.made.keys() if found.made[name] != base.made[name])
    if differing and found.told == base.told:
        return [Verdict("silent", f"{', '.join(differing)} differ, and nothing tells why")]
    return []
