"""The architectures that are tested, and what each is made of: for the folders of tests that go through all of them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8q.options import KvCache, Terms

TINY = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One case: a trained checkpoint beside the repository, or where `fields` are given a tiny random one of
    transformers' class `config`. Seven take their activations in two `terms`; what each makes of the other number is in
    `benchmarks/architectures.py`, and of the random ones in `benchmarks/unseen_architectures.py`.
    """

    name: str
    what: str
    kv_cache: KvCache
    dtype: Literal["bf16", "fp16"] = "bf16"
    config: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    text: str = "python"
    terms: Terms = 1
    kinds: int = 1  # of layers, in turn

    @property
    def trained(self) -> bool:
        """Whether perplexity means anything."""
        return not self.config


ARCHITECTURES = [
    Architecture("llama", "tied head, cache in the compute type, graph in FP16", "off", "fp16", terms=2),
    Architecture("qwen2", "q/k/v biases", "fp8"),
    Architecture("opt", "as many KV heads as heads, learned positions", "fp8", terms=2),
    Architecture("gemma", "scaled embeddings, wide heads", "off"),
    Architecture("gpt2", "Conv1D, fused q/k/v without rotary embedding, learned positions", "fp8", terms=2),
    Architecture("stories260k", "heads too small for a fused attention kernel", "fp8", text="tinystories"),
    Architecture(
        "mistral",
        "a window shorter than the text",
        "fp8",
        terms=2,
        config="MistralConfig",
        fields={"num_key_value_heads": 2, "sliding_window": 4},
    ),
    Architecture(
        "gemma2",
        "capped logits, windows in every other layer",
        "fp8",
        config="Gemma2Config",
        kinds=2,
        # caps that are felt: by default they are far beyond what random weights give
        fields={
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "pad_token_id": 0,
        },
    ),
    Architecture(
        "qwen3",
        "q/k norms, heads wider than the model",
        "off",
        terms=2,
        config="Qwen3Config",
        fields={"num_key_value_heads": 2, "head_dim": 48},
    ),
    Architecture(
        "gpt_neox",
        "fused q/k/v, partial rotary embedding, a head stored under another name",
        "fp8",
        terms=2,
        config="GPTNeoXConfig",
    ),
    Architecture(
        "phi3",
        "fused q/k/v and gate/up",
        "fp8",
        terms=2,
        config="Phi3Config",
        fields={"num_key_value_heads": 2, "pad_token_id": 0},
    ),
]


@pytest.fixture(scope="session")
def random_checkpoint(demo_checkpoint: Path) -> Callable[..., Path]:
    """`random_checkpoint(path, "Phi3Config", {…})`: write a tiny one in BF16, its values spread as trained ones are
    (norms around 1), with the demo's tokenizer.
    """

    def write(path: Path, config: str, fields: dict[str, Any]) -> Path:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**(TINY | fields)))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.1)
        torch.nn.Module.to(model, torch.bfloat16).save_pretrained(path)
        shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
        # of no class of the architecture's own, which would want other files, or tokens
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def texts(
    tmp_path_factory: pytest.TempPathFactory, shared_data: Callable[[str], Path]
) -> Callable[[str], tuple[Path, Path]]:
    """`texts("python")`: a calibration and an evaluation text of a few thousand tokens."""
    folder = tmp_path_factory.mktemp("texts")
    sources = {
        "python": ("python-calibration.txt", "python-evaluation.txt"),
        "tinystories": ("tinystories-train-1000.txt", "tinystories-valid-excerpt.txt"),
    }

    def cut(kind: str) -> tuple[Path, Path]:
        paths = folder / f"{kind}-calibration.txt", folder / f"{kind}-evaluation.txt"
        for path, source, size in zip(paths, sources[kind], (24_000, 8_000), strict=True):
            path.write_text(shared_data(source).read_text(encoding="utf-8")[:size], encoding="utf-8")
        return paths

    return cut
