"""Weights that differ and compute the same are no fault; weights that differ and hardly show are one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8q.validate.pair.causes import Facts, causes_of
from fp8q.validate.pair.document import Cause, ModuleError
from fp8q.validate.pair.models import load_candidate
from fp8q.validate.pair.module_errors import compare_modules, embedding_errors, expert_errors, matrices
from fp8q.validate.pair.module_outliers import JudgedModules
from fp8q.validate.pair.outliers import outlier_limit
from tests.validate.pair.damaged import Tensors, quantized

Damage = Callable[[Tensors], object]
IDS = torch.arange(5, 69)[None] * 7 % 4001


@pytest.fixture
def caused(shared_checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., list[Cause]]:
    """Change the weights of a checkpoint, in BF16 or before they are rounded to FP8; return the causes."""

    def compare(name: str, damage: Damage, fp8: bool = False) -> list[Cause]:
        original = shared_checkpoint(name)
        candidate = changed = Path(shutil.copytree(original, tmp_path / "changed"))
        tensors = load_file(original / "model.safetensors")
        damage(tensors)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, changed / "model.safetensors", {"format": "pt"})
        if fp8:
            candidate = quantized(changed, tmp_path / "candidate")
        first = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16).eval()
        second = load_candidate(candidate, "", "cpu").model
        modules, _ = compare_modules(first, second, [IDS])
        configs = tuple(json.loads((path / "config.json").read_text()) for path in (original, candidate))
        facts = Facts(
            original, candidate, (configs[0], configs[1]), [], modules, (matrices(first), matrices(second)),
            expert_errors(first, second), embedding_errors(first, second),
        )  # fmt: skip
        return causes_of(facts)

    return compare


def heads_in_another_order(tensors: Tensors) -> None:
    """Two groups of three heads change places in all matrices of attention, and two heads within one."""
    layer = "model.layers.2.self_attn."
    rows = torch.arange(6 * 64).view(6, 64)
    queries = rows[[4, 3, 5, 0, 1, 2]].flatten()
    keys = torch.arange(2 * 64).view(2, 64)[[1, 0]].flatten()
    for part, order in (("q", queries), ("k", keys), ("v", keys)):
        tensors[f"{layer}{part}_proj.weight"] = tensors[f"{layer}{part}_proj.weight"][order]
    tensors[f"{layer}o_proj.weight"] = tensors[f"{layer}o_proj.weight"][:, queries]


def channels_in_another_order(tensors: Tensors) -> None:
    """The channels of every MLP are in another order, in all three matrices."""
    torch.manual_seed(0)
    for layer in range(6):
        mlp, order = f"model.layers.{layer}.mlp.", torch.randperm(1024)
        for part in ("gate", "up"):
            tensors[f"{mlp}{part}_proj.weight"] = tensors[f"{mlp}{part}_proj.weight"][order]
        tensors[f"{mlp}down_proj.weight"] = tensors[f"{mlp}down_proj.weight"][:, order]


def smoothed(tensors: Tensors) -> None:
    """Channels of a norm are divided by powers of two that the matrices behind it are multiplied by (SmoothQuant)."""
    scale = 2.0 ** (torch.arange(384) % 4)
    for layer in range(6):
        name = f"model.layers.{layer}."
        for norm, parts in {
            "input_layernorm": ("self_attn.q", "self_attn.k", "self_attn.v"),
            "post_attention_layernorm": ("mlp.gate", "mlp.up"),
        }.items():
            tensors[f"{name}{norm}.weight"] = (tensors[f"{name}{norm}.weight"] / scale).to(torch.bfloat16)
            for part in parts:
                matrix = tensors[f"{name}{part}_proj.weight"]
                tensors[f"{name}{part}_proj.weight"] = (matrix * scale).to(torch.bfloat16)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("damage", [heads_in_another_order, channels_in_another_order, smoothed])
def test_the_same_function_in_other_weights_is_no_fault(
    caused: Callable[..., list[Cause]], damage: Damage, fp8: bool
) -> None:
    assert caused("llama", damage, fp8) == []


def channels_of_opt(tensors: Tensors) -> None:
    """The channels of an MLP without a module of its own are in another order."""
    layer = next(name for name in tensors if name.endswith("layers.1.fc1.weight")).removesuffix("fc1.weight")
    order = torch.arange(1023, -1, -1)
    for name in ("fc1.weight", "fc1.bias"):
        tensors[f"{layer}{name}"] = tensors[f"{layer}{name}"][order]
    tensors[f"{layer}fc2.weight"] = tensors[f"{layer}fc2.weight"][:, order]


def test_channels_in_another_order_without_a_module_around_them_are_no_fault(
    caused: Callable[..., list[Cause]],
) -> None:
    assert caused("opt", channels_of_opt) == []


def experts_of_mixtral(tensors: Tensors, router: bool) -> None:
    """Two experts of a layer change places, with their rows of the router or without."""
    for first in [name for name in tensors if "layers.2." in name and ".experts.0." in name]:
        second = first.replace(".experts.0.", ".experts.1.")
        tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()
    if router:
        gate = next(name for name in tensors if "layers.2." in name and name.endswith("gate.weight"))
        tensors[gate] = tensors[gate][[1, 0, 2, 3]]


def test_two_experts_of_four_that_changed_places_are_named(caused: Callable[..., list[Cause]]) -> None:
    causes = caused("mixtral", lambda tensors: experts_of_mixtral(tensors, router=False))
    told = [str(cause) for cause in causes if cause.rule == "expert"]
    assert told[0].startswith(
        "model.layers.2.mlp.experts.gate_up_proj: the weight of expert 0, 1 is zero or another weight"
    )


def test_experts_in_another_order_with_their_router_are_no_fault(caused: Callable[..., list[Cause]]) -> None:
    assert caused("mixtral", lambda tensors: experts_of_mixtral(tensors, router=True)) == []


def queries_alone(tensors: Tensors) -> None:
    """Heads change places in the queries alone."""
    name = "model.layers.2.self_attn.q_proj.weight"
    tensors[name] = tensors[name].view(6, 64, 384)[[4, 3, 5, 0, 1, 2]].reshape(384, 384)


def one_norm(tensors: Tensors) -> None:
    """One norm is 5 % larger."""
    tensors["model.layers.3.input_layernorm.weight"] = tensors["model.layers.3.input_layernorm.weight"] * 1.05


def one_layer_twice(tensors: Tensors) -> None:
    """One layer has all weights of the layer before."""
    for name in [name for name in tensors if ".layers.2." in name]:
        tensors[name.replace(".layers.2.", ".layers.3.")] = tensors[name].clone()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("damage", "subject"),
    [
        (queries_alone, "model.layers.2.self_attn.q_proj"),
        (one_norm, "model.layers.3.input_layernorm"),
        (one_layer_twice, "model.layers.3."),
    ],
)
def test_another_function_is_a_fault(
    caused: Callable[..., list[Cause]], damage: Damage, subject: str, fp8: bool
) -> None:
    causes = caused("llama", damage, fp8)
    assert {cause.severity for cause in causes} == {"error"}
    assert causes[0].subject.startswith(subject)


def positions_not_finite(tensors: Tensors) -> None:
    """Positions from 200 on are NaN; OPT's table has two rows more, in front."""
    tensors[next(name for name in tensors if "embed_positions" in name)][202:] = float("nan")


