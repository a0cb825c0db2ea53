"""Costs by hand, and against `quantize.scales.serving_cost`."""

from dataclasses import replace

import pytest

from fp8q.options import ScaleOptions, Server
from fp8q.quantize.scales.decisions import Scales, TensorScale, WeightScales
from fp8q.quantize.scales.serving_cost import Cost, cost_of
from fp8q.validate.tuning.choices import (
    FORMS,
    ROUNDINGS,
    Group,
    GroupForm,
    Mix,
    Price,
    Shape,
    changes,
    form_of,
    limited_to,
    members,
    options_of,
)
from fp8q.validate.tuning.document import Recipe
from fp8q.validate.tuning.solve import Correction, Losses, Problem, same

#: q and k read one tensor, down another; a head of 80 × 40 stays in BF16.
GROUPS = (Group("q", {"q": (40, 40), "k": (20, 40)}), Group("down", {"down": (40, 60)}))
SHAPE = Shape(GROUPS, 3200, {"a.k": 200, "a.v": 200})
#: down loses most in one term; gptq wins back half of every weight; the cache's keys cost four times its values.
LOSSES = Losses(
    {
        "q": {"nearest one_term": 3, "nearest two_terms": 1, "gptq one_term": 2.5, "gptq two_terms": 0.5},
        "down": {"nearest one_term": 9, "nearest two_terms": 1, "gptq one_term": 8.5, "gptq two_terms": 0.5},
        "a.k": {"fp8": 4},
        "a.v": {"fp8": 1},
    },
    ("nearest", "gptq"),
    ("off", "v", "fp8"),
    ("one_term", "two_terms"),
)
#: With a tail, which loses a little more than two terms and costs a prompt of 2,048 tokens a thirty-second more.
TAILS = replace(
    LOSSES,
    parts={
        **LOSSES.parts,
        **{name: {**LOSSES.parts[name], "nearest tail": 1.5, "gptq tail": 1.0} for name in ("q", "down")},
    },
    on_codes=("one_term", "tail", "two_terms"),
)


def mix(
    q: str = "one_term",
    down: str = "one_term",
    rounding: str = "nearest",
    kv_cache: str = "off",
    wide: tuple[str, ...] = (),
) -> Mix:
    return Mix({"q": q, "down": down}, rounding, kv_cache, wide)  # type: ignore[dict-item,arg-type]


def problem(prefer: str = "memory", own: Mix | None = None) -> Problem:
    return Problem(LOSSES, SHAPE, Price(SHAPE.plain, prefer, 10), own or mix())  # type: ignore[arg-type]


def test_costs_are_those_of_a_checkpoint_with_these_scales() -> None:
    """q and k: 2,400 values and 60 scales; down: 2,400 and 40; the head 3,200 in BF16; a cache of 400 values."""
    assert SHAPE.cost(mix()) == SHAPE.plain == Cost(6400 + 2400 + 240 + 2400 + 160, 800, 6400 + 2400 + 2400)
    assert SHAPE.cost(mix("two_terms", "bf16", kv_cache="v")) == Cost(6400 + 2640 + 4800, 600, 6400 + 4800 + 4800)
    tensor = TensorScale(method="amax", amax=1, clip=1, scale=1, saturation=0, underflow=0, sqnr_db=30)
    weight = WeightScales(method="mse", axis=0, channels=40, scale_min=1, scale_max=1, sqnr_db=30)
    scales = Scales(
        weights={"q": weight, "k": weight.model_copy(update={"channels": 20})},
        activations=dict.fromkeys(("q", "k"), tensor.model_copy(update={"terms": 2})),
        kv_cache={"a.v": tensor},
        skipped={},
    )
    shapes = {name: shape for group in GROUPS for name, shape in group.weights.items()} | {"lm_head": (80, 40)}
    assert SHAPE.cost(mix("two_terms", "bf16", kv_cache="v")) == cost_of(shapes, SHAPE.cache, scales)


def test_what_is_dear_weighs_and_the_other_decides_between_equals() -> None:
    """Plain: 11,600 + 10 · 800 bytes, 11,200 operations."""
    assert Price(SHAPE.plain, "memory", 10).of_cost(SHAPE.plain) == pytest.approx(1 + 1e-4)
    assert Price(SHAPE.plain, "prefill", 10).combine(19_600, 0) == pytest.approx(1e-4)
    assert Price(SHAPE.plain, "memory", 10).combine(1960, 1120) == pytest.approx(0.1 + 1e-5)


