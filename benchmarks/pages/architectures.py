"""The tables of docs/architectures.md: accuracy by architecture, drafts, and what works or is refused."""

import re

from markdown import Figures, load, table
from published_sizes import class_of


def architectures() -> str:
    """Perplexity of the reference by terms and cache."""
    head = ["model", "BF16", "one term", "two terms", "one term, FP8 cache", "two terms, FP8 cache"]
    rows = (architecture(name, result) for name, result in load("architectures")["results"].items())
    return table(head, rows)


def architecture(name: str, result: Figures) -> list[str]:
    """A row of `architectures`: BF16's perplexity, and the increase of each form."""
    forms = [result[f"{cache}{terms}"] for cache in ("off", "fp8") for terms in ("", ", two terms")]
    bf16 = forms[0]["perplexity"]["bf16"]
    return [name, f"{bf16:.3f}", *(f"{each['perplexity']['reference'] / bf16 - 1:+.2%}" for each in forms)]


#: Rows of `drafts`, as the table has them, and the type of the layer that drafts.
DRAFTS = {
    "BF16": ("the original", "BF16"),
    "calibrate": ("`fp8q calibrate`", "BF16"),
    "calibrate --form dynamic": ("`fp8q calibrate --form dynamic`", "BF16"),
    "convert": ("`fp8q convert`", "BF16"),
    "convert --mtp": ("`fp8q convert --mtp`", "FP8"),
    "convert --form block": ("`fp8q convert --form block`", "BF16"),
    "convert --form block --mtp": ("`fp8q convert --form block --mtp`", "FP8"),
    "random": ("control: the original", "random"),
    "convert --mtp, joined in FP8": ("fault, mended: `eh_proj` and head in FP8 too", "FP8"),
    "convert, by files' names": ("fault, mended: listed by the files' names", "BF16"),
}


def drafts() -> str:
    """Shares of drafts that vLLM accepts, by what wrote the checkpoint."""
    results = load("drafts")["results"]
    families = [results[family] for family in ("glm4_moe", "ernie4_5_moe")]
    rows = [
        [name, kind, *(cell for family in families for cell in drafts_of(family.get(row)))]
        for row, (name, kind) in DRAFTS.items()
    ]
    heads = ["GLM-4.5: accepted", "− original, points", "ERNIE 4.5: accepted", "− original, points"]
    return table(["checkpoint", "drafting layer", *heads], rows)


def drafts_of(row: Figures | None) -> tuple[str, str]:
    """The share of a row with its interval, and its difference from the original's in points."""
    if row is None:
        return "", ""
    if "error" in row:
        return ("not run: this CPU has no AMX" if "AMX" in row["error"] else row["error"]), ""
    share, (low, high), apart = row["share"], row["interval"], row["difference"]
    points = " to ".join(f"{apart[end] * 100:+.1f}" for end in ("low", "high"))
    return (
        f"{row['accepted']:,} of {row['drafted']:,}, {share:.1%} ({low * 100:.1f} to {high * 100:.1f})",
        f"{apart['mean'] * 100:+.1f} ({points})" if apart["low"] != apart["high"] else "",
    )


#: Kinds, as `small_configurations` has them, and how the table calls them.
KINDS = {
    "dense": "dense decoders of text",
    "mixture": "mixtures of experts",
    "hybrid": "hybrids of attention and a recurrence, a convolution or an indexer",
    "variant": "others of these, and language models inside models that see",
}


def breadth() -> str:
    """Kind -> how many go how far."""
    rows = []
    for kind, name in KINDS.items():
        count = load("unseen_architectures")["counts"].get(kind)
        if count is None:  # of an older result
            continue
        shares = [f"{count[what]} ({count[what] / count['tried']:.0%})" for what in ("whole_way", "checkpoint")]
        rows.append([name, str(count["tried"]), *shares, str(count["refused"])])
    return table(["", "tried", "the whole way", "a checkpoint at least", "refused by name"], rows)


#: Reasons in the result that are no longer given: these models get a checkpoint ("Hybrids" on the page).
NO_LONGER = (
    "refused: attends to tokens that an indexer chooses by a cache of its own",
    "refused: keeps a recurrent state",
)


def unseen_architectures() -> str:
    """Those that work; and those that get no graph or are refused, by the reason that is given."""
    measured = load("unseen_architectures")
    results, version = measured["results"], measured["versions"]["transformers"]
    works = [_name(name) for name, found in results.items() if "one_term" in found]
    reasons: dict[str, list[str]] = {}
    for name, found in results.items():
        if why := found.get("no_graph"):
            reasons.setdefault(f"a checkpoint, no graph: {_short(_without_name(why))}", []).append(_name(name))
        if "refused" in found:
            reason = found["refused"]
            for end in (
                ", which fp8q does not do",
                ", and fp8q does no other",
                ": its weights are not",
                ", so that its codes",
            ):
                reason = reason.partition(end)[0]
            if " does not make a " in reason:
                reason = f"transformers {version} makes no model of it that runs"
            reasons.setdefault(f"refused: {_short(_without_name(reason))}", []).append(_name(name))
        if "unmade" in found:
            reasons.setdefault(f"transformers {version} makes no model of its configuration", []).append(_name(name))
    rows = [("the whole way", works), *(row for row in sorted(reasons.items()) if row[0] not in NO_LONGER)]
    return table(["how far, and why", ""], ([reason, ", ".join(names)] for reason, names in rows))


