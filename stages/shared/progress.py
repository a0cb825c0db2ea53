"""Save the progress of a stage in its work folder, so that a killed call goes on from there."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

from ...core.files import reading, replacing


@dataclass
class Saved:
    """A base class whose fields, which JSON can store and which have defaults, are saved in the file at `path`."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the results in the file at `path`, empty where there is none; raises InputError for a damaged file."""
        with reading(path, "what a killed call left", "remove it"):
            if path.is_file():
                return cls(path, **json.loads(path.read_text(encoding="utf-8")))
            return cls(path)

    def save(self) -> None:
        """Write all fields to the file."""
        values = {saved.name: getattr(self, saved.name) for saved in fields(self) if saved.name != "path"}
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(values), encoding="utf-8")
