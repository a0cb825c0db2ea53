"""Find the rank of this process from the variables of torchrun, without heavy imports."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ...core.errors import InputError


@dataclass(frozen=True)
class ProcessRank:
    """The rank of this process among `ranks`, and among those on its machine."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1


def process_rank(environment: Mapping[str, str] | None = None) -> ProcessRank:
    """The rank of this process by torchrun's variables; a single rank where there are none.

    Raises InputError for variables that make no sense.
    """
    env = os.environ if environment is None else environment
    if "RANK" not in env or env.get("WORLD_SIZE", "1") == "1":
        return ProcessRank()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise InputError(
            "",
            f"RANK is {env['RANK']} of {env['WORLD_SIZE']}, and {missing[0]} is not set",
            "start the ranks with torchrun, or unset RANK",
        )
    values = {
        name: env.get(name, default)
        for name, default in (("RANK", ""), ("WORLD_SIZE", ""), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    }
    wrong = next((name for name, value in values.items() if not re.fullmatch(r"\d{1,9}", value)), None)
    if wrong:
        raise InputError(
            "", f"{wrong} is {values[wrong]!r}, which is no number", "start the ranks with torchrun, or unset RANK"
        )
    rank, ranks, local_rank, local_ranks = map(int, values.values())
    if rank >= ranks:
        raise InputError(
            "",
            f"RANK is {rank} of {ranks}, and the last is {ranks - 1}",
            "start the ranks with torchrun, or unset RANK",
        )
    return ProcessRank(rank, ranks, local_rank, local_ranks)
