"""The checks of `make lint` that are our own: a tree that breaks a rule is told so, at its line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from .style import LONGEST, LONGEST_FILE, MOST_PARAMETERS, RULES, TWICE, faults, sources

ROOT = Path(__file__).resolve().parent.parent
Tree = Callable[[str], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """`tree(text)`: a package whose one module, core/paths.py, has this text."""

    def write(text: str) -> Path:
        (tmp_path / "core").mkdir(exist_ok=True)
        (tmp_path / "core" / "paths.py").write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('"""What it is."""\n', "core/paths.py:1: a docstring opens with `What`"),
        ('\ndef read():\n    """Where it reads."""\n', "core/paths.py:2: a docstring opens with `Where`"),
        ("\nfound = 1\n", "core/paths.py:2: `found` does not say what it holds"),
        ("for each in ():\n    pass\n", "core/paths.py:1: `each` does not say what it holds"),
        ("def read(whole): ...\n", "core/paths.py:1: `whole` does not say what it holds"),
        ("x = 1\n" * 601, f"core/paths.py: has 601 lines, of at most {LONGEST_FILE}"),
        ("def read():\n" + "    x = 1\n" * 60, f"core/paths.py:1: read has 61 lines, of at most {LONGEST}"),
    ],
)
def test_a_fault_is_named_with_its_file_and_line(tree: Tree, text: str, fault: str) -> None:
    assert faults(tree(text)) == [fault]


@pytest.mark.parametrize(
    "text",
    [
        '"""Read paths."""\n\n\ndef read(path):\n    """Read a path."""\n    return path.found\n',
        "x = 1\n" * LONGEST_FILE,
        "def read():\n" + "    x = 1\n" * (LONGEST - 1),
        f"def read({', '.join(f'a{number}' for number in range(MOST_PARAMETERS + 1))}): ...\n",  # one is allowed
        "def read():\n    from .files import x\n",
        "class Converted:\n    kept: int\n    beside: str = ''\n",  # keys of a file
    ],
)
def test_what_keeps_to_the_style_has_no_faults(tree: Tree, text: str) -> None:
    assert faults(tree(text)) == []


def test_of_what_is_to_become_fewer_all_are_listed_once_there_are_more(tree: Tree, tmp_path: Path) -> None:
    parameters = ", ".join(f"a{number}" for number in range(MOST_PARAMETERS + 1))
    many = f"def one({parameters}): ...\ndef two(self, {parameters}): ...\n"
    assert faults(tree(many)) == [
        f"core/paths.py:{line}: {name} has 7 parameters, of at most 6 (2, of at most 1)"
        for line, name in ((1, "one"), (2, "two"))
    ]
    names = "".join(f"def name_{number}(): ...\n" for number in range(TWICE + 1))
    tree(names)
    (tmp_path / "core" / "files.py").write_text(names, encoding="utf-8")
    listed = faults(tmp_path)
    assert len(listed) == TWICE + 1
    assert listed[0] == "name_0: is defined in core/files.py, core/paths.py (3, of at most 2)"
    imports = "def read():\n" + "    from .files import x\n" * 27
    (tmp_path / "core" / "files.py").unlink()
    assert len(faults(tree(imports))) == 27


def test_a_module_called_after_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "helpers.py").write_text("", encoding="utf-8")
    assert faults(tmp_path) == ["serve/helpers.py: is called `helpers`"]


def test_every_rule_is_run_by_make_lint_and_none_may_have_more_than_there_are() -> None:
    assert "$(BIN)/python tests/style.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
    files = sources(ROOT)
    assert {rule.__name__: len([*rule(files)]) for rule in RULES} == {
        rule.__name__: most for rule, most in RULES.items()
    }
