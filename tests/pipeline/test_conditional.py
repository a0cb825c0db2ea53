"""Models that also see: the language model is measured and quantized, the rest stays as it is, and graph and engine
take text alone.
"""

import copy
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForMultimodalLM, Qwen2Config, Qwen2ForCausalLM

from fp8q import api
from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity
from fp8q.calibrate.measure.stream import measure_streamed
from fp8q.calibrate.model.skeleton import skeleton
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from tests.noise import SAME_CODES

from ..command_result import Result
from ..conftest import MadeOnce, Texts
from .other_models import SHARE, least_distance, mean_kl, other_models, sequences

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def unseen() -> ModuleType:
    return importlib.import_module("unseen_architectures")


@pytest.fixture(scope="module")
def gemma3(unseen: ModuleType, made_once: MadeOnce, demo_texts: Texts) -> Run:
    """Gemma 3 with its tower, calibrated with an FP8 cache."""

    def make(folder: Path) -> None:
        model = unseen.random_checkpoint(folder / "model", "Gemma3Config")
        (model / "preprocessor_config.json").write_text('{"size": {"height": 28, "width": 28}}', encoding="utf-8")
        text = folder / "text.txt"
        text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
        options = api.CalibrateOptions(kv_cache="fp8", samples=4, seq_len=48)
        api.calibrate(str(model), str(text), folder / "run", options=options)

    return Run(made_once("gemma3", make) / "run")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
    return tensors


def test_the_language_model_alone_is_quantized(gemma3: Run) -> None:
    scales = load_scales(gemma3)
    assert len(scales.weights) == 14
    assert {name.split(".layers.")[0] for name in scales.weights} == {"model.language_model"}
    assert set(scales.skipped) == {"lm_head"}
    assert set(scales.kv_cache) == {
        f"model.language_model.layers.{layer}.self_attn.{part}" for layer in (0, 1) for part in "kv"
    }


def test_the_tower_is_copied_byte_for_byte_and_ignored(gemma3: Run) -> None:
    before, after = stored(Path(gemma3.record().model["path"])), stored(gemma3.model)
    beside = [name for name in before if "language_model" not in name]
    assert len(beside) > 30
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in beside)
    ignored = json.loads((gemma3.model / "config.json").read_text())["quantization_config"]["ignore"]
    towers = [name for name in beside if before[name].dim() == 2 and name.endswith("proj.weight")]
    assert len(towers) == 2 * 4 + 1, "of two layers, and of the head"
    assert {f"model.{name.removesuffix('.weight')}" for name in towers} < set(ignored)
    assert not any("language_model" in name for name in ignored)
    card = (gemma3.model / "README.md").read_text(encoding="utf-8")
    assert (
        "was measured on text alone; `model.vision_tower`, `model.multi_modal_projector` stay as they were, in BF16."
        in card
    )
    assert "AutoModelForMultimodalLM.from_pretrained" in card
    assert (gemma3.model / "preprocessor_config.json").is_file()


def test_transformers_loads_it_whole_and_says_what_the_reference_says(gemma3: Run) -> None:
    """In BF16, since transformers 5.14 leaves tensors that it renames in that type, whatever type is asked for."""
    loaded: Any = AutoModelForMultimodalLM.from_pretrained(gemma3.model, output_loading_info=True)
    assert not any(loaded[1].values())
    assert type(loaded[0]).__name__ == "Gemma3ForConditionalGeneration"
    ids = torch.from_numpy(load_tokens(gemma3, gemma3.evaluation)[None, :32])
    reference = load_reference(gemma3.model, "fast", torch.bfloat16)
    with torch.inference_mode():
        theirs, ours = (
            model(input_ids=ids, past_key_values=reference.new_cache(), use_cache=True).logits.double().log_softmax(-1)
            for model in (loaded[0], reference.model)
        )
    assert float((ours.exp() * (ours - theirs)).sum(-1).mean()) < 0.05, "two roundings to BF16; a lost scale gives > 1"


def test_onnx_runtime_says_what_the_reference_says(gemma3: Run) -> None:
    """Far nearer than the model that is not quantized."""
    others, session = other_models(gemma3), OnnxRuntimeSession(gemma3.onnx_fp32)
    logits = []
    for row in sequences(gemma3):
        ids = row[None]
        positions = np.arange(len(row))[None]
        logits.append(session.forward(ids, np.ones_like(ids), positions)[0][0])
    differences = [np.abs(found - expected) for expected, found in zip(others["one term"], logits, strict=True)]
    assert min(difference[0].max() for difference in differences) < SAME_CODES
    assert mean_kl(others["one term"], logits) < SHARE * least_distance(others)


