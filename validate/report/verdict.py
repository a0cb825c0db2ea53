"""The verdict of a run, and what to do next: commands with the run's own path, most urgent first.

`validate.accuracy.decision` makes the verdict; a run of an older version, whose `accuracy.json` has none or one by
perplexity alone, gets it anew.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...calibrate.text.evaluation import enough_tokens
from ...core.columns import Column, Table
from ...core.commands import name_in_commands, tune_command
from ...core.run import Run
from ...options import BF16
from ...quantize.scales.decisions import Scales, load_scales
from ...quantize.scales.scheme import in_two_codes
from ..accuracy.decision import decide, limits_of, one_code, verdict_limits
from ..accuracy.document import Verdict, load_accuracy, load_divergences, load_token_losses
from ..accuracy.limits import DEFAULT_RISE, tune_budget
from ..advice.remedy import NextStep, calibrate_command, remedy_of
from ..tuning.document import Tuning, load_tuning
from ..tuning.form_choice import ALLOW_MORE, NO_FORM_MEETS, load_form_choice
from .rows import wrote

#: The option that evaluates more text, where that of the run is at its end.
LONGER_TEXT = "--data TEXT"


@dataclass(frozen=True)
class Standing:
    """The results of the run, for the files that are in it now; `name` is the run in its commands, and `tuned` the
    options of `fp8q tune` whose choice meets the budget. `alone`: the checkpoint of a run that has no graph, and so no
    engine and no repository. `form`: its inputs in words; `plugin`: vLLM multiplies some as validated with fp8q-vllm
    alone, and `one_code` judges what it computes without. `remedy`: the change of forms that lessens its loss.
    `searched`: `fp8q run` found no form that meets these limits. `more`: the option that evaluates more text.
    `other_tokens`: the step that lets vLLM read the tokens that were calibrated, where it does not.
    """

    name: str
    located: bool
    tuned: str | None
    engine: bool
    repository: bool
    alone: str | None = None
    form: str = ""
    plugin: bool = False
    one_code: str | None = None
    more: str = LONGER_TEXT
    remedy: NextStep | None = None
    searched: bool = False
    other_tokens: NextStep | None = None


def report_verdict(run: Run) -> Verdict:
    """Is the model of `run` good enough in FP8? Its detail begins with what vLLM reads as other tokens, if anything."""
    verdict = _stored_verdict(run)
    if verdict.runtime is None or not (remark := other_tokens_remark(run)):
        return verdict
    return verdict.model_copy(update={"detail": f"{remark} {verdict.detail}".rstrip()})


def other_tokens_remark(run: Run) -> str | None:
    """State the kinds of text that vLLM reads as other tokens than were calibrated; None where there are none."""
    corpus = run.record().stages.get("corpus")
    kinds = corpus.options.get("other_tokens") if corpus else None
    if not isinstance(kinds, list) or not kinds:
        return None
    listed = ", ".join(map(str, kinds))
    return f"It does not hold in vLLM, which reads other tokens than were calibrated and validated, of {listed}."


def _stored_verdict(run: Run) -> Verdict:
    if not wrote(run, run.accuracy, "validate"):
        said = "Not known yet: FP8 was not held against BF16 on any text"
        return Verdict(kind="unknown", sentence=said, limit=DEFAULT_RISE, limit_is_default=True)
    accuracy = load_accuracy(run)
    verdict = accuracy.verdict
    if verdict and (verdict.kl_limit_nats is not None or verdict.runtime is None):
        return verdict
    return decide(accuracy, load_token_losses(run), limits_of(verdict), load_divergences(run))


def standing(run: Run) -> Standing:
    """Find the results that the run has of its present files."""

    def current(stage: str) -> bool:
        return stage in run.record().stages and not run.is_stale(stage)

    scales = load_scales(run)
    return Standing(
        name_in_commands(run.root),
        located=current("sensitivity"),
        tuned=tuned_for(load_tuning(run)) if current("tune") else None,
        engine=current("build-engine"),
        repository=current("triton"),
        alone=name_in_commands(run.model) if run.without_graph() else None,
        form=forms_in_words(scales),
        plugin=bool(in_two_codes(scales.forms)),
        one_code=_one_code(run),
        more=_more(run),
        remedy=remedy_of(run) if current("sensitivity") else None,
        searched=current("forms") and _searched_in_vain(run),
        other_tokens=_other_tokens_step(run),
    )


def _other_tokens_step(run: Run) -> NextStep | None:
    """The step that calibrates by what vLLM reads, for a run that was not and will be served there."""
    if not (remark := other_tokens_remark(run)) or "measure" not in run.record().stages:
        return None
    return NextStep(f"For vLLM: {remark}", calibrate_command(run, ["--tokenizer", "auto"]))


def _more(run: Run) -> str:
    """The option that evaluates more text, for a verdict that is not known: the one that `fp8q validate` noted where
    windows were too few.
    """
    if report_verdict(run).kind != "unknown" or not wrote(run, run.accuracy, "validate"):
        return LONGER_TEXT
    windows = len(next(iter(load_token_losses(run).values())))
    most = enough_tokens(load_accuracy(run).protocol, windows)
    if most is None:
        return LONGER_TEXT
    return f"--max-tokens {most}"


def _one_code(run: Run) -> str | None:
    """Judge the run in one code, as its verdict does; None where that was not measured."""
    limits = verdict_limits(report_verdict(run))
    if limits is None or not wrote(run, run.accuracy, "validate"):
        return None
    return one_code(load_accuracy(run), limits)


def _searched_in_vain(run: Run) -> bool:
    """Tell whether `fp8q run` found no form for the limits of today's verdict, and the run has the one that it took."""
    choice = load_form_choice(run)
    verdict = report_verdict(run)
    limits = (choice.limit, choice.kl_limit_nats, choice.flips_limit)
    if choice.met or limits != (verdict.limit, verdict.kl_limit_nats, verdict.flips_limit):
        return False
    made = run.record().stages["quantize"].options
    recipe = choice.recipe
    return (made["form"], made["skip"], made["weight_rounding"]) == (recipe.form, recipe.skip, recipe.weight_rounding)


