"""The commands on the pages for users run as they stand, on small models, so that no page says what fp8q does not do.

A block of commands is fenced by ```sh. The comment in front of it says why it is not run (`<!-- not run: … -->`), or
what small models need beside it (`<!-- run with: … -->`). Names on the pages (`my-llama`, `chats.jsonl`) are small
models and texts of these names here; a page is run from top to bottom, in a folder of its own.
"""

import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tomllib import loads
from typing import Any

import pytest

from fp8q import api
from fp8q.cli import commands, launch
from fp8q.core.run import Run
from fp8q.options import BF16, CalibrateOptions, ExportOptions
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.pipeline.stages import QUANTIZE
from fp8q.validate.accuracy.document import load_accuracy

from ..architectures import random_checkpoint  # noqa: F401
from ..command_result import Result
from ..conftest import DEMO, ROOT, KeepingGraphs, MadeOnce
from ..mixtures import random_mixture

Fp8q = Callable[..., Result]
DOCS = ROOT / "docs"
PAGES = ["quickstart.md", "recipes.md", *sorted(f"guides/{path.name}" for path in (DOCS / "guides").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- (not run|run with): (.+?) -->\n)?^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Commands that end with exit code 3 where a gate is not met, as small models may not meet one.
GATES = ("--max-ppl-increase", "doctor", "recipes/")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass(frozen=True)
class Block:
    """A block of a page: its commands, why they are not run, and what they are given beside."""

    commands: list[list[str]]
    reason: str | None = None
    beside: tuple[str, ...] = ()


def blocks(page: str) -> list[Block]:
    """The blocks of commands of a page, in order."""
    found = []
    for mark, said, text in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
        commands = [shlex.split(line, comments=True) for line in text.replace("\\\n", "").splitlines() if line.strip()]
        reason, beside = (said, "") if mark == "not run" else (None, said)
        found.append(Block([command for command in commands if command], reason, tuple(beside.split())))
    return found


@pytest.fixture(scope="session")
def world(made_once: MadeOnce, made_adapter: Callable[..., Path]) -> Path:
    """The models and texts that the pages name, small."""

    def make(folder: Path) -> None:
        llama = Path(shutil.copytree(DEMO / "checkpoint", folder / "my-llama"))
        config = json.loads((llama / "config.json").read_text(encoding="utf-8"))
        (llama / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}), encoding="utf-8")
        (llama / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        text = (DEMO / "calibration.txt").read_text(encoding="utf-8")
        (folder / "text.txt").write_text(text[:36_000], encoding="utf-8")
        chats = [
            {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
            for ask, answer in zip(text[:16_000].split("\n\n"), text[16_000:72_000].split("\n\n"), strict=False)
        ]
        (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)), encoding="utf-8")
        random_mixture(folder / "my-mixtral", "mixtral")
        made_adapter(llama, folder / "style", r=4)
        demo = folder / "examples" / "demo"
        demo.mkdir(parents=True)
        (demo / "checkpoint").symlink_to("../../my-llama")
        for name in ("calibration.txt", "evaluation.txt"):
            (demo / name).write_text((DEMO / name).read_text(encoding="utf-8")[:12_000], encoding="utf-8")
        (folder / "examples" / "recipes").symlink_to(ROOT / "examples" / "recipes")
        options = CalibrateOptions(samples=4), ExportOptions(graph=False)
        made = api.calibrate(str(llama), str(folder / "text.txt"), folder / "made", None, *options)
        shutil.move(made.model, folder / "their-fp8")

    return made_once("world-of-docs", make)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_as_they_stand(
    page: str, fp8q: Fp8q, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeping_graphs: KeepingGraphs
) -> None:
    for path in world.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        for name, *words in block.commands if block.reason is None else ():
            assert name == "fp8q", f"{page}: `{name}` is run by no test; mark its block with `<!-- not run: … -->`"
            with keeping_graphs():
                told = fp8q(*words, *block.beside)
            gate = any(mark in word for word in words for mark in GATES)
            assert told.code in ((0, 3) if gate else (0,)), f"{page}: fp8q {shlex.join(words)}: {told.err}"


def test_every_page_of_commands_has_some() -> None:
    assert [page for page in PAGES if not any(block.reason is None for block in blocks(page))] == []


def test_a_reason_says_more_than_that_it_is_not_run() -> None:
    reasons = [block.reason for page in PAGES for block in blocks(page) if block.reason is not None]
    assert len(reasons) >= 5
    assert [reason for reason in reasons if len(reason.split()) < 5] == []


