"""Save the results of a stage so far in a file: a killed call goes on from it."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from ...core.files import replacing


@dataclass
class Saved:
    """The fields of a subclass, which JSON can hold and which have defaults, in the file at `path`."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the results in the file at `path`; nothing where there is none."""
        return cls(path, **json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else cls(path)

    def save(self) -> None:
        """Write all of it."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "path"}
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(found), encoding="utf-8")