def token_of_another(tensors: Tensors) -> None:
    """A token that the text has not got has the embedding of another."""
    tensors[next(name for name in tensors if "embed_tokens" in name)][4050] *= -1


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            positions_not_finite,
            (
                "model.decoder.embed_positions: 312 rows, 202 to 513, of 514 are not finite: so are the tokens or "
                "positions that read them; copy the original's"
            ),
        ),
        (
            token_of_another,
            (
                "model.decoder.embed_tokens: row 4,050 of 4,096 is not the original's (relative error 2): so are the "
                "tokens or positions that read them; copy the original's"
            ),
        ),
    ],
)
def test_rows_that_no_window_reads_are_compared(caused: Callable[..., list[Cause]], damage: Damage, said: str) -> None:
    assert said in [str(cause) for cause in caused("opt", damage)]


def test_half_of_the_errors_do_not_hide_each_other() -> None:
    """1.4 of two experts of four would raise the median; the lower quartile is that of the right ones."""
    assert outlier_limit([0.03, 1.4, 1.4, 0.03]) == pytest.approx(0.12)
    assert outlier_limit([1.4, 1.4, 1.4, 1.4]) == 0.5, "an error that no rounding has"
    assert outlier_limit([0.0, 0.0, 0.0]) == 0.1
    assert outlier_limit([None, 0.03]) == pytest.approx(0.12)
    assert outlier_limit([]) == 0.1


def test_a_silent_module_is_never_undone() -> None:
    zero = ModuleError(module="model.layers.0.mlp.up_proj", error=1.0, gain=0.0, correlation=0.0, part_error=0.0)
    assert JudgedModules([zero], set()).faults == [zero]
