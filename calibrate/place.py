"""Which of several processes this is, told from the variables that torchrun sets: the command line asks before anything heavy is imported."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InputError


@dataclass(frozen=True)
class Place:
    """Which of `ranks` processes this is, and which of those on its machine."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1


def place(environment: Mapping[str, str] | None = None) -> Place:
    """This process's place, by the variables that torchrun sets; alone where there are none. Raises InputError for variables that make no sense."""
    env = os.environ if environment is None else environment
    if "RANK" not in env or env.get("WORLD_SIZE", "1") == "1":
        return Place()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise InputError(f"RANK is {env['RANK']} of {env['WORLD_SIZE']}, and {missing[0]} is not set; start the ranks with torchrun, or unset RANK")
    ranks = int(env["WORLD_SIZE"])
    return Place(int(env["RANK"]), ranks, int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1)))
