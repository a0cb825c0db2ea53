"""Cases drawn, each told by its seed and its index: what is wrong, by subject."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

from case import (
    COMPARE,
    CONVERT,
    CONVERT_BLOCKS,
    EVALUATE,
    LOG,
    ON_A_RUN,
    ON_CHECKPOINTS,
    ON_HOSTILE,
    ON_LEARNED,
    PAIR_NEW,
    PAIR_STORED,
    TEXT,
    VALIDATE,
    Case,
    calibrate,
    change,
    copy_world,
    rewrite,
)
from case_generate import of_generate
from mutate_checkpoint import mutate_checkpoint
from mutate_files import PLACES, mutate_place
from mutate_json import mutate_json
from mutate_onnx import mutate_onnx
from mutate_text import MUST_BE_SAID, mutate_saved
from mutate_toml import mutate_toml
from mutate_yaml import mutate_yaml
from options_drawn import mutate_options
from served import draw_served
from world import ASKED, TARGET, WEIGHTS

#: The parts of the world that cases of a subject need; the others need all.
PARTS = {
    "checkpoint": ("run",),
    "model": ("tiny", "sharded", "texts", "run"),
    "text": ("tiny", "texts", "run"),
    "run": ("tiny", "texts", "run", "part-0", "part-1", "tasks"),
    "onnx": ("run", "alone"),
    "config": ("tiny", "texts", "run", "options"),
    "generate": ("tiny", "texts", "run"),
    "server": ("tiny", "run", "tasks"),
    "compared": ("tiny", "run"),
    "tasks": ("tiny", "run", "tasks"),
    "learned": ("tiny", "texts", "learned", "tasks"),
    "log": ("log",),
    "convert": ("tiny", "sharded", "options"),
    "pair": ("tiny", "texts", "converted", "pair"),
    "hostile": ("tiny", "sharded", "options", "texts", "converted"),
}
#: Subjects, and how often each is drawn.
SUBJECTS = {
    "model": 26, "text": 16, "run": 24, "onnx": 12, "options": 10, "config": 5, "files": 8, "environment": 4,
    "generate": 6, "checkpoint": 4, "server": 16, "compared": 6, "tasks": 4, "learned": 10, "log": 4,
    "convert": 8, "pair": 8, "hostile": 24,
}  # fmt: skip


def draw_case(
    seed: int, index: int, world: Path, folder: Path, known: dict[str, tuple[str, ...]],
    subjects: Mapping[str, int] = SUBJECTS,
) -> Case:  # fmt: skip
    """Case `index` of a campaign; its world is made in `folder`, from that in `world`. `known`: the options of each
    command. `subjects`: how often each is drawn.
    """
    draw = random.Random(f"{seed}:{index}")
    subject = draw.choices(list(subjects), list(subjects.values()))[0]
    copy_world(world, folder, None if subject in ("options", "files", "environment") else PARTS[subject])
    case: Case = DRAWN[subject](draw, Case(seed, index, subject, folder, [], ()), known)
    if not case.base:
        case.base = tuple(case.argv)
    return case


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


def of_onnx(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A graph that somebody else exported, or that of a run."""
    case.argv = ["lint", draw.choice(["run/model/model.onnx", "alone/graph.onnx", "alone/graph.onnx"]), "--json"]
    if "alone" in case.argv[1] and draw.random() < 0.5:
        case.argv += ["--run", "run"]
    case.base = tuple(case.argv)
    case.what = change(draw, case.folder / case.argv[1], mutate_onnx)
    return case


