"""What stands before and behind the layers of a chain."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fp8q.calibrate.measure.chain import Chain
from fp8q.calibrate.model.decoder import NoChainError


class Model(nn.Module):
    def __init__(self, embedding: nn.Module, head: nn.Module | None):
        super().__init__()
        self.embedding, self.head = embedding, head

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


def chain(model: nn.Module) -> Chain:
    made: Any = object.__new__(Chain)
    made.model, made.described = model, SimpleNamespace(architecture="OddForCausalLM", name="/odd")
    return made  # type: ignore[no-any-return]


def test_the_embedding_and_the_output_head_have_names() -> None:
    model = Model(nn.Embedding(4, 2), nn.Linear(2, 4))
    assert chain(model).ends() == ("embedding", model.embedding, "head")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Model(nn.Linear(4, 2), nn.Linear(2, 4)), "looks tokens up in Linear, which is no nn.Embedding"),
        (Model(nn.Embedding(4, 2), None), "names no module that makes the logits"),
    ],
)
def test_a_model_without_one_is_no_chain(model: nn.Module, why: str) -> None:
    with pytest.raises(NoChainError) as refused:
        chain(model).ends()
    assert str(refused.value) == (
        f"/odd: OddForCausalLM {why}, so it cannot be streamed layer by layer; calibrate it in memory, with --no-stream"
    )
