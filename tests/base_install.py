"""fp8q as if only some of what is installed here were there."""

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

#: Runs `fp8q` with modules (argument 1) and distributions (argument 2) hidden as if they were not installed: not even
#: `find_spec` and `version` see them.
HIDING = """
import importlib.machinery, runpy, sys
modules, distributions = (set(argument.split(",")) for argument in sys.argv[1:3])
class Installed(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in modules else super().find_spec(name, path, target)
    @classmethod
    def find_distributions(cls, *context):
        return (found for found in super().find_distributions(*context) if found.name not in distributions)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Installed
sys.argv[:] = ["fp8q", *sys.argv[3:]]
runpy.run_module("fp8q", run_name="__main__")
"""


def base_distributions(*extras: str) -> set[str]:
    """The distributions that `pip install fp8q` brings, or `fp8q[extras]`: fp8q's requirements and theirs."""
    found, waiting = set[tuple[str, str]](), [("fp8q", extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) not in found:
            found.add((name, extra))
            needed = [
                r
                for r in map(Requirement, metadata.requires(name) or [])
                if r.marker is None or r.marker.evaluate({"extra": extra})
            ]
            waiting += [(canonicalize_name(r.name), e) for r in needed for e in ["", *r.extras]]
    return {name for name, _ in found}
