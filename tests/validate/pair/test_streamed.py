"""`fp8q compare ORIGINAL --model CANDIDATE --stream`: one decoder layer of each model in memory, and the results of the
models held whole.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from published_classes import checkpoint
from safetensors.torch import load_file, save_file
from torch import nn

from fp8q import api
from fp8q.calibrate.measure.hidden_states import HiddenStates
from fp8q.calibrate.model.decoder import NoChainError, outputs_behind
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.options import ConvertOptions, PairOptions
from fp8q.validate.endpoint.transformers_loader import TransformersLoader
from fp8q.validate.pair.checkpoint_chain import CheckpointChain, LayerMatrices
from fp8q.validate.pair.document import PairComparison
from fp8q.validate.pair.module_errors import matrices
from fp8q.validate.pair.streamed import PairStream
from tests.quantize.reading.fp8_checkpoints import compressed, fine_grained
from tests.validate.pair import damaged
from tests.validate.pair.damaged import UP, quantized

Compare = Callable[..., PairComparison]
STORY = "Once upon a time there was a little girl who had a red ball. " * 40


class Killed(BaseException):
    """A process that ends here."""


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Each value of a document, by its path."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{path}.{key}")
    else:
        yield path, value


def assert_alike(streamed: PairComparison, whole: PairComparison) -> None:
    """Numbers differ by less than a thousandth, and nothing else does."""
    documents = [dict(leaves(one.model_dump(exclude={"tokens_sha256"}))) for one in (streamed, whole)]
    assert documents[0].keys() == documents[1].keys()
    for path, expected in documents[1].items():
        if isinstance(expected, float):
            assert documents[0][path] == pytest.approx(expected, rel=1e-3, abs=1e-6, nan_ok=True), path
        else:
            assert documents[0][path] == expected, path


def as_block(demo: Path, out: Path) -> object:
    """Write the form that compressed-tensors does not run here, in its last layers' inputs of width 704."""
    return api.convert(str(demo), out, ConvertOptions(form="block", layout="compressed-tensors"), SILENT)


def written(damage: damaged.Damage = lambda tensors, path: None, cache: bool = False) -> Callable[[Path, Path], object]:
    return partial(quantized, damage=damage, cache=cache)


