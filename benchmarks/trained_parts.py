"""What each part of a hybrid or a mixture costs alone in FP8, where its weights are trained.

    python benchmarks/trained_parts.py [--steps 700] [--names Lfm2ForCausalLM] [--save trained_parts]

The small models of `published_classes` (two layers or so of width 64) learn the source of Python's standard library, as
the demo did, for some minutes each in FP32, and are stored in BF16. They are calibrated on the demo's calibration text
by default, and each part alone computes in FP8, all else in FP32: KL(BF16 || FP8) in nats, with half of its 95 %
interval over windows, and perplexity on the demo's evaluation text, which none of this saw. Gates, indexers and routers
stay in BF16 by default; here they are in FP8, by a scale for each channel and each token.

Prints one JSON line. Small models that learned little: the order of the parts is what they tell.
"""

import os
import runpy
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from fitting import fit
from published_classes import DEMO, checkpoint, parts_in_fp8, standing_in
from result import arguments, described, publish
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from transformers import AutoTokenizer

from fp8q.api import CalibrateOptions, calibrate
from fp8q.calibrate.input.silence import quiet_transformers
from fp8q.core.reporter import SILENT

#: The classes that are trained, by what they are made of. States of Kimi Linear and of lightning attention take
#: seconds a step in plain torch.
CLASSES = {
    "attention and experts": "MiniMaxM2ForCausalLM",
    "Mamba-2, attention and experts": "GraniteMoeHybridForCausalLM",
    "gated delta nets, attention and experts": "Qwen3_5MoeForConditionalGeneration",
    "gated delta nets and attention": "Qwen3_5ForConditionalGeneration",
    "convolutions and attention": "Lfm2ForCausalLM",
}
WINDOW, BATCH, RATE = 64, 16, 4e-3
#: Of the library's files, every third is learned from.
FILES = 3
EVALUATED = 64
Figures = dict[str, Any]


def token_ids(name: str, path: Path) -> torch.Tensor:
    """The tokens of a text of the demo."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids: Any = tokenizer((DEMO / f"{name}.txt").read_text(encoding="utf-8"), return_tensors="pt", verbose=False)
    return torch.as_tensor(ids["input_ids"][0])


def library_ids(path: Path) -> torch.Tensor:
    """The tokens of Python's standard library, one file in three, without those that the demo's texts are of."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = runpy.run_path(str(DEMO / "train.py"))["Texts"].read().training
    parts: Any = tokenizer([text for _, text in texts[::FILES]], verbose=False)["input_ids"]
    return torch.tensor([token for ids in parts for token in ids])


def learn(name: str, path: Path, steps: int) -> None:
    """Train the checkpoint at `path`, and store it again."""
    ids = library_ids(path)
    model = getattr(transformers, name).from_pretrained(path, dtype=torch.float32)

    def drawn(draw: torch.Generator) -> dict[str, torch.Tensor]:
        starts = torch.randint(len(ids) - WINDOW, (BATCH, 1), generator=draw)
        windows = ids[starts + torch.arange(WINDOW)]
        return {"input_ids": windows, "labels": windows}

    fit(model, drawn, steps, RATE)
    model.to(torch.bfloat16).save_pretrained(path)


@torch.no_grad()
def log_p_of(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """The log probabilities behind each token, float64 [windows, positions, vocabulary]."""
    return torch.cat(
        [model(input_ids=part, use_cache=False).logits.double().log_softmax(-1) for part in windows.split(8)]
    )


def lost(log_p: torch.Tensor, expected: torch.Tensor, windows: torch.Tensor) -> Figures:
    """KL in nats from `expected` with half of its interval, and the perplexity."""
    by_window = kl_div(log_p, expected, log_target=True, reduction="none").sum(-1).mean(1).numpy()
    loss = cross_entropy(log_p[:, :-1].flatten(0, 1), windows[:, 1:].flatten())
    half = 1.96 * np.std(by_window, ddof=1) / len(by_window) ** 0.5
    return {"kl": float(by_window.mean()), "half_interval": float(half), "perplexity": float(loss.exp())}


def measured(name: str, steps: int, folder: Path) -> Figures:
    """Train, calibrate, and measure the parts of one class."""
    path = checkpoint(folder / "model", name)
    learn(name, path, steps)
    options = CalibrateOptions(samples=64, seq_len=WINDOW)
    text = str(DEMO / "calibration.txt")
    run = calibrate(str(path), text, folder / "run", options=options, graph=False, progress=SILENT)
    original, parts = parts_in_fp8(run, path)
    ids = token_ids("evaluation", path)
    windows = ids[: EVALUATED * WINDOW].view(EVALUATED, WINDOW)
    expected = log_p_of(original, windows)
    figures: Figures = {"bf16": {"perplexity": lost(expected, expected, windows)["perplexity"]}}
    for part, layers in parts.items():
        with standing_in(original, layers):
            figures[part] = lost(log_p_of(original, windows), expected, windows) | {"gemms": len(layers)}
    every = {layer: module for part in parts.values() for layer, module in part.items()}
    with standing_in(original, every):
        figures["all"] = lost(log_p_of(original, windows), expected, windows) | {"gemms": len(every)}
    print(f"{name}: {figures}", file=sys.stderr, flush=True)
    return figures


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=700, help="steps of training")
    parser.add_argument("--names", help="only these classes, with commas between")
    asked = parser.parse_args()
    head = described("trained_parts")
    warnings.simplefilter("ignore")
    wanted = asked.names.split(",") if asked.names else [*CLASSES.values()]
    results: dict[str, Figures] = {}
    with quiet_transformers():
        for name in wanted:
            with tempfile.TemporaryDirectory() as folder:
                results[name] = measured(name, asked.steps, Path(folder))
    return publish(head, {"made_of": CLASSES, "steps": asked.steps, "results": results}, asked.save)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
