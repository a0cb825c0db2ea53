"""Find the cheapest form of a run that meets a limit, by predicted losses that a few measurements correct.

`fp8q run` asks this where one code an activation loses too much. The losses come from a prediction for each tensor
(`sensitivity`), so that of a group of GEMMs in a form is the sum of its weights' and of its input's. The sums are
corrected by measuring: first the form that loses least with FP8 weights everywhere, then the mix that seems cheapest.

Unlike `fp8q tune`, which has one preferred cost, bytes and operations count alike, each as a share of one code
everywhere: else a module in BF16 would never stand against two codes for all others.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from re import sub

from ...options import ONE, KvCache, ScaleOptions
from ...quantize.sensitivity.document import Sensitivity
from .choices import (
    CODES,
    FORMS,
    TWO_TERMS,
    Group,
    GroupForm,
    Mix,
    Price,
    RoundingName,
    Shape,
    input_form,
    members,
    variant,
)
from .solve import Correction, Losses, Problem, same

#: A mix that uses this share of what is aimed at is not made cheaper.
CLOSE = 0.9
#: The most mixes that are measured for one aim.
ROUNDS = 4


class EvenPrice(Price):
    """Bytes of a decode step and operations of a prompt, which count alike."""

    def combine(self, step_bytes: float, operations: float) -> float:
        """Combine the bytes of a decode step and the operations of a prompt into a price."""
        read = step_bytes / self.plain.step_bytes(self.positions)
        return (read + operations / self.plain.prefill_operations) / 2


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


def shape_of(
    groups: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[int, ...]], tail: int, gemms: Iterable[str]
) -> Shape:
    """Return the sizes that costs are computed from. `groups`: the GEMMs in FP8 that read one tensor, by the first;
    `shapes`: of the weights of all `gemms`; the others than those in groups stay in BF16.
    """
    sizes = {name: (shapes[name][0], prod(shapes[name][1:])) for name in gemms if name in shapes}
    listed = tuple(
        Group(name, {member: sizes.get(member, (0, 0)) for member in names}, tail) for name, names in groups.items()
    )
    taken = {member for group in listed for member in group.weights}
    return Shape(listed, sum(prod(size) for name, size in sizes.items() if name not in taken), {})


@dataclass
class FormSearch:
    """The state of a search: the problem, and the measured KL in nats a token of the mixes that were `tried`.

    `cached`: the predicted loss of the cache, which all mixes have.
    """

    problem: Problem
    cached: float = 0.0
    tried: list[tuple[Mix, float]] = field(default_factory=list)

    def add(self, mix: Mix, kl_nats: float) -> None:
        """Note the measured KL of `mix`."""
        self.tried.append((mix, kl_nats))

    def measured(self, mix: Mix) -> float | None:
        """Return the measured KL of `mix`, if any."""
        return next((kl for other, kl in self.tried if same(mix, other)), None)

    def expected(self, mix: Mix) -> float:
        """Return the KL of `mix` that is measured, or else expected by the measured ones."""
        known = self.measured(mix)
        if known is None:
            return self._correction().to_measured(self.problem.losses.total(mix))
        return known

    def next_mix(self, aim: float) -> Mix | None:
        """The mix to measure next for a KL of at most `aim`; None where that would tell nothing new."""
        finest = self.problem.finest()
        if self.measured(finest) is None:
            return finest
        if any(CLOSE * aim <= kl <= aim for _, kl in self.tried):
            return None
        mix = self.problem.cheapest(self._correction().to_predicted(aim) - self.cached) or self.problem.best()
        return mix if self.measured(mix) is None else None

    def cheapest(self, aim: float) -> Mix:
        """The cheapest measured mix with a KL of at most `aim`, or the one that loses least."""
        within = [mix for mix, kl in self.tried if kl <= aim]
        if within:
            return min(within, key=self.price)
        return min(self.tried, key=lambda pair: pair[1])[0]

    def price(self, mix: Mix) -> float:
        """Return the price of `mix`: its bytes and operations, of one code everywhere 1."""
        return self.problem.price.of_cost(self.problem.shape.cost(mix))

    def _correction(self) -> Correction:
        return Correction((self.problem.losses.total(mix), kl) for mix, kl in self.tried)


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
