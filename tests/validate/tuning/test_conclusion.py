"""The last line of `fp8q tune`: loss and cost in a sentence, and the command."""

from typing import Any

import pytest

from fp8q.validate.tuning.document import (
    Change,
    Chosen,
    Interval,
    Point,
    Recipe,
    Tuning,
    Windows,
    change_table,
    conclusion,
)

RUN = Point(
    kl_nats=0.002, measured=True, weight_bytes=1000, cache_bytes=100, prefill_flops_ratio=1.0,
    weight_rounding="nearest", kv_cache="fp8", two_terms=0, bf16=0,
)  # fmt: skip


def chosen(**more: Any) -> Chosen:
    fields = RUN.model_dump() | {"weight_bytes": 1100, "cache_bytes": 150, "prefill_flops_ratio": 1.03} | more
    rise = Interval(increase=0.0021)
    recipe = Recipe(two_terms=[], skip=[], kv_cache="fp8", weight_rounding="gptq")
    return Chosen(
        **fields, recipe=recipe, predicted_increase=rise, held_out_kl_nats=0.001, measured_kl_nats=0.00102,
        measured_increase=rise,
    )  # fmt: skip


def tuning(**more: Any) -> Tuning:
    windows = Windows(rounding=2, choosing=1, held_out=1)
    fields: dict[str, Any] = {"prefer": "memory", "changes": [], "run": RUN, "frontier": [], "windows": windows}
    return Tuning(**{**fields, "rise_over_kl": 1.0, **more})


COST = (
    "on the evaluation text, 1.10 times the run's bytes of weights, 1.50 times its cache, and 1.03 times the "
    "operations of a prompt with one code an activation."
)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (
            tuning(),
            (
                "No budget was given. For the cheapest mix that loses half of what the run does: "
                "fp8q tune runs/a --max-kl 0.001"
            ),
        ),
        (
            tuning(server="vllm"),
            (
                "No budget was given. For the cheapest mix that loses half of what the run does: "
                "fp8q tune runs/a --max-kl 0.001 --for vllm"
            ),
        ),
        (
            tuning(max_ppl_increase=0.005, met=True, chosen=chosen()),
            f"This mix has +0.21 % perplexity {COST} Apply it: fp8q tune runs/a --max-ppl-increase 0.5% --apply",
        ),
        (
            tuning(max_kl=0.0011, met=True, chosen=chosen(kv_cache="v", tail=3), server="vllm-plugin"),
            (
                f"This mix has a KL of 0.00102 nats {COST} The cache, --kv-cache fp8 in the run, becomes v. "
                "Apply it: fp8q tune runs/a --max-kl 0.0011 --for vllm-plugin --apply"
            ),
        ),
        (
            tuning(max_kl=0.001, met=False, chosen=chosen(kv_cache="fp8", wide_cache=2, tail=3, two_terms=4)),
            (
                f"This mix has a KL of 0.00102 nats {COST} The cache, --kv-cache fp8 in the run, becomes fp8 but 2. "
                "7 GEMMs take second codes, which vLLM computes with fp8q-vllm alone; for other servers give "
                "--for vllm."
            ),
        ),
    ],
)
def test_the_conclusion_says_loss_cost_and_command(found: Tuning, line: str) -> None:
    assert conclusion(found, "runs/a") == line


def test_a_model_of_which_no_cache_was_measured_has_no_share_of_one() -> None:
    found = tuning(max_kl=1, met=True, chosen=chosen(cache_bytes=0)).model_copy(
        update={"run": RUN.model_copy(update={"cache_bytes": 0})}
    )
    assert "times the run's bytes of weights, and 1.03 times the operations" in conclusion(found, "runs/a")


def test_a_group_is_one_row_with_all_its_members() -> None:
    group = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    changes = [Change(module=group[0], choice="two_terms", members=group), Change(module="*", choice="gptq")]
    table = change_table(tuning(max_kl=1, changes=changes))
    assert [[cell.text for cell in row] for row in table.cells()] == [
        ["model.layers.0.self_attn.q_proj, k_proj, v_proj", "two terms"], ["all", "gptq"],
    ]  # fmt: skip
