"""`fp8q evaluate` where lm-eval is: the command in lm-eval's environment, on tasks of the demo's text."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_jobs import installed_plugin
from vllm_server import Vllm, vllm_server

import fp8q
from fp8q import api
from fp8q.core.run import Run
from fp8q.examples.demo.tasks import write_tasks

from ..conftest import Texts
from .packages import site_packages

pytestmark = pytest.mark.xdist_group("lm-eval")

#: The repository is the package.
ROOT = Path(fp8q.__file__).parent
LIFE_S = 600
QUESTIONS = 24


@dataclass(frozen=True)
class Harness:
    """lm-eval's environment at `home`, without a network, and the folder `tasks`."""

    home: Path
    folder: Path

    @property
    def tasks(self) -> Path:
        return self.folder / "tasks"

    def fp8q(self, *words: object) -> "subprocess.CompletedProcess[str]":
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self.folder / "cache")}
        command = [str(self.home / "bin" / "python"), "-m", "fp8q", *map(str, words)]
        environment = os.environ | offline | {"PYTHONPATH": str(self.folder / "path")}
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=LIFE_S, env=environment)

    def evaluate(self, run: Run, tasks: str, *more: object) -> "subprocess.CompletedProcess[str]":
        return self.fp8q("evaluate", run.root, "--tasks", tasks, "--include-path", self.tasks, *more)

    def result(self, run: Run, tasks: str, *more: object) -> tuple[dict[str, Any], str]:
        """The JSON object of a call that ends well, and what it said."""
        done = self.evaluate(run, tasks, "--json", *more)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found, done.stderr

    def complaint(self, run: Run, tasks: str, *more: object) -> str:
        """The one line of a call that is refused with exit code 2."""
        done = self.evaluate(run, tasks, *more)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        return done.stderr.removeprefix("fp8q: ").removesuffix("\n")


@pytest.fixture(scope="module")
def harness(home_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, demo_texts: Texts) -> Harness:
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "path").mkdir()
    (folder / "path" / "fp8q").symlink_to(ROOT)
    found = Harness(home_of("lm-eval"), folder)
    write_tasks(found.tasks, demo_texts.evaluation.read_text(encoding="utf-8"), QUESTIONS)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Texts) -> Run:
    options, export = api.CalibrateOptions(samples=16, seq_len=64), api.ExportOptions(graph=False)
    texts, out = (str(demo_texts.calibration), str(demo_texts.evaluation)), tmp_path_factory.mktemp("run") / "run"
    return api.calibrate(str(demo_checkpoint), texts[0], out, texts[1], options, export)


def written(run: Run) -> dict[str, int]:
    """When each file of answers was written."""
    return {path.name: path.stat().st_mtime_ns for path in run.answers.iterdir()}


def test_scores_answers_card_and_report_have_what_both_models_answered(harness: Harness, run: Run) -> None:
    """And a second call, with a task more, asks for that alone; then other scales ask FP8 again, and not BF16."""
    found, _ = harness.result(run, "next_line,word_sampled", "--noise-floor", "--seeds", 2)
    assert found["models"] == {"bf16": "here, CPU", "fp8": "here, CPU", "fp32": "here, CPU"}
    rows = {(row["task"], row["metric"]): row for row in found["results"]}
    assert rows.keys() == {("next_line", "acc"), ("next_line", "acc_norm"), ("word_sampled", "exact_match")}
    lines = rows["next_line", "acc"]
    assert lines["bf16"] > 0.4, "the demo knows which line comes next, where chance is a quarter"
    assert 0.8 < lines["paired"]["recovery"] < 1.25
    assert lines["noise"]["right_to_wrong"] + lines["noise"]["wrong_to_right"] <= 2
    assert rows["word_sampled", "exact_match"]["seeds"] == 2
    assert sorted(path.name for path in run.answers.iterdir()) == sorted(
        f"{name}-{runtime}{seed}.json"
        for runtime in ("bf16", "fp8", "fp32")
        for name, seed in (("next_line", ""), ("word_sampled", "-1"), ("word_sampled", "-2"))
    )
    assert "| next_line (0-shot) | acc |" in run.card.read_text(encoding="utf-8")
    assert [row.task for row in api.report_tables(run.root)["tasks"].rows] == ["next_line", "next_line", "word_sampled"]

    before = written(run)
    again, said = harness.result(run, "next_line,word")
    assert "bf16: 1 of 2 answers to tasks are there already" in said
    after = written(run)
    assert sorted(after.keys() - before.keys()) == ["word-bf16.json", "word-fp8.json"]
    assert before.items() <= after.items()
    kept = next(row for row in again["results"] if row["metric"] == "acc")
    assert kept["bf16"] == lines["bf16"]
    assert harness.result(run, "next_line,word") == (again, "")

    other = Run(Path(shutil.copytree(run.root, harness.folder / "other")))
    api.scales(other.root, api.RescaleOptions(clip=api.Clipping(margin=1)))
    assert api.report_tables(other.root)["tasks"].rows == []
    before = written(other)
    harness.result(other, "word")
    asked = [name for name, when in written(other).items() if before[name] != when]
    assert asked == ["word-fp8.json"]


def test_a_task_that_is_not_there_is_named_with_the_nearest(harness: Harness, run: Run) -> None:
    assert harness.complaint(run, "nextline") == (
        "--tasks nextline: lm-eval 0.4.13 has no such task (it has next_line); `lm_eval ls tasks` lists them, and "
        "--include-path adds a folder of your own"
    )


def test_a_task_whose_data_is_on_the_hub_is_named_where_there_is_none(harness: Harness, run: Run) -> None:
    assert harness.complaint(run, "hellaswag") == (
        "--tasks hellaswag: its data is on the hub, which does not give it here (Couldn't reach 'Rowan/hellaswag' on "
        "the Hub (OfflineModeIsEnabled)); run it once with a network, which leaves the data in the cache, or give a "
        "task of local files with --include-path"
    )


