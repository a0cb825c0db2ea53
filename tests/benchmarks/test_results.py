"""Figures in docs were measured: tables are made from committed results, and results are of today's options."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import run
import stale
import tables
from missed import missed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
#: First lines of tables that state rules, forms and arithmetic, and nothing that was measured.
NOT_MEASURED = (
    "| `--for` | server | GEMMs | experts of a mixture |",
    "| server or loader | run | read |",
    "| reader | one static scale a tensor | a scale for each channel and token |",
    "| column | meaning |",
    "| check of a log | value | watch above | bad above |",
    "| what is wrong | exit code |",
    "| verdict | what it says |",
    "| form | positions of a window | gives |",
    "| form | an input is | what is lost of it | operations of a prompt | graph, engine | computed so by |",
    "| older | the same by `--form` |",
    "| class | exit code | raised for | by |",
    "| field | holds |",
    "| measure | option | without it |",
    "| `--form` | weights | inputs | written as |",
    "| word | meaning |",
    "| argument | meaning |",
    "| rules | about | each broken by an example |",
    "| form | scale of a weight [out, in] | of a static input | of a cache | who reads it |",
    "| architecture | what is different about it | tested with | Hugging Face form |",
    "| `--method` | clip | saturates |",
    "| check | value | watch above | bad above |",
    "| tried with | on | what holds |",
    "| verdict | when |",
    "| path | what |",
    "| you want | take |",
    "| field | |",
    "| field | what it is |",
    "| `--runtimes` | what runs |",
    "| in the repository | what it is |",
    "| file | what of it | bounds |",
    "| form | named by | weights' scales | scales of activations, of a cache |",
    "| `--runtime` | runs |",
    "| runtime | builds for | where | what was run |",
    "| | batch | seq (tokens in this step) | scored (those with logits) | capacity (slots of the past) |",
    "| in the checkpoint | vLLM 0.32 | transformers 5.23 | who says so |",
    "| `--kv-cache` | keys | values | bytes of a position, against BF16 | `model/` says so to transformers and vLLM |",
    "| | formula | Llama 3.1 70B | Llama 3.1 405B |",
    "| part | what it asks | asked for |",
    "| library | the tested set | the newest | why not |",
    "| family | file | what is particular to it |",
    "| file | written by | contents |",
    "| code | meaning | in Python |",
    "| server | versions read | by |",
    "| report | what the source says | found by |",
)


#: Results that `make benchmarks` has to measure again: those of Qwen2, whose tokens were AutoTokenizer's, and are by
#: default those of tokenizer.json since.
OTHER_TOKENS = {
    "accumulator", "accuracy", "architectures", "as_served", "culprit_proof", "distill_peer_others", "doctor",
    "exact_answers", "fp8_input", "kv_cache", "sensitivity", "top_logits", "tune", "two_implementations",
    "weight_rounding",
}  # fmt: skip


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_of_which_commit_machine_and_versions_it_is(path: Path) -> None:
    result = read(path)
    assert path.stem.startswith(result["benchmark"])
    scripts = ROOT / "benchmarks" / f"{result['benchmark']}.py", ROOT / "benchmarks" / result["benchmark"] / "run.py"
    assert any(script.is_file() for script in scripts)
    assert re.fullmatch(r"[0-9a-f]{7,12}", result["commit"])
    assert "core" in result["machine"]
    assert result["versions"]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_can_be_measured_again_and_would_be_the_same(path: Path) -> None:
    """Its commit is one of this history, without changes, and its options are those of today."""
    result = read(path)
    reasons = stale.stale_options(result)
    if path.stem in OTHER_TOKENS:
        expected = "CalibrateOptions.tokenizer is new; without it auto was run, and today's default is file"
        assert reasons == [expected], f"{path.name}: it was measured again; take it from OTHER_TOKENS"
        reasons = []
    try:
        reasons += stale.stale_commit(result)
    except stale.HistoryError as error:
        if not reasons:
            pytest.skip(str(error))
    assert not reasons, f"{path.name}: {'; '.join(reasons)}: run `make benchmarks PARTS={path.stem}`"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_has_the_command_and_the_seconds_it_took(path: Path) -> None:
    result = read(path)
    if result["benchmark"] == "gpu":
        assert result["command"].startswith("python benchmarks/gpu/run.py --part ")
        assert result["took_seconds"] == pytest.approx(
            sum(part["seconds"] for part in result["parts"].values()), abs=0.1
        )
        assert all(part["error"] is None for part in result["parts"].values())
    elif "options_read_from" in result:  # from before they were recorded
        assert result["options_read_from"] == result["commit"]
        assert all(record["used"] is None for record in result["options"].values())
    else:
        words = ["python", *run.words_of(path.stem, "python" if "--llmcompressor" in result["command"] else None)[1:]]
        if path.stem == "published_classes":  # each row that was not measured again names its commit
            given = shlex.split(result["command"])
            if "--names" in given:
                again = given[given.index("--names") + 1].split(",")
                assert {*again, *result["kept"]} == {*result["rows"]}
            words = [*words[:2], *given[2:]]
        elif "kept" in result:  # some rows were measured again
            words = [*words[:2], "--names", result["kept"]["not"], "--save", path.stem]
        assert result["command"] == shlex.join(words)
        assert result["took_seconds"] > 0


def test_every_result_is_made_by_a_part_of_make_benchmarks_and_every_part_has_one() -> None:
    made = {part: words.split()[0] for part, words in {**run.PARTS, **run.BY_HAND}.items()}
    by_parts = {path for path in RESULTS if read(path)["benchmark"] == "gpu"}  # `make gpu`, a file a GPU
    assert made == {path.stem: f"{read(path)['benchmark']}.py" for path in RESULTS if path not in by_parts}
    command = ["make", "--dry-run", "benchmarks", "PARTS=memory tune", "AGAIN=1", "LLMCOMPRESSOR=there/python"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "benchmarks/run.py memory tune --again --llmcompressor there/python\n" in printed


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_that_missed_its_limits_says_which_below_a_table(path: Path) -> None:
    lines = missed(path.stem, read(path))
    assert bool(lines) == (not read(path).get("passed", True))
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in tables.pages())
    assert all(line in text for line in lines)


def test_a_page_says_where_windows_were_measured_without_bos() -> None:
    pages = {
        "accuracy": "decisions/0042-how-gptq-and-sequential-were-chosen",
        "as_served": "decisions/0042-how-gptq-and-sequential-were-chosen",
        "kv_cache": "decisions/0041-keys-stay-in-their-basis",
    }  # fmt: skip
    for path in RESULTS:
        records = read(path).get("options", {}).values()
        if any(used.get("bos", "auto") != "auto" for record in records for used in record["used"] or ()):
            assert path.stem in pages, f"{path.stem}: its page does not say `--bos never`"
    assert all("--bos never" in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in pages.values())


def test_the_tables_in_docs_are_those_of_the_results() -> None:
    for page in tables.pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text == tables.made(page, text), f"{page}: run `python benchmarks/tables.py --write`"


def test_the_pictures_in_docs_are_those_of_the_results() -> None:
    for picture, draw in tables.PICTURES.items():
        assert draw().wide == (ROOT / picture).read_text(encoding="utf-8"), f"{picture}: run tables.py --write"


def test_every_other_table_in_docs_states_nothing_that_was_measured() -> None:
    docs = ROOT / "docs"
    for path in sorted([*docs.glob("*.md"), *docs.glob("guides/*.md"), *docs.glob("reference/*.md")]):
        typed = tables.BLOCK.sub("", path.read_text(encoding="utf-8"))
        heads = re.findall(r"^(\|.*\|)\n\|---", typed, re.MULTILINE)
        assert set(heads) <= set(NOT_MEASURED), path


def test_a_table_that_is_missing_from_its_page_is_named() -> None:
    tables_there = r"^docs/kv-cache.md: has the tables \[\], and should have \['kv_cache_real'\]$"
    with pytest.raises(ValueError, match=tables_there):
        tables.made("docs/kv-cache.md", "no table\n")


def test_a_figure_that_was_typed_is_made_again() -> None:
    page = "docs/decisions/0041-keys-stay-in-their-basis.md"
    text = (ROOT / page).read_text(encoding="utf-8")
    figure = re.search(r"^\| K \| (\d+) ", text, re.MULTILINE)
    assert figure is not None
    spoiled = text.replace(figure[0], f"| K | {int(figure[1]) + 1} ")
    assert spoiled != text
    assert tables.made(page, spoiled) == text
