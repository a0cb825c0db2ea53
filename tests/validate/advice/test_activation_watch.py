"""What is seen of the float model, held against what transformers itself computes, and of tensors made by hand."""

from dataclasses import replace
from math import log
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from fp8q.calibrate.model.classes import new_model
from fp8q.calibrate.model.decoder import Layers
from fp8q.options import ScaleOptions
from fp8q.quantize.reference.linear import FP8Linear
from fp8q.quantize.scales.decisions import TensorScale
from fp8q.validate.advice import model_checks
from fp8q.validate.advice.activation_watch import LargestValues, Watcher, head_logits, one_hot
from fp8q.validate.advice.checkup import Remedies
from fp8q.validate.advice.hidden_states import Divergences, Sums, float_gemm, fp8_gemm

REMEDIES = Remedies("RUN", "MODEL", "TEXT", 8)
INFINITY = float("inf")


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, max_position_embeddings=64,
    )  # fmt: skip
    made: PreTrainedModel = LlamaForCausalLM(config).eval()
    return made


def watched(model: PreTrainedModel, ids: torch.Tensor) -> LargestValues:
    watcher = Watcher(model)
    with watcher.watching(ids) as cache, torch.inference_mode():
        model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    return watcher.seen


def test_norms_and_logits_are_those_that_transformers_computes(model: PreTrainedModel) -> None:
    """Eager attention gives its weights, which are the softmax of its logits."""
    ids = torch.randint(61, (2, 7))
    seen = watched(model, ids)
    assert list(seen.norms) == [
        "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm", "model.norm",
    ]  # fmt: skip
    with torch.inference_mode():
        embedded = model.get_input_embeddings()(ids)
        called = captured(model, ids)
        model.set_attn_implementation("eager")
        weights = model(input_ids=ids, output_attentions=True).attentions
    assert seen.norms["model.layers.0.input_layernorm"] == pytest.approx(float(embedded.abs().max()))
    heads = [head_logits(called[0][:, head], called[1][:, head // 2], called[2]) for head in range(4)]
    for head, logits in enumerate(heads):
        assert torch.allclose(logits.softmax(-1), weights[0][:, head], atol=1e-6)
    largest = max(float(logits[logits > -INFINITY].abs().max()) for logits in heads)
    assert seen.logits["model.layers.0.self_attn"] == pytest.approx(largest)
    assert watched(model, ids).logits == pytest.approx(seen.logits), "eager attention is seen too"


def test_capped_logits_are_seen_capped() -> None:
    """Gemma 2's, which only its own eager attention caps."""
    torch.manual_seed(2)
    config = Gemma2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=61, max_position_embeddings=64, attn_logit_softcapping=0.5,
    )  # fmt: skip
    model = new_model(config, torch.float32)
    torch.nn.init.normal_(model.get_parameter("model.layers.0.self_attn.q_proj.weight"), std=10)
    assert watched(model, torch.arange(14).reshape(2, 7)).logits["model.layers.0.self_attn"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    "made_of",
    [
        BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=61),
        FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=61),
    ],
)
def test_an_attention_outside_transformers_interface_is_not_seen(made_of: PreTrainedConfig) -> None:
    """Falcon calls its own SDPA, though its configuration has transformers' name for it."""
    assert not Watcher(new_model(made_of, torch.float32)).sees_logits


def captured(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Queries and keys that the first layer's attention is called with, and its scaling."""
    plain, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], list[tuple[torch.Tensor, torch.Tensor, float]]()

    def noting(module: object, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append((query, key, options["scaling"]))
        return plain(module, query, key, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", noting)
        model.base_model(input_ids=ids)
    return calls[0]


def test_logits_take_the_scaling_the_cap_and_the_mask() -> None:
    query, key = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]), torch.tensor([[[2.0, 1.0], [0.0, 5.0]]])
    assert head_logits(query, key, 1.0).tolist() == [[[6.0, -INFINITY], [4.0, 20.0]]]
    assert head_logits(query, key, None)[0, 1, 1] == pytest.approx(20 / 2**0.5)
    assert head_logits(query, key, 1.0, softcap=10.0)[0, 1, 1] == pytest.approx(10 * torch.tanh(torch.tensor(2.0)))
    seen = torch.tensor([[[True, True], [False, True]]])
    assert head_logits(query, key, 1.0, mask=seen).tolist() == [[[6.0, 0.0], [-INFINITY, 20.0]]]
    added = torch.zeros((1, 2, 2)).masked_fill(~seen, torch.finfo(torch.float32).min)
    assert head_logits(query, key, 1.0, mask=added).tolist() == [[[6.0, 0.0], [-INFINITY, 20.0]]]


