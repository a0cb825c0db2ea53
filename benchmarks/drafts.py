"""How many drafts does vLLM accept of a checkpoint in FP8, whose layers for multi-token prediction (MTP) are in BF16 or
in FP8 too?

    python benchmarks/drafts.py --vllm PYTHON [--prompts 32] [--tokens 64] [--steps 400] [--samples 32] [--save drafts]

`--vllm`: the interpreter of an environment with vLLM for CPUs, as `make test-elsewhere` leaves one in `.venv/vllm`. The
demo is written as GLM-4.5 and as ERNIE 4.5, with a layer that drafts and was trained here (`draft_models.py`). vLLM
drafts one token a step by it (`--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'`) in greedy
answers to prompts of 32 tokens of the demo's evaluation text, one after the other, and counts the drafts that it
accepts. Accepted drafts of the BF16 original are the ceiling, but for noise; below it stand

    calibrate …          `model/` of a run, whose layer stays in BF16
    convert …            `fp8q convert`, whose layer is in BF16, or in FP8 by `--mtp`
    random               the original with random numbers in the layer: that vLLM reads the layer at all
    …, joined in FP8     `--mtp` that also quantizes what joins embedding and hidden state, and the head of the layer
    …, by files' names   a list of modules in BF16 that has the files' names alone, where vLLM has others

An interval of a share is exact for independent drafts; the difference from the original is paired by prompts, which a
bootstrap draws. A draft changes no answer: those with drafts are counted that equal those without. vLLM has no FP8
products of experts for CPUs; they are multiplied in BF16, by their FP8 numbers. Prints one JSON line.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from draft_models import ERNIE, FAMILIES, FILE, make, text_ids
from models import DEMO
from result import arguments, described, publish
from safetensors.torch import load_file, save_file
from vllm_jobs import ask, job
from vllm_plugin import version_of

from fp8q.api import CalibrateOptions, ConvertOptions, ExportOptions, calibrate, convert
from fp8q.calibrate.checkpoint.mtp_layers import mtp_prefixes
from fp8q.quantize.conversion.rules import RULES
from fp8q.validate.accuracy.bootstrap import Bootstrap
from fp8q.validate.accuracy.share_interval import share_interval

#: Tokens of a prompt.
PROMPT = 32
BF16 = "BF16"
#: Writes a checkpoint of the source into a folder, and returns where it lies.
Write = Callable[[Path, Path], Path]


def calibrated(samples: int, *form: str) -> Write:
    """A run of `fp8q calibrate` in this form; the default one without."""

    def write(source: Path, folder: Path) -> Path:
        texts = str(DEMO / "calibration.txt"), folder, str(DEMO / "evaluation.txt")
        run = calibrate(source, *texts, CalibrateOptions(samples=samples, form=form), ExportOptions(graph=False))
        return run.model

    return write


def converted(**options: Any) -> Write:
    """`fp8q convert` with these options."""
    return lambda source, folder: convert(source, folder, ConvertOptions(**options)).path


def joined_in_fp8(source: Path, folder: Path) -> Path:
    """`fp8q convert --mtp` by a rule that does not keep what servers read in BF16 alone."""
    rules = folder.with_suffix(".toml")
    text = RULES.read_text(encoding="utf-8")
    text = text.replace('"shared_head"', '"-"').replace('"eh_proj"', '"-"').replace('"o_proj"', '"o_proj", "eh_proj"')
    rules.write_text(text, encoding="utf-8")
    return convert(source, folder, ConvertOptions(mtp=True, rules=rules)).path


def by_files_names(source: Path, folder: Path) -> Path:
    """`fp8q convert` without the names that vLLM has for modules which files call otherwise."""
    path = convert(source, folder, ConvertOptions()).path
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    layer = f"model.layers.{config['num_hidden_layers']}."
    fields = config["quantization_config"]
    fields["ignore"] = [module for module in fields["ignore"] if not module.startswith(layer)]
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return path


def random_drafts(source: Path, folder: Path) -> Path:
    """The source with random matrices in the layer that drafts, of the same size; embedding and head as they were."""
    shutil.copytree(source, folder)
    tensors, config = load_file(source / FILE), json.loads((source / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        same = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        if name.startswith(mtp_prefixes(config, tensors)) and tensor.dim() == 2 and not same:
            tensors[name] = (torch.randn(tensor.shape) * tensor.float().std()).bfloat16()
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder


def forms(family: str, samples: int) -> dict[str, tuple[Write, str]]:
    """Name -> how the checkpoint is written, and the name of a row with the same model but for drafts."""
    rows = {
        BF16: (lambda source, _: source, BF16),
        "calibrate": (calibrated(samples), "calibrate"),
        "calibrate --form dynamic": (calibrated(samples, "dynamic"), "calibrate --form dynamic"),
        "convert": (converted(), "convert"),
        "convert --mtp": (converted(mtp=True), "convert"),
        "random": (random_drafts, BF16),
    }
    if family == ERNIE:
        return rows | {"convert, by files' names": (by_files_names, "convert")}
    return rows | {
        "convert --mtp, joined in FP8": (joined_in_fp8, "convert"),
        "convert --form block": (converted(form="block"), "convert --form block"),
        "convert --form block --mtp": (converted(form="block", mtp=True), "convert --form block"),
    }


def row(answer: Mapping[str, Any], without: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the result: shares, the difference from the original's, and answers that drafts left as they were."""
    if error := answer.get("error") or without.get("error"):
        return {"error": " ".join(str(error).split())}
    accepted, drafted = sum(answer["accepted"]), sum(answer["drafted"])
    shares, others = (np.divide(counts["accepted"], counts["drafted"]) for counts in (answer, original))
    mean, low, high = Bootstrap(np.arange(len(shares))).interval(shares - others)
    return {
        "accepted": accepted,
        "drafted": drafted,
        "share": accepted / drafted,
        "interval": share_interval(accepted, drafted),
        "difference": {"mean": mean, "low": low, "high": high},
        "answers": len(shares),
        "answers_unchanged": sum(map(list.__eq__, answer["answers"], without["answers"])),
    }


