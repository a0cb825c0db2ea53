"""Which layers the plugin takes, and that none that is listed runs in one term in silence; with a stand-in for vLLM."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8q.quantize.codes.encoding import encode
from tests.stand_in.vllm import (
    CompressedTensorsW8A8Fp8,
    CompressedTensorsW8A16Fp8,
    LinearBase,
    ParallelLMHead,
    Plugin,
    WeightsMapper,
)

IN, OUT = 32, 8
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
#: A layer's parts as the checkpoint has them, and as vLLM does.
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj")


def listed(layers: Iterable[int], parts: Sequence[str] = PARTS) -> list[str]:
    return [f"model.layers.{number}.{part}" for number in layers for part in parts]


class Model:
    """Layers as vLLM makes them: all first, then the weights of each."""

    def __init__(self, plugin: Plugin, own: Mapping[str, Any], schemes: Mapping[str, Any], prefixes: Mapping[str, Any]):
        self.config = plugin.config.Config(schemes, FUSED)
        self.config.maybe_update_config("a model", SimpleNamespace(fp8q=dict(own)))
        if prefixes:
            self.config.apply_vllm_mapper(WeightsMapper(prefixes))
        self.layers: dict[str, tuple[Any, Any]] = {}
        for name in schemes:
            layer = (ParallelLMHead if name == "lm_head" else LinearBase)((OUT, IN))
            self.layers[name] = layer, self.config.get_quant_method(layer, name)

    def load(self) -> Model:
        draw = torch.Generator().manual_seed(0)
        for layer, method in self.layers.values():
            if hasattr(layer, "scheme"):
                layer.scheme.create_weights(layer)
                scale = torch.full((OUT, 1), 2.0**-5, dtype=torch.float32)
                weight = encode(torch.randn(OUT, IN, generator=draw, dtype=torch.float32), scale)
                loaded = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(2.0**-11)}
                for name, tensor in loaded.items():
                    setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
            method.process_weights_after_loading(layer)
        return self

    def terms(self) -> dict[str, int | None]:
        """The tail of each layer: 0 for two terms, None for one term."""
        return {name: getattr(layer.scheme, "tail", None) for name, (layer, _) in self.layers.items()}


def codes() -> Any:
    return CompressedTensorsW8A8Fp8("per channel", True)


def made(
    plugin: Plugin,
    names: Iterable[str],
    own: Mapping[str, Any],
    prefixes: Mapping[str, str | None] | None = None,
    **others: Any,
) -> Model:
    """A model of these layers, all in FP8 but for `others`; underscores stand for the dots of their names."""
    schemes = {name: codes() for name in names} | {name.replace("__", "."): each for name, each in others.items()}
    return Model(plugin, own, schemes, prefixes or {})


def test_what_a_layer_computes_survives_sleep_and_reload(plugin: Plugin) -> None:
    """As vLLM 0.33 sleeps at level 2: it saves the buffers, lets the memory of all tensors go, and gives the buffers
    back; then the weights are loaded and processed again. Captured graphs read tensors where they lay before.
    """
    model = made(plugin, listed([0], LAYERS), {"two_terms": listed([0])}).load()
    x = torch.randn(3, IN, generator=torch.Generator().manual_seed(1), dtype=torch.float32).bfloat16()
    plugin.forward(None)

    def answers() -> list[torch.Tensor]:
        return [layer.scheme.apply_weights(layer, x) for layer, _ in model.layers.values()]

    before, layers = answers(), [layer for layer, _ in model.layers.values()]
    ones = [layer.one for layer in layers]
    saved = [{name: buffer.clone() for name, buffer in layer.named_buffers()} for layer in layers]
    for layer in layers:
        assert [name for name, value in vars(layer).items() if isinstance(value, torch.Tensor)] == []
        for tensor in [*layer.parameters(), *layer.buffers()]:
            tensor.untyped_storage().fill_(0xFF)
        assert list(layer.state_dict()) == ["weight", "weight_scale", "input_scale"]
    for layer, buffers in zip(layers, saved, strict=True):
        for name, buffer in layer.named_buffers():
            buffer.copy_(buffers[name])
    assert [float(layer.one) for layer in layers] == [1.0, 1.0]
    for one in ones:
        one.fill_(float("nan"))  # and a reload alone makes it anew, where it lay
    model.load()
    assert all(torch.equal(old, new) for old, new in zip(before, answers(), strict=True))
    assert [layer.one is one and float(one) == 1.0 for layer, one in zip(layers, ones, strict=True)] == [True, True]


def test_modules_in_two_terms_are_taken_and_counted(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    names = listed(range(2), (*LAYERS, "mlp.down_proj"))
    with caplog.at_level(logging.INFO, "vllm.fp8q"):
        model = made(plugin, names, {"two_terms": listed(range(2)), "tails": dict.fromkeys(listed([1]), 64)}).load()
    assert model.terms() == {
        "model.layers.0.self_attn.qkv_proj": 0, "model.layers.0.self_attn.o_proj": 0,
        "model.layers.0.mlp.down_proj": None, "model.layers.1.self_attn.qkv_proj": 64,
        "model.layers.1.self_attn.o_proj": 64, "model.layers.1.mlp.down_proj": None,
    }  # fmt: skip
    assert caplog.messages == ["8 of 8 modules in two terms"]


@pytest.mark.parametrize(("own", "field"), [
    ({"two_terms": 3}, "two_terms"),
    ({"two_terms": [3]}, "two_terms"),
    ({"two_terms": ["a"], "tails": ["a"]}, "tails"),
    ({"two_terms": ["a"], "tails": {"a": "64"}}, "tails"),
    ({"two_terms": ["a"], "stored": {"a": None}}, "stored"),
])  # fmt: skip
def test_fields_of_other_types_are_refused_by_name(plugin: Plugin, own: Mapping[str, Any], field: str) -> None:
    message = (
        f"a model: config.json has fp8q.{field} of another type than fp8q writes; write the checkpoint again with "
        "`fp8q scales RUN`"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Model(plugin, own, {}, {})


def test_a_model_that_drafts_is_in_two_terms_too(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM 0.32 puts a prefix of its own before the names of its layers."""
    names = [f"draft_model.{name}" for name in listed(range(2), LAYERS)]
    with caplog.at_level(logging.INFO, "vllm.fp8q"):
        model = made(plugin, names, {"two_terms": listed(range(2))}).load()
    assert model.terms() == dict.fromkeys(names, 0)
    assert caplog.messages == ["8 of 8 modules in two terms"]


