"""The record beside a result: options are noted while a benchmark runs, and what changed since makes it stale."""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import missed
import pytest
import ran
import result
import run
import stale
import tables
from pages.figures import FIGURES

from fp8q.options import CorpusOptions

ROOT = Path(__file__).resolve().parents[2]
#: Runs a stage, makes option values as a benchmark does and as the package does, and starts a child that makes one.
SCRIPT = """
import subprocess, sys
from pathlib import Path
import ran
ran.start()
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CorpusOptions, DoctorOptions, GenerateOptions, SensitivityOptions
from fp8q.stages.pipeline.stage import NO_FACTS, Key, NoFacts, Stage
from fp8q.stages.pipeline.stage import Notes
stage = Stage("corpus", CorpusOptions, NoFacts, (), (), "corpus.write_corpus")
with stage.writing(Run(Path(sys.argv[1])), Key({}, CorpusOptions(samples=3), NO_FACTS), Notes(SILENT)):
    pass
exec(compile("DoctorOptions(); GenerateOptions(max_tokens=len(sys.argv))", "%(own)s", "exec"))
exec(compile("SensitivityOptions()", "/elsewhere/other.py", "exec"))
if len(sys.argv) == 2:
    subprocess.run([sys.executable, *sys.orig_argv[1:], "child"], check=True)
    import json
    print(json.dumps(ran.options()))
"""