def test_it_is_built_and_answers_as_transformers_does(gemma3: Run, fp8q: Callable[..., Result], tmp_path: Path) -> None:
    """Every expected GEMM in FP8; twelve greedy tokens, prompt and decoding, through the FP8 cache."""
    run = Run(Path(shutil.copytree(gemma3.root, tmp_path / "run")))
    options = api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=48)
    api.build_engine(run.root, options)
    (view,) = api.engine(run.root)
    assert (view.promised_products, view.fp8_products) == (14, 14)
    told = fp8q("generate", run.root, "--prompt", PROMPT, "--max-tokens", "12")
    assert told.code == 0
    tokenizer = Tokenizer.from_file(str(run.model / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    reference = load_reference(run.model, "exact", torch.float32)
    model: Any = reference.model
    answer = model.generate(input_ids=ids, past_key_values=reference.new_cache(), max_new_tokens=12, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert tokenizer.decode(answer.tolist()) in told.out


def test_streamed_it_gives_the_same_statistics(unseen: ModuleType, tmp_path: Path) -> None:
    """Its tower has as many layers as its language model, and comes first."""
    source = open_source(str(unseen.random_checkpoint(tmp_path / "model", "Gemma3Config")))
    identity = ModelIdentity(name="model", architecture="any", fingerprint="0")
    corpus = Corpus(name="random tokens", fingerprint="0", windows=3, seq_len=24, batch_size=2)
    what = Measurement(np.random.default_rng(0).integers(3, 500, (3, 24)), identity, corpus)
    (tmp_path / "steps").mkdir()
    streamed = measure_streamed(source, what, SILENT, tmp_path / "steps")
    whole = measure_in_memory(load_model(source, torch.bfloat16), what, SILENT)
    assert streamed.tensors.keys() == whole.tensors.keys()
    assert len(whole.tensors) == 2 * (4 + 2)
    for name, tensor in whole.tensors.items():
        assert tensor.histogram == streamed.tensors[name].histogram, name


@pytest.mark.parametrize(
    "config",
    [
        "Qwen2VLConfig",
        "Qwen2_5_VLConfig",
        "Qwen3VLConfig",
        "Mistral3Config",
        "LlavaConfig",
        "InternVLConfig",
        "Idefics3Config",
    ],
)
def test_the_graph_says_what_eager_attention_says(config: str, unseen: ModuleType, tmp_path: Path) -> None:
    found = unseen.graph_alone(config, tmp_path)
    assert found["graph_difference"] < unseen.LIMIT


def test_a_model_that_looks_ahead_in_its_prompt_has_no_graph(unseen: ModuleType, tmp_path: Path) -> None:
    assert unseen.graph_alone("PaliGemmaConfig", tmp_path)["no_graph"] == (
        "PaliGemmaForConditionalGeneration attends to later tokens too (GemmaAttention.is_causal is False)"
    )


def test_of_text_alone_positions_of_three_sections_are_those_of_one(unseen: ModuleType, tmp_path: Path) -> None:
    """Qwen2-VL's language model with its weights in a Qwen2, whose rotary embedding has no sections."""
    seeing = AutoModelForMultimodalLM.from_pretrained(
        unseen.random_checkpoint(tmp_path / "model", "Qwen2VLConfig"), dtype=torch.float32
    )
    text = AutoConfig.from_pretrained(tmp_path / "model").text_config
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    plain = Qwen2ForCausalLM(
        Qwen2Config(
            **{field: getattr(text, field) for field in (*fields, "num_key_value_heads", "rms_norm_eps")},
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    ).eval()
    plain.model.load_state_dict(seeing.model.language_model.state_dict())
    plain.lm_head.load_state_dict(seeing.lm_head.state_dict())
    ids = torch.arange(2, 42)[None]
    with torch.inference_mode():
        assert torch.equal(seeing(input_ids=ids).logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize(
    "config", ["Gemma3Config", "Idefics3Config", "InternVLConfig", "LlavaConfig", "Mistral3Config", "Qwen2VLConfig"]
)
def test_the_buffers_of_a_tower_are_those_of_its_class(config: str, unseen: ModuleType) -> None:
    """The reference is built without transformers' loading, which computes them."""
    fields = getattr(transformers, config)(**unseen.CONFIGURATIONS[config])
    expected = AutoModelForMultimodalLM.from_config(copy.deepcopy(fields), dtype=torch.bfloat16)
    ours = dict(skeleton(fields, torch.bfloat16).named_buffers())
    for name, buffer in expected.named_buffers():
        assert torch.equal(ours[name].float(), buffer.float()), name
