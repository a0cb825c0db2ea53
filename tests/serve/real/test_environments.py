"""Environments beside the repository's: made once, made anew where they should hold something else."""

from pathlib import Path

import pytest
from environments import UnavailableError, kept_environment


def test_an_environment_is_filled_once_and_anew_for_other_packages(tmp_path: Path) -> None:
    filled = list[Path]()
    for packages in ("one", "one", "two"):
        assert kept_environment(tmp_path / "home", packages, filled.append) == tmp_path / "home"
    assert filled == [tmp_path / "home", tmp_path / "home"]
    assert (tmp_path / "home" / "bin" / "python").exists()


def test_a_link_to_an_environment_of_other_packages_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    theirs = kept_environment(tmp_path / "theirs", "one", lambda _: None)
    (theirs / "package").touch()
    before = sorted(theirs.rglob("*"))
    (link := tmp_path / "link").symlink_to(theirs)
    assert kept_environment(link, "one", lambda _: pytest.fail("it holds these packages")) == link
    with pytest.raises(UnavailableError) as refused:
        kept_environment(link, "two", lambda _: pytest.fail("it is another's"))
    assert str(refused.value) == f"{link}: is a link to an environment of other packages; remove the link"
    assert (link.is_symlink(), sorted(theirs.rglob("*"))) == (True, before)
