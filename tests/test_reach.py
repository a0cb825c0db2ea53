"""The files that calibration reaches: what follows it is not among them."""

from pathlib import Path

from .reach import reached

#: The files that `stages.calibrate` reaches, which may only become fewer.
CALIBRATION = 188


def test_calibration_reaches_no_more_files_than_it_did() -> None:
    assert len(reached("stages.calibrate")) <= CALIBRATION


def test_imports_in_functions_count_and_those_for_types_do_not(tmp_path: Path) -> None:
    texts = {
        "core/__init__.py": '"""Nothing but a docstring."""\n',
        "core/a.py": "def read():\n    from .b import x\n",
        "core/b.py": "if TYPE_CHECKING:\n    from .c import y\nfrom ..options import d\n",
        "core/c.py": "y = 1\n",
        "options/__init__.py": "x = 1\n",
        "options/d.py": "x = 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "api.py").write_text("", encoding="utf-8")
    assert sorted(reached("core.a", tmp_path)) == ["core.a", "core.b", "options.__init__", "options.d"]