def test_what_changes_is_told_by_groups_and_for_the_whole_model() -> None:
    assert changes(mix(), mix()) == []
    assert changes(mix(), mix("bf16", rounding="gptq", kv_cache="v")) == [
        ("*", "gptq"), ("*", "kv_cache=v"), ("q", "bf16"),
    ]  # fmt: skip
    assert members(GROUPS, mix("tail"), "tail") == ["q", "k"]


@pytest.mark.parametrize(
    ("prefer", "budget", "expected"),
    [
        ("memory", 17, mix(kv_cache="fp8")),  # 3 + 9 + 5: nothing is cheaper than one term and an FP8 cache
        ("memory", 16.9, mix(rounding="gptq", kv_cache="fp8")),  # 2.5 + 8.5 + 5: rounding costs nothing
        ("memory", 9, mix(down="two_terms", kv_cache="fp8")),  # 3 + 1 + 5
        ("memory", 2, mix("two_terms", "two_terms", "gptq", "v")),  # 0.5 + 0.5 + 1
        ("memory", 1.9, mix("two_terms", "two_terms", "gptq", "off")),  # 2,000 bytes more, for 10 positions
        ("memory", 0.9, mix("bf16", "two_terms", "gptq", "off")),  # q in BF16 is 2,160 more bytes, down 2,240
        ("prefill", 12, mix(rounding="gptq", kv_cache="v")),  # 2.5 + 8.5 + 1: a cache in BF16 adds no operation
        ("prefill", 11.9, mix(rounding="gptq", kv_cache="off")),
        ("prefill", 4.9, mix("one_term", "two_terms", "gptq", "v")),  # as many operations as in BF16, fewer bytes
        ("prefill", 2.9, mix("one_term", "bf16", "gptq", "off")),
    ],
)
def test_the_cheapest_mix_by_hand(prefer: str, budget: float, expected: Mix) -> None:
    found = problem(prefer).cheapest(budget)
    assert found is not None
    assert LOSSES.total(found) <= budget
    assert same(found, expected), changes(expected, found)


@pytest.mark.parametrize(
    ("server", "dense", "experts"),
    [
        ("tensorrt", ["one_term", "tail", "two_terms", "bf16"], ["one_term", "tail", "two_terms", "bf16"]),
        ("vllm-plugin", ["one_term", "tail", "two_terms", "bf16"], ["one_term"]),
        ("vllm", ["one_term", "weights_alone", "bf16"], ["one_term"]),
        ("any", ["one_term", "weights_alone", "bf16"], ["one_term"]),
    ],
)
def test_a_server_limits_the_forms_of_dense_products_and_of_experts(
    server: Server, dense: list[str], experts: list[str]
) -> None:
    """The cheapest mix without loss of activations has them: for any budget no other form is chosen."""
    of_experts = Group("l.experts.0.down", {"l.experts.0.down": (40, 60)})
    groups = limited_to((GROUPS[0], of_experts), server, ["l.experts"])
    parts = {"q": TAILS.parts["q"], of_experts.name: TAILS.parts["down"]}
    alone = {
        name: {**part, **{f"{rounding} weights_alone": part[f"{rounding} two_terms"] for rounding in ROUNDINGS}}
        for name, part in parts.items()
    }
    own = Mix({"q": "one_term", of_experts.name: "one_term"}, "nearest", "off")
    shape = replace(SHAPE, groups=groups, cache={})
    limited = Problem(replace(TAILS, parts=alone, caches=("off",)), shape, Price(SHAPE.plain, "memory", 10), own)
    chosen = [limited.cheapest(budget) for budget in (20, 10.7, 9.2, 3, 2, 1, 0.6, 0)] + [limited.best()]
    mixes = [mix for mix in chosen if mix is not None]
    assert {mix.forms["q"] for mix in mixes} <= set(dense)
    assert {mix.forms[of_experts.name] for mix in mixes} <= set(experts)
    assert limited.finest().forms == {"q": dense[-2], of_experts.name: experts[-2] if len(experts) > 1 else experts[0]}
    assert {form for mix in limited.frontier() for form in mix.forms.values()} <= {*dense, *experts}