@pytest.mark.parametrize("broken", [float("nan"), INFINITY])
@pytest.mark.parametrize("first", [True, False])
def test_queries_that_are_no_numbers_are_bad_whatever_other_windows_give(
    model: PreTrainedModel, broken: float, first: bool
) -> None:
    """In one layer of two, in one window of two."""
    watcher, weight = Watcher(model), model.get_parameter("model.layers.1.self_attn.q_proj.weight")
    sound = weight.detach().clone()
    for damaged in (first, not first):
        with torch.no_grad():
            weight.copy_(sound)
            weight[0, 0] = broken if damaged else weight[0, 0]
        ids = torch.arange(7)[None]
        with watcher.watching(ids) as cache, torch.inference_mode():
            model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
    found = model_checks.attention_logits(watcher.seen, [], REMEDIES)
    assert [(each.verdict, each.module, each.value) for each in found] == [("bad", "model.layers.1.self_attn", None)]


def test_a_row_is_one_hot_where_fp32_says_so() -> None:
    """exp(-16.7) is lost beside 1 in FP32, exp(-16.5) is not."""
    logits = torch.tensor([[[0.0, -INFINITY, -INFINITY], [20.0, 20 - 16.5, -INFINITY], [20 - 16.7, 20.0, 1.0]]])
    assert one_hot(logits) == (1, 2)
    first = logits[0].softmax(-1).amax(-1)
    assert [bool(1 - each < 2**-24) for each in first] == [True, False, True]
    assert 24 * log(2) == pytest.approx(16.6, abs=0.05)
    assert one_hot(torch.zeros((1, 1, 1))) == (0, 0)


def test_the_token_that_stands_out_is_told_by_position_and_id() -> None:
    seen = LargestValues()
    seen.ids = [torch.tensor([[10, 11, 12]]), torch.tensor([[20, 21, 22]])]
    seen.tokens = {
        "0.attn.k": [torch.tensor([[300.0, 1, 1]]), torch.tensor([[1.0, 1, 1]])],
        "0.attn.v": [torch.ones(1, 3)] * 2,
    }
    worst = seen.outlier("0.attn.k")
    assert (worst.ratio, worst.position, worst.token) == (300.0, 0, 10)
    cached = model_checks.cache_tokens(seen, ["0.attn.k", "0.attn.v"], lambda token: f"<{token}>", REMEDIES)
    assert [(each.verdict, each.module, each.said) for each in cached] == [
        ("bad", "0.attn.k", "300 times, position 0, <10>")
    ]
    assert cached[0].remedy == "`fp8q scales RUN --kv-cache v`"
    several = replace(REMEDIES, chosen=ScaleOptions(kv_cache="fp8", kv_skip=("1.*",)), cached=("0.attn", "2.attn"))
    cached = model_checks.cache_tokens(seen, ["0.attn.k", "0.attn.v"], str, several)
    assert cached[0].remedy == "`fp8q scales RUN --kv-skip '1.*' --kv-skip 0.attn`"
    wide = model_checks.cache_tokens(seen, [], str, REMEDIES)
    assert [each.verdict for each in wide] == ["watch"]
    nothing = model_checks.cache_tokens(LargestValues(), [], str, REMEDIES)
    assert [(each.verdict, each.said) for each in nothing] == [("unknown", "nothing was written to a cache")]


def test_what_norms_read_is_held_against_the_type_of_the_graph() -> None:
    seen = LargestValues(norms={"0.norm": 2.0, "1.norm": 20_000.0})
    good = model_checks.norm_inputs(seen, False, REMEDIES)[0]
    assert (good.verdict, good.module, good.said) == ("good", "1.norm", "2e+04, 1e+04 times the first norm's")
    assert model_checks.norm_inputs(seen, True, REMEDIES)[0].verdict == "watch"
    beyond = model_checks.norm_inputs(LargestValues(norms={"0.norm": 7e4}), True, REMEDIES)[0]
    assert (beyond.verdict, beyond.remedy) == ("bad", "serve it in BF16, not in FP16: `fp8q export RUN --dtype bf16`")
    broken = model_checks.norm_inputs(LargestValues(norms={"0.norm": INFINITY}), False, REMEDIES)[0]
    assert (broken.verdict, broken.value) == ("bad", None)