@pytest.mark.parametrize(
    ("make", "loaded_by"),
    [
        pytest.param(written(cache=True), "transformers", id="dynamic inputs, cache in FP8"),
        pytest.param(compressed, "transformers", id="static inputs"),
        pytest.param(written(partial(damaged.as_integers, bits=8)), "transformers", id="W8A8"),
        pytest.param(written(partial(damaged.as_integers, bits=4)), "transformers", id="W4A16"),
        pytest.param(fine_grained, "fp8q", id="fp8 in blocks"),
        pytest.param(partial(fine_grained, block=None), "transformers", id="fp8, static inputs"),
        pytest.param(written(damaged.as_modelopt), "transformers", id="ModelOpt", marks=pytest.mark.quick),
        pytest.param(as_block, "fp8q", id="compressed-tensors in blocks"),
        pytest.param(written(damaged.weight_of_another_layer), "transformers", id="a weight of another layer"),
        pytest.param(written(damaged.nan_code), "transformers", id="a NaN code"),
    ],
)
@pytest.mark.slow
def test_the_results_are_those_of_the_models_in_memory(
    make: Callable[[Path, Path], object],
    loaded_by: str,
    compared_briefly: Compare,
    demo_checkpoint: Path,
    tmp_path: Path,
) -> None:
    make(demo_checkpoint, tmp_path / "candidate")
    whole = compared_briefly(out="whole", stream=False)
    assert whole.candidate.loaded_by == loaded_by
    assert_alike(compared_briefly(out="streamed", stream=True), whole)
    assert sorted(path.name for path in (tmp_path / "streamed").iterdir()) == [
        ".lock", "comparison.json", "report.html", "tokens.npz",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma", "llama", "opt", "qwen2"))],
)
def test_models_of_other_classes_are_streamed(
    name: str, shared_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """All experts of a layer are one parameter, of which one expert is zero; of others one layer is a tenth larger."""
    original = shared_checkpoint(name)
    candidate = Path(shutil.copytree(original, tmp_path / "candidate"))
    tensors = load_file(original / "model.safetensors")
    experts = name == "mixtral"
    changed = {key: (value * (0 if experts else 1.1)).to(value.dtype) for key, value in tensors.items()
               if ".1." in key and (not experts or (".layers.1." in key and ".experts.2." in key))}  # fmt: skip
    save_file(tensors | changed, candidate / "model.safetensors", {"format": "pt"})
    (text := tmp_path / "text.txt").write_text(STORY, encoding="utf-8")
    found = [
        api.compare_checkpoints(original, candidate, PairOptions(
            data=str(text), out=tmp_path / str(stream), context=64, max_tokens=660, stream=stream
        ), SILENT)
        for stream in (True, False)
    ]  # fmt: skip
    assert_alike(*found)
    assert experts or found[0].modules[0].error
    if experts:
        assert [cause.rule for cause in found[0].causes][:1] == ["expert"]


@pytest.mark.parametrize(
    "name",
    [
        "Mistral4ForCausalLM",
        pytest.param("Mistral3ForConditionalGeneration", marks=pytest.mark.slow),
        pytest.param("Qwen3_5ForConditionalGeneration", marks=pytest.mark.slow),
    ],
)
def test_classes_that_transformers_lists_among_those_that_see_are_compared(name: str, tmp_path: Path) -> None:
    """Of the same files, by the class that config.json names, whole and a layer at a time."""
    original = checkpoint(tmp_path / "model", name)
    assert type(TransformersLoader(original, "", "cpu").load()).__name__ == name
    candidate = Path(shutil.copytree(original, tmp_path / "candidate"))
    (text := tmp_path / "text.txt").write_text(STORY, encoding="utf-8")
    for stream in (False, True):
        found = api.compare_checkpoints(original, candidate, PairOptions(
            data=str(text), out=tmp_path / str(stream), context=32, max_tokens=320, module_windows=1, stream=stream
        ), SILENT)  # fmt: skip
        assert (found.candidate.loaded_by, found.notes) == ("transformers", [])
        assert abs(found.kl_nats.mean) < 1e-6
        assert found.modules[0].error == 0


def test_a_part_has_the_weights_of_the_whole_model(demo_checkpoint: Path, tmp_path: Path) -> None:
    chain = CheckpointChain(quantized(demo_checkpoint, tmp_path / "candidate"), "", "cpu")
    with chain.open_layer(1) as model:
        inside = dict(model.named_parameters())
        layer = model.get_submodule("model.layers.1")
        assert isinstance(model.get_submodule("model.layers.0"), nn.Identity)
    assert {name.rpartition("layers.")[0] for name in inside} == {"model."}
    assert {name.split(".")[2] for name in inside} == {"1"}
    stored = load_file(tmp_path / "candidate" / "model.safetensors")
    wanted = stored[f"{UP}.weight"].float() * stored[f"{UP}.weight_scale"]
    torch.testing.assert_close(layer.get_submodule("mlp.up_proj").weight, wanted.bfloat16())
    with chain.open_outside() as model:
        assert {name for name, value in model.named_parameters() if not value.is_meta} == {
            "model.embed_tokens.weight", "model.norm.weight",
        }  # fmt: skip
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight, "they are tied"


def test_weights_are_looked_up_a_layer_at_a_time(demo_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = CheckpointChain(demo_checkpoint, "", "cpu", torch.bfloat16)
    weights, asked, opened = LayerMatrices(chain), list[int](), chain.open_layer

    def counted(index: int) -> AbstractContextManager[transformers.PreTrainedModel]:
        asked.append(index)
        return opened(index)

    monkeypatch.setattr(chain, "open_layer", counted)
    assert (UP in weights, f"{UP}.more" in weights) == (True, False)
    assert {name for name, _ in weights.items()} == matrices(chain.model).keys()
    assert asked == [1, 0, 1, 2, 3], "each layer is loaded once in a pass"


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_anywhere_it_goes_on_at_the_layer_it_reached(
    at: int, compared_briefly: Compare, report: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Step 0 is the embedding, 1 to 4 are layers, stopped where a model writes its second batch; 5 follows them."""
    ran, layer, write = list[int](), PairStream._layer, HiddenStates.write

    def counted(self: PairStream, step: int) -> None:
        ran.append(step)
        layer(self, step)

    def stopping(self: HiddenStates, batch: int, hidden: torch.Tensor) -> None:
        write(self, batch, hidden)
        if batch == 1 and self.path.name.startswith("candidate") and max(ran, default=0) == at:
            raise Killed

    def stopped(self: PairStream, base: object, compared_with: object) -> None:
        raise Killed

    monkeypatch.setattr(PairStream, "_layer", counted)
    with monkeypatch.context() as once:
        once.setattr(HiddenStates, "write", stopping)
        once.setattr(PairStream, "_behind", stopped)
        with pytest.raises(Killed):
            compared_briefly(stream=True)
    assert (tmp_path / "out" / ".compare.work").is_dir()
    ran.clear()
    monkeypatch.setattr(CheckpointChain, "check", None)  # the candidate's layers have run a token each
    found = compared_briefly(stream=True, report=report)
    assert ran == list(range(max(at, 1), 5))
    assert [line for line in report.lines if "going on" in line] == (
        [f"going on at decoder layer {min(at, 4)} of 4, where an earlier call stopped"] if at > 1 else []
    )
    assert not (tmp_path / "out" / ".compare.work").exists()
    if at == 3:
        assert_alike(found, compared_briefly(out="whole", stream=False))


CHILD = """
import sys
from fp8q.api import compare_checkpoints
original, candidate, data, out = sys.argv[1:]
compare_checkpoints(original, candidate, data=data, out=out, context=64, max_tokens=660, stream=True)
"""


@pytest.mark.slow
def test_sigkill_half_way_then_the_same_results(
    demo_checkpoint: Path, demo_texts: Any, compared_briefly: Compare, tmp_path: Path
) -> None:
    expected = compared_briefly(out="whole", stream=False)
    words = [demo_checkpoint, tmp_path / "candidate", demo_texts.evaluation, tmp_path / "out"]
    command = [sys.executable, "-W", "ignore", "-c", CHILD, *map(str, words)]
    with subprocess.Popen(command) as child:
        while not [*tmp_path.glob("out/.compare.work/layers/00002.json")]:
            assert child.poll() is None, "the process ended before it was killed"
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out" / "comparison.json").exists()
    subprocess.run(command, check=True, timeout=300)
    assert_alike(compared_briefly(stream=True), expected)
    assert not (tmp_path / "out" / ".compare.work").exists()


def test_without_memory_for_both_it_streams_and_says_so(
    compared_briefly: Compare, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo has 3,475,712 weights: two models in BF16 take 4 bytes each of them."""
    monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device: 15_000_000)
    monkeypatch.setattr("fp8q.stages.compare_pair._run", None)
    assert compared_briefly(module_windows=0, report=report).modules == []
    (line,) = report.lines
    assert line == (
        "--stream: two models in BF16, or the original in FP32, take 0.0139 GB, and 80% of the memory available is "
        "0.012 GB: comparing layer by layer"
    )


def test_a_form_that_is_not_streamed_is_refused_by_its_name(compared_briefly: Compare, tmp_path: Path) -> None:
    def as_gptq(tensors: damaged.Tensors, path: Path) -> None:
        damaged.edit_json(path / "config.json", lambda fields: fields.update(
            quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}
        ))  # fmt: skip

    with pytest.raises(InputError) as refused:
        compared_briefly(as_gptq, stream=True)
    assert str(refused.value) == (
        f"--model {tmp_path / 'candidate'}: is in the form gptq, which is not compared layer by layer; "
        "give --no-stream, and memory for whole models"
    )
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_no_chain_is_refused(
    compared_briefly: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_chain(calls: object, layers: object, source: Any) -> None:
        raise NoChainError(source, "changes the hidden states between layer 0 and layer 1")

    monkeypatch.setattr("fp8q.validate.pair.checkpoint_chain.common_output", no_chain)
    with pytest.raises(InputError, match=(
        r"LlamaForCausalLM changes the hidden states between layer 0 and layer 1, so it cannot be compared layer by "
        "layer; give --no-stream, and memory for whole models"
    )):  # fmt: skip
        compared_briefly(stream=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", [damaged.renamed, damaged.disguised])
def test_what_cannot_be_loaded_is_refused_as_without_streaming(
    damage: damaged.Damage, compared_briefly: Compare, tmp_path: Path
) -> None:
    told = []
    for stream in (True, False):
        with pytest.raises(InputError) as refused:
            compared_briefly(damage, stream=stream)
        told.append(str(refused.value))
        assert not (tmp_path / "out").exists()
    assert told[0] == told[1]


Usage = namedtuple("Usage", ("total", "used", "free"))


def test_a_disk_without_room_is_refused_with_the_numbers(
    compared_briefly: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of ten windows 64 · 256 values in BF16 twice and FP32, of two for modules in BF16 twice; each in two files."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - 2_883_583, 2_883_583))
    with pytest.raises(InputError) as refused:
        compared_briefly(stream=True)
    told = str(refused.value)
    assert told.startswith("--stream: the hidden states take 2.88 MB on the disk of ")
    assert told.endswith("free some, name another directory with --out, or give a smaller --max-tokens")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_disk_that_shrinks_makes_the_batches_of_logits_smaller(
    compared_briefly: Compare, monkeypatch: pytest.MonkeyPatch, report: Any
) -> None:
    """The logits of three windows take half of the disk; those of the ten of the batch went through layers at once."""
    roomy = compared_briefly(out="roomy", stream=True)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - 8_000_000, 8_000_000))
    assert_alike(compared_briefly(out="scarce", stream=True, report=report), roomy)
    assert any(line.startswith("3 of 10 windows at a time") for line in report.lines)


def test_a_disk_that_fills_leaves_nothing(
    compared_briefly: Compare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(self: PairStream, step: int, results: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PairStream, "_save", full)
    with pytest.raises(InputError, match="no space left on the disk"):
        compared_briefly(stream=True)
    assert not (tmp_path / "out").exists()


SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
#: A configuration of transformers, and its fields: layers of several kinds, experts, a recurrence, a tower of images.
OTHER_CLASSES: dict[str, dict[str, Any]] = {
    "Gemma3Config": {
        "text_config": SMALL | KINDS,
        "vision_config": TOWER | {"image_size": 16, "patch_size": 8},
        "mm_tokens_per_image": 4,
    },
    "GPT2Config": {"vocab_size": 128, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "GptOssConfig": SMALL | KINDS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": SMALL | EXPERTS | {"num_experts": 4, "mlp_only_layers": [0]},
    "Qwen3NextConfig": SMALL | EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "DeepseekV3Config": SMALL | EXPERTS | {
        "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_layers_one_by_one_compute_the_logits_of_the_whole_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**OTHER_CLASSES[name])
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    ids, states = torch.randint(128, (2, 24)), list[torch.Tensor]()
    with torch.inference_mode():
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
        chain = CheckpointChain(tmp_path, "", "cpu")
        calls = chain.enter({0: ids.numpy()}, lambda _, entering: states.append(entering), lambda _: nullcontext(None))
        for index, call in enumerate(calls[2, 24]):
            with chain.open_layer(index) as model:
                states.append(call.run(chain.layers.modules(model)[index], states[-1], None))
        with chain.open_outside(head=True) as model:
            outputs = outputs_behind(model, chain.layers, chain.layer_output, ids, states[-1])
        torch.testing.assert_close(outputs.logits, whole(input_ids=ids, use_cache=False).logits)
