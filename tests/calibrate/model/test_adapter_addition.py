"""A base with its adapter, merged or beside, is what PEFT makes of the two."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity
from fp8q.calibrate.measure.stream import measure_streamed
from fp8q.calibrate.model.adapter_addition import add_lora_output
from fp8q.calibrate.model.adapter_base import with_adapters
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.reporter import SILENT

IDS = torch.arange(2 * 24).view(2, 24) * 7 % 2000
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def adapter(demo_checkpoint: Path, made_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of every GEMM of the demo, with ranks and alphas of single modules' own."""
    return made_adapter(
        demo_checkpoint, tmp_path_factory.mktemp("adapter") / "every", r=8, lora_alpha=24, target_modules=EVERY,
        rank_pattern={"v_proj": 3, r"layers\.1\.mlp\.down_proj": 5}, alpha_pattern={"q_proj": 5}, use_rslora=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def source(demo_checkpoint: Path) -> Source:
    return open_source(str(demo_checkpoint))


def of_peft(base: Path, adapter: Path) -> peft.PeftModel:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter).eval()


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def test_beside_by_hand() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [5.0]])
    found = add_lora_output(torch.tensor([[100.0, 200.0]]), torch.tensor([[10.0, 1.0]]), a, b, 0.5)
    # A x = 12, s A x = 6, B s A x = 18, 30
    assert found.tolist() == [[118.0, 230.0]]


def test_beside_the_base_it_computes_what_peft_computes(source: Source, demo_checkpoint: Path, adapter: Path) -> None:
    both = with_adapters(source, [adapter], "beside")
    alone, on = (logits(load_model(variant, torch.float32)) for variant in both.variants)
    torch.testing.assert_close(on, logits(of_peft(demo_checkpoint, adapter)), atol=2e-4, rtol=1e-4)
    assert float((on - alone).abs().max()) > 0.5


def test_merged_weights_are_pefts_rounded_once(source: Source, demo_checkpoint: Path, adapter: Path) -> None:
    merged = with_adapters(source, [adapter], "merge").weights()
    theirs = of_peft(demo_checkpoint, adapter).merge_and_unload().state_dict()
    for name in merged.names():
        ours, wanted = merged.tensor(name), theirs[name].to(torch.bfloat16)
        assert ours.dtype == torch.bfloat16
        # sums in FP32 may differ in their last bit, and so round the other way where they lie between two numbers
        assert float((ours != wanted).float().mean()) < 1e-3, name
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=2**-7, atol=1e-7)


def test_merged_into_a_checkpoint_in_fp32_nothing_is_rounded(
    demo_checkpoint: Path, adapter: Path, tmp_path: Path
) -> None:
    from fp8q.calibrate.checkpoint.companions import companions

    AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.float32).save_pretrained(tmp_path)
    for path in companions(demo_checkpoint):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    both = with_adapters(open_source(str(tmp_path)), [adapter], "merge")
    ours = load_model(both, torch.float32).state_dict()
    for name, wanted in of_peft(tmp_path, adapter).merge_and_unload().state_dict().items():
        torch.testing.assert_close(ours[name], wanted, rtol=1e-6, atol=1e-7)


def test_a_conv1d_takes_its_sum_the_other_way_round(
    shared_checkpoint: Callable[[str], Path], made_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    base = shared_checkpoint("gpt2")
    adapter = made_adapter(base, tmp_path / "adapter", r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    source, theirs = open_source(str(base)), of_peft(base, adapter)
    on = with_adapters(source, [adapter], "beside").variants[1]
    torch.testing.assert_close(logits(load_model(on, torch.float32)), logits(theirs), atol=2e-4, rtol=1e-4)
    merged = load_model(with_adapters(source, [adapter], "merge"), torch.float32).state_dict()
    for name, wanted in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], wanted, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("mode", ["merge", "beside"])
def test_layer_by_layer_it_is_measured_as_in_memory(source: Source, adapter: Path, mode: str, tmp_path: Path) -> None:
    adapted = with_adapters(source, [adapter], mode).variants[-1]  # type: ignore[arg-type]  # one of the two
    identity = ModelIdentity(name="demo", architecture=source.architecture, fingerprint=source.fingerprint)
    corpus = Corpus(name="t", fingerprint="t", windows=2, seq_len=24, batch_size=1)
    what = Measurement(IDS.numpy(), identity, corpus)
    whole = measure_in_memory(load_model(adapted, torch.bfloat16), what, SILENT)
    streamed = measure_streamed(adapted, what, SILENT, tmp_path)
    alone = measure_in_memory(load_model(source, torch.bfloat16), what, SILENT)
    assert whole.tensors.keys() == streamed.tensors.keys()
    for name, tensor in whole.tensors.items():
        for one, other in (
            (tensor.histogram.counts, streamed.tensors[name].histogram.counts),
            (tensor.amax_channels, streamed.tensors[name].amax_channels),
        ):
            np.testing.assert_array_equal(one, other)
    assert any(
        not np.array_equal(tensor.amax_channels, alone.tensors[name].amax_channels)
        for name, tensor in whole.tensors.items()
    )
    same = {name for name, amax in whole.weights.items() if np.array_equal(amax, alone.weights[name])}
    assert same == (set() if mode == "merge" else set(whole.weights))


def test_all_that_were_on_are_added(source: Source, adapter: Path) -> None:
    identity = ModelIdentity(name="demo", architecture=source.architecture, fingerprint=source.fingerprint)
    corpus = Corpus(name="t", fingerprint="t", windows=2, seq_len=24, batch_size=1)
    both = with_adapters(source, [adapter], "beside")
    base, on = (
        measure_in_memory(load_model(variant, torch.bfloat16), Measurement(IDS.numpy(), identity, corpus), SILENT)
        for variant in both.variants
    )
    added = base.with_variant(both.adapters[0], on)
    assert added.record.tokens == 96
    assert added.record.model.adapters == {"every": both.adapters[0].fingerprint}
    for name, tensor in added.tensors.items():
        assert tensor.histogram.counts.sum() == 2 * base.tensors[name].histogram.counts.sum()
        np.testing.assert_array_equal(
            tensor.amax_batches, np.maximum(base.tensors[name].amax_batches, on.tensors[name].amax_batches)
        )
    assert replace(added, record=base.record).weights == base.weights
