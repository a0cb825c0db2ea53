"""The choices of a search for a form: what each loses, the forms that one code, two codes and so on are everywhere, and
the options that make a run of a mix.

`fp8q run` searches (`search`) where one code an activation loses too much. The losses come from a prediction for each
tensor (`sensitivity`), so that of a group of GEMMs in a form is the sum of its weights' and of its input's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod
from re import sub

from ...options import ONE, KvCache, ScaleOptions
from ...quantize.sensitivity.document import Sensitivity
from .choices import CODES, FORMS, TWO_TERMS, Group, GroupForm, Mix, RoundingName, Shape, input_form, members, variant
from .solve import Losses


def group_losses(
    sensitivity: Sensitivity, on_codes: Sequence[GroupForm], roundings: tuple[RoundingName, ...], kv_cache: KvCache
) -> Losses:
    """Sum the predicted losses of weights and inputs for each group of GEMMs, in every form and rounding.

    `sensitivity`: of a run in one code. `on_codes`: the forms whose inputs are codes; `roundings`: the run's first.
    """
    weights = {loss.module: loss for loss in sensitivity.modules if loss.kind == "weight"}
    parts: dict[str, dict[str, float]] = {
        loss.module: {CODES: loss.kl_nats} for loss in sensitivity.modules if loss.kind == "kv_cache"
    }
    for loss in sensitivity.modules:
        if loss.kind != "activation":
            continue
        read = [weights[name] for name in loss.shared_by or [loss.module] if name in weights]
        exact = loss.kl_after.exact or 0.0
        by_token = loss.kl_nats if loss.kl_after.dynamic is None else loss.kl_after.dynamic
        inputs: dict[GroupForm, float] = {
            "one_term": loss.kl_nats,
            "dynamic": by_token,
            "tail": exact,
            TWO_TERMS: exact,
        }
        group = parts.setdefault(loss.module, {})
        for rounding in roundings:
            compensated = rounding == "gptq" != roundings[0]
            rounded = sum(
                weight.kl_after.gptq if compensated and weight.kl_after.gptq is not None else weight.kl_nats
                for weight in read
            )
            for form in (*on_codes, "weights_alone"):
                group[variant(rounding, form)] = rounded + inputs.get(form, 0.0)
    return Losses(parts, roundings, (kv_cache,), tuple(on_codes))


def uniform_forms(shape: Shape, losses: Losses, run_mix: Mix) -> list[Mix]:
    """List the mixes that have one form in every group that may take it, with the rounding that loses least."""
    listed = []
    for form in FORMS:
        if form == "bf16" or form not in (*losses.on_codes, "weights_alone"):
            continue
        forms = {group.name: form if form in group.forms else run_mix.forms[group.name] for group in shape.groups}
        if form in forms.values():
            listed.append(replace(run_mix, forms=forms, rounding=losses.roundings[-1]))
    return listed


def mix_options(groups: Sequence[Group], mix: Mix, tail: int, before: ScaleOptions) -> ScaleOptions:
    """The options of `fp8q scales` that make `mix` of a run with the options `before`: the form of most weights for all
    modules, and rules for the others, of all layers at once where these agree.
    """
    weights = Counter[GroupForm]()
    for group in groups:
        if mix.forms[group.name] != "bf16":
            weights[mix.forms[group.name]] += sum(map(prod, group.weights.values()))
    most = max(weights, key=lambda form: weights[form])
    every = [] if most == "one_term" else [str(input_form(most, tail))]
    names = [member for group in groups for member in group.weights]
    rules = [
        f"{pattern}={input_form(form, tail)}"
        for form in FORMS
        if form not in (most, "bf16")
        for pattern in patterns(members(groups, mix, form), names)
    ]
    return replace(
        before.in_one_form(ONE),
        form=(*every, *rules),
        skip=(*before.skip, *patterns(members(groups, mix, "bf16"), names)),
        weight_rounding=mix.rounding,  # type: ignore[arg-type]  # the names of roundings are the options'
    )


def patterns(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """List patterns that match all `wanted` names and none of the other `names`: one for the modules of all layers
    where all are wanted.
    """
    inside = {*wanted}
    patterns: dict[str, None] = {}
    for name in wanted:
        of_layers = sub(r"(?<=\.)\d+(?=\.)", "*", name)
        in_all_layers = all(other in inside for other in names if fnmatchcase(other, of_layers))
        patterns[of_layers if in_all_layers else name] = None
    return [*patterns]