def published_classes() -> str:
    """Published model -> how far its class goes, of those that were run."""
    measured = load("published_classes")
    head = ["model", "class", "calibrate", "validate", "convert", "transformers loads both", "vLLM runs both"]
    rows = _ran(measured["rows"])
    models = ((model, name) for model, name in measured["models"].items() if name in rows)
    return table(head, ([model, f"`{class_of(name)}`", *_steps(rows[name])] for model, name in models))


def _ran(rows: Figures) -> Figures:
    """The rows but those of classes whose temporary folder was taken away while they ran."""
    return {name: row for name, row in rows.items() if "MODEL: is not there" not in row.get("calibrate", "")}


#: The lint's rule that ERNIE 4.5 VL's run breaks, as docs/architectures.md says.
DIVIDED = "C116 split-projections"


def _steps(row: Figures) -> list[str]:
    """The cells of a class: how each step ended."""
    if "unmade" in row:
        return ["not made", "", "", "", ""]
    loads = {row[step] for step in LOADS if step in row}
    if errors := {end for end in row["lint"].values() if end != "yes" and DIVIDED not in end}:
        raise ValueError(f"docs/architectures.md says that the lint finds no errors, and it finds {errors}")
    ends = [_end(row.get(step, "")) for step in ("calibrate", "validate", "convert")]
    if not loads:
        return [*ends, "", ""]
    return [*ends, "yes" if loads == {"yes"} else "no", _in_vllm(row["vllm"]) if "vllm" in row else ""]


def _in_vllm(answers: Figures) -> str:
    """The cell of what vLLM made of the original and of the checkpoints."""
    original, *ours = answers.values()
    if not ours:
        return "not the original"
    if isinstance(original, str) and all(str(answer).startswith("loaded") for answer in ours):
        return "loads both"
    takes = [which for which, answer in answers.items() if which != "original" and isinstance(answer, float)]
    return "yes" if len(takes) == len(ours) else f"that of {takes[0]}" if takes else "no"


def _end(outcome: str) -> str:
    return outcome.partition(":")[0]


#: The steps in which transformers loads a checkpoint, and who wrote it.
LOADS = {"loads the run": "what `calibrate` wrote", "loads what convert wrote": "what `convert` wrote"}


def published_reasons() -> str:
    """What stops a step of `published_classes`, and the model: in the words of fp8q or transformers."""
    measured = load("published_classes")
    rows = _ran(measured["rows"])
    reasons: list[list[str]] = []
    for model, name in measured["models"].items():
        for step in ("unmade", "calibrate", "validate", "convert", *LOADS):
            if (outcome := rows.get(name, {}).get(step, "yes")) != "yes":
                what = LOADS.get(step, f"`{step}`" if step != "unmade" else "made by transformers")
                reason = outcome.removeprefix("refused: MODEL: ").partition(", so that")[0].partition(" (and ")[0]
                reasons.append([model, what, reason])
        answers = rows.get(name, {}).get("vllm", {})
        for which, answer in answers.items():
            if isinstance(answer, str) and (which == "original" or answer != answers["original"]):
                of = "the original" if which == "original" else f"what `{which}` wrote"
                reasons.append([model, f"{of}, in vLLM", answer.partition(". ")[0].removeprefix("loaded: ")])
    return table(["model", "of", "why not"], reasons)


def published_parts() -> str:
    """KL of a part alone in FP8, by published model."""
    measured = load("published_classes")
    rows = measured["rows"]
    by_model = {model: rows.get(name, {}).get("kl_by_part") for model, name in measured["models"].items()}
    losses = {model: by_part for model, by_part in by_model.items() if by_part}
    parts = sorted({part for of_model in losses.values() for part in of_model})
    cells = ([model, *(_loss(of_model, part) for part in parts)] for model, of_model in losses.items())
    return table(["KL in millinats of the part alone", *parts], cells)


def trained_parts() -> str:
    """KL and perplexity of a part alone in FP8, by small trained model."""
    measured = load("trained_parts")
    results = measured["results"]
    parts = [*sorted({part for row in results.values() for part in row} - {"bf16", "all"}), "all"]

    def cell(bf16: float, part: Figures | None) -> str:
        if part is None:
            return ""
        increase = part["perplexity"] / bf16 - 1
        return f"{1000 * part['kl']:.2f} ± {1000 * part['half_interval']:.2f}, {increase:+.2%}"

    cells = (
        [made_of, *(cell(results[name]["bf16"]["perplexity"], results[name].get(part)) for part in parts)]
        for made_of, name in measured["made_of"].items()
        if name in results
    )
    return table(["KL in millinats, perplexity", *parts], cells)


def _loss(losses: Figures, part: str) -> str:
    return f"{1000 * losses[part]:.2f}" if part in losses else ""


def _name(configuration: str) -> str:
    return configuration.replace("Config", "")


def _without_name(reason: str) -> str:
    """A reason without the model's name that it begins with, if it does."""
    return reason if reason.startswith(("transformers ", "torch ")) else reason.partition(" ")[2]


def _short(reason: str) -> str:
    """A reason without the names of modules, so that those of a kind are in one row."""
    return re.sub(r" \([^)]*\)| \(.*$| in model\.\S+|;.*|, and of others.*|\. Use .*", "", reason)


TABLES = (architectures, published_classes, published_reasons, breadth, unseen_architectures)
DECISION_TABLES = (drafts,)
PART_TABLES = (published_parts, trained_parts)
