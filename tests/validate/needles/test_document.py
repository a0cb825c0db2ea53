"""What is said of needles: by depth, by length, and beside BF16."""

from fp8q.validate.needles.document import Answered, NeedleAnswers, NeedleScores, NeedleSummary, needle_table


def needle(length: int, depth: float, **answers: tuple[bool, float]) -> NeedleAnswers:
    """A needle with the answers of runtimes: right, log-probability."""
    own = {name: Answered(right=right, log_probability=value) for name, (right, value) in answers.items()}
    return NeedleAnswers(length=length, depth=depth, trial=0, key="Bavodi", value="4821", answers=own)


SCORES = NeedleScores(
    text="text",
    sentence="{key} {value}",
    needles=[
        needle(64, 0.0, bf16=(True, -0.5), reference=(False, -2.0)),
        needle(64, 1.0, bf16=(False, -3.0), reference=(True, -1.0)),
        needle(128, 0.0, bf16=(True, -0.25), reference=(True, -0.75)),
    ],
)


def test_a_cell_pairs_each_answer_with_bf16s_of_the_same_needle() -> None:
    assert SCORES.cell("reference", 64) == NeedleSummary(
        needles=2, right=1, log_probability=-1.5, change=0.25, lost=1, gained=1
    )
    assert SCORES.cell("bf16", 64, 0.0) == NeedleSummary(needles=1, right=1, log_probability=-0.5)
    assert SCORES.cell("reference", 128, 1.0) is None


def test_the_table_has_a_row_for_each_length_and_runtime() -> None:
    table = needle_table(SCORES)
    assert [column.title for column in table.columns] == [
        "tokens", "runtime", "at 0%", "at 100%", "log-probability", "change from BF16", "lost + gained",
    ]  # fmt: skip
    assert [[cell.text for cell in row] for row in table.cells()] == [
        ["64", "bf16", "1 of 1", "0 of 1", "−1.75", "", ""],
        ["64", "reference", "0 of 1", "1 of 1", "−1.5", "+0.25", "1 + 1"],
        ["128", "bf16", "1 of 1", "", "−0.25", "", ""],
        ["128", "reference", "1 of 1", "", "−0.75", "−0.5", "0 + 0"],
    ]
    assert needle_table(None).missing == "Not asked: `fp8q validate RUN --needles 1024,4096` does."