@pytest.mark.parametrize(("logit", "verdict"), [(127.0, "good"), (200.0, "watch"), (2000.0, "bad")])
def test_attention_logits_are_held_against_what_bf16_tells_apart(logit: float, verdict: str) -> None:
    seen = LargestValues(logits={"0.attn": logit}, hot={"0.attn": (1, 4)})
    (found,) = model_checks.attention_logits(seen, ["0.attn.k", "0.attn.v"], REMEDIES)
    assert (found.verdict, found.module, found.value) == (verdict, "0.attn", logit)
    assert "25.00 % of the rows" in found.said
    if verdict != "good":
        assert found.remedy == "`fp8q scales RUN --kv-cache v`"
        assert (
            model_checks.attention_logits(seen, ["0.attn.v"], REMEDIES)[0].remedy
            == "`fp8q scales RUN --two-terms '0.attn.*'`"
        )
    assert model_checks.attention_logits(LargestValues(), [], REMEDIES)[0].verdict == "unknown"


def parted(*errors: float) -> Divergences:
    """Layers whose hidden states are off by so much, and one GEMM each."""
    found = Divergences()
    for layer, error in enumerate(errors):
        exact = torch.tensor([[[3.0, 4.0]]])
        found.add(layer, exact + torch.tensor([0.0, 5.0 * error]), exact)
        found.gemms[f"h.{layer}.up"] = Sums(error**2, 1.0)
    return found


def test_the_first_layer_that_parts_is_named_with_what_errs_most_in_it() -> None:
    (found,) = model_checks.hidden_states(parted(0.01, 0.3, 0.6), Layers("h", 3), [], REMEDIES)
    assert (found.verdict, found.module) == ("bad", "h.1")
    assert found.value == pytest.approx(0.3)
    assert (
        found.said == "30.00 %, cosine 0.9896, 60.00 % at the worst layer; in it h.1.up errs most by itself, by 30.00 %"
    )
    assert found.remedy == "`fp8q scales RUN --two-terms h.1.up`"
    assert [at.value for at in found.by_depth] == pytest.approx([0.01, 0.3, 0.6], rel=1e-4)


def test_layers_that_do_not_part_are_good_and_a_model_without_layers_is_unknown() -> None:
    (found,) = model_checks.hidden_states(parted(0.01, 0.05), Layers("h", 2), [], REMEDIES)
    assert (found.verdict, found.module, found.said) == ("good", "h.1", "5.00 %, cosine 0.9996")
    (unknown,) = model_checks.hidden_states(Divergences(), None, [], REMEDIES)
    assert (unknown.verdict, unknown.value) == ("unknown", None)


def test_hidden_states_that_are_no_numbers_are_bad() -> None:
    (found,) = model_checks.hidden_states(parted(0.01, float("nan")), Layers("h", 2), [], REMEDIES)
    assert (found.verdict, found.module, found.value) == ("bad", "h.1", None)


def scale_in(terms: Literal[1, 2]) -> TensorScale:
    return TensorScale(method="amax", amax=1, clip=1, scale=1, terms=terms, saturation=0, underflow=0, sqnr_db=None)


def test_each_product_answers_for_its_own_error() -> None:
    inputs = {"h.1.up": scale_in(1), "h.2.up": scale_in(2)}
    found = model_checks.gemm_errors(parted(0.01, 0.1, 0.2), inputs, REMEDIES)
    assert [(each.verdict, each.module) for each in found] == [("bad", "h.2.up"), ("watch", "h.1.up")]
    assert found[0].remedy == "`fp8q scales RUN --skip h.2.up`"
    assert found[1].remedy == "`fp8q scales RUN --two-terms h.1.up`"
    assert model_checks.gemm_errors(Divergences(), {}, REMEDIES)[0].verdict == "unknown"


def test_a_bias_hides_no_error_of_its_product() -> None:
    """Codes 1, 2 and 3, 5 under scales of one: 1·3 + 2·5 = 13, whatever the bias; of 1.03 the code is 1."""
    codes = torch.tensor([[3.0, 5.0]]).to(torch.float8_e4m3fn)
    bias = torch.tensor([1000.0])
    layer = FP8Linear(codes, torch.ones(1), torch.tensor(1.0), bias, "fast")
    product = nn.Linear(2, 1).to(torch.bfloat16)
    product.weight.data, product.bias.data = torch.tensor([[3.0, 5.0]]).bfloat16(), bias.bfloat16()
    x = torch.tensor([[1.0, 2.0], [1.03125, 2.0]], dtype=torch.bfloat16)
    assert fp8_gemm(layer, x).tolist() == [[13.0], [13.0]]
    assert float_gemm(product, x)[0].tolist() == [13.0]
    column = Conv1D(1, 2).to(torch.bfloat16)
    column.weight.data = torch.tensor([[3.0], [5.0]]).bfloat16()
    assert float_gemm(column, x)[0].tolist() == [13.0]