def test_blocks_are_read_with_what_is_said_of_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "# Page\n\n<!-- not run: it has no end -->\n```sh\nfp8q serve RUN # until Ctrl-C\n```\n\n"
        "<!-- run with: --seq-len 16 -->\n```sh\nfp8q a 'b c' \\\n  d\n```\n\n```python\nfp8q\n```\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(f"{__name__}.DOCS", tmp_path)
    assert blocks("page.md") == [
        Block([["fp8q", "serve", "RUN"]], "it has no end"),
        Block([["fp8q", "a", "b c", "d"]], None, ("--seq-len", "16")),
    ]


#: The lines of the README's first two screens, and the words that a reader of one of them takes in.
SCREENS, MOST_WORDS = 60, 120


def test_the_readme_begins_with_commands_and_few_words() -> None:
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:SCREENS])
    prose = re.sub(r"```sh.*?```|<!--.*?-->|^ {4}.*?$", "", first, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= MOST_WORDS


#: A line of a page that is a command, with what stands in front of it; the rest may be redirected.
COMMAND = re.compile(r"^(?: {4})?(?:[A-Z0-9_]+=\S+ )?(?:\.venv/bin/)?(fp8q ([a-z-]+)(?: .*)?)$", re.MULTILINE)
READ = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), ROOT / "integrations" / "vllm" / "README.md"]


def test_every_command_of_every_page_is_understood() -> None:
    """Those of `PAGES` run; of the others, README first, no command or option is one that fp8q does not have."""
    understood = Counter[str]()
    for page in READ:
        for line, command in COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", "")):
            if command not in commands.app or "--config" in line:  # a sentence about fp8q; a file that is not here
                continue
            words = shlex.split(re.split(r"\s[|<>&]", line)[0], comments=True)
            assert list(launch.understand(words[1:])[2]) == [command], f"{page.name}: {line}"
            understood[page.name] += 1
    assert understood["README.md"] >= 5
    assert understood.total() >= 100


#: The family's small model: a trained one beside the repository, or the class and fields of a random one.
RECIPES: dict[str, str | tuple[str, dict[str, Any]]] = {
    "llama": "llama",
    "qwen": "qwen2",
    "gemma": "gemma",
    "mixtral": "mixtral",
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 4}),
    "phi": ("Phi3Config", {"num_key_value_heads": 2, "pad_token_id": 0}),
}


def test_every_recipe_has_a_family_here_and_a_row_on_its_page() -> None:
    names = sorted(path.stem for path in (ROOT / "examples" / "recipes").glob("*.toml"))
    assert names == sorted(RECIPES)
    assert sorted(re.findall(r"\| `(\w+)\.toml` \|", (DOCS / "recipes.md").read_text(encoding="utf-8"))) == names


@pytest.mark.slow
@pytest.mark.parametrize("family", RECIPES)
def test_a_recipe_runs_on_a_small_model_of_its_family(
    family: str, fp8q: Fp8q, world: Path, tmp_path: Path, shared_checkpoint: Callable[[str], Path],
    random_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,  # noqa: F811
) -> None:  # fmt: skip
    """All of `fp8q run` but the graphs and the report, on which no recipe has a say."""
    monkeypatch.setattr("fp8q.stages.run.report", lambda *_: None)
    model, run = RECIPES[family], Run(tmp_path / "run")
    path = shared_checkpoint(model) if isinstance(model, str) else random_checkpoint(tmp_path / "model", *model)
    evaluation = tmp_path / "evaluation.txt"
    evaluation.write_text((DEMO / "evaluation.txt").read_text(encoding="utf-8")[:2_000], encoding="utf-8")
    recipe = ROOT / "examples" / "recipes" / f"{family}.toml"
    asked = ("--data", world / "text.txt", "--eval-data", evaluation, "--out", run.root, "--config", recipe)
    told = fp8q("run", path, *asked, "--samples", "4", "--seq-len", "32", "--no-graph")
    assert told.code in (0, 3), told.err
    assert {"bf16", "reference"} == load_accuracy(run).runtimes.keys()
    chosen = loads(recipe.read_text(encoding="utf-8"))
    assert run.options(QUANTIZE).kv_cache == chosen.get("kv-cache", "off")
    scales = load_scales(run)
    assert set(scales.in_form(BF16)) == {
        module for module in scales.weights if family != "mixtral" or "self_attn" in module
    }
