"""Models whose vision tower is stored in another form than transformers computes in: its queries, keys and values as
one tensor, and in another order. Text does not reach it, and the run's checkpoint has it as the source has.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from fp8q import api
from fp8q.calibrate.model.classes import non_text_modules
from fp8q.core.errors import InputError
from fp8q.core.files import RESTORE
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import load_reference

from ..conftest import Texts

pytestmark = pytest.mark.slow

TEXT = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
#: A configuration of transformers, its fields, and a tensor of its files that makes several of the model's.
TOWERS: dict[str, tuple[dict[str, Any], str]] = {
    "Step3p7Config": (
        {
            "text_config": TEXT | {"mlp_layer_types": ["dense", "dense"], "sliding_window": 8},
            "vision_config": TOWER | {"mlp_ratio": 1.5},
            "image_token_id": 3,
        },
        "vision_model.transformer.resblocks.0.attn.in_proj_weight",
    ),
    "QianfanOCRConfig": (
        {"text_config": TEXT, "vision_config": TOWER | {"image_size": [32, 32], "patch_size": [8, 8]},
         "image_token_id": 3},
        "vision_model.encoder.layers.0.attn.qkv.weight",
    ),
}  # fmt: skip


def write_source(path: Path, name: str, tokenizer: Path) -> Path:
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    config = getattr(transformers, name)(**TOWERS[name][0])
    model = AutoModelForMultimodalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.1)
    model.save_pretrained(path)
    shutil.copyfile(tokenizer / "tokenizer.json", path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return path


@pytest.mark.parametrize("name", TOWERS)
def test_the_tower_has_transformers_own_values_and_the_run_validates(
    name: str, demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path
) -> None:
    source, stored = write_source(tmp_path / "source", name, demo_checkpoint), TOWERS[name][1]
    texts = []
    for text in (demo_texts.calibration, demo_texts.evaluation):
        texts.append(tmp_path / text.name)
        texts[-1].write_text(text.read_text(encoding="utf-8")[:6_000], encoding="utf-8")
    settings: dict[str, Any] = {"samples": 4, "seq_len": 48, "graph": False, "progress": SILENT}
    run: Run = api.calibrate(source, texts[0], tmp_path / "run", texts[1], **settings)
    accuracy = api.validate(run.root, max_tokens=192, progress=SILENT)
    assert accuracy.verdict is not None
    assert 0 < (accuracy.verdict.kl_nats or 0.0) < 0.2

    reference = load_reference(run.model, "fast", torch.bfloat16).model
    whole = AutoModelForMultimodalLM.from_pretrained(source, dtype=torch.bfloat16)
    expected = {
        f"{place}.{key}": parameter
        for place, module in non_text_modules(whole).items()
        for key, parameter in module.named_parameters(recurse=False)
    }
    assert any("q_proj" in key for key in expected)
    held = dict(reference.named_parameters())
    assert [key for key, parameter in expected.items() if not torch.equal(held[key], parameter)] == []

    index = run.model / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))
    shard = run.model / listed["weight_map"].pop(stored)
    save_file({key: tensor for key, tensor in load_file(shard).items() if key != stored}, shard)
    index.write_text(json.dumps(listed), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_reference(run.model, "fast", torch.bfloat16)
    first = next(key for key in expected if ".0." in key and "q_proj.weight" in key)
    lost = str(refused.value).split(" holds no ")[1].split(",")[0]
    assert lost.rpartition(".layers.0.")[0] == first.rpartition(".layers.0.")[0]
    assert str(refused.value) == f"{run.model}: holds no {lost}, which {type(whole).__name__} has; {RESTORE}"
