"""What the sources hold of CONTRIBUTING's section "Style", as far as a parser can tell."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("api.py", "cli", "core", "options", "calibrate", "quantize", "export", "validate", "serve", "stages")
#: A docstring begins with a verb, or with the noun that it describes.
OPENINGS = ("What", "Which", "Whether", "Where", "Who", "How", "That of", "The same")
#: Rules of the lints are stated as sentences, and a field's description is read in a schema.
STATED = {"other_codes", "scaled_behind", "model_file", "Health"}
#: Words that say where a thing was put or found, and not what it is.
VAGUE = {"found", "given", "kept", "told", "made", "place", "seen", "beside", "alone", "ahead", "utils", "helpers"}
LONGEST, MOST_PARAMETERS, LONGEST_FILE = 60, 6, 600
#: Functions of more parameters: public ones of `api` and `cli`, whose parameters are the command's; others are to be
#: mended.
MANY = 1
#: Public names that are defined in more than one module. To be lowered.
TWICE = 8
#: Imports of own modules in functions, outside `api` and `cli`. To be lowered.
IMPORTS_INSIDE = 26


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Each file of the package, by its path, and its syntax tree."""
    for name in PACKAGE:
        path = ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_docstrings_open_with_what_they_do() -> None:
    opened = set()
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if any(text.startswith(f"{opening} ") for opening in OPENINGS):
                    opened.add(getattr(node, "name", path))
    assert opened == STATED


def test_modules_and_folders_are_called_after_their_subjects() -> None:
    vague = [path for path, _ in sources() if VAGUE & {*Path(path).with_suffix("").parts}]
    assert vague == []


def test_functions_are_short() -> None:
    lengths = {
        f"{path}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path, tree in sources()
        for node in functions(tree)
    }
    assert len(lengths) > 2000
    assert [name for name, length in lengths.items() if length > LONGEST] == []


def test_files_are_short() -> None:
    lengths = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path, _ in sources()}
    del lengths["api.py"]  # the list of public functions, which is as long as they are many
    assert [path for path, length in lengths.items() if length > LONGEST_FILE] == []


def test_functions_with_many_parameters_do_not_grow_in_number() -> None:
    many = []
    for path, tree in sources():
        for node in functions(tree):
            if any("triton.jit" in ast.unparse(each) for each in node.decorator_list):
                continue  # a kernel takes pointers and sizes, and no values that hold several
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if len([name for name in names if name not in {"self", "cls"}]) > MOST_PARAMETERS:
                many.append(f"{path}: {node.name}")
    assert len(many) <= MANY, many


def test_public_names_defined_twice_do_not_grow_in_number() -> None:
    """A command, its public function and what its stage returns may share a name."""
    defined = defaultdict(set)
    for path, tree in ((path, tree) for path, tree in sources() if not path.startswith(("api.py", "cli/"))):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].add(path)
    twice = sorted(name for name, paths in defined.items() if len(paths) > 1)
    assert len(twice) <= TWICE, twice


def test_imports_of_own_modules_stand_at_the_top() -> None:
    """Lazy loading is in `api` and `cli`, and elsewhere where a host without torch, or Triton, does not come."""
    inside = [
        f"{path}:{node.lineno}"
        for path, tree in sources()
        if not path.startswith(("api.py", "cli/"))
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert len(inside) <= IMPORTS_INSIDE, inside
