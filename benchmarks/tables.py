"""The tables of measured figures in docs, made from `results/`, and the pictures.

    python benchmarks/tables.py [--write]

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `tests/benchmarks` holds each against what is made
here, so no figure there is typed; a picture is a file of its own. With `--write` the pages are brought up to date;
without it what differs is named.

A file of `pages/` has one page's tables: functions without arguments that give Markdown (`markdown.table`) from a
result (`markdown.load`), each called as its markers are, and together in `TABLES` (what draws pictures: in `PICTURES`).
A page is added by such a file, its line in `PAGES` and the markers in docs; a table by its function and its markers.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pages import (
    accuracy,
    adapters,
    architectures,
    attention,
    baselines,
    choosing_scales,
    compare,
    corpora,
    doctor,
    elsewhere,
    engines,
    evaluate,
    exact_answers,
    experts,
    fp8_input,
    generate,
    guides,
    kv_cache,
    numbers,
    quickstart,
    readme,
    sensitivity,
    serve,
    tune,
    two_terms,
    validate,
    weights,
)

from fp8q.validate.report.plots import Plot

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: Page -> the tables on it.
PAGES: Mapping[str, Sequence[Callable[[], str]]] = {
    "README.md": readme.TABLES,
    "docs/accuracy.md": accuracy.TABLES,
    "docs/adapters.md": adapters.TABLES,
    "docs/architectures.md": architectures.TABLES,
    "docs/attention.md": attention.TABLES,
    "docs/baselines.md": baselines.TABLES,
    "docs/choosing-scales.md": choosing_scales.TABLES,
    "docs/compare.md": compare.TABLES,
    "docs/corpora.md": corpora.TABLES,
    "docs/doctor.md": doctor.TABLES,
    "docs/elsewhere.md": elsewhere.TABLES,
    "docs/engines.md": engines.TABLES,
    "docs/evaluate.md": evaluate.TABLES,
    "docs/exact-answers.md": exact_answers.TABLES,
    "docs/experts.md": experts.TABLES,
    "docs/fp8-input.md": fp8_input.TABLES,
    "docs/generate.md": generate.TABLES,
    "docs/guides/larger-than-memory.md": guides.MEMORY,
    "docs/guides/llama-8b.md": guides.ONE_GPU,
    "docs/kv-cache.md": kv_cache.TABLES,
    "docs/numbers.md": numbers.TABLES,
    "docs/quickstart.md": quickstart.TABLES,
    "docs/sensitivity.md": sensitivity.TABLES,
    "docs/serve.md": serve.TABLES,
    "docs/tune.md": tune.TABLES,
    "docs/two-terms.md": two_terms.TABLES,
    "docs/validate.md": validate.TABLES,
    "docs/weights.md": weights.TABLES,
}
#: Picture -> what draws it.
PICTURES: Mapping[str, Callable[[], Plot]] = accuracy.PICTURES


def made(page: str, text: str) -> str:
    """`text` of a page with its tables made anew. Raises ValueError when they are not those of `PAGES`."""
    tables = {make.__name__: make for make in PAGES[page]}
    found = [block["name"] for block in BLOCK.finditer(text)]
    if sorted(found) != sorted(tables):
        raise ValueError(f"{page}: has the tables {found}, and should have {list(tables)}")
    return BLOCK.sub(lambda block: f"{block[1]}{tables[block['name']]()}{block[3]}", text)


def old(page: str) -> str:
    """What a page or picture is now."""
    path = ROOT / page
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    """Write the pages, or name those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    wanted = {page: made(page, old(page)) for page in PAGES}
    wanted |= {picture: draw().wide for picture, draw in PICTURES.items()}
    stale = [page for page, text in wanted.items() if old(page) != text]
    if write:
        for page in stale:
            (ROOT / page).write_text(wanted[page], encoding="utf-8")
    print("\n".join(f"{page}: {'written' if write else 'differs from its results'}" for page in stale) or "all as made")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
