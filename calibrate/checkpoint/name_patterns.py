"""Patterns of names: the name of a module with `{}` in the place of each number, which is a layer's or an expert's.

Loaders find the GEMMs of a block of experts by one pattern for all layers and experts, and fp8q's config.json names
them so.
"""

import re
from collections.abc import Mapping

from ...core.errors import InputError

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def name_pattern(module: str) -> str:
    """The pattern of a module's name: `layers.3.mlp` -> `layers.{}.mlp`."""
    return NUMBER.sub("{}", module)


def check_one_pattern(stored: Mapping[str, str], subject: str) -> None:
    """Raise InputError where the files name a module in another way than that of another layer or expert.

    `stored`: module -> its name in the files of the checkpoint `subject`.
    """
    first_of: dict[str, str] = {}
    for module, under in stored.items():
        first = first_of.setdefault(name_pattern(module), under)
        if name_pattern(under) != name_pattern(first) or NUMBER.findall(under) != NUMBER.findall(module):
            raise InputError(
                subject,
                f"its files name {under} in another way than {first}, and loaders find experts by one pattern of names",
                "write the checkpoint again, as `save_pretrained` of transformers does",
            )
