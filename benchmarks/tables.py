"""The tables of measured figures in docs, made from `results/`, and the pictures.

    python benchmarks/tables.py [--write]

A table stands between `<!-- table NAME -->` and `<!-- end -->`; `tests/benchmarks` holds each against what is made
here, so no figure there is typed; a picture is a file of its own. Below a table stands what its results miss of their
limits (`missed`). A figure within a sentence stands between `<!-- figure NAME -->` and `<!-- end -->`, not at the start
of a line, where Markdown would take the line for HTML; `pages/figures.py` has the figures. With `--write` the pages are
brought up to date; without it what differs is named.

A file of `pages/` has one page's tables: functions without arguments that give Markdown (`markdown.table`) from a
result (`markdown.load`), each called as its markers are, and together in `TABLES` (what draws pictures: in `PICTURES`);
tables of what was tried stand on pages of decisions, and in tuples of their own.
A page is added by such a file, its line in `PAGES` and the markers in docs; a table by its function and its markers.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import markdown
from missed import missed, paragraph
from pages import (
    accuracy,
    adapters,
    architectures,
    attention,
    baselines,
    choosing_scales,
    compare,
    corpora,
    distill,
    doctor,
    elsewhere,
    engines,
    evaluate,
    exact_answers,
    experts,
    forms,
    fp8_input,
    generate,
    gpu,
    guides,
    kv_cache,
    numbers,
    quickstart,
    readme,
    sensitivity,
    serve,
    training,
    tune,
    two_terms,
    validate,
    weights,
)
from pages.figures import FIGURES

from fp8q.validate.report.plots import Plot

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- table (?P<name>[a-z0-9_]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure (?P<name>[a-z0-9_]+) -->)([^<]*)(<!-- end -->)")

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
    "docs/elsewhere.md": elsewhere.TABLES,
    "docs/engines.md": engines.TABLES,
    "docs/exact-answers.md": exact_answers.TABLES,
    "docs/forms.md": forms.TABLES,
    "docs/fp8-input.md": fp8_input.TABLES,
    "docs/generate.md": generate.TABLES,
    "docs/gpu.md": gpu.TABLES,
    "docs/guides/larger-than-memory.md": guides.MEMORY,
    "docs/guides/convert.md": guides.CONVERT,
    "docs/guides/llama-8b.md": guides.ONE_GPU,
    "docs/kv-cache.md": kv_cache.TABLES,
    "docs/numbers.md": numbers.TABLES,
    "docs/quickstart.md": quickstart.TABLES,
    "docs/serve.md": serve.TABLES,
    "docs/training.md": training.TABLES,
    "docs/two-terms.md": two_terms.TABLES,
    "docs/validate.md": validate.TABLES,
    "docs/distill.md": distill.TABLES,
    "docs/weights.md": weights.TABLES,
    "docs/decisions/0002-observe-without-converting.md": gpu.COUNTING_TABLES,
    "docs/decisions/0011-two-forms-of-a-weights-scale.md": engines.FORM_TABLES,
    "docs/decisions/0016-windows-begin-as-served-text.md": corpora.DECISION_TABLES,
    "docs/decisions/0018-a-mix-is-predicted-by-groups-and-measured-whole.md": (
        *sensitivity.DECISION_TABLES,
        *tune.DECISION_TABLES,
    ),
    "docs/decisions/0019-each-product-answers-for-itself.md": doctor.DECISION_TABLES,
    "docs/decisions/0022-experts-are-linear-layers.md": experts.TOKEN_TABLES,
    "docs/decisions/0026-an-expert-is-a-branch.md": experts.BRANCH_TABLES,
    "docs/decisions/0029-bf16-products-without-bf16-units.md": numbers.DECISION_TABLES,
    "docs/decisions/0030-a-tail-of-second-terms.md": exact_answers.DECISION_TABLES,
    "docs/decisions/0031-two-terms-in-vllm-by-a-plugin.md": gpu.DECISION_TABLES,
    "docs/decisions/0032-scales-of-heads-are-an-option.md": kv_cache.HEAD_TABLES,
    "docs/decisions/0033-logits-that-are-asked-for.md": engines.LOGIT_TABLES,
    "docs/decisions/0034-answers-paired-by-lm-eval.md": evaluate.TASK_TABLES,
    "docs/decisions/0035-addresses-share-the-rows.md": serve.DECISION_TABLES,
    "docs/decisions/0039-needles-are-part-of-validate.md": evaluate.DECISION_TABLES,
    "docs/decisions/0040-drafts-stay-as-they-were.md": architectures.DECISION_TABLES,
    "docs/decisions/0041-keys-stay-in-their-basis.md": kv_cache.DECISION_TABLES,
    "docs/decisions/0042-how-gptq-and-sequential-were-chosen.md": (*weights.SECOND_TABLES, *accuracy.DECISION_TABLES),
    "docs/decisions/0043-steps-of-a-share-of-a-layers-magnitude.md": distill.DECISION_TABLES,
    "docs/decisions/0044-a-training-is-watched-by-records.md": training.DECISION_TABLES,
    "docs/decisions/0060-each-measure-suffices.md": compare.DECISION_TABLES,
    "docs/decisions/0073-a-decode-step-reads-the-cache-once.md": engines.CACHE_TABLES,
    "docs/decisions/0075-hybrids-keep-their-states.md": architectures.PART_TABLES,
    "docs/decisions/0078-mxfp8-is-no-form.md": forms.DECISION_TABLES,
    "docs/decisions/0080-experts-are-judged-on-tokens-held-out.md": experts.ROUNDING_TABLES,
    "docs/decisions/0082-the-first-token-by-its-gradient.md": weights.LEVER_TABLES,
    "docs/decisions/0081-the-costliest-weights-stay.md": weights.SPENT_TABLES,
    "docs/decisions/0131-correlations-that-few-tokens-show.md": weights.SHRUNK_TABLES,
    "docs/decisions/0091-a-class-says-what-is-linear.md": guides.CLASSES,
    "docs/decisions/0094-one-reader-of-chats.md": accuracy.CHAT_TABLES,
    "docs/decisions/0096-files-are-compared-beside-the-losses.md": compare.FILE_TABLES,
    "docs/decisions/0101-amax-is-the-clip.md": choosing_scales.DECISION_TABLES,
    "docs/decisions/0125-the-output-side-of-gptq.md": weights.OUTPUT_TABLES,
    "docs/decisions/0126-the-costliest-inputs-are-exact.md": forms.KIND_TABLES,
}
#: Picture -> what draws it.
PICTURES: Mapping[str, Callable[[], Plot]] = accuracy.PICTURES


def made(page: str, text: str) -> str:
    """Return the `text` of a page with its tables and figures made anew.

    Raises ValueError when the tables are not those of `PAGES`, or a figure is unknown or begins a line.
    """
    tables = {make.__name__: make for make in PAGES.get(page, ())}
    names = [block["name"] for block in BLOCK.finditer(text)]
    if sorted(names) != sorted(tables):
        raise ValueError(f"{page}: has the tables {names}, and should have {list(tables)}")
    told: set[str] = set()
    text = BLOCK.sub(lambda block: f"{block[1]}{with_limits(tables[block['name']], told)}{block[3]}", text)
    return FIGURE.sub(lambda figure: f"{figure[1]}{figure_text(page, figure)}{figure[4]}", text)


def with_limits(make: Callable[[], str], told: set[str]) -> str:
    """Make a table, and below it the limits that its results miss, but for the results in `told`, which grows."""
    markdown.LOADED.clear()
    text = make()
    new = [name for name in dict.fromkeys(markdown.LOADED) if name not in told]
    told.update(new)
    return text + paragraph([line for name in new for line in missed(name, markdown.load(name))])


def figure_text(page: str, figure: re.Match[str]) -> str:
    """Make the figure that a marker names."""
    name = figure["name"]
    if name not in FIGURES:
        raise ValueError(f"{page}: the figure {name} is none of pages/figures.py, which has {', '.join(FIGURES)}")
    line = figure.string[: figure.start()].rpartition("\n")[2]
    if not line.strip(" >"):
        raise ValueError(f"{page}: the marker of the figure {name} begins a line; put a word in front of it")
    return FIGURES[name]()


def pages() -> list[str]:
    """List the pages that have tables, and all others of the documentation that have figures."""
    others = (path for path in sorted((ROOT / "docs").rglob("*.md")) if FIGURE.search(path.read_text(encoding="utf-8")))
    return list(dict.fromkeys([*PAGES, *(str(path.relative_to(ROOT)) for path in others)]))


def old(page: str) -> str:
    """What a page or picture is now."""
    path = ROOT / page
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> int:
    """Write the pages, or name those that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    wanted = {page: made(page, old(page)) for page in pages()}
    wanted |= {picture: draw().wide for picture, draw in PICTURES.items()}
    stale = [page for page, text in wanted.items() if old(page) != text]
    if write:
        for page in stale:
            (ROOT / page).write_text(wanted[page], encoding="utf-8")
    print("\n".join(f"{page}: {'written' if write else 'differs from its results'}" for page in stale) or "all as made")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
