"""Choose the GEMMs that run in FP8: all linear layers but the output head and those that the user leaves out; and the
form of their inputs, by the options of scales.

The output head stays in BF16 because its error goes straight into the logits and it is a small share of the work.
Embeddings and norms are no GEMMs. What stays is listed with its reason; nothing is left out in silence.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ...core.errors import InputError
from ...options import AT_RUN_TIME, ONE, Form, FormRule, ScaleOptions
from .decisions import Scales, Skipped
from .servers import MODELOPT_GRANULARITY


@dataclass(frozen=True)
class ModelGemms:
    """The GEMMs of a model.

    `names`: all of them; `head`: the output head; `unknown`: GEMMs of a class that cannot be quantized -> the class;
    `in_bf16`: those that an FP8 source checkpoint has in BF16; `no_graph`: why no ONNX graph can be made of the model;
    `routers`: the GEMMs that choose among experts; `fp32`: those that transformers keeps in FP32; `stay`: those that
    stay for a reason of their own (they compute a recurrent state or an indexer's keys, or are among the costliest) ->
    that reason; `widths`: module -> the numbers of its input, of modules whose weight is a matrix; `vision`: the
    modules with a matrix that text does not reach, of which `names` has those that `--vision` names.
    """

    names: tuple[str, ...]
    head: str | None
    unknown: dict[str, str]
    in_bf16: frozenset[str] = frozenset()
    no_graph: str | None = None
    routers: frozenset[str] = frozenset()
    fp32: frozenset[str] = frozenset()
    stay: Mapping[str, str] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    vision: frozenset[str] = frozenset()

    @property
    def named_vision(self) -> list[str]:
        """The modules that `--vision` names."""
        return [name for name in self.names if name in self.vision]


#: Calibration tokens for each number of an input that second moments need, about. Before correlations were shrunk
#: (decision 131), GPTQ gained nothing on SmolLM2's widest inputs with five (decision 72), and with four it left Gemma 3
#: a fifth more loss than with sixteen (`benchmarks/weight_levers.py`).
TOKENS_AN_INPUT = 6


@dataclass(frozen=True)
class WantedTokens:
    """The calibration tokens that compensated rounding wants, for the widest input that it reads, `width` numbers of
    `module`.
    """

    module: str
    width: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return TOKENS_AN_INPUT * self.width

    def few(self, windows: int, seq_len: int) -> str | None:
        """State that so many `windows` of `seq_len` tokens are fewer, and the option that mends it; None where they are
        enough.
        """
        if (tokens := windows * seq_len) >= self.tokens:
            return None
        return (
            f"{tokens:,} calibration tokens are few for inputs of {self.width:,} numbers, as that of {self.module}: "
            f"codes fit other text less than they could; --samples {self.windows(seq_len)} takes the "
            f"{self.tokens:,} that they want"
        )

    def windows(self, seq_len: int) -> int:
        """The windows of `seq_len` tokens that have so many."""
        return -(-self.tokens // seq_len)


def wanted_tokens(widths: Mapping[str, int]) -> WantedTokens | None:
    """Return the tokens that compensated rounding of these modules wants, by the `widths` of their inputs; None without
    any.

    Experts are judged on tokens held out (`quantize.weights.channels`), and starved ones have notes of their own.
    """
    dense = {module: width for module, width in widths.items() if ".experts." not in module}
    widest = max(dense, key=lambda module: dense[module], default=None)
    if widest is None:
        return None
    return WantedTokens(widest, dense[widest])


def few_tokens_note(gemms: ModelGemms, options: ScaleOptions, windows: int, seq_len: int) -> str | None:
    """Warn, before any work, of second moments of too few calibration tokens; None where they are enough."""
    if options.weight_rounding == "nearest":
        return None
    stay = {gemms.head, *gemms.stay, *gemms.unknown, *gemms.fp32, *gemms.routers}
    coded = {
        name: width
        for name, width in gemms.widths.items()
        if name not in stay and not any(fnmatchcase(name, pattern) for pattern in options.skip)
    }
    wanted = wanted_tokens(coded)
    few = wanted and wanted.few(windows, seq_len)
    if few:
        return f"--weight-rounding {options.weight_rounding}: {few}"
    return None


def select(gemms: ModelGemms, skip: Sequence[str], only: Sequence[str] = ()) -> tuple[list[str], dict[str, Skipped]]:
    """Split `gemms` into modules to quantize and modules that stay in BF16, with the reasons.

    `skip`, `only`: shell patterns over module names; without `only`, all modules but those that an FP8 source
    checkpoint has in BF16. Raises InputError for a pattern that matches nothing, and when nothing is left.
    """
    for option, pattern in [*(("--skip", pattern) for pattern in skip), *(("--only", pattern) for pattern in only)]:
        if not any(fnmatchcase(name, pattern) for name in gemms.names):
            raise _unmatched(f"{option} {pattern}", pattern, gemms)
    skipped: dict[str, Skipped] = {}
    for name in gemms.names:
        matching = [pattern for pattern in skip if fnmatchcase(name, pattern)]
        if name == gemms.head:
            skipped[name] = Skipped(reason="output head: its error would go straight into the logits")
        elif name in gemms.routers:
            skipped[name] = Skipped(reason="router: another choice of experts costs more than its product")
        elif name in gemms.stay:
            skipped[name] = Skipped(reason=gemms.stay[name])
        elif name in gemms.fp32:
            skipped[name] = Skipped(reason="kept in FP32 by transformers, which would read its codes as numbers")
        elif name in gemms.unknown:
            skipped[name] = Skipped(
                reason=f"of class {gemms.unknown[name]}, which does not compute as a linear layer does"
            )
        elif matching:
            skipped[name] = Skipped(reason=f"stays in BF16 (--skip {matching[0]})")
        elif only and not any(fnmatchcase(name, pattern) for pattern in only):
            skipped[name] = Skipped(reason=f"not in --only {' '.join(only)}")
        elif name in gemms.in_bf16 and not only:
            skipped[name] = Skipped(reason="as it was given: no FP8 codes in the source checkpoint")
    chosen = [name for name in gemms.names if name not in skipped]
    if not chosen:
        raise InputError(
            "",
            f"all {len(gemms.names)} GEMMs stay in BF16, so there is nothing to quantize",
            "skip fewer with --skip, or name more with --only",
        )
    return chosen, skipped


def rule_modules(rule: FormRule, gemms: ModelGemms, chosen: Sequence[str]) -> list[str]:
    """The modules among `chosen`, the quantized ones, to which a rule gives its form.

    Raises InputError for a pattern that matches none of them.
    """
    if rule.every:
        return [*chosen]
    if not any(fnmatchcase(name, rule.pattern) for name in gemms.names):
        raise _unmatched(rule.written, rule.pattern, gemms)
    matching = [name for name in chosen if fnmatchcase(name, rule.pattern)]
    if not matching:
        raise InputError(rule.written, "all that it matches stays in BF16", "name other modules")
    return matching


def complete_groups(named: Sequence[str], groups: Iterable[Sequence[str]]) -> list[str]:
    """The `named` modules and all that read the same tensors, since a tensor is quantized once for all its readers."""
    wanted = set(named)
    return [member for members in groups if not wanted.isdisjoint(members) for member in members]


def module_forms(
    options: ScaleOptions, gemms: ModelGemms, chosen: Sequence[str], groups: Iterable[Sequence[str]]
) -> dict[str, Form]:
    """Resolve the form of the input of every module among `chosen`, the quantized ones.

    The last rule that matches a module counts, and takes with it all modules of its group. `groups`: modules that
    receive the same tensor. Modules of the vision part take one code in the place of a tail: images have no last
    positions. Raises InputError for a pattern that matches no quantized module.
    """
    sharing = [*groups]
    forms: dict[str, Form] = {}
    for rule in options.form_rules:
        named = rule_modules(rule, gemms, chosen)
        forms |= dict.fromkeys(named if rule.every else complete_groups(named, sharing), rule.form)
    forms |= {module: ONE for module, form in forms.items() if form.tail is not None and module in gemms.vision}
    return {module: forms[module] for module in chosen}


def check_patterns(options: ScaleOptions, gemms: ModelGemms) -> list[str]:
    """The modules that are quantized under `options`; raises InputError for a pattern that matches nothing."""
    chosen, _ = select(gemms, options.skip, options.only)
    module_forms(options, gemms, chosen, ())
    return chosen


def check_dynamic(options: ScaleOptions, gemms: ModelGemms, chosen: Sequence[str], conv1d: Collection[str]) -> None:
    """Raise InputError for a form with scales of run time of a model with quantized modules of class Conv1D, `conv1d`.

    Loaders have no form of these, and a graph has static scales alone, so that nothing but the reference would run it.
    """
    forms = module_forms(options, gemms, chosen, [[module] for module in chosen])
    layer = next((module for module in chosen if module in conv1d), None)
    if layer and (form := next((form for form in AT_RUN_TIME if form in forms.values()), None)):
        raise InputError(
            f"--form {form}",
            f"{layer} is a Conv1D, of which transformers and vLLM load no FP8 weights, and graphs take static scales",
            "give --form one",
        )


def check_layout(
    options: ScaleOptions, gemms: ModelGemms, chosen: Sequence[str], conv1d: Collection[str], experts: Sequence[str]
) -> None:
    """Raise InputError for what ModelOpt's layout, where it was asked for, does not say, of a model with modules of
    class Conv1D, `conv1d`, and modules that hold `experts`.
    """
    if options.layout != "modelopt":
        return
    of_experts = tuple(f"{layer}." for layer in experts)
    unsaid = [*_unsaid_of_forms(options, gemms, chosen), *_unsaid_of_cache(options)]
    for module in chosen:
        if module in conv1d:
            unsaid.append((f"has no FP8 weights of a Conv1D, as {module} is", ""))
        if module.startswith(of_experts):
            unsaid.append((f"has no reader that takes scales of channels for experts, as {module}", ""))
    for fault, remedy in unsaid:
        raise InputError("--layout modelopt", fault, f"{remedy}give --layout compressed-tensors")


def _unsaid_of_forms(options: ScaleOptions, gemms: ModelGemms, chosen: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield fault and remedy of the first form, mix of forms, or granularity that ModelOpt's layout does not say."""
    forms = module_forms(options, gemms, chosen, [[module] for module in chosen])
    first = forms[chosen[0]]
    either = "give --form one with --weight-scale tensor, or --form dynamic, or "
    for module, form in forms.items():
        if form.kind not in MODELOPT_GRANULARITY:
            yield f"does not say --form {form}, as of {module}", either
            return
        if form != first:
            yield f"says one form of all modules, and {module} is in {form} beside {chosen[0]} in {first}", either
            return
    granularity = MODELOPT_GRANULARITY[first.kind]
    if options.weight_scale != granularity:
        fault = f"says --form {first} with one scale a {granularity}, and --weight-scale is {options.weight_scale}"
        yield fault, f"{'leave --inherit out, ' * options.inherit}give --weight-scale {granularity}, or "


def _unsaid_of_cache(options: ScaleOptions) -> Iterator[tuple[str, str]]:
    """Yield fault and remedy of what ModelOpt's layout does not say of a cache."""
    if options.kv_cache == "v":
        yield "says keys and values in FP8 together, and --kv-cache is v", "give --kv-cache fp8 or off, or "
    if options.kv_scale != "tensor":
        yield f"has one scale for the keys of a layer, and --kv-scale is {options.kv_scale}", "leave that out, or "
    if options.q_scale:
        yield "has no place for the scales of --q-scale", "leave that out, or "


def check_tail_length(options: ScaleOptions, positions: int | None) -> None:
    """Raise InputError for a tail as long as any call of a model with so many `positions` (None: no limit)."""
    for rule in options.form_rules:
        if positions is None or rule.form.tail is None or rule.form.tail < positions:
            continue
        older = not rule.written.startswith("--form")
        written, instead = (
            (f"--exact-tail {rule.form.tail}", "--activation-terms 2") if older else (rule.written, "the form two")
        )
        raise InputError(
            written,
            f"the model has {positions} positions, so every call would be in two terms throughout",
            f"give fewer, or {instead}",
        )


def taken_along(patterns: Sequence[str], modules: Iterable[str]) -> list[str]:
    """The `modules` of a form that no pattern matches: they share the input of a module that a pattern matches."""
    return [name for name in modules if patterns and not any(fnmatchcase(name, pattern) for pattern in patterns)]


def shared_input_notes(options: ScaleOptions, forms: Mapping[str, Form]) -> Iterator[str]:
    """Name the modules that no pattern names, and that take a form because they share the input of one that is named.

    `forms`: module -> the form of its input in the run.
    """
    patterns: dict[Form, list[FormRule]] = {}
    for rule in options.form_rules:
        if not rule.every and rule.form != options.form_of_all:
            patterns.setdefault(rule.form, []).append(rule)
    for form, rules in patterns.items():
        others = taken_along([rule.pattern for rule in rules], [name for name in forms if forms[name] == form])
        if others:
            yield (
                f"{rules[0].written.split()[0]}: {others[0]}"
                f"{f' and {len(others) - 1} more' if len(others) > 1 else ''} read the same tensor as a module that it "
                f"names, and take {'a tail' if form.tail else form.words} with it"
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
    in_bf16, fp8 = (
        [member for member in mixed[0] if (member in scales.skipped) == skipped] for skipped in (True, False)
    )
    others = f", and so in {len(mixed) - 1} more such groups" if len(mixed) > 1 else ""
    return (
        f"{', '.join(in_bf16)} in BF16 beside {', '.join(fp8)} in FP8{others}: vLLM makes one GEMM of them and "
        "refuses such a checkpoint; keep all of a group in BF16, or none, if vLLM is to serve it"
    )


def mixed_experts_warning(experts: Iterable[str], scales: Scales) -> str | None:
    """Warn of layers in which only some GEMMs of the experts run in FP8; None where there are none.

    `experts`: the modules that hold the experts of a layer. vLLM holds them in one tensor, and takes all to be stored
    as expert 0 is (0.32's compressed_tensors_moe.py, read): it refuses where the GEMMs of expert 0 differ, and
    otherwise reads codes as values, or values as codes.
    """
    mixed: list[tuple[str, list[str], int]] = []
    for layer in experts:
        inside = [name for name in (*scales.modules, *scales.skipped) if name.startswith(f"{layer}.")]
        bf16 = [name for name in inside if name in scales.skipped]
        if 0 < len(bf16) < len(inside):
            mixed.append((layer, bf16, len(inside)))
    if not mixed:
        return None
    layer, bf16, count = mixed[0]
    named = ", ".join(name.removeprefix(f"{layer}.") for name in bf16[:3]) + (" …" if len(bf16) > 3 else "")
    others = f", and so in {len(mixed) - 1} more {'layers' if len(mixed) > 2 else 'layer'}" if len(mixed) > 1 else ""
    return (
        f"{layer}: {len(bf16)} of {count} GEMMs of its experts in BF16 ({named}) beside others in FP8{others}: vLLM "
        "takes all experts of a layer to be stored as expert 0 is, and refuses such a checkpoint or reads it wrong in "
        "silence; keep all experts of a layer in BF16, or none, if vLLM is to serve it"
    )


def check_measured(gemms: ModelGemms, options: ScaleOptions, measured: Collection[str]) -> None:
    """Raise InputError for a module that `--vision` names whose input is not among those of the modules `measured`."""
    missing = [name for name in gemms.named_vision if name not in gemms.unknown and name not in measured]
    if missing:
        raise InputError(
            f"--vision {options.vision[0]}",
            f"the input of {missing[0]} was not measured",
            "use `fp8q calibrate` with it and rows with images, or leave it out",
        )


def vision_tail_note(options: ScaleOptions, scales: Scales) -> str | None:
    """Note the modules of the vision part that take one code where a tail was asked for; None without any."""
    if not scales.vision or not any(rule.form.tail for rule in options.form_rules):
        return None
    return "--vision: images have no last positions, so modules of the vision part take one code in place of a tail"


def _unmatched(written: str, pattern: str, gemms: ModelGemms) -> InputError:
    blind = min((name for name in gemms.vision if fnmatchcase(name, pattern)), default=None)
    if blind is not None:
        return InputError(
            written,
            f"matches only modules that text does not reach, such as {blind}, and they stay in BF16",
            "name them by --vision too, which takes rows with images, or leave it out",
        )
    return InputError(written, "matches no module", f"names are like {', '.join(_examples(gemms.names))}")


def _examples(names: Iterable[str]) -> list[str]:
    """Up to four names, one for each last part of a name."""
    return list({name.rpartition(".")[2]: name for name in names}.values())[:4]