#: A second layer of the cache, whose keys lose ten times what the first one's do; those of the first are three times
#: as wide.
LAYERS = replace(SHAPE, cache={"a.k": 600, "a.v": 200, "b.k": 200, "b.v": 200})
UNEVEN = replace(LOSSES, parts={**LOSSES.parts, "b.k": {"fp8": 40}, "b.v": {"fp8": 1}})


@pytest.mark.parametrize(
    ("budget", "expected", "cache_bytes"),
    [
        (58, mix(kv_cache="fp8"), 1200),  # 3 + 9 + 46
        (57, mix(rounding="gptq", kv_cache="fp8"), 1200),
        (17.1, mix(kv_cache="fp8", wide=("b",)), 1600),  # 3 + 9 + 5; with codes of values alone 2,000 bytes
        (8, mix(down="two_terms", kv_cache="fp8", rounding="gptq", wide=("b",)), 1600),  # 2.5 + 0.5 + 5
        (1, mix("two_terms", "two_terms", rounding="gptq"), 2400),  # all layers left out are no FP8 cache
    ],
)
def test_layers_whose_keys_lose_most_stay_wide_first(budget: float, expected: Mix, cache_bytes: int) -> None:
    found = Problem(UNEVEN, LAYERS, Price(LAYERS.plain, "memory", 10), mix()).cheapest(budget)
    assert found is not None
    assert UNEVEN.total(found) <= budget
    assert (found.kv_cache, found.wide_cache) == (expected.kv_cache, expected.wide_cache)
    assert same(found, expected), changes(expected, found)
    assert LAYERS.cost(found).cache_bytes == cache_bytes


def test_a_layer_that_becomes_wide_or_codes_again_is_told() -> None:
    before, after = (mix(kv_cache="fp8", wide=(layer,)) for layer in "ab")
    assert changes(before, after) == [("b", "wide_cache"), ("a", "coded_cache")]
    assert changes(before, mix()) == [("*", "kv_cache=off")]
    own = ScaleOptions(kv_cache="fp8", kv_skip=("a",))
    assert Recipe.from_mix(GROUPS, after).over(own).kv_skip == ("b",)
    assert Recipe.from_mix(GROUPS, mix()).over(own) == ScaleOptions(kv_cache="off")


def test_of_equals_the_one_that_changes_least_is_taken() -> None:
    """13 is met by one term and values in FP8 either way of rounding."""
    for rounding in ("nearest", "gptq"):
        found = problem("prefill", mix(rounding=rounding)).cheapest(13)
        assert found is not None
        assert found.rounding == rounding


def test_something_stays_in_fp8_whatever_is_asked_for() -> None:
    assert problem().cheapest(0) is None
    best = problem().best()
    assert sorted(best.forms.values()) == ["bf16", "two_terms"]
    assert LOSSES.total(best) == 0.5
    assert all(set(point.forms.values()) != {"bf16"} for point in problem().frontier())


@pytest.mark.parametrize("own", ["one_term", "two_terms"])
def test_a_group_whose_loss_is_not_known_stays_as_it_is(own: GroupForm) -> None:
    """No token came by `down`: of q and k 3 is too much for a budget of 2, and 1 is not."""
    losses = replace(LOSSES, parts={name: found for name, found in LOSSES.parts.items() if name != "down"})
    tried = Problem(losses, SHAPE, Price(SHAPE.plain, "memory", 10), mix(down=own))
    assert tried.unknown == ["down"]
    found = [tried.cheapest(budget) for budget in (100, 2)]
    assert [each and each.forms["q"] for each in found] == ["one_term", "two_terms"]
    every = [*found, tried.best(), *tried.frontier()]
    assert {each.forms["down"] for each in every if each} == {own}
    assert tried.best().forms["q"] == "two_terms"