def forms_in_words(scales: Scales) -> str:
    """Describe the forms of the inputs that `scales` have, the most frequent first: `a tail of 64`."""
    counts = Counter(form.words for form in scales.forms.values())
    return ", ".join(f"{words} in {count}" if len(counts) > 1 else words for words, count in counts.most_common())


def tuned_for(tuning: Tuning) -> str | None:
    """Return the budget of `fp8q tune` as its option; None where the chosen mix does not meet it."""
    return tuning.budget if tuning.met else None


def step_table(steps: Sequence[NextStep]) -> Table[NextStep]:
    """Tabulate the next steps, most urgent first."""
    columns = (
        Column[NextStep]("why", lambda step: step.why, numeric=False),
        Column[NextStep]("command", lambda step: step.command, numeric=False),
    )
    return Table("What to do next", steps, columns, "Nothing.")


def serving_step(has: Standing) -> NextStep:
    """The step that serves a checkpoint without a graph: in vLLM, with the plugin where its form needs that."""
    if has.plugin:
        why = (
            f"Serve it ({has.form}) in vLLM with the plugin fp8q-vllm, which is installed so into vLLM's environment, "
            f"from a clone of fp8q; without it vLLM computes one code{_as_measured(has)}."
        )
        return NextStep(why, f"pip install ./integrations/vllm && vllm serve {has.alone}")
    where = (
        "in vLLM on a GPU, since vLLM refuses weights alone in FP8 on a CPU" if BF16.words in has.form else "in vLLM"
    )
    return NextStep(f"Serve it ({has.form}) {where}." if has.form else "Serve it in vLLM.", f"vllm serve {has.alone}")


def _as_measured(has: Standing) -> str:
    """Say, after what vLLM computes without the plugin, how that was judged."""
    if has.one_code:
        return f" ({has.one_code})"
    return ", another model, which was not measured"


def _other_form(verdict: Verdict, has: Standing) -> NextStep:
    """The step that has another form chosen for a run beyond its limits; learned codes where no form meets them."""
    if has.tuned:
        return NextStep("Make it anew by what was chosen for the budget.", f"fp8q tune {has.name} {has.tuned} --apply")
    if has.searched:
        why = f"{NO_FORM_MEETS}; {ALLOW_MORE}, or learn the codes from text."
        return NextStep(why, f"fp8q distill {has.name}")
    tune = tune_command(has.name, tune_budget(verdict), has.alone is None, plugin=has.plugin)
    return NextStep("Have the cheapest change chosen that meets the limit.", tune)


def next_steps(verdict: Verdict, has: Standing) -> list[NextStep]:
    """List the steps after the verdict, most urgent first."""
    run = has.name
    if verdict.runtime is None:
        return [NextStep("Hold FP8 against BF16 on text that was held out.", f"fp8q validate {run}")]
    if verdict.kind == "unknown":
        return [NextStep("Evaluate on more text.", f"fp8q validate {run} {has.more}")]
    steps = []
    if verdict.kind in ("worse", "broken"):
        if has.remedy:
            steps.append(replace(has.remedy, why=f"{has.remedy.why}."))
        if not has.located:
            steps.append(NextStep("See which tensors cost most.", f"fp8q sensitivity {run}"))
        steps.append(_other_form(verdict, has))
        steps.append(NextStep("Look for what is unstable.", f"fp8q doctor {run}"))
    if has.alone is not None:
        steps += [has.other_tokens] if has.other_tokens else []
        return steps or [serving_step(has)]
    if not has.engine:
        steps.append(NextStep("Build an engine, and prove what it runs in FP8.", f"fp8q build-engine {run}"))
    if not has.repository:
        steps.append(NextStep("Write the Triton model repository.", f"fp8q triton {run}"))
    steps = steps or [NextStep("Try it.", f"fp8q serve {run}")]
    if has.other_tokens:
        return [*steps, has.other_tokens]
    return steps
