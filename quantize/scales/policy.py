"""Choose the matrix products that run in FP8: all linear layers but the output head and those that the user leaves out.

The output head stays in BF16 because its error goes straight into the logits and it is a small share of the work.
Embeddings and norms are no matrix products. What stays is listed with its reason; nothing is left out in silence.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...core.errors import InputError
from ...options import ScaleOptions, Terms
from .decisions import Scales, Skipped


@dataclass(frozen=True)
class Products:
    """The matrix products of a model.

    `names`: all of them; `head`: the output head; `unknown`: products of a class that cannot be quantized -> the class;
    `wide`: those that an FP8 source checkpoint has in BF16; `no_graph`: why no ONNX graph can be made of the model;
    `routers`: the products that choose among experts; `fp32`: those that transformers keeps in FP32.
    """

    names: tuple[str, ...]
    head: str | None
    unknown: dict[str, str]
    wide: frozenset[str] = frozenset()
    no_graph: str | None = None
    routers: frozenset[str] = frozenset()
    fp32: frozenset[str] = frozenset()


def select(products: Products, skip: Sequence[str], only: Sequence[str] = ()) -> tuple[list[str], dict[str, Skipped]]:
    """Split `products` into modules to quantize and modules that stay in BF16, with the reasons.

    `skip`, `only`: shell patterns over module names; without `only`, all modules but those that an FP8 source
    checkpoint has in BF16. Raises InputError for a pattern that matches nothing, and when nothing is left.
    """
    for option, pattern in [*(("--skip", pattern) for pattern in skip), *(("--only", pattern) for pattern in only)]:
        if not any(fnmatchcase(name, pattern) for name in products.names):
            raise _unmatched(option, pattern, products.names)
    skipped: dict[str, Skipped] = {}
    for name in products.names:
        matching = [pattern for pattern in skip if fnmatchcase(name, pattern)]
        if name == products.head:
            skipped[name] = Skipped(reason="output head: its error would go straight into the logits")
        elif name in products.routers:
            skipped[name] = Skipped(reason="router: another choice of experts costs more than its product")
        elif name in products.fp32:
            skipped[name] = Skipped(reason="kept in FP32 by transformers, which would read its codes as numbers")
        elif name in products.unknown:
            skipped[name] = Skipped(
                reason=f"of class {products.unknown[name]}, which does not compute as a linear layer does"
            )
        elif matching:
            skipped[name] = Skipped(reason=f"asked for: --skip {matching[0]}")
        elif only and not any(fnmatchcase(name, pattern) for pattern in only):
            skipped[name] = Skipped(reason=f"asked for: not in --only {' '.join(only)}")
        elif name in products.wide and not only:
            skipped[name] = Skipped(reason="as it was given: no FP8 codes in the source checkpoint")
    chosen = [name for name in products.names if name not in skipped]
    if not chosen:
        raise InputError(
            "",
            f"all {len(products.names)} matrix products stay in BF16, so there is nothing to quantize",
            "skip fewer with --skip, or name more with --only",
        )
    return chosen, skipped


def match_terms(option: str, patterns: Sequence[str], products: Products, chosen: Sequence[str]) -> list[str]:
    """The modules among `chosen`, the quantized ones, that the `patterns` of an `option` for inputs match.

    Raises InputError for a pattern that matches none of them.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in products.names):
            raise _unmatched(option, pattern, products.names)
        if not any(fnmatchcase(name, pattern) for name in chosen):
            raise InputError(f"{option} {pattern}", "all that it matches stays in BF16", "name other modules")
    return [name for name in chosen if any(fnmatchcase(name, pattern) for pattern in patterns)]


def whole_groups(named: Sequence[str], groups: Iterable[Sequence[str]]) -> list[str]:
    """The `named` modules and all that read the same tensors, since a tensor is quantized once for all its readers."""
    wanted = set(named)
    return [member for members in groups if not wanted.isdisjoint(members) for member in members]


def finer_modules(
    options: ScaleOptions, products: Products, chosen: Sequence[str], groups: Iterable[Sequence[str]]
) -> dict[str, int | None]:
    """Map the modules among `chosen`, the quantized ones, whose input is two codes a value, to their tail.

    The tail is the number of positions at the end of a call that have the second codes; None for all positions. A
    pattern goes before what all modules have, and two terms before a tail. `groups`: modules that receive the same
    tensor. Raises InputError for a pattern that matches no quantized module.
    """
    sharing = [*groups]
    everywhere: dict[Terms, dict[str, int | None]] = {
        1: {},
        2: dict.fromkeys(chosen),
        "tail": dict.fromkeys(chosen, options.exact_tail),
        "bf16": {},
    }
    finer = everywhere[options.activation_terms]
    for option, patterns, tail in (
        ("--tail", options.tail, options.exact_tail),
        ("--two-terms", options.two_terms, None),
    ):
        finer |= dict.fromkeys(whole_groups(match_terms(option, patterns, products, chosen), sharing), tail)
    return finer


def bf16_input_modules(
    options: ScaleOptions, products: Products, chosen: Sequence[str], groups: Iterable[Sequence[str]]
) -> list[str]:
    """The modules among `chosen`, the quantized ones, whose input stays in BF16, so that their weight alone is codes.

    A pattern goes before what all modules have, and that of `--bf16-input` before those of two terms and of tails.
    `groups`: modules that receive the same tensor. Raises InputError for a pattern that matches no quantized module.
    """
    sharing = [*groups]
    named = set(whole_groups(match_terms("--bf16-input", options.bf16_input, products, chosen), sharing))
    if options.activation_terms == "bf16":
        named |= set(chosen) - finer_modules(options, products, chosen, sharing).keys()
    return [module for module in chosen if module in named]


