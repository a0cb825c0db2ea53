"""Figures in sentences of docs come from results, or are among the reviewed ones, which nobody has to measure."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest
import tables

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "decisions" not in path.parts)]

#: Why a figure needs no result: `arithmetic` that the sentence or its link shows; a `published` source; a `limit` or
#: default in the code; a constant of a `format`, a device or a statistical test.
Kind = Literal["arithmetic", "published", "limit", "format"]

#: Page -> the words of a figure -> its kind.
REVIEWED: Mapping[str, Mapping[str, Kind]] = {
    "docs/attention.md": {"values below 2.2e-6 become 0": "format"},
    "docs/compare.md": {
        "Intervals are 95 %": "format",
        "ten times as far as": "limit",
        "flips (√2 times": "limit",
        "flips (√10 times": "limit",
        "4 bytes a weight of the original": "arithmetic",
        "exceed 80 % of the free memory": "limit",
        "16 bytes · tokens · width": "arithmetic",
    },
    "docs/corpora.md": {"more than 32 MB (or 16 bytes for each token": "limit"},
    "docs/distill.md": {
        "26 bytes a weight": "arithmetic",
        "comes to lie 5 % above": "limit",
        "Memory: 12 bytes a weight": "arithmetic",
        "some 23 bytes a weight": "arithmetic",
    },
    "docs/doctor.md": {
        "16 tokens, four times at the end": "limit",
        "sign test (5 %)": "format",
    },
    "docs/elsewhere.md": {"is a twelfth, is four times as large": "arithmetic"},
    "docs/evaluate.md": {
        "95 to 101 % allows a loss of 5 %": "arithmetic",
        "No flip of 40 questions allows 8.8 %, of 200 1.8 %": "arithmetic",
        "half of them right and 2 % flips, recovery is known to some ± 2 points": "arithmetic",
        "from 91 % to 13 % on Hopper": "published",
    },
    "docs/exact-answers.md": {"64 / 1,024 = 6 %": "arithmetic"},
    "docs/faq.md": {"8.03 · 10⁹ bytes, in BF16 15.0 · 10⁹, so 1.87 times": "arithmetic"},
    "docs/gpu.md": {
        "A part has eight minutes": "limit",
        "a copy of 2 GB": "limit",
    },
    "docs/guides/larger-than-memory.md": {
        "one GPU of 80 GB": "format",
        "exceed 80 % of the free memory": "limit",
    },
    "docs/guides/llama-8b.md": {"one GPU of 80 GB": "format"},
    "docs/guides/mixture.md": {"256 experts are 210 GB": "arithmetic"},
    "docs/input.md": {
        "larger than 32 MB": "limit",
        "at most four times that": "limit",
        "2 GiB of memory": "limit",
        "20 s plus 20 ms for each": "limit",
        "may take 10 s together": "limit",
        "at most 64 MiB and 89,478,485": "limit",
    },
    "docs/numbers.md": {
        "limit 1.5 times, either way": "limit",
        "448 and 896 times 2⁻⁶": "arithmetic",
        "limit for fp8q 1.15×": "limit",
    },
    "README.md": {
        "loses more than 1 % of perplexity": "limit",
        "a KL of 0.00995 nats (ln 1.01) or 8 % of the next tokens": "limit",
    },
    "docs/reference/files.md": {"0.004 is 0.4 %": "arithmetic"},
    "docs/report.md": {"95 % interval": "format"},
    "docs/scaling.md": {
        "after 30 s of silence": "limit",
        "noticed within half an hour": "limit",
        "two minutes where it ends": "limit",
        "2 bytes · 8 · 2,048 · m": "arithmetic",
        "held to 1.2 GB plus three times the largest layer": "limit",
    },
    "docs/sensitivity.md": {
        "the default above 0.5 GB on a CPU": "limit",
        "(32 + 3) · 4 · 32,768 · 4,096 = 18.8 GB": "arithmetic",
    },
    "docs/serve.md": {
        "1 MiB and 32 bytes for each": "limit",
        "30 seconds to arrive": "limit",
        "does not read for 60 s": "limit",
        "unread for 2 s": "limit",
    },
    "docs/two-terms.md": {"131,072 · 2^-22 = 3 %": "arithmetic", "differ by 1e-7 relative": "format"},
    "docs/validate.md": {
        "at least 10 times BF16's own KL from FP32 and √10 times its own flips": "limit",
        "32 · (4 + 4) + 4 = 260 bytes": "arithmetic",
        "one batch (16 MB)": "limit",
    },
    "docs/weights.md": {
        "output, 59 GB for that Llama": "arithmetic",
        "33 GB for a Llama of 8 B": "arithmetic",
        "16 bytes for each token and channel": "arithmetic",
    },
}

UNIT = r"(?:%|×(?! \d)|(?:ms|s|seconds?|minutes?|hours?|times|bytes?|[kMGT]i?B|nats|dB|points)\b)"
NUMBER = r"(?<![A-Za-z0-9.])\d[\d,.]*(?:e-?\d+)?"
WORD = r"\b(?:two|three|four|five|six|seven|eight|nine|ten|half an?)"
FIGURE = re.compile(rf"(?:{NUMBER}|{WORD})\s?{UNIT}|{NUMBER} × 10⁻|\b\d[\d.]*e-\d+")
MEND = """

