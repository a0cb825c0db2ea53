"""A case: a world of its own with one thing wrong in it, and the command that meets it."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from mutate_bytes import mutate_bytes, mutate_npz, mutate_safetensors
from mutate_json import mutate_json
from mutate_onnx import mutate_onnx
from mutate_text import mutate_parquet, mutate_rows, mutate_text
from world import ASKED, COMPARED, LEARNING, SHORT, TARGET

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
    #: the file that is on standard input
    typed: str = "/dev/null"
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
IN_PLACE = ("scales", "export", "build-engine", "validate", "triton", "report", "compare", "evaluate", "distill")
ENGINE = ("--runtime", "tensorrt-rtx", "--target", TARGET, "--max-batch", "2")
VALIDATE = ("validate", "run", "--runtimes", "bf16,reference")
#: A few tokens after a prompt, in every way.
WORDS = ("--prompt", "the scale of", "--max-tokens", "3", "--json")
GENERATE = tuple(
    ("generate", "run", *WORDS, *more)
    for more in ((), ("--runtime", "reference"), ("--runtime", "bf16"), ("--compare",), ("--chat",))
)
#: Another checkpoint beside the run's runtimes, tasks of a folder, codes that learn, and the log of a training.
COMPARE = ("compare", "run", "--model", "tiny", "--windows", "2", "--json")
EVALUATE = ("evaluate", "run", *ASKED)
DISTILL = ("distill", "run", "--data", "texts/text.txt", "--allow-overlap", "--epochs", "0.1", "--samples", "10")
LOG = ("inspect", "log", "--json")
#: A conversion by names, in either form; and two checkpoints compared, once more or for the first time.
CONVERT = ("convert", "tiny", "--out", "out", "--json")
CONVERT_BLOCKS = ("convert", "sharded", "--out", "out", "--form", "block", "--rules", "options/rules.toml", "--json")
PAIR = ("compare", "tiny", "--model", "converted", *COMPARED)
PAIR_STORED, PAIR_NEW = (*PAIR, "--out", "pair"), (*PAIR, "--out", "out")
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
    (list(GENERATE[0]), 3),
    (list(COMPARE), 4),
    (list(EVALUATE), 2),
    (list(DISTILL), 2),
    (list(LOG), 0),
    (["report", "run"], 0),
)
#: Commands on the run that has learned codes, an adapter and answers.
ON_LEARNED: tuple[tuple[tuple[str, ...], int], ...] = (
    (("distill", "learned", *LEARNING), 2),
    (("distill", "learned", *LEARNING, "--train", "adapter"), 2),
    (("generate", "learned", *WORDS, "--runtime", "reference"), 3),
    (("inspect", "learned", "--json"), 1),
    (("validate", "learned", "--runtimes", "bf16,reference"), 2),
    (("evaluate", "learned", *ASKED), 4),
    (("compare", "learned", "--model", "tiny", "--windows", "2", "--json"), 2),
    (("scales", "learned", "--method", "mse"), 1),
)
#: Commands that read checkpoints and no run; the last are of one that is hostile (`mutate_checkpoint`).
CONVERT_SHARDS, LINT = ("convert", "sharded", "--out", "out", "--json"), ("lint", "converted", "--json")
LINT_SERVER = (*LINT, "--for", "vllm")
ON_CHECKPOINTS = (CONVERT, CONVERT_BLOCKS, PAIR_STORED, PAIR_NEW)
ON_HOSTILE = (CONVERT, CONVERT_BLOCKS, CONVERT_SHARDS, PAIR_NEW, LINT, LINT_SERVER)


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


def rewrite(draw: random.Random, path: Path, record: Path, mutation: Mutation | None = None) -> str:
    """Mutate a file of a run and, half of the time, its SHA-256 in the record; what was done."""
    before = sha256(path.read_bytes()).hexdigest()
    what = change(draw, path, mutation)
    if path != record and draw.random() < 0.5:
        after = sha256(path.read_bytes()).hexdigest()
        record.write_text(record.read_text(encoding="utf-8").replace(before, after), encoding="utf-8")
        what += ", and recorded so"
    return what