def measure(family: str, folder: Path, asked: argparse.Namespace) -> dict[str, Any]:
    """Form -> row."""
    source, rows = make(family, folder / "source", asked.steps), forms(family, asked.samples)
    paths = {name: write(source, folder / f"form {number}") for number, (name, (write, _)) in enumerate(rows.items())}
    ids = text_ids("evaluation.txt").numpy()
    starts = np.linspace(0, len(ids) - PROMPT, asked.prompts).astype(np.int64)
    prompts = np.stack([ids[start : start + PROMPT] for start in starts])
    plain = dict.fromkeys(same for _, same in rows.values())
    wanted = [(name, True) for name in rows] + [(name, False) for name in plain]
    jobs = [job(paths[name], prompts, steps=asked.tokens, wide_experts=True, drafts=drafts) for name, drafts in wanted]
    answers = dict(zip(wanted, ask(asked.vllm, jobs), strict=True))
    judged = {}
    for name, (_, same) in rows.items():
        figures = row(answers[name, True], answers[same, False], answers[BF16, True])
        size = sum(file.stat().st_size for file in paths[name].glob("*.safetensors"))
        judged[name] = figures | {"bytes": size}
        print(f"{family}: {name}: {judged[name]}", file=sys.stderr, flush=True)
    return judged


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of the evaluation text")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--steps", type=int, default=400, help="steps in which the layer that drafts is trained")
    parser.add_argument("--samples", type=int, default=32, help="windows of the calibration text")
    asked = parser.parse_args()
    head, results = described("drafts"), {}
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            results[family] = measure(family, Path(folder), asked)
    figures = {name: getattr(asked, name) for name in ("prompts", "tokens", "steps", "samples")}
    return publish(head, figures | {"vllm": version_of(asked.vllm), "results": results}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
