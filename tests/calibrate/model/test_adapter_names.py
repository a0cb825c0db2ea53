"""Adapters on single experts under the names that the base's files have."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8q.calibrate.model.adapter_base import with_adapters
from fp8q.calibrate.model.source import Source, open_source
from fp8q.core.errors import InputError

from ...mixtures import random_mixture

#: Two modules of a Mixtral's first layer as its files call them, and as its class does where experts are apart.
W1, W2 = (f"model.layers.0.block_sparse_moe.experts.1.{name}" for name in ("w1", "w2"))
GATE = "model.layers.0.mlp.experts.1.gate_proj"


def adapter(folder: Path, modules: dict[str, tuple[int, int]]) -> Path:
    """An adapter of rank 1 and alpha 2, its A of 0.5 and its B of 0.25: it adds 2 · 0.25 · 0.5 = 0.25 everywhere."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {}
    for module, (out, width) in modules.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.full((1, width), 0.5)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.full((out, 1), 0.25)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Source:
    return open_source(str(random_mixture(tmp_path / "mixtral", "mixtral")))


def test_an_expert_under_its_files_name_is_merged(base: Source, tmp_path: Path) -> None:
    merged = with_adapters(base, [adapter(tmp_path / "style", {W1: (96, 64), W2: (64, 96)})], "merge")
    for module in (W1, W2):
        before, after = (source.weights().tensor(f"{module}.weight") for source in (base, merged))
        assert torch.equal(after, (before.float() + 0.25).to(torch.bfloat16))
    other = f"{W1}.weight".replace("experts.1", "experts.0")
    assert torch.equal(merged.weights().tensor(other), base.weights().tensor(other))


def test_the_models_own_name_of_an_expert_is_the_same_module(base: Source, tmp_path: Path) -> None:
    by_model = with_adapters(base, [adapter(tmp_path / "one", {GATE: (96, 64)})], "merge")
    by_files = with_adapters(base, [adapter(tmp_path / "other", {W1: (96, 64)})], "merge")
    assert torch.equal(by_model.weights().tensor(f"{W1}.weight"), by_files.weights().tensor(f"{W1}.weight"))


def test_experts_that_the_base_stores_in_one_tensor_are_merged_too(tmp_path: Path) -> None:
    base = open_source(str(random_mixture(tmp_path / "fused", "mixtral", save_original_format=False)))
    merged = with_adapters(base, [adapter(tmp_path / "style", {W1: (96, 64)})], "merge")
    before, after = (source.weights().tensor(base.stored(f"{GATE}.weight")) for source in (base, merged))
    assert torch.equal(after, (before.float() + 0.25).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("modules", "mode", "why"),
    [
        ({W1: (96, 32)}, "merge", (f"adapts {GATE} of 32 inputs and 96 outputs, which here has 64 and 96: "
         "it is of another base than {base}; give that one")),
        ({W1: (96, 64), GATE: (96, 64)}, "merge", (f"adapts {W1} and {GATE}, which is one module of "
         "MixtralForCausalLM; take one of the two out")),
        ({W1: (96, 64)}, "beside", (f"adapts {W1} under the name that the files of {{base}} have, and "
         f"MixtralForCausalLM calls it {GATE}: beside the base it would be looked for there; "
         "merge it, with --adapter-mode merge")),
        ({W1.replace("experts.1", "experts.9"): (96, 64)}, "merge",
         (f"adapts {W1.replace('experts.1', 'experts.9')}, and MixtralForCausalLM has no such linear layer: it is of "
         "another base than {base}; give that one")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_for_what_it_is(
    base: Source, tmp_path: Path, modules: dict[str, tuple[int, int]], mode: str, why: str
) -> None:
    folder = adapter(tmp_path / "style", modules)
    with pytest.raises(InputError) as caught:
        with_adapters(base, [folder], mode)  # type: ignore[arg-type]
    assert str(caught.value) == f"{folder / 'adapter_model.safetensors'}: {why.format(base=base.name)}"
