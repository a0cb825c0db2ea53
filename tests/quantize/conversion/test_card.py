"""The model card of a converted checkpoint."""

from fp8q.quantize.conversion.card import card
from fp8q.quantize.conversion.coding import Errors
from fp8q.quantize.conversion.plan import CheckpointPlan


def text(unloadable: str | None) -> str:
    unquantized = {f"model.layers.{index}.norm.weight": "is a norm" for index in range(6)}
    plan = CheckpointPlan(
        "dynamic", "compressed-tensors", (), unquantized, decided_by="LlamaForCausalLM", unloadable=unloadable
    )
    return card(plan, "mine", Errors(0.25, 1 / 32), []).decode()


def test_a_class_that_loads_no_fp8_is_said_to_readers_of_the_card() -> None:
    why = "HrmTextForCausalLM loads no FP8 checkpoint, whatever is quantized"
    assert f"Linear layers are what LlamaForCausalLM says.\n**{why}.**\n0 tensors are E4M3 codes." in text(why)
    assert "Linear layers are what LlamaForCausalLM says.\n0 tensors are E4M3 codes." in text(None)


def test_a_reason_names_four_modules_and_counts_the_rest() -> None:
    kept = ", ".join(f"`model.layers.{index}.norm`" for index in range(4))
    assert f"- {kept} and 2 more: is a norm\n" in text(None)
    assert "the largest error is 0.25 of a step\nbetween codes, and 3.12% of a value." in text(None)