@pytest.mark.parametrize(
    ("scheme", "by"),
    [
        (CompressedTensorsW8A16Fp8(), "CompressedTensorsW8A16Fp8"),
        (None, "no scheme"),
        (CompressedTensorsW8A8Fp8("per channel", False), "CompressedTensorsW8A8Fp8 without the input's scale"),
    ],
)
def test_a_module_that_vllm_multiplies_in_another_form_is_refused(plugin: Plugin, scheme: Any, by: str) -> None:
    said = (
        f"model.layers.0.self_attn.o_proj: its input has two terms, and this vLLM multiplies it by {by}, not FP8 codes "
        "by FP8 codes; serve it on a GPU of compute capability 8.9 or newer, or without the plugin "
        "(VLLM_PLUGINS=none), which runs what vLLM makes of it"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        made(plugin, [], {"two_terms": listed([0])}, model__layers__0__self_attn__o_proj=scheme)
    made(plugin, [], {"two_terms": []}, model__layers__0__self_attn__o_proj=scheme)


@pytest.mark.parametrize(
    ("names", "missing", "due", "first"),
    [
        (listed(range(2), ("self_attn.qkv_proj",)), 2, 8, "model.layers.0.self_attn.o_proj"),
        (listed(range(2), ("attention.qkv_proj", "attention.o_proj")), 8, 8, "model.layers.0.self_attn.k_proj"),
        (listed([1], ("self_attn.qkv_proj",)), 1, 4, "model.layers.1.self_attn.o_proj"),
    ],
)
def test_modules_that_match_no_layer_are_refused(
    plugin: Plugin, names: list[str], missing: int, due: int, first: str
) -> None:
    model = made(plugin, names, {"two_terms": listed(range(2))})
    said = (
        f"fp8q: {missing} of {due} modules whose inputs have two terms are no layers of this vLLM's and would run in "
        f"one term, the first {first} ({first} by vLLM's names); serve it with a vLLM that was tried, or without the "
        "plugin (VLLM_PLUGINS=none), in one term"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        model.load()


def test_where_no_listed_module_has_a_layer_by_its_new_name_it_is_refused(plugin: Plugin) -> None:
    """A mapping that gives other names than the layers have."""
    model = made(plugin, listed([0], LAYERS), {"two_terms": listed([0])}, {"model.": "language_model.model."})
    with pytest.raises(
        ValueError, match=r"^fp8q: 4 of 4 modules .* \(language_model\.model\.layers\.0\..* by vLLM's names\)"
    ):
        model.load()


@pytest.mark.parametrize(
    ("names", "prefixes", "taken"),
    [
        (listed([1], LAYERS), {}, 4),  # a pipeline's stage
        (["model.layers.2.self_attn.o_proj"], {}, 0),  # a stage of layers in one term
        (["lm.layers.0.self_attn.qkv_proj", "lm.layers.0.self_attn.o_proj"], {"model.": "lm."}, 4),
    ],
)
def test_a_part_of_the_layers_is_taken_as_it_is(
    plugin: Plugin, names: list[str], prefixes: dict[str, str | None], taken: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.fp8q"):
        made(plugin, names, {"two_terms": listed(range(2))}, prefixes).load()
    assert caplog.messages == [f"{taken} of 8 modules in two terms"]


def test_a_draft_of_layers_in_bf16_is_served(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    """Layers for multi-token prediction, which have the number behind the last."""
    made(plugin, [], {"two_terms": listed(range(2))}, model__layers__2__eh_proj=None)
    assert caplog.messages == []


def test_names_in_files_count_once(plugin: Plugin, caplog: pytest.LogCaptureFixture) -> None:
    stored = {"model.layers.{}.self_attn.o_proj": "transformer.h.{}.attn.out"}
    own = {"two_terms": listed(range(2), ("self_attn.o_proj",)), "stored": stored}
    with caplog.at_level(logging.INFO, "vllm.fp8q"):
        model = made(plugin, ["transformer.h.0.attn.out", "transformer.h.1.attn.out"], own).load()
    assert set(model.terms().values()) == {0}
    assert caplog.messages == ["2 of 2 modules in two terms"]


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.kv_b_proj", "lm_head"])
def test_layers_with_other_rows_than_the_batchs_have_second_terms_in_all(plugin: Plugin, name: str) -> None:
    model = made(plugin, [name, "model.layers.0.self_attn.o_proj"], {"two_terms": [name], "tails": {name: 16}}).load()
    assert model.terms() == {name: 0, "model.layers.0.self_attn.o_proj": None}


def test_latent_attention_gets_the_weights_of_what_it_expands(plugin: Plugin) -> None:
    """While the model is loaded torch's default type is the model's; the input's largest code is below 1 here."""
    name = "model.layers.0.self_attn.kv_b_proj"
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = made(plugin, [name], {"two_terms": [name]}).load()
        layer, method = model.layers[name]
        weights = method.apply(layer, torch.eye(layer.input_size_per_partition)).T
        plugin.forward(None)
        answer = method.apply(layer, torch.ones(3, IN))
    finally:
        torch.set_default_dtype(torch.float32)
    assert weights.dtype == answer.dtype == torch.bfloat16
    assert torch.equal(weights, (layer.weight.t().float() * layer.weight_scale).bfloat16())


def test_inputs_in_codes_are_answered_in_the_models_type(plugin: Plugin) -> None:
    """Latent attention with prompts in FP8 hands over values that were cast."""
    name = "model.layers.0.self_attn.kv_b_proj"
    layer, method = made(plugin, [name], {"two_terms": [name]}).load().layers[name]
    plugin.forward(None)
    x = torch.full((2, IN), 2.0**-6)
    assert torch.equal(method.apply(layer, x.to(torch.float8_e4m3fn)), method.apply(layer, x))


def test_rows_before_a_tail_have_the_codes_that_vllm_makes(plugin: Plugin) -> None:
    """Of a prompt of 12 positions that no CUDA graph has, the last 3 are exact."""
    name = "model.layers.0.self_attn.o_proj"
    model = made(plugin, [name], {"two_terms": [name], "tails": {name: 3}}).load()
    layer, method = model.layers[name]
    layer.scheme.free_rows = 8
    x = torch.randn(12, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    starts = SimpleNamespace(query_start_loc=torch.tensor([0, 12], dtype=torch.int32), num_actual_tokens=12)
    plugin.forward({"a": starts})
    y = method.apply(layer, x)
    weight = layer.weight.t().float() * layer.weight_scale
    one_code = encode(x, layer.input_scale).float() * layer.input_scale
    torch.testing.assert_close(y[:9], (one_code[:9] @ weight.T).bfloat16())
    torch.testing.assert_close(y[9:], (x[9:].float() @ weight.T).bfloat16())
    assert not torch.equal(y[:9], (x[:9].float() @ weight.T).bfloat16())


def test_without_vllms_gemm_of_codes_all_rows_are_exact_and_that_is_said_once(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = listed(range(2), ("self_attn.o_proj",))
    model = made(plugin, names, {"two_terms": names, "tails": dict.fromkeys(names, 64)})
    assert {layer.scheme.quantize for layer, _ in model.layers.values()} == {None}
    (message,) = caplog.messages
    assert message == (
        "vLLM has no GEMM of FP8 codes to torch.float32 on this GPU, so all rows are exact, not the tails of prompts "
        "alone: prompts take the time of 16 bits"
    )
    monkeypatch.setattr(plugin.config, "cutlass_fp8_supported", lambda: True)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert plugin.config.multiplies_one_code()
    finally:
        torch.set_default_dtype(torch.float32)
