"""A case: a world of its own with one thing wrong in it, and the command that meets it; told by seed and index."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mutate_bytes import mutate_bytes, mutate_npz, mutate_safetensors
from mutate_files import PLACES, mutate_place
from mutate_json import mutate_json
from mutate_onnx import mutate_onnx
from mutate_text import MUST_BE_SAID, mutate_parquet, mutate_rows, mutate_saved, mutate_text
from mutate_toml import mutate_toml
from options_drawn import mutate_options
from world import SHORT, TARGET, WEIGHTS

Mutation = Callable[[random.Random, bytes], tuple[str, bytes]]
#: How a file is mutated, by how its name ends; bytes alone, where nothing is said.
BY_SUFFIX: dict[str, Mutation] = {
    ".json": mutate_json,
    ".safetensors": mutate_safetensors,
    ".npz": mutate_npz,
    ".onnx": mutate_onnx,
    ".txt": mutate_text,
    ".jsonl": mutate_rows,
    ".parquet": mutate_parquet,
}
TEXT = ("--data", "texts/text.txt", "--eval-data", "texts/other.txt")


@dataclass
class Case:
    """What is run, in `folder`, and what is known of it beforehand."""

    seed: int
    index: int
    subject: str
    folder: Path
    argv: list[str]
    #: the same command without what is wrong: what its result is held against
    base: tuple[str, ...]
    what: str = "nothing"
    environment: dict[str, str] = field(default_factory=dict)
    #: "closed stdout" and the like: how the process is started
    start: frozenset[str] = frozenset()
    #: accepting it without a word would be wrong
    must_be_said: bool = False

    @property
    def out(self) -> str | None:
        """The run that the command writes, where its arguments tell."""
        if "--out" in self.argv[:-1]:
            last = len(self.argv) - self.argv[-2::-1].index("--out") - 1  # given twice, the last one counts
            return self.argv[last]
        return self.base[1] if self.base[0] in IN_PLACE else None

    def __str__(self) -> str:
        return f"{self.seed}:{self.index} [{self.subject}] {self.what} | fp8q {' '.join(self.argv)}"


def calibrate(model: str = "tiny", *more: str, text: tuple[str, ...] = TEXT) -> list[str]:
    """Measure the first batch: all of `calibrate` but scales and graphs, which take seconds."""
    return ["calibrate", model, *text, "--out", "out", "--batches", "0:1", *SHORT, *more]


#: Commands that write into the run that is their argument.
IN_PLACE = ("scales", "export", "build-engine", "validate", "triton", "report")
ENGINE = ("--runtime", "tensorrt-rtx", "--target", TARGET, "--max-batch", "2")
VALIDATE = ("validate", "run", "--runtimes", "bf16,reference")
ON_A_RUN: tuple[tuple[list[str], int], ...] = (
    (["scales", "run", "--method", "mse"], 5),
    (["inspect", "run", "--json"], 4),
    (["lint", "run/model/model.onnx", "--json"], 4),
    (["engine", "run", "--json"], 3),
    (["build-engine", "run", *ENGINE], 3),
    ([*VALIDATE, "--max-ppl-increase", "5%"], 4),
    (["triton", "run"], 3),
    (["merge", "part-0", "part-1", "--out", "run", "--kv-cache", "fp8", "--method", "percentile"], 4),
    (["calibrate", "tiny", *TEXT, "--out", "run", "--kv-cache", "fp8", *SHORT], 3),
    (["report", "run"], 0),
)
#: The parts of the world that cases of a subject need; the others need all.
PARTS = {
    "model": ("tiny", "sharded", "texts", "run"),
    "text": ("tiny", "texts", "run"),
    "run": ("tiny", "texts", "run", "part-0", "part-1"),
    "onnx": ("run", "alone"),
    "config": ("tiny", "texts", "run", "options"),
}
#: Subjects, and how often each is drawn.
SUBJECTS = {"model": 26, "text": 16, "run": 24, "onnx": 12, "options": 10, "config": 5, "files": 8, "environment": 4}


def draw_case(seed: int, index: int, world: Path, folder: Path, known: dict[str, tuple[str, ...]]) -> Case:
    """Case `index` of a campaign; its world is made in `folder`, from that in `world`. `known`: the options of each
    command.
    """
    draw = random.Random(f"{seed}:{index}")
    subject = draw.choices(list(SUBJECTS), list(SUBJECTS.values()))[0]
    copy_world(world, folder, None if subject in ("options", "files", "environment") else PARTS[subject])
    case: Case = DRAWN[subject](draw, Case(seed, index, subject, folder, [], ()), known)
    if not case.base:
        case.base = tuple(case.argv)
    return case


def copy_world(world: Path, folder: Path, parts: tuple[str, ...] | None = None) -> None:
    """The world as it stands, or the `parts` of it; the paths in its runs' records are those of the copy."""
    folder.mkdir()
    for name in parts or [path.name for path in world.iterdir()]:
        shutil.copytree(world / name, folder / name, symlinks=True)
    for record in folder.glob("*/run.json"):
        record.write_bytes(record.read_bytes().replace(str(world).encode(), str(folder).encode()))


