"""The table in `stages/__init__.py` lists the files of the folder."""

import re
from pathlib import Path

import fp8q.stages


def test_every_file_of_the_folder_has_its_line() -> None:
    page = fp8q.stages.__doc__ or ""
    named = re.findall(r"^    (\w+) +\S", page, re.MULTILINE)
    folder = Path(fp8q.stages.__path__[0])
    there = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert sorted(named) == sorted(there)
