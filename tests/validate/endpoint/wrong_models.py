"""Models that are not the one that was validated, and implementations that are: each made in memory of one checkpoint,
by a change of its weights, its arithmetic, its prompts or its log-probabilities.

FP8 is written here by torch's own cast, apart from what it judges.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8q.calibrate.model.bf16_gemms import gemms_in_fp32
from fp8q.validate.accuracy.top_logits import TopTokens, top_of
from fp8q.validate.endpoint.answers import LikelyTokens
from fp8q.validate.endpoint.document import ModelComparison
from fp8q.validate.endpoint.judgement import Judged, judge

LARGEST = 448.0
Model = Any
Change = Callable[[Model], object]


class Coded(nn.Module):
    """A linear layer of E4M3: a scale for each row of weights, one for the inputs, which are coded in one code, or as
    they are where `terms` is 2.
    """

    def __init__(self, layer: nn.Linear, amax: float, terms: int):
        super().__init__()
        weight = layer.weight.float()
        self.weight_scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
        self.codes = (weight / self.weight_scale).to(torch.float8_e4m3fn).float()
        self.scale, self.terms, self.bias = amax / LARGEST, terms, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        read = x.float()
        if self.terms == 1:
            read = coded(read, self.scale)
        y = linear(read, self.codes * self.weight_scale)
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)


def coded(x: Tensor, scale: float) -> Tensor:
    """The values of the E4M3 codes of `x`."""
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


def layers_of(model: Model) -> dict[str, nn.Linear]:
    """The linear layers of the decoder, by name."""
    return {name: each for name, each in model.model.named_modules() if isinstance(each, nn.Linear)}


def in_fp8(model: Model, amax: Mapping[str, float], terms: int) -> Model:
    """Put the linear layers of `model` in FP8, and return it."""
    model = copy.deepcopy(model)
    for name, layer in layers_of(model).items():
        model.model.set_submodule(name, Coded(layer, amax[name], terms))
    return model


def amax_of(model: Model, ids: Tensor, quantile: float = 1.0) -> dict[str, float]:
    """The largest input of each linear layer, or the largest of a window's quantile of them."""
    found: dict[str, list[float]] = {}

    def see(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        values = inputs[0].float().abs().flatten()
        found.setdefault(name, []).append(float(values.kthvalue(max(1, int(quantile * len(values)))).values))

    handles = [each.register_forward_pre_hook(partial(see, name)) for name, each in layers_of(model).items()]
    with torch.inference_mode(), gemms_in_fp32():
        for window in ids:
            model(input_ids=window[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return {name: max(values) for name, values in found.items()}


@dataclass(frozen=True)
class Variant:
    """A server: a `change` of a copy of a model of `World.models`, `base`; the `ids` that it reads instead of a
    prompt's; the `logits` and `logprobs` that it makes of its own; the number of log-probabilities that it lists.

    `together`: the windows are one batch.
    """

    change: Change | None = None
    ids: Callable[[Tensor], Tensor] | None = None
    logits: Callable[[Tensor], Tensor] | None = None
    logprobs: Callable[[np.ndarray], np.ndarray] | None = None
    base: str = "served"
    top: int = 20
    together: bool = True


@dataclass(frozen=True)
class World:
    """A `checkpoint`, windows of a `text`, and the likeliest tokens that `fp8q validate` would keep of it in FP8, with
    inputs in one code or two (`terms`). The first windows are evaluated, the second calibrate, the third again.
    """

    checkpoint: Path
    text: str
    terms: int
    windows: int = 6
    length: int = 128
    kept_from: int = 8

    @cached_property
    def source(self) -> Model:
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.bfloat16, attn_implementation="eager")
        return model.eval().requires_grad_(False)

    @cached_property
    def parts(self) -> Tensor:
        """int64 [3, windows, length]."""
        count = 3 * self.windows * self.length
        tokenizer = AutoTokenizer.from_pretrained(self.checkpoint)
        tokens = tokenizer(self.text[: 8 * count], add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(tokens[:count]).view(3, self.windows, self.length)

    @cached_property
    def models(self) -> dict[str, Model]:
        """The run's runtimes, and `served`: another implementation, by another kernel of attention."""
        amax = amax_of(self.source, self.parts[1])
        reference = in_fp8(copy.deepcopy(self.source), amax, self.terms)
        wide = in_fp8(copy.deepcopy(self.source).float(), amax, self.terms)
        found = {"bf16": self.source, "reference": reference, "onnxruntime": wide, "served": copy.deepcopy(reference)}
        found["served"].config._attn_implementation = "sdpa"
        if self.terms == 2:
            found["one-term"] = in_fp8(copy.deepcopy(self.source), amax, 1)
        return found

    @cached_property
    def kept(self) -> TopTokens:
        mask = np.zeros(self.parts[0].shape, np.bool_)
        mask[:, self.kept_from :] = True
        runtimes = {name: self.run(model, self.parts[0]) for name, model in self.models.items() if name != "served"}
        return TopTokens(
            np.arange(self.windows),
            self.parts[0].numpy(),
            mask,
            {name: top_of(logits) for name, logits in runtimes.items()},
            {name: self.losses(logits).astype(np.float32) for name, logits in runtimes.items()},
        )

    def run(self, model: Model, ids: Tensor, together: bool = True) -> Tensor:
        """The logits that score the kept positions, the last of `ids`: float32 [positions, vocabulary]."""
        with torch.inference_mode(), gemms_in_fp32():
            found = [model(input_ids=each, use_cache=False).logits for each in ids.split(len(ids) if together else 1)]
        return torch.cat([logits[:, :-1].float()[:, self.kept_from - self.length :].flatten(0, 1) for logits in found])

    def losses(self, logits: Tensor) -> np.ndarray:
        targets = self.parts[0, :, self.kept_from :].flatten()
        found: np.ndarray = -torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0].double().numpy()
        return found

    def answers(self, variant: Variant) -> LikelyTokens:
        model = self.models[variant.base]
        if variant.change:
            variant.change(model := copy.deepcopy(model))
        ids = self.parts[0]
        logits = self.run(model, variant.ids(ids) if variant.ids else ids, variant.together)
        if variant.logits:
            logits = variant.logits(logits)
        top, losses = top_of(logits), self.losses(logits)
        tokens = top.tokens[:, : variant.top].astype(np.int64)
        logprobs = top.logprobs[:, : variant.top].astype(np.float64)
        if variant.logprobs:
            logprobs = variant.logprobs(logprobs)
        return LikelyTokens(np.arange(len(losses)), tokens, logprobs, losses, 0, 0)

    def judged(self, variant: Variant) -> Judged:
        return judge(self.kept, self.answers(variant), np.nonzero(self.kept.positions)[0])

    def calibrated_again(self, quantile: float = 1.0) -> Change:
        """Scales of inputs from other text, or clipped."""

        def change(model: Model) -> None:
            amax = amax_of(self.source, self.parts[2], quantile)
            for name, each in zip(layers_of(self.source), coded_layers(model), strict=True):
                each.scale = amax[name] / LARGEST

        return change


# Changes of weights and arithmetic.


def decoder(model: Model, number: int) -> Any:
    return model.model.layers[number]


def coded_layers(model: Model) -> list[Coded]:
    return [each for each in model.modules() if isinstance(each, Coded)]


def negative_norm(model: Model) -> None:
    model.model.norm.weight.neg_()


def random_weights(seed: int, std: float) -> Change:
    def change(model: Model) -> None:
        random = torch.Generator().manual_seed(seed)
        for each in coded_layers(model):
            each.codes = torch.randn(each.codes.shape, generator=random) * std
            each.weight_scale = torch.ones_like(each.weight_scale)
        shape = model.model.embed_tokens.weight.shape
        model.model.embed_tokens.weight.copy_(torch.randn(shape, generator=random) * std)

    return change


def swapped(first: int, second: int) -> Change:
    def change(model: Model) -> None:
        layers = model.model.layers
        layers[first], layers[second] = layers[second], layers[first]

    return change


def dropped(number: int) -> Change:
    return lambda model: model.model.layers.__delitem__(number)


def repeated(number: int) -> Change:
    return lambda model: model.model.layers.insert(number, copy.deepcopy(model.model.layers[number]))


def zeroed(share: float) -> Change:
    def change(model: Model) -> None:
        random = torch.Generator().manual_seed(0)
        for each in coded_layers(model):
            each.codes = torch.where(torch.rand(each.codes.shape, generator=random) < share, 0.0, each.codes)

    return change


def rope(factor: float) -> Change:
    """RoPE of a base that is `factor` times as large."""

    def change(model: Model) -> None:
        frequencies = model.model.rotary_emb.inv_freq
        count = len(frequencies)
        frequencies.mul_(torch.tensor([factor ** (-index / count) for index in range(count)]))

    return change


def rope_scaled(factor: float) -> Change:
    return lambda model: model.model.rotary_emb.inv_freq.div_(factor)


def attention_scale(factor: float) -> Change:
    def change(model: Model) -> None:
        for layer in model.model.layers:
            layer.self_attn.scaling *= factor

    return change


def norm_eps(eps: float) -> Change:
    def change(model: Model) -> None:
        for each in model.modules():
            if hasattr(each, "variance_epsilon"):
                each.variance_epsilon = eps

    return change


def scaled(pattern: str, factor: float) -> Change:
    """The scale of one module's weights times `factor`."""
    return lambda model: model.model.get_submodule(pattern).weight_scale.mul_(factor)


def input_scaled(factor: float) -> Change:
    def change(model: Model) -> None:
        for each in coded_layers(model):
            each.scale *= factor

    return change


def heads_reversed(name: str) -> Change:
    """One layer's heads of `q_proj` or `k_proj` in the other order."""

    def change(model: Model) -> None:
        each, size = decoder(model, 1).self_attn, decoder(model, 1).self_attn.head_dim
        layer = getattr(each, name)
        for field_ in ("codes", "weight_scale"):
            value = getattr(layer, field_)
            setattr(layer, field_, value.view(-1, size, value.shape[1]).flip(0).reshape(value.shape).contiguous())

    return change


def interleaved(model: Model) -> None:
    """Rows of q and k in the order of the other convention of RoPE."""
    for layer in model.model.layers:
        size = layer.self_attn.head_dim
        for each in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            for field_ in ("codes", "weight_scale"):
                value = getattr(each, field_)
                heads = value.view(-1, 2, size // 2, value.shape[1]).transpose(1, 2)
                setattr(each, field_, heads.reshape(value.shape).contiguous())


def gate_and_up(model: Model) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def activation(function: nn.Module) -> Change:
    def change(model: Model) -> None:
        for layer in model.model.layers:
            layer.mlp.act_fn = function

    return change


def low_rank(size: float, rank: int = 4) -> Change:
    """An adapter on every layer: of `size` times the weights' norm."""

    def change(model: Model) -> None:
        random = torch.Generator().manual_seed(0)
        for each in coded_layers(model):
            weight = each.codes * each.weight_scale
            added = torch.randn(len(weight), rank, generator=random) @ torch.randn(
                rank, weight.shape[1], generator=random
            )
            each.codes = weight + added * (size * weight.norm() / added.norm())
            each.weight_scale = torch.ones_like(each.weight_scale)

    return change


def one_scale(model: Model) -> None:
    """One scale for all rows of a matrix."""
    for each in coded_layers(model):
        weight = each.codes * each.weight_scale
        scale = float(weight.abs().max()) / LARGEST
        each.codes, each.weight_scale = coded(weight, scale), torch.ones_like(each.weight_scale)


def integers(bits: int) -> Change:
    def change(model: Model) -> None:
        largest = 2 ** (bits - 1) - 1
        for each in coded_layers(model):
            scale = each.codes.abs().amax(dim=1, keepdim=True) / largest
            each.codes = (each.codes / scale).round() * scale

    return change


def no_scales(name: str) -> Change:
    def change(model: Model) -> None:
        layer = model.model.get_submodule(name)
        layer.weight_scale = torch.ones_like(layer.weight_scale)

    return change


def nothing_of(name: str) -> Change:
    return lambda model: model.model.get_submodule(name).codes.zero_()


def cache_in_fp8(scale: float) -> Change:
    """Keys and values in E4M3, before RoPE."""

    def change(model: Model) -> None:
        for layer in model.model.layers:
            for each in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                each.register_forward_hook(lambda module, inputs, y: coded(y.float(), scale).to(y.dtype))

    return change


def head_in_fp8(model: Model) -> None:
    weight = model.lm_head.weight.float()
    scale = weight.abs().amax(dim=1, keepdim=True) / LARGEST
    model.lm_head.weight = nn.Parameter(((weight / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16())


def embeddings_times(factor: float) -> Change:
    def change(model: Model) -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
        model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data * factor

    return change


def all_attend(model: Model) -> None:
    """Attention without the causal mask."""
    model.config._attn_implementation = "sdpa"
    model.config.is_causal = False
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def residual_times(factor: float) -> Change:
    def change(model: Model) -> None:
        decoder(model, 1).mlp.register_forward_hook(lambda module, inputs, y: y * factor)

    return change


# What a server reads, and what it makes of its logits.


def without_first(ids: Tensor) -> Tensor:
    return ids[:, 1:]


def begun_with(token: int, count: int = 1) -> Callable[[Tensor], Tensor]:
    return lambda ids: torch.cat([torch.full((len(ids), count), token), ids], dim=1)


def other_words(share: float, size: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What another tokenizer of as many words does: a share of them has other ids, on both ends."""
    random = np.random.default_rng(0)
    order = np.arange(size)
    moved = random.choice(size, int(share * size), replace=False)
    order[moved] = random.permutation(moved)
    table = torch.tensor(order)
    return (lambda ids: table[ids]), (lambda logits: logits[:, table])


def tempered(temperature: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: logits / temperature


def soft_capped(cap: float) -> Callable[[Tensor], Tensor]:
    return lambda logits: cap * torch.tanh(logits / cap)


def renormalized(logprobs: np.ndarray) -> np.ndarray:
    """Over the listed tokens alone, as servers do that apply top-k first."""
    found: np.ndarray = logprobs - np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    return found


def wrong_models(world: World) -> dict[str, Variant]:
    """Servers of another model than was validated."""
    last, size = world.source.config.num_hidden_layers - 1, world.source.config.vocab_size
    few_words, all_words = other_words(0.05, size), other_words(1.0, size)
    found = {
        "final norm's sign": Variant(negative_norm),
        "head rolled by 1,000": Variant(logits=lambda z: z.roll(1000, 1)),
        "head rolled by 1": Variant(logits=lambda z: z.roll(1, 1)),
        "random, small": Variant(random_weights(1, 0.02)),
        "random, large": Variant(random_weights(2, 0.1)),
        "first layers swapped": Variant(swapped(0, 1)),
        "last layers swapped": Variant(swapped(last - 1, last)),
        "first layer dropped": Variant(dropped(0)),
        "a layer dropped": Variant(dropped(1)),
        "last layer dropped": Variant(dropped(last)),
        "a layer twice": Variant(repeated(1)),
        "a tenth of the weights zero": Variant(zeroed(0.1)),
        "a hundredth of the weights zero": Variant(zeroed(0.01)),
        "RoPE base × 50": Variant(rope(50)),
        "RoPE base / 10": Variant(rope(0.1)),
        "RoPE base × 1.2": Variant(rope(1.2)),
        "RoPE scaled linearly": Variant(rope_scaled(2)),
        "RoPE of the other convention": Variant(interleaved),
        "attention scale × √2": Variant(attention_scale(2**0.5)),
        "attention scale / 8": Variant(attention_scale(1 / 8)),
        "attention scale × 1.05": Variant(attention_scale(1.05)),
        "no causal mask": Variant(all_attend),
        "heads of q reversed": Variant(heads_reversed("q_proj")),
        "heads of k reversed": Variant(heads_reversed("k_proj")),
        "epsilon 0.1": Variant(norm_eps(0.1)),
        "epsilon 0.001": Variant(norm_eps(1e-3)),
        "epsilon 0.00001": Variant(norm_eps(1e-5)),
        "scale × 8 of one q_proj": Variant(scaled("layers.1.self_attn.q_proj", 8)),
        "scale × 8 of one down_proj": Variant(scaled("layers.1.mlp.down_proj", 8)),
        "scale × 2 of one k_proj": Variant(scaled("layers.1.self_attn.k_proj", 2)),
        "scale × 1.1 of one v_proj": Variant(scaled("layers.1.self_attn.v_proj", 1.1)),
        "no scales of one q_proj": Variant(no_scales("layers.1.self_attn.q_proj")),
        "one o_proj zero": Variant(nothing_of("layers.1.self_attn.o_proj")),
        "one down_proj zero": Variant(nothing_of("layers.1.mlp.down_proj")),
        "an MLP × 1.1": Variant(residual_times(1.1)),
        "gate and up swapped": Variant(gate_and_up),
        "GELU": Variant(activation(nn.GELU())),
        "ReLU": Variant(activation(nn.ReLU())),
        "an adapter": Variant(low_rank(0.3)),
        "a weak adapter": Variant(low_rank(0.03)),
        "an adapter of a hundredth": Variant(low_rank(0.01)),
        "one scale for all rows": Variant(one_scale),
        "weights in INT4": Variant(integers(4)),
        "weights in INT6": Variant(integers(6)),
        "weights in INT8": Variant(integers(8)),
        "cache in FP8": Variant(cache_in_fp8(1.0)),
        "cache in FP8, scaled": Variant(cache_in_fp8(0.02)),
        "head in FP8": Variant(head_in_fp8),
        "embeddings × 16": Variant(embeddings_times(16)),
        "embeddings × 1.1": Variant(embeddings_times(1.1)),
        "first token missing": Variant(ids=without_first),
        "another token first": Variant(ids=begun_with(0)),
        "a system prompt": Variant(ids=begun_with(7, 8)),
        "a twentieth of other words": Variant(ids=few_words[0], logits=few_words[1]),
        "another tokenizer": Variant(ids=all_words[0], logits=all_words[1]),
        "temperature 0.7": Variant(logits=tempered(0.7)),
        "temperature 1.3": Variant(logits=tempered(1.3)),
        "temperature 0.95": Variant(logits=tempered(0.95)),
        "a softcap of 10": Variant(logits=soft_capped(10)),
        "a softcap of 30": Variant(logits=soft_capped(30)),
        "top-k before log-probabilities": Variant(logprobs=renormalized),
        "the position before": Variant(logits=lambda z: z.roll(1, 0)),
        "BF16": Variant(base="bf16"),
    }
    if world.terms == 2:
        return found | {"one code for two": Variant(base="one-term")}
    return found | {
        "other calibration text": Variant(world.calibrated_again()),
        "clipped at 99.9 %": Variant(world.calibrated_again(0.999)),
        "clipped at 99 %": Variant(world.calibrated_again(0.99)),
        "input scales × 1.1": Variant(input_scaled(1.1)),
        "input scales / 4": Variant(input_scaled(0.25)),
    }


#: Servers of what was validated.
RIGHT = {
    "the reference": Variant(base="reference"),
    "the graph": Variant(base="onnxruntime"),
    "another implementation": Variant(),
    "a window at a time": Variant(together=False),
    "the reference, a window at a time": Variant(base="reference", together=False),
    "five log-probabilities": Variant(top=5),
    "five of the graph": Variant(base="onnxruntime", top=5),
    "log-probabilities of three digits": Variant(logprobs=lambda values: np.round(values, 3)),
    "logits in BF16": Variant(logits=lambda z: z.bfloat16().float()),
    "logits in FP16": Variant(logits=lambda z: z.half().float()),
    "a logit's constant": Variant(logits=lambda z: z + 3),
}
#: Nearer to the validated model than its own implementations may be, so that they may pass; by what was validated.
NEAR = {
    2: {"epsilon 0.001", "epsilon 0.00001", "an adapter of a hundredth", "weights in INT8"},
    1: {
        "epsilon 0.001", "epsilon 0.00001", "attention scale × 1.05", "an MLP × 1.1", "RoPE base × 1.2",
        "an adapter of a hundredth", "a weak adapter", "one scale for all rows", "weights in INT8", "weights in INT6",
        "cache in FP8", "cache in FP8, scaled", "head in FP8", "first token missing", "other calibration text",
        "input scales × 1.1",
    },
}  # fmt: skip


def compared(found: Judged) -> ModelComparison:
    """Put a verdict into the document of `fp8q compare`, which tells whether it passes."""
    return ModelComparison(
        answered="", model="", form="", requests=0, prompts=4, sent=384, positions=352, runtimes=found.runtimes,
        verdict=found.verdict, arithmetics=found.arithmetics, sentence=found.sentence, noticed=found.noticed,
    )  # fmt: skip
