"""Models whose layers keep more than keys and values: hybrids of attention and a recurrence, and indexers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_configurations import sizes
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    LlamaConfig,
    OlmoHybridConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer
from unseen_architectures import random_checkpoint

from fp8q import api
from fp8q.calibrate.checkpoint.weights import JoinedTensors
from fp8q.calibrate.measure.observe import ObservedLayer
from fp8q.calibrate.model.caches import attention_indices, keeps_states, new_cache
from fp8q.calibrate.model.expert_names import Conversions, expert_names
from fp8q.calibrate.model.gemms import attention_modules
from fp8q.calibrate.model.skeleton import empty, skeleton
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import fp8_cache, load_reference

from ...mixtures import WITHOUT_GATE, random_of

DEMO = Path(__file__).resolve().parents[3] / "examples" / "demo"
IDS = torch.arange(3, 27)[None]


def hybrid(name: str = "Qwen3_5TextConfig") -> PreTrainedModel:
    """A random hybrid of a recurrent layer and one with attention, in FP32."""
    torch.manual_seed(0)
    configuration = {"Qwen3_5TextConfig": Qwen3_5TextConfig, "FalconH1Config": FalconH1Config}[name]
    model: PreTrainedModel = AutoModelForCausalLM.from_config(configuration(**sizes(name)), dtype=torch.float32)
    model.eval()
    return model


def test_a_decoder_of_attention_alone_has_transformers_plain_cache() -> None:
    """Also one with windows, whose layers would be cut to them."""
    for config in (LlamaConfig(), Qwen3Config(use_sliding_window=True, sliding_window=4, max_window_layers=0)):
        assert not keeps_states(config)
        assert attention_indices(config) is None
    model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=32))
    assert new_cache(model).layers == []


def test_a_hybrid_has_layers_of_its_kinds_and_attention_in_some() -> None:
    model = hybrid()
    assert attention_indices(model.config) == {1}
    assert attention_modules(model) == {1: "model.layers.1.self_attn"}
    kinds = [type(layer) for layer in new_cache(model).layers]
    assert kinds == [LinearAttentionLayer, DynamicLayer]
    assert DynamicSlidingWindowLayer not in kinds


@pytest.mark.parametrize("name", ["Qwen3_5TextConfig", "FalconH1Config"])
@torch.no_grad()
def test_an_observed_hybrid_computes_what_it_computes_alone(name: str) -> None:
    """Falcon H1 has attention and a recurrence in each layer, whose state is kept beside keys and values."""
    model, seen = hybrid(name), list[tuple[int, ...]]()
    layer = ObservedLayer(lambda keys, values: seen.append(tuple(keys.shape)))
    cache = new_cache(model, dict.fromkeys(attention_modules(model), layer))
    logits = model(input_ids=IDS, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(logits, model(input_ids=IDS, use_cache=False).logits)
    assert seen == [(1, 2, 24, 32)] * len(attention_modules(model))


@pytest.mark.parametrize("name", ["Qwen3_5TextConfig", "FalconH1Config"])
@torch.no_grad()
def test_an_fp8_cache_of_a_hybrid_decodes_with_its_states(name: str) -> None:
    """Token by token as all at once, within the rounding of FP32; coarse scales of the cache change the answer."""
    model = hybrid(name)
    fine, coarse = ({f"{m}.{part}": torch.tensor([scale]) for m in attention_modules(model).values() for part in "kv"}
                    for scale in (2.0**-8, 2.0))  # fmt: skip
    at_once = model(input_ids=IDS, past_key_values=fp8_cache(fine, model), use_cache=True).logits
    cache = fp8_cache(fine, model)
    parts = [
        model(input_ids=IDS[:, span], past_key_values=cache, use_cache=True).logits
        for span in (slice(0, 16), *(slice(at, at + 1) for at in range(16, IDS.shape[1])))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), at_once, atol=1e-4, rtol=1e-4)
    other = model(input_ids=IDS, past_key_values=fp8_cache(coarse, model), use_cache=True).logits
    assert (other - at_once).abs().max() > 1e-4


def test_multipliers_that_the_whole_model_makes_are_computed() -> None:
    """Falcon H1's buffer of a layer was left as the memory was: NaN, or whatever lay there."""
    config = FalconH1Config(**sizes("FalconH1Config"), ssm_multipliers=[1.0, 2.0, 3.0, 4.0, 5.0])
    vector = skeleton(config, torch.bfloat16).get_buffer("model.layers.0.mamba.mup_vector")
    assert sorted(set(vector.flatten().tolist())) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_convolution_of_three_stored_ones_is_found() -> None:
    model = empty(OlmoHybridConfig(**sizes("OlmoHybridConfig")), torch.bfloat16)
    stored = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    merged = Conversions(model, dense=True).merged(stored)
    assert merged == {"model.layers.0.linear_attn.conv1d.weight": JoinedTensors(tuple(stored), 0)}
    assert Conversions(model, dense=True).merged(stored[:2]) == {}


