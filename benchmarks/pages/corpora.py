"""The tables of docs/corpora.md."""

from markdown import load, table

from fp8q.calibrate.text.formats import FORMATS

#: The number of calibration windows whose verdicts are shown.
WINDOWS = "64"


def bos() -> str:
    """Perplexity and amax of windows that begin with BOS, and of those that do not, over those of serving."""
    rows = []
    for name, found in load("bos")["results"].items():
        ways = found["auto"], found["never"]
        rows.append(
            [
                name,
                *(f"{way['perplexity'] / found['served']['perplexity'] - 1:+.1%}" for way in ways),
                *(f"{way['amax_ratio_least']:.2f} to {way['amax_ratio_most']:.2f}" for way in ways),
            ]
        )
    return table(["over serving", "perplexity: `auto`", "`never`", "amax: `auto`", "`never`"], rows)


def certificate() -> str:
    """What the verdict says of the next window, and what the next windows did."""
    rows = []
    for name, found in load("certificate")["results"].items():
        harmful = found["by_windows"][WINDOWS]["harmful"]
        rates = (harmful[what] for what in ("told", "happened", "happened_in_order", "other_text"))
        rows.append([name, *(f"{rate:.2%}" for rate in rates)])
    return table(["`harmful`", "predicted", "random windows", "the text's order", "other text"], rows)


def vision() -> str:
    """What the parts of a model that sees cost in FP8."""
    rows = []
    for name, part in load("vision")["results"].items():
        before, after = part["perplexity"]
        gemms = " + ".join(str(count) for count in part["gemms"] if count)
        kl = f"{1000 * part['kl']:.3f}"
        rows.append([name, gemms, kl, f"{part['agreement']:.2%}", f"{after / before - 1:+.2%}"])
    return table(["in FP8, form", "GEMMs", "KL, millinats", "agreement", "perplexity"], rows)


def text_formats() -> str:
    """The files that are read as text."""
    rows = [[", ".join(f"`{suffix}`" for suffix in form.suffixes), form.document] for form in FORMATS.values()]
    return table(["ends in", "one document is"], rows)


TABLES = (text_formats, certificate, vision)
DECISION_TABLES = (bos,)
