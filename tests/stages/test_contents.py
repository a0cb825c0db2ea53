"""What `stages/__init__.py` says of the folder is what lies in it."""

import re
from pathlib import Path

import fp8q.stages


def test_every_file_of_the_folder_has_its_line() -> None:
    page = fp8q.stages.__doc__ or ""
    named = re.findall(r"^    (\w+) +\S", page, re.MULTILINE)
    folder = Path(fp8q.stages.__path__[0])
    there = {path.stem for path in (*folder.glob("*.py"), *folder.glob("commands/*.py"))} - {"__init__"}
    assert sorted(named) == sorted(there)
