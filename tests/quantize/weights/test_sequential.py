"""Rounding layer by layer: that both models are what they claim to be, and what a GEMM is added to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from fp8q.calibrate.measure.observe import probe_groups
from fp8q.calibrate.model.gemms import observed_gemms, output_channel_axis
from fp8q.calibrate.model.source import Source, load_model
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.quantize.scales.decisions import TensorScale
from fp8q.quantize.weights.channels import QuantizedWeight, WeightScaling, quantize_weight
from fp8q.quantize.weights.gptq import compensation
from fp8q.quantize.weights.ridge_target import MomentSums
from fp8q.quantize.weights.rounding_progress import Rounded
from fp8q.quantize.weights.sequential import (
    SequentialRounding,
    check_sequential,
    gemm_input,
    residual_bases,
)

SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL | {"num_key_value_heads": 1}),
    "gemma2, whose layers end in norms": ("Gemma2Config", SMALL | {"num_key_value_heads": 1, "head_dim": 16}),
    "gpt2, whose weights lie the other way": (
        "GPT2Config",
        {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    ),
    "opt": ("OPTConfig", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}
#: The last batch is smaller than the others.
BATCHES = {
    batch: np.random.default_rng(batch).integers(3, 500, shape)
    for batch, shape in enumerate([(2, 24), (2, 24), (1, 24)])
}
SCALE = TensorScale(method="amax", amax=4.0, clip=448 / 64, scale=2.0**-6, saturation=0, underflow=0, sqnr_db=30)


class ExactInputs(SequentialRounding):
    """Rounds weights as if activations lost nothing."""

    def input_values(self, x: torch.Tensor, module: str) -> torch.Tensor:
        return x.float()


def rounded(
    source: Source, folder: Path, kind: type[SequentialRounding] = ExactInputs
) -> tuple[PreTrainedModel, SequentialRounding, Rounded]:
    """The float model in FP32, and every GEMM of its layers rounded."""
    folder.mkdir()
    model = load_model(source, torch.float32, "cpu")
    sequence = kind(source, dict.fromkeys(observed_gemms(model), SCALE), WeightScaling("mse"), BATCHES, folder)
    return model, sequence, sequence.run(SILENT)


def weight_of(module: torch.nn.Module) -> torch.Tensor:
    """The weight of a GEMM, in BF16 as it is stored."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().to(torch.bfloat16)


