"""A head under a tie is written so that every loader, each by its own rule, reads the model that was measured."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from fp8q.calibrate.model.source import Source, open_source
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.quantize.checkpoint.baselines import write_bf16
from fp8q.quantize.checkpoint.ties import ties_of
from fp8q.quantize.reference.fp8_model import load_reference

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

Calibrated = Callable[[Run, Source, Path, CalibrateOptions], None]


def tied(path: Path, demo_checkpoint: Path, case: str) -> Source:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
    tensors = load_file(path / "model.safetensors")
    embedding = tensors[EMBEDDING]
    if case == "a head of its own":
        tensors[HEAD] = torch.randn_like(embedding)
    elif case == "a head alone":
        tensors[HEAD] = tensors.pop(EMBEDDING)
    elif case == "both, equal":
        tensors[HEAD] = embedding.clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return open_source(str(path))


@pytest.mark.parametrize("case", ["a head of its own", "a head alone", "both, equal", "an embedding alone"])
def test_all_read_the_model_that_was_measured(
    tmp_path: Path, demo_checkpoint: Path, calibrated: Calibrated, data: Path, case: str
) -> None:
    source, run = tied(tmp_path / "source", demo_checkpoint, case), Run(tmp_path / "run")
    calibrated(run, source, data, CalibrateOptions(samples=2, seq_len=32))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.bfloat16).state_dict()
    write_bf16(source, tmp_path / "bf16", SILENT)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16).state_dict()
    reference = load_reference(run.model, "fast", torch.bfloat16).model.state_dict()
    for name in (HEAD, EMBEDDING):
        assert torch.equal(loaded[name], theirs[name])
        assert torch.equal(reference[name], theirs[name])
    for directory in (run.model, tmp_path / "bf16"):  # as vLLM reads them: of a tied model the embedding alone
        stored = {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}
        ties = json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
        assert torch.equal(stored[EMBEDDING], theirs[EMBEDDING])
        assert torch.equal(stored[EMBEDDING if ties else HEAD], theirs[HEAD])


def test_what_is_changed_is_said(tmp_path: Path, demo_checkpoint: Path) -> None:
    remarks = {
        case: ties_of(tied(tmp_path / case, demo_checkpoint, case)).remark
        for case in ("a head of its own", "a head alone", "both, equal", "an embedding alone")
    }
    assert remarks == {
        "a head of its own": (
            "lm_head.weight: is not model.embed_tokens.weight, and config.json ties both; transformers takes each as "
            "it is, vLLM the embedding for both: model/config.json says tie_word_embeddings false, by which all take "
            "each"
        ),
        "a head alone": (
            "lm_head.weight: is there without model.embed_tokens.weight, to which config.json ties it; it is written "
            "as model.embed_tokens.weight, which all loaders read"
        ),
        "both, equal": None,
        "an embedding alone": None,
    }
