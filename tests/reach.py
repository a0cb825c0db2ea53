"""Count the files of the package that a module reaches by its imports, those in functions included; not those for types
alone.

python tests/reach.py MODULE [OTHER ...]    the number; then the chain of imports by which it reaches each other module
"""

import sys
from functools import cache

import grimp


@cache
def imports() -> grimp.ImportGraph:
    """Read the imports between the files of the package."""
    return grimp.build_graph("fp8q", exclude_type_checking_imports=True)


def reached(start: str) -> set[str]:
    """Return the modules that `start` reaches, itself included."""
    return {start} | imports().find_upstream_modules(start)


def main() -> None:
    """Print the number, and the chains."""
    start, *others = sys.argv[1:]
    print(f"{start}: {len(reached(start))} files")
    for other in others:
        chain = imports().find_shortest_chain(start, other)
        print(" -> ".join(chain) if chain else f"{other} is not reached")


if __name__ == "__main__":
    main()
