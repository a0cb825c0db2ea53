"""Run `fp8q` as on a serving host, in a process of its own: the base install alone, and the stand-in's GPU and runtime.

`python without_torch.py MODULES DISTRIBUTIONS RUNTIME PLANS ARGUMENT…` hides modules and distributions as if they were
not installed, has a GPU with RUNTIME, whose plans run the graphs that PLANS names (plan=graph, by commas), and runs
`fp8q ARGUMENT…`. TensorRT-RTX's bindings stay, since the stand-in builds with them.
"""

import importlib.machinery
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

hidden, distributions = (set(argument.split(",")) for argument in sys.argv[1:3])


class Installed(importlib.machinery.PathFinder):
    """The finder of what is installed, without what is hidden."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context: Any) -> Any:
        return (found for found in super().find_distributions(*context) if found.name not in distributions)


def main() -> None:
    from tests.stand_in.driver import Driver
    from tests.stand_in.runtime import machine

    runtime, plans = sys.argv[3].replace("-", "_"), sys.argv[4]
    sys.argv[:] = ["fp8q", *sys.argv[5:]]
    with machine(Driver(), runtime) as host:
        for pair in filter(None, plans.split(",")):
            plan, graph = map(Path, pair.split("="))
            host.knows(plan, graph)
        runpy.run_module("fp8q", run_name="__main__")


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Installed
    main()