def change(draw: random.Random, path: Path, mutation: Mutation | None = None) -> str:
    """Mutate one file in its place; what was done to it."""
    mutate = mutation or (mutate_bytes if draw.random() < 0.1 else BY_SUFFIX.get(path.suffix, mutate_bytes))
    what, content = mutate(draw, path.read_bytes())
    path.write_bytes(content)
    return f"{path.parent.name}/{path.name} {what}"


def of_model(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A file of a checkpoint."""
    folder = draw.choice(["tiny", "tiny", "sharded"])
    weights = sorted(path.name for path in (case.folder / folder).glob("*.safetensors*"))
    files = ["config.json"] * 5 + ["tokenizer.json"] * 2 + ["tokenizer_config.json", "generation_config.json"]
    name = draw.choice([*files, *(weights * 2)])
    case.base = tuple(calibrate(folder, *draw.choice([[], [], ["--stream"]])))
    if folder == "tiny" and draw.random() < 0.1:
        case.base = ("scales", "run", "--method", "mse")
    case.what = change(draw, case.folder / folder / name)
    if draw.random() < 0.1:
        case.what += ", " + change(draw, case.folder / folder / draw.choice(["config.json", "tokenizer_config.json"]))
    case.argv = list(case.base)
    return case


def of_text(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A text, to calibrate on, to evaluate on, or to compare with."""
    name = draw.choice(["text.txt", "text.txt", "text.jsonl", "chats.jsonl", "text.parquet", "saved"])
    path = case.folder / "texts" / name
    data = ("--data", f"texts/{name}", "--eval-data", "texts/other.txt")
    uses: list[tuple[list[str], int]] = [
        (calibrate(text=data), 6),
        (calibrate(text=("--data", "texts/other.txt", "--eval-data", f"texts/{name}")), 1),
        (calibrate(text=("--data", "texts/other.txt=2", *data)), 1),
        ([*VALIDATE, "--data", f"texts/{name}"], 1),
        (["inspect", "run", "--against", f"texts/{name}", "--json"], 1),
    ]
    argv = draw.choices([use for use, _ in uses], [weight for _, weight in uses])[0]
    if name == "chats.jsonl" and argv[0] == "calibrate":
        argv.append("--chat-template")
    case.base = tuple(argv)
    case.what = mutate_saved(draw, path) if name == "saved" else change(draw, path)
    case.must_be_said = any(said in case.what for said in MUST_BE_SAID)
    case.argv = argv
    return case


def of_run(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A file of a run; half of them with the record made to agree, as another version or a hostile hand would."""
    argv = list(draw.choices([argv for argv, _ in ON_A_RUN], [weight for _, weight in ON_A_RUN])[0])
    name = draw.choice(["part-0", "part-1"]) if argv[0] == "merge" and draw.random() < 0.7 else "run"
    files = sorted(path for path in (case.folder / name).rglob("*") if path.is_file() and path.stat().st_size)
    likely = [path for path in files if path.suffix in (".json", ".safetensors", ".npz", ".onnx", ".plan")]
    path = draw.choice([*files, *likely, *likely, *[case.folder / name / "run.json"] * 8])
    case.what = rewrite(draw, path, case.folder / name / "run.json")
    case.argv, case.base = argv, tuple(argv)
    return case


def rewrite(draw: random.Random, path: Path, record: Path) -> str:
    """Mutate a file of a run and, half of the time, its SHA-256 in the record; what was done."""
    from hashlib import sha256

    before = sha256(path.read_bytes()).hexdigest()
    what = change(draw, path)
    if path != record and draw.random() < 0.5:
        after = sha256(path.read_bytes()).hexdigest()
        record.write_text(record.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
        what += ", and recorded so"
    return what


def of_onnx(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A graph that somebody else exported, or that of a run."""
    case.argv = ["lint", draw.choice(["run/model/model.onnx", "alone/graph.onnx", "alone/graph.onnx"]), "--json"]
    if "alone" in case.argv[1] and draw.random() < 0.5:
        case.argv += ["--run", "run"]
    case.base = tuple(case.argv)
    case.what = change(draw, case.folder / case.argv[1], mutate_onnx)
    return case


def of_options(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """Arguments and options."""
    argv = draw.choice([calibrate(), calibrate(), *(list(argv) for argv, weight in ON_A_RUN if weight)])
    case.base = tuple(argv)
    case.what, case.argv = mutate_options(draw, argv, known[argv[0]])
    if "--out" in case.argv[:-1] and draw.random() < 0.2:
        case.argv[case.argv.index("--out") + 1] = place = draw.choice(PLACES)
        case.what += f", --out {place[:40]!r}"
        hostile_places(case.folder)
    return case


def hostile_places(folder: Path) -> None:
    """What `PLACES` finds in the case's folder."""
    import os

    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    (folder / "locked").mkdir(mode=0o500)


def of_config(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A TOML file of options."""
    uses = [["calibrate", "--config", "options/calibrate.toml", "--out", "out"], ["scales", "run", "--config"]]
    argv = draw.choice([uses[0], uses[0], [*uses[1], "options/scales.toml"]])
    path = next(case.folder / name for name in argv if name.endswith(".toml"))
    case.what = change(draw, path, mutate_toml)
    case.argv, case.base = argv, tuple(argv)
    return case


def of_files(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """Something else in the place of a file or a folder."""
    uses = [
        (calibrate(), ["tiny", "tiny/config.json", "tiny/tokenizer.json", "tiny/model.safetensors",
                       "texts/text.txt", "texts/other.txt", "tiny/tokenizer_config.json",
                       "tiny/generation_config.json"]),
        (calibrate("sharded"), ["sharded/model.safetensors.index.json", "sharded/model-00001-of-00002.safetensors"]),
        (calibrate(text=("--data", "texts/saved", *TEXT[2:])),
         ["texts/saved", "texts/saved/state.json", "texts/saved/dataset_info.json"]),
        (calibrate(text=("--data", "texts/text.parquet", *TEXT[2:])), ["texts/text.parquet"]),
        (calibrate(text=("--data", "texts/text.jsonl", *TEXT[2:])), ["texts/text.jsonl"]),
        (["lint", "alone/graph.onnx", "--run", "run"], ["alone/graph.onnx", f"alone/{WEIGHTS}", "run/model"]),
        (["engine", "run", "--plan", "run/engines/sm89.plan", "--target", TARGET], ["run/engines/sm89.plan"]),
        (["calibrate", "--config", "options/calibrate.toml", "--out", "out"], ["options/calibrate.toml"]),
        *((list(argv), [""]) for argv, weight in ON_A_RUN if weight),
    ]  # fmt: skip
    argv, places = draw.choice(uses)
    place = draw.choice(places)
    if not place:
        found = [path for path in sorted((case.folder / "run").rglob("*")) if "weights" not in path.parts]
        place = str(draw.choice([*found, *[case.folder / "run" / "run.json"] * 4]).relative_to(case.folder))
    case.argv, case.base = argv, tuple(argv)
    case.what = f"{place}: {mutate_place(draw, case.folder / place)}"
    return case


STARTS = ("closed stdout", "closed stderr", "closed stdin", "full stdout", "small files", "closed all")
ENVIRONMENTS = (
    {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0"}, {"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"},
    {"WORLD_SIZE": "-1"}, {"RANK": "5", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "1000000000000", "RANK": "0"},
    {"COLUMNS": "0"}, {"COLUMNS": "1"}, {"COLUMNS": "x"}, {"TERM": "dumb", "NO_COLOR": "1"}, {"FORCE_COLOR": "0"},
    {"HOME": "/nowhere"}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "7", "MASTER_ADDR": "x", "MASTER_PORT": "x"},
    {"TZ": "nowhere"}, {"PAGER": "/bin/false", "EDITOR": "/bin/false"},
    {"CUDA_VISIBLE_DEVICES": "99"}, {"LOCAL_WORLD_SIZE": "0"},
)  # fmt: skip


def of_environment(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """How the process is started: what its streams are, what it may write, what its variables say."""
    case.argv = draw.choice([calibrate(), *(list(argv) for argv, weight in ON_A_RUN if weight)])
    case.base = tuple(case.argv)
    if draw.random() < 0.6:
        case.what = draw.choice(STARTS)
        case.start = frozenset({case.what})
    else:
        case.environment = dict(draw.choice(ENVIRONMENTS))
        case.what = json.dumps(case.environment)
    return case


DRAWN: dict[str, Callable[[random.Random, Case, dict[str, tuple[str, ...]]], Case]] = {
    "model": of_model,
    "text": of_text,
    "run": of_run,
    "onnx": of_onnx,
    "options": of_options,
    "config": of_config,
    "files": of_files,
    "environment": of_environment,
}
