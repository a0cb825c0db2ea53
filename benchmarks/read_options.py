"""Read the options of results that were measured before options were recorded, from the commits they name.

    python benchmarks/read_options.py [NAME …]

The script of a result, as it is at the commit, tells which functions of `fp8q.api` it calls and which option classes it
names; the option classes of that commit tell their defaults then. Both are facts of the commit. What the script set
beside the defaults stands in the script alone, so `used` is null. `options_read_from` in the result says so. Results
of uncommitted changes, or of commits that are not in this history, are left as they are: nothing can be read for them.
"""

import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import ran

ROOT = Path(__file__).resolve().parent.parent


def names_in(script: Path, known: set[Path]) -> Iterator[str]:
    """Yield the names of option classes and of functions of `fp8q.api` in a script and in those it imports."""
    if script in known or not script.is_file():
        return
    known.add(script)
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="api"), attr=name):
                yield name
            case ast.ImportFrom(module="fp8q.api" | "fp8q.options"):
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield from names_in(script.parent / f"{module}.py", known)


def option_classes(script: Path) -> dict[str, type]:
    """Return the option classes behind a script of the `fp8q` that can be imported here: those that it names, and those
    that the functions of `fp8q.api` it names take.
    """
    from fp8q import api, options

    found: dict[str, type] = {}
    for name in set(names_in(script, set())):
        thing = getattr(options, name, None) or getattr(api, name, None)
        if name in getattr(api, "__all__", ()) and inspect.isfunction(thing):
            parameters = inspect.signature(thing).parameters.values()
            kinds = [type(each.default) for each in parameters if type(each.default).__name__.endswith("Options")]
        else:
            kinds = [thing] if inspect.isclass(thing) and name.endswith("Options") else []
        found |= {kind.__name__: kind for kind in kinds if get_type_hints(kind)}
    return found


def read(commit: str, benchmark: str) -> dict[str, Any]:
    """Return the record of options of a benchmark at a commit, by running this script on the tree of that commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "fp8q"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            command = [sys.executable, __file__, "--script", str(tree / "benchmarks" / f"{benchmark}.py")]
            environment = os.environ | {"PYTHONPATH": folder}
            printed = subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE).stdout
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    record: dict[str, Any] = json.loads(printed)
    return record


def main() -> int:
    """Fill the results that have no record, or print the record of a script."""
    if sys.argv[1:2] == ["--script"]:
        classes = option_classes(Path(sys.argv[2]))
        print(json.dumps({name: {"defaults": ran.defaults(classes[name]), "used": None} for name in sorted(classes)}))
        return 0
    from result import RESULTS  # not above: the package of an older commit need not have what these import
    from stale import stale_commit

    for path in [RESULTS / f"{name}.json" for name in sys.argv[1:]] or sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if "options" in result or stale_commit(result):
            continue
        result.pop("defaults", None)
        options = read(result["commit"], result["benchmark"])
        text = json.dumps(
            result | {"options": options, "options_read_from": result["commit"]}, indent=1, ensure_ascii=False
        )
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path.stem}: {', '.join(options) or 'no options'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