def leaving(model: PreTrainedModel, sequence: SequentialRounding) -> dict[int, torch.Tensor]:
    """What leaves the last layer of a model in memory, for each batch."""
    found: list[torch.Tensor] = []
    last = sequence.layers.modules(model)[-1]
    handle = last.register_forward_hook(lambda m, i, out: found.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        for ids in BATCHES.values():
            model.base_model(input_ids=torch.from_numpy(ids))
    handle.remove()
    return dict(zip(BATCHES, found, strict=True))


def put(model: PreTrainedModel, sequence: SequentialRounding, kept: Rounded, but: str = "") -> list[str]:
    """Give the GEMMs of the layers the numbers of their codes, `but` one; which they are."""
    products = observed_gemms(model)
    inside = [name for name in products if sequence.layers.index(name) is not None and name != but]
    for name in inside:
        made = kept.get(name)
        assert made is not None
        weight = (made[0].float() * made[1][:, None]).movedim(0, output_channel_axis(products[name])).contiguous()
        products[name].weight = torch.nn.Parameter(weight, requires_grad=False)
    return inside


def test_what_two_terms_leave_of_an_input_is_all_of_it() -> None:
    x = torch.tensor([3.140625, -0.0712890625, 27.5, 2.0**-10])  # of BF16's eight digits
    scale = {"method": "amax", "amax": 27.5, "clip": 28.0, "scale": 2.0**-4, "saturation": 0, "underflow": 0}
    two, one = (
        gemm_input(x, TensorScale.model_validate(scale | {"terms": terms, "sqnr_db": None})) for terms in (2, 1)
    )
    assert two.tolist() == x.tolist()
    assert one.tolist() == [3.25, -0.0703125, 28.0, 2.0**-10]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kind", [ExactInputs, SequentialRounding])
def test_what_leaves_the_last_layer_is_that_of_both_models_in_memory(
    name: str, kind: type[SequentialRounding], tiny: Callable[..., Source], tmp_path: Path
) -> None:
    """The oracle runs whole models; the quantized one has the weights that were kept, and rounds its inputs."""

    def values(x: torch.Tensor) -> torch.Tensor:
        return x.float() if kind is ExactInputs else gemm_input(x, SCALE)

    model, sequence, kept = rounded(tiny(*ARCHITECTURES[name]), tmp_path / "work", kind)
    for batch, hidden in leaving(model, sequence).items():
        torch.testing.assert_close(sequence.float[0].read(batch, "cpu"), hidden, rtol=1e-5, atol=1e-5)
    products = observed_gemms(model)
    for module in put(model, sequence, kept):
        products[module].register_forward_pre_hook(lambda m, inputs: (values(inputs[0]), *inputs[1:]))
    for batch, hidden in leaving(model, sequence).items():
        torch.testing.assert_close(sequence.quantized[0].read(batch, "cpu"), hidden, rtol=1e-4, atol=1e-4)


def test_what_a_product_has_lost_is_what_the_sum_it_is_part_of_lacks(
    tiny: Callable[..., Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle runs whole models: the quantized one has every weight rounded but the last."""
    told: list[torch.Tensor] = []
    add = MomentSums.add

    def telling(self: MomentSums, tokens: torch.Tensor, lost: torch.Tensor) -> None:
        told.append(lost)
        add(self, tokens, lost)

    monkeypatch.setattr(MomentSums, "add", telling)
    model, sequence, kept = rounded(tiny(*ARCHITECTURES["llama"]), tmp_path / "work")
    exact = leaving(model, sequence)
    put(model, sequence, kept, but="model.layers.1.mlp.down_proj")
    for (batch, got), lost in zip(leaving(model, sequence).items(), told[-len(BATCHES) :], strict=True):
        torch.testing.assert_close(lost, (exact[batch] - got).flatten(0, 1), rtol=1e-3, atol=1e-5)
        assert lost.abs().max() > 1e-3


def test_the_first_group_is_rounded_as_gptq_rounds_it_and_the_last_to_another_weight(
    tiny: Callable[..., Source], tmp_path: Path
) -> None:
    """Nothing was lost before the first GEMM, so its drift is zero to the bit; before the last one something was."""
    model, _, kept = rounded(tiny(*ARCHITECTURES["llama"]), tmp_path / "work")
    products = observed_gemms(model)
    first, last = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    for name, equal in ((first, True), (last, False)):
        inputs: list[torch.Tensor] = []
        handle = products[name].register_forward_pre_hook(lambda m, given, into=inputs: into.append(given[0]))
        with torch.inference_mode():
            for ids in BATCHES.values():
                model.base_model(input_ids=torch.from_numpy(ids))
        handle.remove()
        weight = weight_of(products[name])
        moments = torch.zeros(weight.shape[1], weight.shape[1])
        for x in inputs:
            moments += x.flatten(0, 1).T @ x.flatten(0, 1)
        expected = quantize_weight(weight, "mse", compensation(moments))
        made = kept.get(name)
        assert isinstance(expected, QuantizedWeight)
        assert made is not None
        assert torch.equal(made[0].view(torch.uint8), expected.codes.view(torch.uint8)) is equal


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"self_attn.o_proj": "", "mlp.down_proj": "post_attention_layernorm"}),
        ("opt", {"self_attn.out_proj": "", "fc2": "final_layer_norm"}),
        ("gpt2, whose weights lie the other way", {"attn.c_proj": "", "mlp.c_proj": "ln_2"}),
        ("gemma2, whose layers end in norms", {}),
    ],
)
def test_what_a_product_is_added_to_is_found_in_the_layer(
    name: str, expected: dict[str, str], tiny: Callable[..., Source]
) -> None:
    model = load_model(tiny(*ARCHITECTURES[name]), torch.float32, "cpu")
    prefix, layers = next(
        (name, list(module.children()))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
    )
    products = {name: module for name, module in observed_gemms(model).items() if name.startswith(f"{prefix}.0.")}
    entering: list[torch.Tensor] = []

    def see(module: torch.nn.Module, args: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor]) -> None:
        entering.append(args[0] if args else given["hidden_states"])

    def whole() -> torch.Tensor:
        left: list[torch.Tensor] = []
        handle = layers[0].register_forward_hook(
            lambda m, i, out: left.append(out[0] if isinstance(out, tuple) else out)
        )
        model.base_model(input_ids=torch.from_numpy(BATCHES[0]))
        handle.remove()
        return left[0]

    handle = layers[0].register_forward_pre_hook(see, with_kwargs=True)
    with torch.inference_mode():
        whole()
        handle.remove()
        found = residual_bases(model, layers[0], products, entering[0], whole)
    short = {module.removeprefix(f"{prefix}.0."): base.removeprefix(f"{prefix}.0.") for module, base in found.items()}
    assert short == expected


def test_the_float_outputs_are_closer_than_with_the_moments_of_the_float_model(
    tiny: Callable[..., Source], tmp_path: Path
) -> None:
    """What the second layer is for: against `gptq` of every GEMM on its float input."""
    source = tiny(*ARCHITECTURES["llama"])
    model, sequence, _ = rounded(source, tmp_path / "work")
    exact = leaving(model, sequence)
    products = observed_gemms(model)
    moments: dict[str, torch.Tensor] = {}

    def see(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            x = given[0].flatten(0, 1)
            moments[name] = moments.get(name, torch.zeros(())) + x.T @ x

        return hook

    handles = [products[first].register_forward_pre_hook(see(first)) for first in probe_groups(model, products)]
    leaving(model, sequence)
    for handle in handles:
        handle.remove()
    groups = {member: first for first, members in sequence.groups.items() for member in members}
    for name, module in products.items():
        made = quantize_weight(weight_of(module), "mse", compensation(moments[groups[name]]))
        assert isinstance(made, QuantizedWeight)
        module.weight.data = made.codes.float() * made.scale[:, None]
    gptq = leaving(model, sequence)
    lost = [
        sum(float((states[batch] - exact[batch]).square().sum()) for batch in BATCHES)
        for states in (gptq, {batch: sequence.quantized[0].read(batch, "cpu") for batch in BATCHES})
    ]
    assert lost[1] < 0.95 * lost[0]


def test_a_model_without_a_list_of_layers_is_refused_by_name(
    tiny: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, init = tiny(*ARCHITECTURES["llama"]), transformers.LlamaModel.__init__

    def nameless(self: Any, config: Any) -> None:
        init(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    monkeypatch.setattr(transformers.LlamaModel, "__init__", nameless)
    with pytest.raises(InputError) as refused:
        check_sequential(source, "cpu")
    assert str(refused.value) == (
        f"{source.name}: LlamaForCausalLM has no list of 2 decoder layers, so it cannot be rounded layer by layer; use "
        "--weight-rounding gptq"
    )
