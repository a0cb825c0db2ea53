"""Watching a training: every number against torch's own tensors, and a training that stays as it was."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.options import WatchOptions
from fp8q.quantize.training.training_log import TrainingLog, read_log
from fp8q.quantize.training.watch import watched_modules

EVERY_STEP = WatchOptions(every=1)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: nn.Module, steps: int, each: Callable[[torch.Tensor], None] = lambda loss: None) -> None:
    """Train on random numbers; `each` gets the loss after each backward pass."""
    draw, optimizer = torch.Generator().manual_seed(1), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(7, 6, generator=draw)).square().mean()
        loss.backward()
        each(loss)
        optimizer.step()
        optimizer.zero_grad()


def value(log: TrainingLog, tensor: str, column: str, record: int = 0) -> float:
    return float(log.column(column)[record, log.tensors.index(tensor)])


def test_numbers_are_those_of_the_tensors(tmp_path: Path) -> None:
    model, x = two_layers(), torch.randn(7, 6)
    with api.watch(model, tmp_path, EVERY_STEP) as log:
        hidden = model[0](x)
        hidden.retain_grad()
        read = model[1](hidden)
        y = model[2](read)
        y.retain_grad()
        y.square().mean().backward()
        log.step(y.square().mean())
    found = read_log(tmp_path)
    assert hidden.grad is not None
    assert y.grad is not None
    tensors = {
        "0.input": x, "0.weight": model[0].weight, "0.gradient": hidden.grad,
        "2.input": read, "2.weight": model[2].weight, "2.gradient": y.grad,
    }  # fmt: skip
    assert found.tensors == [*tensors]
    for name, tensor in tensors.items():
        rounded = tensor.detach().bfloat16().float()
        assert value(found, name, "amax") == pytest.approx(float(rounded.abs().max()), rel=1e-3)
        assert value(found, name, "rms") == pytest.approx(float(rounded.square().mean().sqrt()), rel=1e-3)
        assert value(found, name, "zeros") == pytest.approx(float((rounded == 0).float().mean()), rel=1e-3)
    assert found.loss[0] == pytest.approx(float(y.detach().square().mean()), rel=1e-3)
    norm = torch.stack(
        [parameter.grad.square().sum() for parameter in model.parameters() if parameter.grad is not None]
    )
    assert found.gradient_norm[0] == pytest.approx(float(norm.sum().sqrt()), rel=1e-3)


def test_training_is_the_same_and_hooks_are_there_at_recorded_steps_alone(tmp_path: Path) -> None:
    alone, watched = two_layers(), two_layers()
    train(alone, 7)
    hooked: list[bool] = []

    with api.watch(watched, tmp_path, WatchOptions(every=3)) as log:

        def each(loss: torch.Tensor) -> None:
            hooked.append(hooks_of(watched) > 0)
            log.step(loss)

        train(watched, 7, each)
    assert hooked == [True, False, False, True, False, False, True]
    assert read_log(tmp_path).steps.tolist() == [0, 3, 6]
    for own, other in zip(alone.parameters(), watched.parameters(), strict=True):
        assert torch.equal(own, other)
        assert not other._post_accumulate_grad_hooks
    assert hooks_of(watched) == 0


def test_layers_that_share_an_input_record_it_once(tmp_path: Path) -> None:
    model, ids = llama(), torch.arange(12)[None]
    assert "lm_head" not in watched_modules(model)
    with api.watch(model, tmp_path, EVERY_STEP) as log:
        model(input_ids=ids, labels=ids).loss.backward()
        log.step()
    tensors = read_log(tmp_path).tensors
    first = "model.layers.0."
    assert [tensor for tensor in tensors if tensor.startswith(first) and tensor.endswith(".input")] == [
        f"{first}{name}.input" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    assert sum(tensor.endswith(".gradient") for tensor in tensors) == 14
    assert np.isnan(read_log(tmp_path).loss).all()


def test_evaluations_between_are_not_counted_and_checkpointed_layers_once(tmp_path: Path) -> None:
    ids = torch.arange(12)[None]

    def recorded(name: str, checkpointed: bool, evaluated: bool) -> np.ndarray:
        model = llama()
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # before 5.23
        model.train()
        with api.watch(model, tmp_path / name, EVERY_STEP) as log:
            if evaluated:
                with torch.no_grad():
                    model(input_ids=ids.flip(1))
            model(input_ids=ids, labels=ids).loss.backward()
            log.step()
        return read_log(tmp_path / name).values

    plain = recorded("plain", checkpointed=False, evaluated=False)
    np.testing.assert_array_equal(plain, recorded("evaluated", checkpointed=False, evaluated=True))
    np.testing.assert_allclose(plain, recorded("checkpointed", checkpointed=True, evaluated=False), rtol=2e-3)


def test_several_backward_passes_are_one_step(tmp_path: Path) -> None:
    model, x = two_layers(), torch.randn(8, 6)
    with api.watch(model, tmp_path, EVERY_STEP) as log:
        for part in x.chunk(2):
            model(part).square().sum().backward()
        log.step()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = float(torch.stack([grad.square().sum() for grad in grads]).sum().sqrt())
    found = read_log(tmp_path)
    assert found.gradient_norm[0] == pytest.approx(norm, rel=1e-3)
    assert value(found, "0.input", "amax") == pytest.approx(float(x.bfloat16().abs().max()), rel=1e-3)


def test_what_is_not_finite_is_recorded_as_such(tmp_path: Path) -> None:
    model = two_layers()
    with api.watch(model, tmp_path, EVERY_STEP) as log:
        y = model(torch.full((2, 6), float("nan")))
        y.sum().backward()
        log.step(y.sum())
    found = read_log(tmp_path)
    assert value(found, "0.input", "not_finite") == 12
    assert np.isinf(found.loss[0])
    assert np.isinf(found.gradient_norm[0])


def test_a_resumed_training_goes_on_in_the_log(tmp_path: Path) -> None:
    whole, model = two_layers(), two_layers()
    with api.watch(whole, tmp_path / "whole", EVERY_STEP) as log:
        train(whole, 6, log.step)
    with api.watch(model, tmp_path / "parts", EVERY_STEP) as log:
        train(model, 5, log.step)  # killed, and its last checkpoint was that after three steps
    model = two_layers()
    train(model, 3)
    with api.watch(model, tmp_path / "parts", EVERY_STEP, first_step=3) as log:
        draw, optimizer = torch.Generator().manual_seed(1), torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.randn(7, 6, generator=draw) for _ in range(6)]
        for x in batches[3:]:
            loss = model(x).square().mean()
            loss.backward()
            log.step(loss)
            optimizer.step()
            optimizer.zero_grad()
    found, expected = read_log(tmp_path / "parts"), read_log(tmp_path / "whole")
    assert found.steps.tolist() == [0, 1, 2, 3, 4, 5]
    np.testing.assert_allclose(found.values, expected.values, rtol=1e-3)  # with the histories, which scales follow from


def test_a_log_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    with api.watch(two_layers(), tmp_path, EVERY_STEP) as log:
        train(log.model, 1, log.step)
    before = (tmp_path / "training.jsonl").read_bytes()
    wanted = "is there already; give another directory, or first_step, the step that training goes on with"
    with pytest.raises(InputError, match=f"^{tmp_path}/training.jsonl: {wanted}$"), api.watch(two_layers(), tmp_path):
        raise AssertionError
    with (
        pytest.raises(InputError, match=r"is of another model, or of other options; give another directory$"),
        api.watch(two_layers(), tmp_path, WatchOptions(every=2), first_step=1),
    ):
        raise AssertionError
    assert (tmp_path / "training.jsonl").read_bytes() == before


def test_a_model_without_a_linear_layer_and_layers_that_do_not_run_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match=r"^ReLU: has no linear layer to watch; give them as `modules`$"),
        api.watch(nn.ReLU(), tmp_path / "none"),
    ):
        raise AssertionError
    with (
        pytest.raises(InputError, match=r"^step 0: none of the 2 watched layers ran; watch the module that runs "),
        api.watch(two_layers(), tmp_path / "other", EVERY_STEP) as log,
    ):
        log.step()


class Pair(nn.Linear):
    """A linear layer that is called with a tuple."""

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return super().forward(both[0]) + both[1]


class OfPairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.last = Pair(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.pair((x, x)))
        return found


def test_a_layer_that_is_called_with_a_tuple_gives_what_it_gave(tmp_path: Path) -> None:
    """Its input is the tuple's first tensor."""
    torch.manual_seed(0)
    model, x = OfPairs(), torch.tensor([[1.0, -8.0, 2.0, 0.5]])
    wanted = model(x)
    with api.watch(model, tmp_path, WatchOptions(every=1)) as log:
        loss = model(x).sum()
        loss.backward()
        log.step(loss)
    assert torch.equal(model(x), wanted)
    found = read_log(tmp_path)
    assert found.column("amax")[0, found.tensors.index("pair.input")] == 8