def test_a_task_that_runs_the_models_code_is_refused(harness: Harness, run: Run) -> None:
    text = (harness.tasks / "word.yaml").read_text(encoding="utf-8")
    (harness.folder / "unsafe").mkdir()
    (harness.folder / "unsafe" / "unsafe.yaml").write_text(
        f"{text}unsafe_code: true\n".replace("task: word", "task: runs")
    )
    assert harness.complaint(run, "runs", "--include-path", harness.folder / "unsafe") == (
        "--tasks runs: runs the code that the model writes, which fp8q does not; leave it out"
    )


def test_a_template_reaches_its_document_alone(harness: Harness, run: Run) -> None:
    """In lm-eval's own environment of Jinja this template would write the file."""
    reached = "{{ cycler.__init__.__globals__.os.system('touch reached') }}"
    (folder := harness.folder / "template").mkdir()
    text = (harness.tasks / "word.yaml").read_text(encoding="utf-8").replace("task: word", "task: reaches")
    lines = [line for line in text.splitlines() if not line.startswith("doc_to_text")]
    (folder / "reaches.yaml").write_text("\n".join([*lines, f'doc_to_text: "{reached}"', ""]), encoding="utf-8")
    for file in harness.tasks.glob("*.jsonl"):
        shutil.copy(file, folder)
    assert harness.complaint(run, "reaches", "--include-path", folder) == (
        "--tasks reaches: cannot be loaded (SecurityError: access to attribute '__init__' of 'type' object is unsafe.)"
    )
    assert not (harness.folder / "reached").exists()


def test_a_task_whose_file_is_gone_is_named(harness: Harness, run: Run) -> None:
    folder = harness.folder / "gone"
    folder.mkdir()
    text = (harness.tasks / "word.yaml").read_text(encoding="utf-8").replace("word.jsonl", "gone.jsonl")
    (folder / "gone.yaml").write_text(text.replace("task: word", "task: gone"), encoding="utf-8")
    assert harness.complaint(run, "gone", "--include-path", folder).startswith("--tasks gone: cannot be loaded (")


@pytest.fixture
def served(run: Run) -> Iterator[str]:
    """The address of `fp8q serve`, which runs the FP8 reference."""
    command = [sys.executable, "-m", "fp8q", "serve", str(run.root), "--runtime", "reference", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            line = next(each for each in server.stdout if "http://" in each)
            yield line.split(" at ")[1].split()[0]
        finally:
            server.terminate()


def test_a_server_generates_what_the_model_here_does(harness: Harness, run: Run, served: str) -> None:
    """And scores the same likelihoods, one prompt a request or eight."""
    here, there, eight = (
        Run(Path(shutil.copytree(run.root, harness.folder / name))) for name in ("here", "there", "eight")
    )
    harness.result(here, "word", "--limit", 8)
    found, _ = harness.result(there, "word", "--limit", 8, "--url", served)
    assert found["models"] == {"bf16": "here, CPU", "fp8": served}
    answers = [json.loads((each.answers / "word-fp8.json").read_text())["answers"] for each in (here, there)]
    assert sum(one == other for one, other in zip(*answers, strict=True)) >= 7, "a sum in another order may flip one"
    likelihoods = ("next_line", "--limit", 4, "--batch-size", 1)
    rows = [harness.result(each, *likelihoods, *more)[0]["results"] for each, more in (
        (here, ()), (there, ("--url", served)),
    )]  # fmt: skip
    assert rows[0] == rows[1]
    chosen = [json.loads((each.answers / "next_line-fp8.json").read_text())["answers"] for each in (here, there)]
    assert chosen[0] == chosen[1]
    together, _ = harness.result(eight, *likelihoods[:3], "--batch-size", 8, "--url", served)
    assert together["results"] == rows[0]


def test_a_server_that_does_not_answer_leaves_the_answers_of_the_other_model(harness: Harness, run: Run) -> None:
    other = Run(Path(shutil.copytree(run.root, harness.folder / "served")))
    shutil.rmtree(other.answers, ignore_errors=True)
    (other.root / "evaluation.json").unlink(missing_ok=True)
    done = harness.evaluate(other, "word", "--url", "http://127.0.0.1:9", "--limit", 4)
    assert done.returncode == 4
    last = done.stderr.splitlines()[-1]
    assert last == "fp8q: http://127.0.0.1:9: no server answers there; start it, or give its address with --url"
    assert [path.name for path in other.answers.iterdir()] == ["word-bf16.json"]


def test_vllm_answers_likelihoods_as_the_model_here_does(
    harness: Harness, run: Run, home_of: Callable[[str], Path], vllm_python: Path, tmp_path: Path
) -> None:
    """vLLM's own server with the plugin, one term: its sums are in another order, so that one choice may differ."""
    packages, plugin = site_packages(home_of("vllm-server")), installed_plugin(vllm_python, tmp_path / "plugin")
    here, there = (Run(Path(shutil.copytree(run.root, tmp_path / name))) for name in ("here", "there"))
    harness.result(here, "next_line", "--limit", 8)
    with vllm_server(Vllm(vllm_python, packages, plugin), run.model, True, tmp_path / "log.txt") as url:
        found, _ = harness.result(there, "next_line", "--limit", 8, "--url", url)
    assert found["models"] == {"bf16": "here, CPU", "fp8": url}
    answers = [json.loads((each.answers / "next_line-fp8.json").read_text())["answers"] for each in (here, there)]
    assert len(answers[1]) == 8
    assert sum(one == other for one, other in zip(*answers, strict=True)) >= 7
