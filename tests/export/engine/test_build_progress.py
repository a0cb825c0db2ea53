"""How far a build is, from the builder's nested phases."""

from fp8q.export.engine.build import BuildProgress


def test_progress_is_the_share_of_nested_phases() -> None:
    parts: list[int] = []
    progress = BuildProgress(parts.append)
    progress.start("building", None, 4)
    progress.start("cloning", "building", 2)
    assert progress.step("cloning", 0)  # half of the first quarter
    assert sum(parts) == 12
    progress.step("cloning", 1)
    progress.finish("cloning")
    progress.step("building", 0)
    assert sum(parts) == 25
    progress.start("timing", "building", 5)
    progress.step("timing", 4)
    assert sum(parts) == 50
    progress.step("building", 0)  # earlier than what was reached: nothing is taken back
    progress.step("unheard of", 3)
    progress.reach(1.0)
    assert sum(parts) == 100
    assert min(parts) > 0


def test_a_cancelled_build_is_told_to_stop_at_its_next_step() -> None:
    progress = BuildProgress(lambda done: None)
    progress.start("building", None, 2)
    assert progress.step("building", 0)
    progress.cancel()
    assert not progress.step("building", 1)
