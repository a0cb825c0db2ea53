"""An adapter on a frozen FP8 layer: its numbers and gradients, what it begins with, what is written of it, and the
training of a small model, killed, worse and ended by a NaN.
"""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from fp8q.calibrate.checkpoint.adapter import open_adapter
from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.quantize.codes.encoding import encode
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.learning.adapter import FrozenLinear, adam, add_adapter, save_adapter, target_names
from fp8q.quantize.learning.document import AdapterLearning, Moment
from fp8q.quantize.learning.linear import LearnedLinear
from fp8q.quantize.learning.training import Listener, LossIsNotFiniteError, Schedule, learn
from fp8q.quantize.reference.linear import replace_linears
from fp8q.quantize.scales.decisions import TensorScale
from fp8q.quantize.weights.channels import QuantizedWeight, quantize_weight
from fp8q.quantize.weights.sequential import weight_rows

TWO = TensorScale(
    method="amax", amax=4.0, clip=448 / 64, scale=2.0**-6, saturation=0, underflow=0, sqnr_db=None, terms=2
)
ONE = TWO.model_copy(update={"terms": 1, "sqnr_db": 30.0})
WINDOWS: npt.NDArray[np.int64] = np.random.default_rng(0).integers(3, 60, (30, 24))
TEXT = WINDOWS[:24], WINDOWS[24:]
SCHEDULE = Schedule(epochs=4, batch_size=4, learning_rate=0.005, seed=0, optimizer=adam)
Models = tuple[PreTrainedModel, PreTrainedModel]


