"""What the model card gains where the model is served: replaced by the next, and gone without any."""

from pathlib import Path

from fp8q.quantize.checkpoint.card_additions import MARKS, state_validated


def test_lines_are_added_replaced_and_removed_and_the_rest_stays(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# model\n\nText.\n", encoding="utf-8")
    state_validated(card, ["tensorrt: perplexity 13.4"])
    added = f"\n{MARKS[0]}\n**Validated where it is served**:\n\n- tensorrt: perplexity 13.4\n{MARKS[1]}\n"
    assert card.read_text(encoding="utf-8") == "# model\n\nText.\n" + added
    card.write_text(card.read_text(encoding="utf-8") + "\nMine.\n", encoding="utf-8")
    state_validated(card, ["tensorrt: perplexity 13.5"])
    assert card.read_text(encoding="utf-8") == "# model\n\nText.\n" + added.replace("13.4", "13.5") + "Mine.\n"
    state_validated(card, [])
    assert card.read_text(encoding="utf-8") == "# model\n\nText.\nMine.\n"


def test_a_card_to_which_nothing_was_added_stays_as_it_is(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# model\n\n\n", encoding="utf-8")
    state_validated(card, [])
    assert card.read_text(encoding="utf-8") == "# model\n\n\n"


def test_a_card_that_is_gone_stays_away(tmp_path: Path) -> None:
    state_validated(tmp_path / "README.md", ["tensorrt: perplexity 13.4"])
    assert [*tmp_path.iterdir()] == []