#: A terminal's Ctrl-C reaches both the part and the runner.
INTERRUPT = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(0.2)"


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit that has the script of a benchmark, for `result` and `stale`."""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "tune.py").write_text("1\n", encoding="utf-8")
    (tmp_path / "benchmarks" / "results" / "tune.json").write_text("{}\n", encoding="utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "One")
    monkeypatch.setattr(result, "ROOT", tmp_path)
    monkeypatch.setattr(stale, "ROOT", tmp_path)
    return tmp_path


def test_options_of_stages_and_those_a_benchmark_makes_are_noted_in_every_process(tmp_path: Path) -> None:
    script = SCRIPT % {"own": ROOT / "benchmarks" / "own.py"}
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True, check=True)
    noted = json.loads(done.stdout.splitlines()[-1])
    assert sorted(noted) == ["CorpusOptions", "DoctorOptions", "GenerateOptions"]
    assert noted["CorpusOptions"]["used"] == [{"samples": 3}]
    assert noted["CorpusOptions"]["defaults"]["bos"] == "auto"
    assert noted["DoctorOptions"]["used"] == [{}]
    assert noted["GenerateOptions"]["used"] == [{"max_tokens": 2}, {"max_tokens": 3}]


def test_defaults_leave_out_the_gates_and_hold_nested_options() -> None:
    from fp8q.options import EngineOptions, ScaleOptions

    assert "min_fp8_share" not in ran.defaults(EngineOptions)
    assert ran.defaults(ScaleOptions)["clip"]["method"] == "amax"


def recorded(kind: type, **changes: Any) -> dict[str, Any]:
    """A result that was measured when the defaults were these; None: there was no such field."""
    values = {**ran.defaults(kind), **changes}
    defaults = {name: value for name, value in values.items() if value is not None or name not in changes}
    return {"options": {kind.__name__: {"defaults": defaults, "used": [{}]}}}


def test_a_default_that_changed_and_a_field_that_was_removed_make_a_result_stale() -> None:
    assert stale.stale_options(recorded(CorpusOptions)) == []
    assert stale.stale_options(recorded(CorpusOptions, seed=1)) == ["CorpusOptions.seed was 1 and is None"]
    assert stale.stale_options(recorded(CorpusOptions, pack=True)) == ["CorpusOptions.pack was removed"]
    assert stale.stale_options({"options": {"GoneOptions": {"defaults": {}}}}) == ["GoneOptions was removed"]
    assert stale.stale_options({}) == ["no options are recorded"]


def test_a_field_that_is_new_stands_for_what_stages_declare_of_older_records() -> None:
    """Stories of 5.822 perplexity were measured before `--bos auto`, which makes them 6.467."""
    before = "CorpusOptions.bos is new; without it never was run, and today's default is auto"
    assert stale.stale_options(recorded(CorpusOptions, bos=None)) == [before]
    assert stale.stale_options(recorded(CorpusOptions, allow_overlap=None)) == []


def test_a_default_that_other_options_decide_is_what_it_was_measured_with() -> None:
    from fp8q.options import CalibrateOptions

    assert ran.defaults(CalibrateOptions)["tokenizer"] is None
    measured = recorded(CalibrateOptions) | {"models": "qwen2"}  # whose tokens another tokenizer changes
    assert stale.stale_options(measured) == []
    measured["options"]["CalibrateOptions"]["defaults"]["tokenizer"] = "auto"
    assert stale.stale_options(measured) == ["CalibrateOptions.tokenizer was auto and is file"]


def test_nested_options_are_compared_field_by_field() -> None:
    from fp8q.options import ScaleOptions

    clip = ran.defaults(ScaleOptions)["clip"]
    measured = recorded(ScaleOptions, clip={**clip, "margin": 2})
    assert stale.stale_options(measured) == ["ScaleOptions.margin was 2 and is 0"]
    without = {name: value for name, value in clip.items() if name != "margin"}
    assert stale.stale_options(recorded(ScaleOptions, clip=without)) == []


def test_a_result_of_another_history_or_a_changed_tree_is_refused(repository: Path) -> None:
    commit = stale.git("rev-parse", "--short", "HEAD").stdout.strip()
    assert stale.stale_commit({"benchmark": "tune", "commit": commit}) == []
    changed = {"benchmark": "tune", "commit": f"{commit}+"}
    assert stale.stale_commit(changed) == [f"was measured with uncommitted changes on {commit}"]
    lost = {"benchmark": "tune", "commit": "0123456"}
    assert stale.stale_commit(lost) == ["0123456 is no commit of this history"]
    other = {"benchmark": "load", "commit": commit}
    assert stale.stale_commit(other) == [f"{commit} has no benchmarks/load.py, so it is not what was measured"]


def test_a_shallow_clone_or_none_cannot_tell_of_a_commit(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(repository, "commit", "-q", "--allow-empty", "-m", "Two")
    git(repository, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    first = stale.git("rev-parse", "--short", "HEAD~1").stdout.strip()
    (repository / "none").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository))
    for folder in ("shallow", "none"):
        monkeypatch.setattr(stale, "ROOT", repository / folder)
        with pytest.raises(stale.HistoryError, match=r"^there is no git history here, or not all of it$"):
            stale.stale_commit({"benchmark": "tune", "commit": first})


def test_saving_from_a_changed_tree_is_refused_before_anything_is_measured(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "benchmarks" / "results" / "tune.json").write_text("[]\n", encoding="utf-8")
    assert result.arguments(None).parse_args(["--save", "tune"]) == argparse.Namespace(save="tune")
    (repository / "benchmarks" / "tune.py").write_text("2\n", encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        result.arguments(None).parse_args(["--save", "tune"])
    assert stopped.value.code == 2
    message = "argument --save: tune: benchmarks/tune.py differs from its commit; commit first, then measure\n"
    assert capsys.readouterr().err.endswith(message)


def test_a_part_is_measured_again_where_code_or_options_changed_since(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", repository / "benchmarks" / "results")
    commit = stale.git("rev-parse", "--short", "HEAD").stdout.strip()
    saved = {"benchmark": "tune", "commit": commit, **recorded(CorpusOptions)}
    (repository / "benchmarks" / "results" / "tune.json").write_text(json.dumps(saved), encoding="utf-8")
    assert run.passed_over("tune", again=False, peer=None) == "is of today's code and options"
    assert run.passed_over("tune", again=True, peer=None) is None
    assert run.passed_over("calibration", again=True, peer=None) == "needs --llmcompressor"
    (repository / "README.md").write_text("words\n", encoding="utf-8")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "Two")
    assert run.passed_over("tune", again=False, peer=None) == "is of today's code and options"
    (repository / "benchmarks" / "tune.py").write_text("2\n", encoding="utf-8")
    git(repository, "commit", "-qam", "Three")
    assert run.passed_over("tune", again=False, peer=None) is None


def test_parts_say_what_they_took_and_one_that_fails_ends_itself_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {"tune": 3, "load": 0}
    monkeypatch.setattr(run, "words_of", lambda part, peer: [sys.executable, "-c", f"raise SystemExit({status[part]})"])
    assert run.measure(["tune", "load"], again=True, peer=None) == ["tune"]
    assert capsys.readouterr().out == "1/2 tune …\n1/2 tune: 0 s, exit status 3\n2/2 load …\n2/2 load: 0 s\n"


def test_ctrl_c_says_that_the_same_command_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "words_of", lambda part, peer: [sys.executable, "-c", INTERRUPT])
    monkeypatch.setattr(sys, "argv", ["run.py", "tune", "--again"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert run.main() == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "stopped; the same command goes on with the part that was running\n"


def test_commands_have_no_folder_of_this_machine() -> None:
    words = [str(ROOT / "benchmarks" / "tune.py"), f"{ROOT.parent}/shared/a=/tmp/b,c", "--python=/opt/bin/python"]
    assert result.command(words) == "python benchmarks/tune.py ../shared/a=b,c --python=python"


def test_a_limit_that_is_missed_without_words_for_it_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"^bos: passed is false, and benchmarks/missed.py does not say of what limit$"
    ):
        missed.missed("bos", {"benchmark": "bos", "passed": False})


def test_every_figure_stands_on_a_page() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in tables.pages())
    assert set(FIGURES) == {figure["name"] for figure in tables.FIGURE.finditer(text)}


def test_a_figure_within_a_sentence_is_made_and_must_not_begin_a_line() -> None:
    page, marker = "docs/any.md", "<!-- figure tail_operations -->"
    made = tables.made(page, f"Up to {marker}99<!-- end --> times.\n")
    assert made == f"Up to {marker}{FIGURES['tail_operations']()}<!-- end --> times.\n"
    with pytest.raises(
        ValueError, match=r"^docs/any.md: the marker of the figure tail_operations begins a line; put a"
    ):
        tables.made(page, f"Up to\n{marker}99<!-- end --> times.\n")
    with pytest.raises(ValueError, match=r"^docs/any.md: the figure other is none of pages/figures.py, which has "):
        tables.made(page, "Up to <!-- figure other -->99<!-- end --> times.\n")