def unadapted() -> Models:
    """A small random Llama, and the same on codes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    teacher = LlamaForCausalLM(config).eval().requires_grad_(False)
    student, layers = deepcopy(teacher), {}
    for name, module in observed_gemms(student).items():
        rounded = quantize_weight(weight_rows(module), "amax")
        assert isinstance(rounded, QuantizedWeight)
        layers[name] = FrozenLinear(rounded.codes, rounded.scale, None, None)
    replace_linears(student, layers)
    return teacher, student


def adapted(models: Models, **changed: int) -> tuple[Models, dict[str, Any]]:
    """The models with an adapter of rank 4 on every FP8 layer of the second, and its configuration."""
    options = {"rank": 4, "alpha": 8, "seed": 0} | changed
    products = [name for name, each in models[1].named_modules() if isinstance(each, FrozenLinear)]
    return models, add_adapter(models[1], products, **options)


def train(
    models: Models, folder: Path, advance: Callable[[int], None] = lambda steps: None, schedule: Schedule = SCHEDULE,
    text: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = TEXT,
) -> list[Moment]:  # fmt: skip
    return learn(models, text, schedule, folder, Listener(advance, lambda ids: ""))


def learned(student: PreTrainedModel) -> dict[str, bytes]:
    found = {name: each for name, each in student.named_parameters() if each.requires_grad}
    assert len(found) == 2 * 14
    return {name: each.detach().numpy().tobytes() for name, each in found.items()}


@pytest.mark.parametrize("activation", [None, ONE, TWO], ids=["weights alone", "one code", "two codes"])
def test_a_frozen_layer_is_a_learned_one_at_its_beginning(activation: TensorScale | None) -> None:
    draw = torch.Generator().manual_seed(1)
    weight, x, bias = (torch.randn(shape, generator=draw) for shape in ((24, 32), (5, 7, 32), (24,)))
    x[0, 0, 0] = 1e4  # saturates
    scale = weight.abs().amax(1) / E4M3.max
    codes = encode(weight, scale[:, None])
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    for kind, each in zip((FrozenLinear, LearnedLinear), inputs, strict=True):
        outputs.append(kind(codes, scale, activation, bias)(each))
        (outputs[-1] ** 2).sum().backward()
    assert torch.equal(*outputs)
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert (float(inputs[0].grad[0, 0, 0]) == 0.0) == (activation is not None)


def test_only_the_adapter_is_learned_and_it_begins_as_nothing() -> None:
    models = unadapted()
    with torch.no_grad():
        before = models[1](torch.from_numpy(WINDOWS)).logits
    (_, student), config = adapted(models)
    trained = {name for name, each in student.named_parameters() if each.requires_grad}
    assert trained == {
        f"{name}.{part}.default.weight"
        for name in (f"model.layers.{layer}.{kind}" for layer in (0, 1) for kind in (
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        ))
        for part in ("lora_A", "lora_B")
    }  # fmt: skip
    with torch.no_grad():
        assert torch.equal(student(torch.from_numpy(WINDOWS)).logits, before)
    assert (config["r"], config["lora_alpha"], config["lora_dropout"], config["bias"]) == (4, 8, 0.0, "none")


def test_the_seed_is_that_of_the_adapter_and_of_nothing_else() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    models = unadapted()
    torch.manual_seed(7)
    (_, student), _ = adapted(models, seed=3)
    assert torch.equal(torch.rand(1), expected)
    assert learned(student) == learned(adapted(unadapted(), seed=3)[0][1])
    assert learned(student) != learned(adapted(unadapted(), seed=4)[0][1])


def test_a_frozen_layer_with_an_adapter_by_hand() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes, scale = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).to(torch.float8_e4m3fn), torch.tensor([0.5, 0.25])
            self.product = FrozenLinear(codes, scale, ONE.model_copy(update={"scale": 1.0}), None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.product(x)
            return out

    model = Model()
    add_adapter(model, ["product"], 1, 3, 0)  # type: ignore[arg-type]  # a model of one layer
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.data = torch.tensor([[1.0, 10.0]])
        if "lora_B" in name:
            parameter.data = torch.tensor([[1.0], [-1.0]])
    # 0.3 has the code 0.3125; the adapter gets 0.3: 3 · (0.3 + 10 · 2) = 60.9
    torch.testing.assert_close(model(torch.tensor([0.3, 2.0])), torch.tensor([0.15625 + 60.9, 1.0 - 60.9]))


def test_products_are_named_by_their_ends_where_these_name_no_others() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)})})
    model["b"] = nn.ModuleDict({"up": nn.Linear(2, 2)})
    assert target_names(model, ["a.down"]) == ["down"]
    assert target_names(model, ["b.up", "a.up", "a.down"]) == ["down", "up"]
    assert target_names(model, ["b.up", "a.down"]) == ["a.down", "b.up"]


def test_the_best_moment_stays_and_is_written_as_peft_writes_it(tmp_path: Path) -> None:
    models, config = adapted(unadapted())
    moments = train(models, tmp_path / "work")
    best = min(moments, key=lambda moment: moment.kl)
    assert [moment.step for moment in moments] == [0, 3, 6, 9, 12, 15, 18, 21, 24]
    assert best.step > 0
    assert best.kl < 0.9 * moments[0].kl
    files = save_adapter(tmp_path / "adapter", models[1], config, "owner/base")
    assert [path.name for path in files] == ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted((tmp_path / "adapter").iterdir()) == files
    read, own = open_adapter(tmp_path / "adapter"), dict(models[1].named_parameters())
    assert len(read.parts) == 14
    for module, part in read.parts.items():
        assert (part.rank, part.scale) == (4, 2.0)
        for name, tensor in zip(("lora_A", "lora_B"), read.read(module), strict=True):
            assert torch.equal(tensor, own[f"{module}.{name}.default.weight"])
    fields = json.loads(files[0].read_text(encoding="utf-8"))
    assert (fields["base_model_name_or_path"], fields["peft_type"], fields["task_type"]) == (
        "owner/base", "LORA", "CAUSAL_LM",
    )  # fmt: skip
    assert fields["inference_mode"] is True
    assert fields["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert str(tmp_path) not in files[0].read_text(encoding="utf-8")
    assert all(tensor.dtype == torch.float32 for tensor in load_file(files[1]).values())


def test_a_killed_training_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    class Killed(BaseException):
        """A kill."""

    taken = list[int]()

    def die(steps: int) -> None:
        taken.append(steps)
        if sum(taken) == 14:
            raise Killed

    models, config = adapted(unadapted())
    whole = train(models, tmp_path / "whole")
    with pytest.raises(Killed):
        train(adapted(unadapted())[0], tmp_path / "killed", die)
    again, _ = adapted(unadapted())
    assert train(again, tmp_path / "killed") == whole
    assert learned(again[1]) == learned(models[1])
    written = [save_adapter(tmp_path / name, each[1], config, "b") for name, each in (("a", models), ("b", again))]
    for one, other in zip(*written, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_what_gets_worse_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    models = unadapted()
    with torch.no_grad():
        before = models[1](torch.from_numpy(WINDOWS)).logits
    adapted(models)
    moments = train(models, tmp_path, schedule=Schedule(1, 4, 5.0, 0, adam))
    assert moments[0].kl == min(moment.kl for moment in moments)
    with torch.no_grad():
        assert torch.equal(models[1](torch.from_numpy(WINDOWS)).logits, before)


def test_a_loss_that_is_no_number_ends_it(tmp_path: Path) -> None:
    bad = WINDOWS.copy()
    bad[:24, 3] = 63
    models, _ = adapted(unadapted())
    for model in models:
        with torch.no_grad():
            model.get_input_embeddings().weight[63] = float("nan")  # type: ignore[operator]
    with pytest.raises(LossIsNotFiniteError, match="^the loss is nan at step 1 of 24$") as raised:
        train(models, tmp_path, text=(bad[:24], bad[24:]))
    assert [moment.step for moment in raised.value.moments] == [0]


def test_dropout_of_a_configuration_is_off_while_learning(tmp_path: Path) -> None:
    """The student is the model that is served: with dropout the first step would find another divergence."""
    outcomes = []
    for dropout in (0.0, 0.9):
        models, _ = adapted(unadapted())
        for layer in models[1].model.layers:
            layer.self_attn.attention_dropout = dropout
        train(models, tmp_path / str(dropout), schedule=Schedule(1, 4, 0.005, 0, adam))
        outcomes.append(learned(models[1]))
    assert outcomes[0] == outcomes[1]


def test_the_outcome_in_a_sentence() -> None:
    moments = [Moment(step=0, kl=1e-3), Moment(step=5, kl=8e-4), Moment(step=9, kl=9e-4)]
    found = AdapterLearning(
        data="t", tokens=9, held_out=9, steps=10, seconds=1.0, moments=moments, modules=28, parameters=299_008
    )
    assert found.conclusion == (
        "the held-out KL fell from 1.000e-03 to 8.000e-04 nats a token (-20%), by step 5 of 10; adapter/ has 299,008 "
        "numbers for 28 GEMMs"
    )
    assert found.model_copy(update={"moments": moments[:1]}).conclusion == (
        "nothing better was found in 0 steps: the held-out KL is 1.000e-03 nats a token as it was, and no adapter is "
        "written"
    )