def check_patterns(options: ScaleOptions, products: Products) -> list[str]:
    """The modules that are quantized under `options`; raises InputError for a pattern that matches nothing."""
    chosen, _ = select(products, options.skip, options.only)
    finer_modules(options, products, chosen, ())
    bf16_input_modules(options, products, chosen, ())
    return chosen


def check_tail_length(options: ScaleOptions, positions: int | None) -> None:
    """Raise InputError for a tail as long as any call of a model with so many `positions` (None: no limit)."""
    if options.has_tail and positions is not None and options.exact_tail >= positions:
        raise InputError(
            f"--exact-tail {options.exact_tail}",
            f"the model has {positions} positions, so every call would be in two terms throughout",
            "give fewer, or --activation-terms 2",
        )


def taken_along(patterns: Sequence[str], modules: Iterable[str]) -> list[str]:
    """The `modules` of a form that no pattern matches: they share the input of a module that a pattern matches."""
    return [name for name in modules if patterns and not any(fnmatchcase(name, pattern) for pattern in patterns)]


def shared_input_notes(options: ScaleOptions, scales: Scales) -> Iterator[str]:
    """Name the modules that an option for some inputs did not name, and that take the form of those with them."""
    throughout = [module for module in scales.two_terms if module not in scales.tails]
    patterns = options.two_terms if options.activation_terms != 2 else ()
    for option, matching, modules, form in (
        ("--two-terms", patterns, throughout, "two terms"),
        ("--tail", options.tail, scales.tails, "a tail"),
        ("--bf16-input", options.bf16_input, scales.bf16_inputs, "BF16"),
    ):
        if others := taken_along(matching, modules):
            yield (
                f"{option}: {others[0]}{f' and {len(others) - 1} more' if len(others) > 1 else ''} read the same "
                f"tensor as a module that it names, and take {form} with it"
            )


def mixed_group_warning(groups: Iterable[Sequence[str]], scales: Scales, experts: Iterable[str] = ()) -> str | None:
    """Warn of sibling modules that read one tensor of which only some run in FP8; None where there are none.

    vLLM makes one fused projection of such siblings (q, k and v; gate and up), and wants them all in one scheme.
    `groups`: modules that receive the same tensor. `experts`: the modules that hold the experts of a layer, which are
    left to `mixed_experts_warning`.
    """
    families: dict[tuple[str, ...], None] = {}
    held = tuple(f"{layer}." for layer in experts)
    for members in groups:
        for parent in {member.rpartition(".")[0] for member in members if not member.startswith(held)}:
            families[tuple(member for member in members if member.rpartition(".")[0] == parent)] = None
    mixed = [family for family in families if 0 < sum(member in scales.skipped for member in family) < len(family)]
    if not mixed:
        return None
    wide, fp8 = ([member for member in mixed[0] if (member in scales.skipped) == skipped] for skipped in (True, False))
    others = f", and so in {len(mixed) - 1} more such groups" if len(mixed) > 1 else ""
    return (
        f"{', '.join(wide)} in BF16 beside {', '.join(fp8)} in FP8{others}: vLLM makes one product of them and "
        "refuses such a checkpoint; keep all of a group in BF16, or none, if vLLM is to serve it"
    )


def mixed_experts_warning(experts: Iterable[str], scales: Scales) -> str | None:
    """Warn of layers in which only some products of the experts run in FP8; None where there are none.

    `experts`: the modules that hold the experts of a layer. vLLM holds them in one tensor, and takes all to be stored
    as expert 0 is (0.32's compressed_tensors_moe.py, read): it refuses where the products of expert 0 differ, and
    otherwise reads codes as values, or values as codes.
    """
    mixed: list[tuple[str, list[str], int]] = []
    for layer in experts:
        inside = [name for name in (*scales.modules, *scales.skipped) if name.startswith(f"{layer}.")]
        wide = [name for name in inside if name in scales.skipped]
        if 0 < len(wide) < len(inside):
            mixed.append((layer, wide, len(inside)))
    if not mixed:
        return None
    layer, wide, count = mixed[0]
    named = ", ".join(name.removeprefix(f"{layer}.") for name in wide[:3]) + (" …" if len(wide) > 3 else "")
    others = f", and so in {len(mixed) - 1} more {'layers' if len(mixed) > 2 else 'layer'}" if len(mixed) > 1 else ""
    return (
        f"{layer}: {len(wide)} of {count} products of its experts in BF16 ({named}) beside others in FP8{others}: vLLM "
        "takes all experts of a layer to be stored as expert 0 is, and refuses such a checkpoint or reads it wrong in "
        "silence; keep all experts of a layer in BF16, or none, if vLLM is to serve it"
    )


def _unmatched(option: str, pattern: str, names: Iterable[str]) -> InputError:
    return InputError(f"{option} {pattern}", "matches no module", f"names are like {', '.join(_examples(names))}")


def _examples(names: Iterable[str]) -> list[str]:
    """Up to four names, one for each last part of a name."""
    return list({name.rpartition(".")[2]: name for name in names}.values())[:4]
