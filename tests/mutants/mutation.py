"""The mutations in `mutations/*.toml`, a file for each folder of the package: one line changed, and the tests that must
fail of it.

    [overlap-threshold]
    file = "calibrate/text/overlap.py"
    old = "SAME = 0.10"
    new = "SAME = 0.20"
    tests = ["tests/calibrate/text/test_overlap.py"]

`old` occurs once in `file`. `tests` are few and quick, each a file, or `file::test`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(__file__).with_name("mutations")


@dataclass(frozen=True)
class Mutation:
    """`old`, a text that occurs once in `file`, becomes `new`; one of `tests` must then fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, source: str) -> str:
        """Change `source`, the text of `file`. Raises ValueError where `old` does not occur once in it."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: {self.file} has its old text {count} times, not once")
        return source.replace(self.old, self.new)

    def key(self, root: Path) -> str:
        """Hash all that a verdict on it was reached with: itself, the file, and the files of tests."""
        files = [self.file, *(test.partition("::")[0] for test in self.tests)]
        texts = [(root / file).read_text(encoding="utf-8") for file in files]
        return sha256(repr([self, *texts]).encode()).hexdigest()


def mutations() -> Mapping[str, Mutation]:
    """Read all mutations, by name. Raises ValueError where two have the same name."""
    every: dict[str, Mutation] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items():
            if name in every:
                raise ValueError(f"{path.name}: there is another mutation called {name}")
            every[name] = Mutation(name, entry["file"], entry["old"], entry["new"], tuple(entry["tests"]))
    return every