def test_experts_whose_patterns_escape_their_dots_are_found() -> None:
    """Kimi's were "missing": w1 is gate_proj, and the block has another name."""
    from transformers import KimiLinearConfig

    model = empty(KimiLinearConfig(**sizes("KimiLinearConfig")), torch.bfloat16)
    names = expert_names(model, [f"model.layers.1.block_sparse_moe.experts.3.w{n}.weight" for n in (1, 2, 3)])
    assert {ours.rpartition("experts.")[2]: stored.rpartition("experts.")[2] for ours, stored in names.items()} == {
        "3.gate_proj.weight": "3.w1.weight", "3.down_proj.weight": "3.w2.weight", "3.up_proj.weight": "3.w3.weight",
    }  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((DEMO / "calibration.txt").read_text(encoding="utf-8")[:9000], encoding="utf-8")
    return str(path)


Calibrate = Callable[..., Path]


@pytest.fixture
def calibrated(text: str, tmp_path: Path) -> Calibrate:
    def made(model: Path, **options: Any) -> Path:
        chosen = api.CalibrateOptions(samples=2, seq_len=32, batch_size=1, kv_cache="fp8", **options)
        return api.calibrate(str(model), text, tmp_path / f"run-{len(options)}", options=chosen).root

    return made


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("Qwen3_5TextConfig", {"linear_attn.in_proj_a", "linear_attn.in_proj_b"}),
        pytest.param("OlmoHybridConfig", {"linear_attn.a_proj", "linear_attn.b_proj"}, marks=pytest.mark.slow),
        pytest.param("NemotronHConfig", set(), marks=pytest.mark.slow),
        pytest.param("FalconH1Config", set(), marks=pytest.mark.slow),
        pytest.param(
            "DeepseekV32Config",
            {"self_attn.indexer.weights_proj", "self_attn.indexer.wk", "self_attn.indexer.wq_b"},
            marks=pytest.mark.slow,
        ),
    ],
)
@torch.no_grad()
def test_a_hybrid_is_calibrated_streamed_and_run(
    name: str, kept: set[str], calibrated: Calibrate, tmp_path: Path
) -> None:
    """Its gates and its indexer stay; streaming gives the same statistics; the FP8 model is near the original."""
    model = random_checkpoint(tmp_path / "model", name)
    run = calibrated(model)
    scales = json.loads((run / "scales.json").read_text(encoding="utf-8"))
    gates = {
        m.split(".", 3)[3] for m, skipped in scales["skipped"].items() if skipped["reason"].startswith(("rec", "ind"))
    }
    assert gates == kept
    assert len(scales["weights"]) >= 10
    streamed = calibrated(model, stream=True)
    statistics = [load_file(path / "statistics.safetensors") for path in (run, streamed)]
    assert statistics[0].keys() == statistics[1].keys()
    assert all(torch.equal(tensor, statistics[1][name]) for name, tensor in statistics[0].items())
    assert "more than keys and values" in str(Run(run).without_graph())
    reference = load_reference(run / "model", "exact", torch.float32)
    logits = reference.model(input_ids=IDS, past_key_values=reference.new_cache(), use_cache=True).logits
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(input_ids=IDS).logits
    assert (logits - original).norm() < 0.5 * original.norm()


@pytest.mark.slow
def test_experts_without_a_gate_get_codes_that_transformers_loads(calibrated: Calibrate, tmp_path: Path) -> None:
    """Nemotron 3's kind, rounded by GPTQ: two weights an expert, under the names of its files."""
    run = calibrated(random_of(tmp_path / "model", *WITHOUT_GATE), weight_rounding="gptq")
    weights = json.loads((run / "scales.json").read_text(encoding="utf-8"))["weights"]
    experts = {name for name in weights if ".experts." in name}
    assert experts == {
        f"model.layers.1.mixer.experts.{expert}.{gemm}" for expert in range(4) for gemm in ("up_proj", "down_proj")
    }
    assert "more than keys and values" in str(Run(run).without_graph())
    stored = {
        name: tensor for file in (run / "model").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert stored["backbone.layers.1.mixer.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    loading: Any = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.bfloat16, output_loading_info=True)
    loaded, info = loading
    assert not [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[kind]]
    reference = load_reference(run / "model", "exact", torch.float32)
    with torch.no_grad():
        logits = reference.model(input_ids=IDS, past_key_values=reference.new_cache(), use_cache=True).logits
        theirs = loaded(input_ids=IDS).logits.float()
    assert (logits - theirs).norm() < 0.1 * theirs.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3_5TextConfig", "DeepseekV32Config"])
def test_every_command_without_a_graph_goes_over_a_hybrid(name: str, calibrated: Calibrate, tmp_path: Path) -> None:
    """As served too: token by token over a cache with states. A report writes text, a check-up looks for loops."""
    run = calibrated(random_checkpoint(tmp_path / "model", name), weight_rounding="gptq")
    options = api.ValidateOptions(runtimes=("bf16", "reference"), context=32, max_tokens=128)
    accuracy = api.validate(run, str(DEMO / "evaluation.txt"), options)
    assert {"bf16", "reference"} <= accuracy.runtimes.keys()
    assert api.sensitivity(run, api.SensitivityOptions()).modules
    assert api.doctor(run, api.DoctorOptions()).checks
    assert all(path.is_file() for path in api.report(run))
