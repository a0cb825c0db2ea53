"""List the choices, and their cost where they are served.

GEMMs that read one tensor are one `Group`: its codes are shared, so they take one term, a tail, two terms, FP8
weights alone, or BF16 together. Weights alone cost and lose what two terms do. So they take the place of two terms
where a server does not run these, and in groups that have them already.

How weights are rounded is chosen for the whole model, and which parts of the cache are codes too; of these each layer
may be left in BF16 (`--kv-skip`). Rounding costs nothing that is served. What the run keeps in BF16 already stays
there.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal, get_args

from ...options import BF16, DEFAULT_EXACT_TAIL, ONE, Form, Kind, KvCache, Prefer, ScaleOptions, Server
from ...quantize.scales.decisions import CACHE_PARTS, TensorScale
from ...quantize.scales.servers import ONE_CODE_IN_EXPERTS, computes
from ...quantize.scales.serving_cost import BF16_BYTES, BF16_OPERATIONS, SCALE_BYTES, Cost, prompt_operations

#: The form of a group of GEMMs: that of their input, or `bf16` where their weights stay in BF16 too.
GroupForm = Literal["one_term", "dynamic", "tail", "two_terms", "weights_alone", "bf16"]
FORMS: tuple[GroupForm, ...] = get_args(GroupForm)
TWO_TERMS: GroupForm = "two_terms"
#: Form of a group -> the kind of its input's form, as `--form` names it; none where weights stay in BF16 too.
KINDS: Mapping[GroupForm, Kind] = {
    "one_term": "one", "dynamic": "dynamic", "tail": "tail", "two_terms": "two", "weights_alone": "bf16",
}  # fmt: skip
#: The form that loses most.
COARSEST: GroupForm = "one_term"
RoundingName = Literal["nearest", "gptq", "sequential"]
#: Those that `tune` has candidates of.
ROUNDINGS: tuple[RoundingName, ...] = ("nearest", "gptq")
CACHES: tuple[KvCache, ...] = ("off", "v", "fp8")
#: What a price minimizes: one of both costs before all, or both alike.
Dear = Prefer | Literal["both"]
#: The weight of the cost that is not preferred, where the preferred one has 1: it decides between equals.
SECONDARY = 1e-4
#: What is dear -> the weights of the bytes of a decode step and of the operations of a prompt.
WEIGHTS: Mapping[Dear, tuple[float, float]] = {
    "memory": (1.0, SECONDARY), "prefill": (SECONDARY, 1.0), "both": (0.5, 0.5),
}  # fmt: skip


def options_of(options: ScaleOptions, positions: int | None) -> dict[GroupForm, ScaleOptions]:
    """Return form of codes of inputs -> `options` that give it to every module; inherited scales are those of one term.

    A tail is as long as `options` have it; a model of no more `positions` (None: no limit) has none.
    """
    plain = replace(
        options.in_one_form(ONE),
        kv_cache="off",
        kv_scale="tensor",
        kv_skip=(),
        q_scale=False,
    )
    exact = replace(plain, inherit=False)
    by_form: dict[GroupForm, ScaleOptions] = {"one_term": plain}
    tail = options.tail_length
    if positions is None or tail < positions:
        by_form["tail"] = replace(exact, activation_terms="tail", exact_tail=tail)
    return by_form | {"two_terms": replace(exact, activation_terms=2)}


#: The variant that a cache tensor's loss is predicted for.
CODES = "fp8"


def variant(rounding: str, form: GroupForm) -> str:
    """Name a group's loss in one form, its weights rounded so."""
    return f"{rounding} {form}"


def form_of(scale: TensorScale | None) -> GroupForm:
    """The form of an activation with this scale; None: it stays in BF16, before a weight in FP8."""
    kind = BF16.kind if scale is None else scale.form.kind
    return next(form for form, other in KINDS.items() if other == kind)


def input_form(form: GroupForm, tail: int) -> Form:
    """Return the form of inputs, as `--form` has it; of a module in BF16 that of one code, which has no effect."""
    return Form(KINDS.get(form, "one"), tail if form == "tail" else None)


@dataclass(frozen=True)
class Group:
    """The GEMMs that read one tensor, under the name of the first; `weights`: [out, in] of each of them.

    `tail`: the length of a tail, if they take one. `forms`: those that the server computes.
    """

    name: str
    weights: Mapping[str, tuple[int, int]]
    tail: int = DEFAULT_EXACT_TAIL
    forms: tuple[GroupForm, ...] = FORMS

    def bytes_of(self, form: GroupForm) -> int:
        """Return the bytes that a decode step reads of their weights."""
        if form == "bf16":
            return sum(BF16_BYTES * prod(shape) for shape in self.weights.values())
        return sum(prod(shape) + SCALE_BYTES * shape[0] for shape in self.weights.values())

    def operations_of(self, form: GroupForm) -> int:
        """Count the multiplications for each token of a prompt, in multiplications of FP8 codes."""
        operations = BF16_OPERATIONS if form == "bf16" else prompt_operations(input_form(form, self.tail))
        return round(sum(map(prod, self.weights.values())) * operations)


@dataclass(frozen=True)
class Mix:
    """A form for each group, the rounding of weights, the parts of the cache that are codes, and the attention modules
    whose cache stays in BF16.
    """

    forms: Mapping[str, GroupForm]
    rounding: str
    kv_cache: KvCache
    wide_cache: tuple[str, ...] = ()

    @classmethod
    def from_stored(cls, fields: Mapping[str, Any]) -> "Mix":
        """Make a mix of its fields as JSON has them."""
        return cls(**{**fields, "wide_cache": tuple(fields["wide_cache"])})

    def leaves_in_bf16(self, module: str) -> bool:
        """Tell whether the cache of the attention `module` stays in BF16 beside others in codes."""
        return module in self.wide_cache

    def codes(self, tensor: str) -> bool:
        """Tell whether the cache tensor `<attention>.k` or `.v` is codes."""
        module, _, part = tensor.rpartition(".")
        return part in CACHE_PARTS[self.kv_cache] and not self.leaves_in_bf16(module)


