"""Streaming layer by layer: the statistics of the model in memory, whatever the architecture; goes on when killed;
leaves nothing behind.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.moments import SecondMoments
from fp8q.calibrate.measure.statistics import Statistics
from fp8q.calibrate.model.memory import SHARE, available_bytes, container_bytes, weight_bytes
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.stages.measure import streamed
from fp8q.stages.pipeline.stage import Notes

from .streams import CORPUS, IDENTITY, SMALL, WINDOWS, in_memory, streaming

#: Architecture -> its configuration's class and what makes it differ from a Llama.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral with a window shorter than the text": (
        "MistralConfig",
        SMALL | {"num_key_value_heads": 2, "sliding_window": 8},
    ),
    "qwen3 with two layers of full and one of sliding attention": (
        "Qwen3Config",
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "sliding_window": 8,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
    ),
    "gemma2 alternating windows, softcapping": (
        "Gemma2Config",
        SMALL | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    ),
    "gemma3 with two rotary bases": (
        "Gemma3TextConfig",
        SMALL | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    ),
    "gpt-neox": ("GPTNeoXConfig", SMALL),
    "phi3": ("Phi3Config", SMALL | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "olmo2": ("Olmo2Config", SMALL | {"pad_token_id": 0}),
    "falcon with alibi, layers that return tuples": (
        "FalconConfig",
        {**SMALL, "ffn_hidden_size": 96, "alibi": True, "new_decoder_architecture": False},
    ),
    "gpt-j with rotary tables in its layers": (
        "GPTJConfig",
        {"vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
    ),
    "opt with projections before and after its layers": (
        "OPTConfig",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
    ),
}


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
def test_every_architecture_gives_the_statistics_of_the_model_in_memory(
    name: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(str(tiny(*ARCHITECTURES[name])))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "opt", "gpt2"])
def test_trained_checkpoints_give_the_statistics_of_the_model_in_memory(
    name: str, shared_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = open_source(str(shared_checkpoint(name)))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_checkpoint_of_another_type_is_cast_as_in_memory(
    dtype: torch.dtype, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(str(tiny("LlamaConfig", SMALL | {"tie_word_embeddings": True}, dtype)))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


def test_some_of_the_batches_add_up_to_all_of_them(demo_checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(str(demo_checkpoint))
    parts = [streaming(source, tmp_path / f"work{part}", batches=batches) for part, batches in enumerate(([2], [1, 0]))]
    assert_same(parts[0].merge(parts[1]), in_memory(source))


def refused(source: Source, folder: Path) -> str:
    with pytest.raises(InputError) as refusal:
        streaming(source, folder)
    return str(refusal.value)


def test_a_model_without_a_list_of_layers_is_refused_by_name(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("LlamaConfig", SMALL)
    source = open_source(str(path))
    monkeypatch.setattr(transformers.LlamaModel, "__init__", _nameless(transformers.LlamaModel.__init__))
    assert refused(source, tmp_path / "work") == (
        f"{path}: LlamaForCausalLM has no list of 3 decoder layers, so it cannot be streamed layer by layer; "
        "calibrate it in memory, with --no-stream"
    )


def _nameless(init: Callable[..., None]) -> Callable[..., None]:
    def changed(self: Any, config: Any) -> None:
        init(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    return changed


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda hidden, first, ids: (hidden * 2, None), "changes the hidden states between layer 0 and layer 1"),
        (lambda hidden, first, ids: (hidden, first), "gives layer 1 more of an earlier layer than its hidden states"),
        (lambda hidden, first, ids: (hidden, ids), "gives its decoder layers more of the text than hidden states"),
    ],
)
def test_a_model_that_is_no_chain_is_refused_by_what_it_does(
    change: Callable[..., Any], what: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama whose forward pass does between its layers what some models do: scale, hand on the first layer's output,
    hand on the tokens.
    """
    path = tiny("LlamaConfig", SMALL)
    source = open_source(str(path))

    def forward(self: Any, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> None:
        hidden = self.embed_tokens(input_ids)
        embeddings = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        first, extra = None, None
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=embeddings, past_key_values=past_key_values, extra=extra)
            first = hidden if first is None else first
            hidden, extra = change(hidden, first, input_ids)

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    assert refused(source, tmp_path / "work") == (
        f"{path}: LlamaForCausalLM {what}, so it cannot be streamed layer by layer; calibrate it in memory, with "
        "--no-stream"
    )


def test_a_checkpoint_that_memory_does_not_hold_is_streamed_with_a_note(
    demo_checkpoint: Path, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(demo_checkpoint))
    size = weight_bytes(source)
    assert size == sum(2 * parameter.numel() for parameter in load_model(source, torch.bfloat16).parameters())
    for available, expected in ((int(size / SHARE) + 1, False), (int(size / SHARE) - 1, True), (None, False)):
        monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device, available=available: available)
        assert streamed(source, None, Notes(report)) is expected
        assert streamed(source, False, Notes(report)) is False
        assert streamed(source, True, Notes(report)) is True
    assert report.lines == [
        (
            "--stream: the weights take 0.00695 GB in BF16, and 80% of the memory available is 0.00695 GB: calibrating "
            "layer by layer"
        )
    ]


def test_a_containers_limit_is_what_it_leaves_and_its_caches(tmp_path: Path) -> None:
    for name, content in {
        "memory.max": "1000\n",
        "memory.current": "700\n",
        "memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n",
    }.items():
        (tmp_path / name).write_text(content)
    assert container_bytes(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert container_bytes(tmp_path) is None
    assert 0 < (available_bytes("cpu") or 0) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("name", ["opt with projections before and after its layers", "phi3"])
def test_second_moments_are_those_of_the_model_in_memory_even_when_killed(
    name: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(str(tiny(*ARCHITECTURES[name])))
    expected, folder = SecondMoments(tmp_path / "expected"), tmp_path / "work"
    measure_in_memory(
        load_model(source, torch.bfloat16), Measurement(WINDOWS, IDENTITY, CORPUS, moments=expected), SILENT
    )
    expected.close()
    streaming(source, folder, moments=SecondMoments(folder / "moments"))
    for step in sorted(folder.glob("*.safetensors"))[3:]:  # as if killed in the last layer
        step.unlink()
    streaming(source, folder, moments=SecondMoments(folder / "moments"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()}
    assert len(files) >= 3 * 4
    assert {path.name: path.read_bytes() for path in (folder / "moments").iterdir()} == files