def hooks_of(model: nn.Module) -> int:
    """The hooks that a model's modules and torch itself hold."""
    everywhere = torch.nn.modules.module
    own = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())
    return own + len(everywhere._global_forward_hooks) + len(everywhere._global_forward_pre_hooks)


def test_a_copy_of_the_model_has_no_hooks_and_is_not_counted(tmp_path: Path) -> None:
    """A copy that is made at a recorded step, as of averaged weights, and trained on its own."""
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.tensor([[1.0, 2.0]])
    with api.watch(model, tmp_path, WatchOptions(every=1)) as log:
        loss = model(x).sum()
        loss.backward()
        copied = copy.deepcopy(model)
        pickle.dumps(copied)
        copied(torch.tensor([[400.0, 1.0]])).sum().backward()
        log.step(loss)
    assert hooks_of(copied) == hooks_of(model) == 0
    assert read_log(tmp_path).column("amax")[0, 0] == 2


def test_a_step_after_the_end_records_nothing_and_leaves_no_hooks(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.tensor([[1.0, 2.0]])
    with api.watch(model, tmp_path, WatchOptions(every=1)) as log:
        model(x).sum().backward()
        log.step(1.0)
    for _ in range(3):
        log.step(2.0)
    assert hooks_of(model) == 0
    assert read_log(tmp_path).steps.tolist() == [0]
