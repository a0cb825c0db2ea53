"""Streaming layer by layer: the statistics of the model in memory, whatever the architecture; goes on when killed; leaves nothing behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8q.calibrate.measure import measure
from fp8q.calibrate.memory import SHARE, weight_bytes
from fp8q.calibrate.source import Source, load_model, open_source
from fp8q.calibrate.statistics import Corpus, ModelIdentity, Statistics, load_arrays
from fp8q.calibrate.stream import HiddenStates, Stream, measure_streamed
from fp8q.errors import InputError
from fp8q.options import CalibrateOptions
from fp8q.progress import SILENT
from fp8q.run import Run
from fp8q.stages import Notes, measure as measure_stage, save_tokens, streamed

IDENTITY = ModelIdentity(name="model", architecture="any", fingerprint="0")
#: The last batch is smaller than the others: a shape of its own.
CORPUS = Corpus(name="random tokens", fingerprint="0", windows=5, seq_len=24, batch_size=2)
WINDOWS = np.random.default_rng(0).integers(3, 500, (5, 24))
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64}
#: Architecture -> its configuration's class and what makes it differ from a Llama.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral with a window shorter than the text": ("MistralConfig", SMALL | {"num_key_value_heads": 2, "sliding_window": 8}),
    "qwen3 with two layers of full and one of sliding attention": (
        "Qwen3Config",
        SMALL | {"num_key_value_heads": 2, "head_dim": 24, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "gemma2 alternating windows, softcapping": ("Gemma2Config", SMALL | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}),
    "gemma3 with two rotary bases": ("Gemma3TextConfig", SMALL | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}),
    "gpt-neox": ("GPTNeoXConfig", SMALL),
    "phi3": ("Phi3Config", SMALL | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "olmo2": ("Olmo2Config", SMALL | {"pad_token_id": 0}),
    "falcon with alibi, layers that return tuples": ("FalconConfig", {**SMALL, "ffn_hidden_size": 96, "alibi": True, "new_decoder_architecture": False}),
    "gpt-j with rotary tables in its layers": ("GPTJConfig", {"vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 64}),
    "opt with projections before and after its layers": (
        "OPTConfig",
        {"vocab_size": 512, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    ),
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path, demo_checkpoint: Path) -> Callable[..., Path]:
    """`tiny("PhiConfig", {…})`: the directory of a small random checkpoint of that configuration, in BF16, with the demo's tokenizer."""

    def make(config: str, fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Path:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        path = tmp_path / "model"
        model.to(dtype).save_pretrained(path)
        shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
        return path

    return make


def in_memory(source: Source) -> Statistics:
    return measure(load_model(source, torch.bfloat16), WINDOWS, IDENTITY, CORPUS, SILENT)


def streaming(source: Source, folder: Path, **options: Any) -> Statistics:
    folder.mkdir(exist_ok=True)
    return measure_streamed(source, WINDOWS, IDENTITY, CORPUS, SILENT, folder, **options)


def assert_same(streamed: Statistics, expected: Statistics) -> None:
    """Bit for bit: NaN equals NaN, 0.0 is not -0.0."""
    assert streamed.record == expected.record
    assert streamed.tensors.keys() == expected.tensors.keys()
    assert len(expected.tensors) >= 6
    for name, tensor in expected.tensors.items():
        assert streamed.tensors[name].histogram == tensor.histogram, name
        assert streamed.tensors[name].amax_batches.tobytes() == tensor.amax_batches.tobytes(), name
        assert streamed.tensors[name].amax_channels.tobytes() == tensor.amax_channels.tobytes(), name
    assert list(streamed.weights) == list(expected.weights)
    for name, amax in expected.weights.items():
        assert streamed.weights[name].tobytes() == amax.tobytes(), name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_gives_the_statistics_of_the_model_in_memory(name: str, tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = open_source(str(tiny(*ARCHITECTURES[name])))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "opt"])
def test_trained_checkpoints_give_the_statistics_of_the_model_in_memory(name: str, shared_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = open_source(str(shared_checkpoint(name)))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_checkpoint_of_another_type_is_cast_as_in_memory(dtype: torch.dtype, tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = open_source(str(tiny("LlamaConfig", SMALL | {"tie_word_embeddings": True}, dtype)))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


def test_some_of_the_batches_add_up_to_all_of_them(demo_checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(str(demo_checkpoint))
    parts = [streaming(source, tmp_path / f"work{part}", batches=batches) for part, batches in enumerate(([2], [1, 0]))]
    assert_same(parts[0].merge(parts[1]), in_memory(source))