@dataclass(frozen=True)
class Shape:
    """The sizes that costs are computed from: the groups, the number of weights of the other GEMMs, which stay in BF16,
    and for each cache tensor its values a position.
    """

    groups: tuple[Group, ...]
    bf16_values: int
    cache: Mapping[str, int]

    def cost(self, mix: Mix) -> Cost:
        """Return the cost of `mix`."""
        return Cost(
            BF16_BYTES * self.bf16_values + sum(group.bytes_of(mix.forms[group.name]) for group in self.groups),
            sum(self.tensor_bytes(name, mix.codes(name)) for name in self.cache),
            BF16_OPERATIONS * self.bf16_values
            + sum(group.operations_of(mix.forms[group.name]) for group in self.groups),
        )

    def tensor_bytes(self, name: str, codes: bool) -> int:
        """Return the bytes that a sequence keeps of a cache tensor for each position."""
        return self.cache[name] * (1 if codes else BF16_BYTES)

    @property
    def cached(self) -> dict[str, list[str]]:
        """The tensors of the cache, by the attention module that writes them."""
        by_module: dict[str, list[str]] = {}
        for name in self.cache:
            by_module.setdefault(name.rpartition(".")[0], []).append(name)
        return by_module

    @property
    def plain(self) -> Cost:
        """The cost of one term everywhere and a cache in BF16, which other costs are divided by."""
        return self.cost(Mix(dict.fromkeys((group.name for group in self.groups), "one_term"), "nearest", "off"))


@dataclass(frozen=True)
class Price:
    """Both costs as one number: bytes a decode step reads after `positions` tokens and operations of a prompt, each as
    a share of `plain`, in the sum that `WEIGHTS` has for what is `dear`.
    """

    plain: Cost
    dear: Dear
    positions: int

    def combine(self, step_bytes: float, operations: float) -> float:
        """Combine the bytes of a decode step and the operations of a prompt into a price."""
        memory, prefill = WEIGHTS[self.dear]
        return (
            memory * step_bytes / self.plain.step_bytes(self.positions)
            + prefill * operations / self.plain.prefill_operations
        )

    def of_cost(self, cost: Cost) -> float:
        """Return the price of a mix with this `cost`."""
        return self.combine(cost.step_bytes(self.positions), cost.prefill_operations)


def groups_among(groups: Iterable[Sequence[str]], modules: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Limit `groups`, the modules that read one tensor, to those `modules`; return each by its first."""
    read = [tuple(name for name in members if name in modules) for members in groups]
    return {members[0]: members for members in read if members}


def shape_of(
    groups: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    tail: int,
    cache: Mapping[str, int] = MappingProxyType({}),
) -> Shape:
    """Return the sizes that costs are computed from. `groups`: the GEMMs in FP8 that read one tensor, by the first;
    `shapes`: of the weights of all GEMMs, of which the others stay in BF16. `tail`: the length of a tail; `cache`: each
    cache tensor's values a position.
    """
    sizes = {name: (shape[0], prod(shape[1:])) for name, shape in shapes.items()}
    listed = tuple(
        Group(name, {member: sizes.get(member, (0, 0)) for member in members}, tail) for name, members in groups.items()
    )
    taken = {member for members in groups.values() for member in members}
    return Shape(listed, sum(prod(size) for name, size in sizes.items() if name not in taken), cache)


def changes(before: Mix, after: Mix) -> list[tuple[str, str]]:
    """List the changes, as (first module of the group, form); `*` stands for the whole model: its rounding, and
    `kv_cache=` its cache's form. An attention module has a `wide_cache`, or a `coded_cache` again.
    """
    changed = [("*", after.rounding)] if after.rounding != before.rounding else []
    changed += [("*", f"kv_cache={after.kv_cache}")] if after.kv_cache != before.kv_cache else []
    changed += [(name, "wide_cache") for name in after.wide_cache if name not in before.wide_cache]
    if after.kv_cache != "off":
        changed += [(name, "coded_cache") for name in before.wide_cache if name not in after.wide_cache]
    return changed + [(name, form) for name, form in after.forms.items() if form != before.forms[name]]


def served_forms(server: Server) -> tuple[GroupForm, ...]:
    """List the forms that `server` computes as fp8q does, of GEMMs but those of experts."""
    return tuple(form for form in FORMS if form == "bf16" or computes(server, KINDS[form]))


def limited_to(groups: Iterable[Group], server: Server, experts: Iterable[str]) -> tuple[Group, ...]:
    """Limit `groups` to the forms that `server` computes; `experts`: the modules that hold the experts of a layer."""
    dense = served_forms(server)
    of_experts = (COARSEST,) if server in ONE_CODE_IN_EXPERTS else dense
    held = tuple(f"{layer}." for layer in experts)
    return tuple(
        replace(group, forms=of_experts if any(name.startswith(held) for name in group.weights) else dense)
        for group in groups
    )


def leaving_out(group: Group, *forms: GroupForm) -> Group:
    """Leave out `forms` of those that a group may take."""
    return replace(group, forms=tuple(form for form in group.forms if form not in forms))


def members(groups: Iterable[Group], mix: Mix, form: GroupForm) -> list[str]:
    """List the GEMMs of the groups that `mix` has in `form`."""
    return [member for group in groups if mix.forms.get(group.name) == form for member in group.weights]