A figure in prose that was measured is made of a result: give it a function in benchmarks/pages/figures.py, put
`<!-- figure NAME --><!-- end -->` in its place (not at the start of a line), and run `python benchmarks/tables.py
--write`. Or show the arithmetic in the sentence, or leave the number out. What was not measured (arithmetic, a
published source, a limit or default of the code, a constant of a format) goes to REVIEWED in
tests/benchmarks/test_prose.py, with the words around it and its kind."""


def prose(text: str) -> str:
    """Return the sentences of a page in one line, without tables, code, targets of links, and what results make."""
    text = tables.FIGURE.sub("", tables.BLOCK.sub("", text))
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    return " ".join(re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "``", "\n".join(lines))).split())


def unreviewed(page: str, text: str) -> list[str]:
    """List the figures in the prose of a page that are not among the reviewed ones, each with the words around it."""
    sentences = prose(text)
    for words in REVIEWED.get(page, ()):
        sentences = sentences.replace(words, "…")
    return [sentences[max(0, each.start() - 40) : each.end() + 20] for each in FIGURE.finditer(sentences)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_figure_in_prose_is_made_of_a_result_or_reviewed(path: Path) -> None:
    page = str(path.relative_to(ROOT))
    found = unreviewed(page, path.read_text(encoding="utf-8"))
    assert not found, f"{page}:\n" + "\n".join(f"  … {words} …" for words in found) + MEND


def test_every_reviewed_figure_is_still_on_its_page() -> None:
    for page, reviewed in REVIEWED.items():
        sentences = prose((ROOT / page).read_text(encoding="utf-8"))
        for words in reviewed:
            assert FIGURE.search(words), f"{page}: {words!r} in REVIEWED has no figure"
            assert words in sentences, f"{page}: has no longer {words!r}; remove it from REVIEWED"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 3.5 s.", ["3.5 s"]),
        ("Half of 512 windows\nof 2,048 tokens.", []),
        ("A loss of 2e-5\nnats, or 5,500 × 10⁻⁶.", ["2e-5 nats", "5,500 × 10⁻"]),
        ("KL from FP32 × 10⁶, blocks of 128 × 128.", []),
        ("It is five\ntimes as slow, at 12.5 % or 1.05× of 3 GB.", ["five times", "12.5 %", "1.05×", "3 GB"]),
        ("`--timeout 3 s`, and\n\n    after 3 s\n\n| 3 s |\n", []),
        ("Up to <!-- figure tail_operations -->3 %<!-- end --> more.", []),
    ],
)
def test_figures_of_time_memory_share_ratio_and_loss_are_found_in_prose_alone(text: str, found: list[str]) -> None:
    assert FIGURE.findall(prose(text)) == found
