"""Count the files of the package that a module reaches by its imports, those in functions included; not those for types
alone, nor files that have nothing but a docstring.

python tests/reach.py MODULE [OTHER ...]    the number; then the chain of imports by which it reaches each other module
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("api.py", "cli", "core", "options", "calibrate", "quantize", "export", "validate", "serve", "stages")


def package_modules(root: Path) -> dict[str, ast.Module]:
    """Map the dotted name of every file of the package in `root`, with `__init__`, to its syntax tree."""
    modules = {}
    for folder in FOLDERS:
        path = root / folder
        for file in [path] if path.is_file() else path.rglob("*.py"):
            name = ".".join(file.relative_to(root).with_suffix("").parts)
            modules[name] = ast.parse(file.read_text(encoding="utf-8"))
    return modules


def imported(name: str, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """Every file of the package that the file `name` imports, and the `__init__` of the folders around it."""
    tree = modules[name]
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    folders = name.split(".")[:-1]
    names = [".".join([*folders[:depth], "__init__"]) for depth in range(1, len(folders) + 1)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in for_types:
            above = folders[: len(folders) - node.level + 1]
            module = [*above, *(node.module or "").split(".")] if node.module else above
            paths = [module, *([*module, alias.name] for alias in node.names)]
            names += [".".join(path) for path in paths] + [".".join([*path, "__init__"]) for path in paths]
    return (imported for imported in names if imported in modules)


def importers(start: str, modules: Mapping[str, ast.Module]) -> dict[str, str | None]:
    """Map every file that `start` reaches to the one by which it is reached first; `start` itself to None."""
    by: dict[str, str | None] = {start: None}
    waiting = [start]
    for name in waiting:
        for module in imported(name, modules):
            if module not in by:
                by[module] = name
                waiting.append(module)
    return by


def reached(start: str, root: Path = ROOT) -> list[str]:
    """The files with more than a docstring that `start` reaches, itself included."""
    modules = package_modules(root)
    return [name for name in importers(start, modules) if not _is_docstring(modules[name])]


def _is_docstring(tree: ast.Module) -> bool:
    return all(isinstance(statement, ast.Expr) for statement in tree.body)


def main() -> None:
    """Print the number, and the chains."""
    start, *others = sys.argv[1:]
    by = importers(start, package_modules(ROOT))
    print(f"{start}: {len(reached(start))} files")
    for other in others:
        chain = [other] if other in by else []
        while chain and (above := by[chain[-1]]):
            chain.append(above)
        print(" <- ".join(chain) or f"{other} is not reached")


if __name__ == "__main__":
    main()
