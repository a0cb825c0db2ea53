"""Where numbers stop being numbers: the first place, and the first module, by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from fp8q.calibrate.text.evaluation import Protocol, first_not_finite
from fp8q.core.errors import GateError, InputError
from fp8q.stages.shared.gates import check_numbers
from fp8q.validate.accuracy.document import Accuracy, NotFinite, RuntimeAccuracy
from fp8q.validate.accuracy.nonfinite import Culprit, culprit, not_finite, position_of

NAN, INF = float("nan"), float("inf")


def test_the_first_place_is_that_of_the_first_scored_token_without_a_loss() -> None:
    nll = np.array([[NAN, 1, 2], [NAN, 3, INF], [NAN, NAN, 1]], np.float32)
    scored = np.array([[False, True, True]] * 3)
    assert first_not_finite(nll, scored) == (1, 1)  # whose logits score token 2
    assert first_not_finite(nll[:1], scored[:1]) is None


class Attention(nn.Module):
    """A GEMM of numbers that overflow between its modules, on the way to the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.o(self.q(x) * 1e38 * 1e38)
        return found


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Identity()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x, mask=torch.tensor(-INF))
        return {"logits": self.head(x)}


class Plain(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        nn.init.constant_(self.first.weight, 1.0)
        nn.init.constant_(self.second.weight, factor)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.second(self.first(x)),)


class Unpacked(Plain):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, mask)[0]


@pytest.mark.parametrize(
    ("layers", "blamed"),
    [
        ((Unpacked(1.0), Unpacked(2.0)), None),
        ((Unpacked(1.0), Unpacked(NAN), Unpacked(NAN)), Culprit("layers.1.second", 0)),
        ((Unpacked(3e38), Unpacked(1.0)), Culprit("layers.0.second", 2)),
        ((Unpacked(1.0), Attention(), Unpacked(1.0)), Culprit("layers.1", 2)),  # between q and o, in neither
    ],
)
def test_the_first_module_whose_output_is_not_finite_is_to_blame(
    layers: list[nn.Module], blamed: Culprit | None
) -> None:
    model, x = Model(*layers), torch.tensor([[[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]])  # [1, 4, 2]
    assert culprit(model, lambda: model(x), 4) == blamed
    assert not any(module._forward_hooks for module in model.modules())


def test_what_is_looked_through_for_numbers() -> None:
    assert not_finite(((torch.ones(2), None), {"ids": torch.tensor([1])}, "text")) is None
    assert not_finite(torch.ones(2).to(torch.float8_e4m3fn)) is None
    found = not_finite([torch.tensor([1.0]), {"x": torch.tensor([1.0, INF])}])
    assert found is not None
    assert found.tolist() == [False, True]


@pytest.mark.parametrize(("shape", "position"), [((1, 3, 2), 1), ((3, 2), 1), ((2, 3, 1), None), ((), None)])
def test_a_position_is_told_of_a_window_and_of_flat_tokens(shape: tuple[int, ...], position: int | None) -> None:
    bad = torch.zeros(6, dtype=torch.bool)
    bad[3:] = True
    assert position_of(bad.reshape(shape) if shape else bad[0], 3) == position


PROTOCOL = Protocol(dataset="text", sha256="0", tokens=1, context=2, stride=2)
GOOD = RuntimeAccuracy(perplexity=2.0, nll_nats=0.7)


def bad(**place: object) -> RuntimeAccuracy:
    where = NotFinite.model_validate({"window": 3, "position": 17, **place})
    return RuntimeAccuracy(perplexity=NAN, nll_nats=NAN, not_finite=where)


@pytest.mark.parametrize(
    ("runtimes", "kind", "said"),
    [
        (
            {"bf16": bad(module="layers.1.mlp.down_proj", bf16=True), "reference": bad(bf16=True)},
            InputError,
            (
                "bf16: perplexity is nan on text, first at position 17 of window 3 (from 0), by the output of "
                "layers.1.mlp.down_proj: the model gives no finite numbers before anything is quantized; check its "
                "config.json and its weights"
            ),
        ),
        (
            {"bf16": GOOD, "reference": bad(module="layers.0.o_proj", bf16=False)},
            GateError,
            (
                "reference: perplexity is nan on text, first at position 17 of window 3 (from 0), by the output of "
                "layers.0.o_proj, and BF16's is a number; `fp8q inspect` shows what stands out, keep modules in "
                "BF16 with --skip"
            ),
        ),
        (
            {"reference": bad(bf16=True)},
            InputError,
            (
                "reference: perplexity is nan on text, first at position 17 of window 3 (from 0): the model gives no "
                "finite numbers before anything is quantized; check its config.json and its weights"
            ),
        ),
        (
            {"reference": bad()},
            GateError,
            (
                "reference: perplexity is nan on text, first at position 17 of window 3 (from 0), and BF16's is not "
                "known, since its checkpoint is gone; `fp8q inspect` shows what stands out, keep modules in BF16 "
                "with --skip"
            ),
        ),
        (
            {"bf16": GOOD, "onnxruntime-int8": bad(bf16=False)},
            GateError,
            (
                "onnxruntime-int8: perplexity is nan on text, first at position 17 of window 3 (from 0), and BF16's is "
                "a number; `fp8q inspect` shows what stands out, keep modules in BF16 with --skip"
            ),
        ),
    ],
)
def test_it_is_said_who_is_to_blame(runtimes: dict[str, RuntimeAccuracy], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind) as error:
        check_numbers(Accuracy(protocol=PROTOCOL, runtimes=runtimes))
    assert str(error.value) == said