@pytest.mark.parametrize("wide", [(), ("b",)])
def test_a_layer_of_the_cache_whose_loss_is_not_known_stays_as_it_is(wide: tuple[str, ...]) -> None:
    """A budget that lets all codes pass leaves the second layer's cache wide, where it is."""
    losses = replace(UNEVEN, parts={name: found for name, found in UNEVEN.parts.items() if name != "b.k"})
    tried = Problem(losses, LAYERS, Price(LAYERS.plain, "memory", 10), mix(kv_cache="fp8", wide=wide))
    assert tried.unknown == ["b.k"]
    found = tried.cheapest(1000)
    assert found is not None
    assert (found.kv_cache, found.wide_cache) == ("fp8", wide)
    assert Problem(replace(losses, caches=("off",)), LAYERS, tried.price, mix()).unknown == []


def test_along_the_frontier_losses_fall_and_prices_rise() -> None:
    points = problem().frontier()
    losses = [LOSSES.total(point) for point in points]
    prices = [problem().price.of_cost(SHAPE.cost(point)) for point in points]
    assert losses == sorted(losses, reverse=True)
    assert prices == sorted(prices)
    assert same(points[0], mix(rounding="gptq", kv_cache="fp8")) or losses[0] == 17
    assert min(losses) == 0.5


def test_the_correction_goes_through_what_was_measured_and_on_with_the_nearest_ratio() -> None:
    found = Correction([(4, 8), (1, 1)])
    assert [found.to_measured(value) for value in (1, 4, 2)] == pytest.approx([1, 8, 8**0.5])
    assert [found.to_measured(value) for value in (0.5, 8, 0)] == pytest.approx([0.5, 16, 0])
    assert [found.to_predicted(found.to_measured(value)) for value in (0.3, 1.7, 9)] == pytest.approx([0.3, 1.7, 9])


@pytest.mark.parametrize(("budget", "forms"), [(9, "one_term tail"), (7, "tail tail"), (6.5, "two_terms tail")])
def test_a_tail_is_taken_before_two_terms(budget: float, forms: str) -> None:
    """A cache in FP8 loses 5; nearest: 3 + 1.5, then 1.5 + 1.5 (gptq 1 + 1), then gptq with 1 + 0.5."""
    tried = Problem(TAILS, SHAPE, Price(SHAPE.plain, "memory", 10), mix())
    found = tried.cheapest(budget)
    assert found is not None
    assert " ".join(found.forms.values()) == forms


def test_what_was_measured_never_falls_where_more_is_predicted() -> None:
    found = Correction([(1, 2), (2, 1.5), (4, 6)])
    assert found.to_measured(2) == pytest.approx(2)


def test_a_tail_is_as_long_as_the_run_has_it() -> None:
    before = ScaleOptions(activation_terms="tail", exact_tail=16, kv_cache="v")
    forms = options_of(before, None)
    assert forms["one_term"] == ScaleOptions()
    assert forms["tail"] == ScaleOptions(activation_terms="tail", exact_tail=16)
    assert forms["two_terms"] == ScaleOptions(activation_terms=2)
    assert options_of(ScaleOptions(two_terms=("a",)), 512)["tail"] == ScaleOptions(activation_terms="tail")
    assert [*options_of(ScaleOptions(), 64)] == ["one_term", "two_terms"]  # a tail of 64 would be all of a call
    recipe = Recipe(tail=["q"], two_terms=["o"], skip=[], kv_cache="off", weight_rounding="nearest")
    assert recipe.over(before) == ScaleOptions(tail=("q",), two_terms=("o",), exact_tail=16)
    assert recipe.model_copy(update={"tail": []}).over(before) == ScaleOptions(two_terms=("o",))
    assert recipe.over(ScaleOptions()) == ScaleOptions(tail=("q",), two_terms=("o",))


def test_a_tail_costs_a_prompt_its_share_of_2048_tokens() -> None:
    group = Group("q", {"q": (64, 32)}, tail=64)
    assert {form: group.operations_of(form) for form in FORMS} == {
        "one_term": 2048, "dynamic": 2048, "tail": 2112, "two_terms": 4096, "weights_alone": 4096, "bf16": 4096,
    }  # fmt: skip


def test_a_form_is_that_of_the_scale() -> None:
    one = TensorScale(method="amax", amax=1, clip=1, scale=1, saturation=0, underflow=0, sqnr_db=30)
    two = one.model_copy(update={"terms": 2})
    dynamic, tail = one.model_copy(update={"dynamic": True}), two.model_copy(update={"tail": 8})
    assert [form_of(scale) for scale in (one, dynamic, tail, two, None)] == [*FORMS[:-1]]
