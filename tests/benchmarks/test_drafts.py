"""The demo as families that draft have it, and the rows of drafts that were accepted, on numbers worked by hand."""

import pytest
import torch
from draft_models import DraftLayer, dealt_out, neighbours
from drafts import row
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM


def test_the_experts_together_are_the_mlp() -> None:
    torch.manual_seed(0)
    shapes = {"gate_proj": (16, 8), "up_proj": (16, 8), "down_proj": (8, 16)}
    dense = {f"l.mlp.{part}.weight": torch.randn(shape) for part, shape in shapes.items()}
    made = dealt_out("l.", dense | {"l.input_layernorm.weight": torch.ones(8)})
    x = torch.randn(3, 8)

    def mlp(tensors: dict[str, torch.Tensor], start: str) -> torch.Tensor:
        gate, up, down = (tensors[f"{start}.{part}.weight"] for part in shapes)
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    routed = [mlp(made, f"l.mlp.experts.{number}") for number in range(2)]
    together = 2 * (0.5 * routed[0] + 0.5 * routed[1]) + mlp(made, "l.mlp.shared_experts")
    torch.testing.assert_close(together, mlp(dense, "l.mlp"))
    assert made["l.mlp.gate.weight"].count_nonzero() == 0


def test_rows_that_are_rotated_together_come_to_lie_side_by_side() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of four
    assert neighbours(rows, 4).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_draft_sees_no_later_token() -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )  # fmt: skip
    demo = LlamaForCausalLM(config)
    layer = DraftLayer(demo, normed=True)
    hidden, embedded = torch.randn(1, 6, 8), torch.randn(1, 6, 8)
    with torch.no_grad():
        before = layer(hidden, embedded, demo)
        hidden[:, 4:] = 0
        after = layer(hidden, embedded, demo)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_a_row_counts_drafts_and_pairs_prompts() -> None:
    answer = {"answers": [[1, 2], [3, 4]], "drafted": [4, 6], "accepted": [1, 3]}
    without = {"answers": [[1, 2], [3, 5]]}
    original = {"drafted": [4, 4], "accepted": [2, 3]}
    judged = row(answer, without, original)
    assert (judged["accepted"], judged["drafted"], judged["share"]) == (4, 10, 0.4)
    assert judged["interval"] == pytest.approx((0.1216, 0.7376), abs=1e-4)  # Clopper and Pearson
    assert judged["difference"] == {"mean": -0.25, "low": -0.25, "high": -0.25}
    assert (judged["answers"], judged["answers_unchanged"]) == (2, 1)


def test_a_form_that_vllm_refuses_is_a_row_with_its_error() -> None:
    original = {"drafted": [4], "accepted": [2]}
    assert row({"error": "ValueError: no\n kernel"}, {"answers": [[1]]}, original) == {"error": "ValueError: no kernel"}