def of_checkpoint(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """An FP8 checkpoint that somebody else exported: its configuration, its index, or the headers and scales."""
    case.argv = ["lint", "run/model", "--json"]
    case.base = tuple(case.argv)
    name = draw.choice(["config.json", "config.json", "model.safetensors.index.json", WEIGHTS, WEIGHTS])
    case.what = change(draw, case.folder / "run" / "model" / name)
    return case


def of_server(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """Answers of a server that `compare` or `evaluate` asks."""
    port = (case.folder.parent / "port").read_text(encoding="utf-8")
    case.what = draw_served(draw, case.folder)
    url = f"http://127.0.0.1:{port}/{case.folder.name}"
    if draw.random() < 0.2:
        task = draw.choice(["word", "next_line"])
        servers = draw.choice([["--url", url], ["--url", url, "--bf16-url", url]])
        case.argv = ["evaluate", "run", "--tasks", task, *ASKED[2:], *servers, "--timeout", "2", "--json"]
        return case
    case.argv = ["compare", "run", "--url", url, "--windows", draw.choice(["1", "2"]), "--timeout", "2", "--json"]
    return case


def of_compared(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A checkpoint in the place of a server, or the numbers that it is held against."""
    case.argv, case.base = list(COMPARE), COMPARE
    if draw.random() < 0.5:
        name = draw.choice(["top_logits.npz", "tokens.npz", "accuracy.json", "scales.json"])
        case.what = rewrite(draw, case.folder / "run" / name, case.folder / "run" / "run.json")
    else:
        name = draw.choice(
            ["config.json", "config.json", "tokenizer.json", "generation_config.json", "model.safetensors"]
        )
        case.what = change(draw, case.folder / "tiny" / name)
    return case


def of_tasks(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A file of lm-eval's tasks, or of their questions."""
    name = draw.choice(["word.yaml", "word.yaml", "next_line.yaml", "word_sampled.yaml", "word.jsonl"])
    case.argv, case.base = list(EVALUATE), EVALUATE
    path = case.folder / "tasks" / name
    case.what = change(draw, path, mutate_yaml) if name.endswith(".yaml") else change(draw, path)
    return case


def of_learned(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A file of a run that has learned, and of the answers to tasks; half of them with the record made to agree."""
    case.base = draw.choices([argv for argv, _ in ON_LEARNED], [weight for _, weight in ON_LEARNED])[0]
    case.argv = list(case.base)
    run = case.folder / "learned"
    files = ["distill.json", "distilled.safetensors", "adapter.json", "adapter/adapter_config.json"]
    files += ["adapter/adapter_model.safetensors", "evaluation.json", "answers/word-bf16.json", "answers/word-fp8.json"]
    likely = [run / name for name in files if (run / name).exists()]
    others = [path for path in sorted(run.rglob("*")) if path.is_file() and path.stat().st_size]
    case.what = rewrite(draw, draw.choice([*likely * 4, *others, run / "run.json"]), run / "run.json")
    return case


def of_log(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """The log of a training: a line of it, or its bytes."""
    case.argv, case.base = list(LOG), LOG
    path = case.folder / "log" / "training.jsonl"
    if draw.random() < 0.3:
        case.what = change(draw, path)
        return case
    lines = path.read_bytes().splitlines()
    at = draw.randrange(len(lines))
    what, lines[at] = mutate_json(draw, lines[at])
    path.write_bytes(b"\n".join([*lines, b""]))
    case.what = f"line {at} {what}"
    return case


def of_convert(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A checkpoint that is converted, or the rules of a conversion."""
    case.base = draw.choice([CONVERT, CONVERT, CONVERT_BLOCKS])
    case.argv = list(case.base)
    if case.base is CONVERT_BLOCKS and draw.random() < 0.4:
        case.what = change(draw, case.folder / "options" / "rules.toml", mutate_toml)
        return case
    folder = case.folder / case.base[1]
    weights = sorted(path.name for path in folder.glob("*.safetensors*"))
    name = draw.choice(["config.json", "config.json", "tokenizer.json", "generation_config.json", *(weights * 2)])
    case.what = change(draw, folder / name)
    return case


def of_pair(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """One of two checkpoints that are compared, the text, or the stored comparison."""
    case.base = draw.choice([PAIR_STORED, PAIR_NEW])
    case.argv = list(case.base)
    if case.base is PAIR_STORED and draw.random() < 0.6:
        path = case.folder / "pair" / draw.choice(["comparison.json", "tokens.npz"])
    elif draw.random() < 0.1:
        path = case.folder / "texts" / "other.txt"
    else:
        files = ["config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
        path = case.folder / draw.choice(["tiny", "converted", "converted"]) / draw.choice(files)
    case.what = change(draw, path)
    return case


def of_hostile(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """A checkpoint that somebody else made, converted, compared or linted; or one that goes on with what lies there."""
    case.base = draw.choice(ON_HOSTILE)
    case.argv = list(case.base)
    folder = "converted" if case.base[0] == "lint" else case.base[1]
    if case.base is PAIR_NEW and draw.random() < 0.7:
        folder = "converted"
    case.what = mutate_checkpoint(draw, case.folder / folder)
    if case.base[0] == "convert" and draw.random() < 0.15:
        case.what += f", out: {occupy(draw, case.folder / 'out')}"
    return case


def occupy(draw: random.Random, out: Path) -> str:
    """Put something into the directory of a conversion; what it is."""
    out.mkdir()
    (out / ".convert.json").write_text('{"key": "another"}')
    name = draw.choice(["config.json", ".convert.json", ".convert.lock", "model.safetensors", "notes"])
    if not (out / name).exists():
        (out / name).write_text("x")
    return f"{name}: {mutate_place(draw, out / name)}"


def of_options(draw: random.Random, case: Case, known: dict[str, tuple[str, ...]]) -> Case:
    """Arguments and options."""
    argv = draw.choice([calibrate(), calibrate(), *commands()])
    case.base = tuple(argv)
    case.what, case.argv = mutate_options(draw, argv, known[argv[0]])
    if "--out" in case.argv[:-1] and draw.random() < 0.2:
        case.argv[case.argv.index("--out") + 1] = place = draw.choice(PLACES)
        case.what += f", --out {place[:40]!r}"
        hostile_places(case.folder)
    return case


def commands() -> list[list[str]]:
    """Every command but `calibrate`, on a run or on checkpoints."""
    return [list(argv) for argv, weight in ON_A_RUN if weight] + [list(argv) for argv in ON_CHECKPOINTS]


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
        (list(CONVERT_BLOCKS), ["sharded", "sharded/config.json", "sharded/model-00001-of-00002.safetensors",
                                "options/rules.toml", "sharded/tokenizer.json", "sharded/generation_config.json"]),
        (list(PAIR_STORED), ["pair", "pair/comparison.json", "pair/tokens.npz", "converted", "tiny/config.json"]),
        (list(PAIR_NEW), [f"converted/{name}" for name in ("model.safetensors", "tokenizer.json", "config.json",
                                                           "tokenizer_config.json", "generation_config.json")]),
        (list(COMPARE), ["tiny", "tiny/tokenizer.json", "tiny/model.safetensors", "run/top_logits.npz"]),
        (list(EVALUATE), ["tasks", "tasks/word.yaml", "tasks/word.jsonl"]),
        (list(LOG), ["log", "log/training.jsonl"]),
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
    case.argv = draw.choice([calibrate(), *commands()])
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
    "checkpoint": of_checkpoint,
    "options": of_options,
    "config": of_config,
    "files": of_files,
    "environment": of_environment,
    "generate": of_generate,
    "server": of_server,
    "compared": of_compared,
    "tasks": of_tasks,
    "learned": of_learned,
    "log": of_log,
    "convert": of_convert,
    "pair": of_pair,
    "hostile": of_hostile,
}
