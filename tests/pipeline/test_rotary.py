"""Rotary frequencies that transformers stretches: computed once (`yarn`), or changed beyond some length (`dynamic`,
`longrope`). A graph holds those up to that length, and says where it ends.
"""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8q.calibrate.model.source import open_source
from fp8q.export.modules.replaced_attention import fix_frequencies
from fp8q.serve.loop.text import Vocabulary

from ..command_result import Result
from ..conftest import Texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unseen() -> ModuleType:
    return importlib.import_module("unseen_architectures")


@pytest.mark.parametrize("config", ["LlamaConfig-yarn", "LlamaConfig-dynamic", "Phi3Config-longrope"])
def test_the_graph_says_what_eager_attention_says(config: str, unseen: ModuleType, tmp_path: Path) -> None:
    assert unseen.graph_alone(config, tmp_path)["graph_difference"] < unseen.LIMIT


@pytest.mark.parametrize(
    ("config", "positions", "served"),
    [
        ("LlamaConfig-yarn", 128, 128),
        ("LlamaConfig-dynamic", 128, 128),
        ("Phi3Config-longrope", 128, 64),
        ("LlamaConfig", 128, 128),
    ],
)
def test_a_graph_is_served_as_long_as_its_frequencies_are_right(
    config: str, positions: int, served: int, unseen: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to there transformers' logits are the same, bit for bit; of one token more those that change are others."""
    monkeypatch.setitem(unseen.CONFIGURATIONS, "LlamaConfig", unseen.CONFIGURATIONS["ArceeConfig"])
    path = unseen.random_checkpoint(tmp_path / "model", config)
    source = open_source(str(path))
    assert (source.max_positions, source.served_positions) == (positions, served)
    ids = torch.arange(2, served + 3)[None]
    logits = []
    for fixed in (False, True):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if fixed:
            fix_frequencies(model)
        with torch.inference_mode():
            logits.append([model(input_ids=ids[:, :length]).logits for length in (served, served + 1)])
    (within, beyond), (fixed_within, fixed_beyond) = logits
    assert torch.equal(within, fixed_within)
    assert torch.equal(beyond, fixed_beyond) == config.endswith(("yarn", "LlamaConfig"))


def test_a_longer_text_than_that_is_refused(
    fp8q: Callable[..., Result], unseen: ModuleType, demo_texts: Texts, tmp_path: Path
) -> None:
    """By whatever runs the graph; the model's own number of positions stays in config.json, since its attention factor
    follows from it.
    """
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(demo_texts.calibration.read_text(encoding="utf-8")[:12_000], encoding="utf-8")
    model = unseen.random_checkpoint(tmp_path / "model", "Phi3Config-longrope")
    told = fp8q("calibrate", model, "--data", text, "--out", run, "--samples", "4", "--seq-len", "48")
    assert told.code == 0
    said = "graph and engine serve texts of up to 64 positions, whose rotary frequencies they hold"
    assert said in told.err
    assert said[1:] in (run / "model" / "README.md").read_text(encoding="utf-8")
    config = json.loads((run / "model" / "config.json").read_text(encoding="utf-8"))
    assert (config["max_position_embeddings"], config["fp8q"]) == (128, {"positions": 64})
    assert Vocabulary.read(run / "model").positions == 64
    beyond = "is more than 64, the model's positions; ask for at most that, or leave it out"
    assert fp8q("build-engine", run, "--max-seq-len", "65").complaint() == f"--max-seq-len 65: {beyond}"
    assert fp8q("validate", run, "--context", "65").complaint() == f"--context 65: {beyond}"
    told = fp8q("generate", run, "--prompt", "def " * 100, "--max-tokens", "4")
    assert told.code == 2
    assert "positions" in told.err
    assert "64" in told.err
