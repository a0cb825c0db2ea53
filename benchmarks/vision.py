"""What FP8 costs in the language model of a model that sees, in the part that sees, and in both.

    python benchmarks/vision.py [--steps 200] [--random] [--save vision]

A small Gemma 3 (two layers of width 128, a tower of two of width 32, random at first) learns in about a minute to
name the colours of the four quarters of a picture by digits, each mixed with up to as much of another; `--random`
leaves its weights random, of which accuracy says nothing. Of 64 rows that it was not trained on, half are calibrated
on and half evaluated on: KL from BF16 and perplexity of the text behind the picture, and the share of tokens that BF16
finds likeliest too, by `fp8q validate`'s own runtimes of torch. Its text is code that it never saw, and only fills the
windows that calibration asks for. One code for each input, static or for each token.

Prints one JSON line. A small model, trained on one task: the order of the parts is what it tells, and no number for
another model.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from fitting import fit
from PIL import Image
from result import arguments, described, publish
from seeing_models import PLACEHOLDER, asking, seeing_checkpoint, write_rows
from transformers import AutoModelForMultimodalLM
from unseen_architectures import DEMO

from fp8q.api import CalibrateOptions, RescaleOptions, ValidateOptions, calibrate, scales, validate
from fp8q.calibrate.model.processor import load_processor
from fp8q.calibrate.model.source import open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text.chat import content_parts, messages
from fp8q.calibrate.text.image_rows import ImageRow, image_files
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import WeightRounding
from fp8q.quantize.scales.decisions import load_scales

#: The colours of the quarters of a picture, named by their places here, each a token.
COLOURS = ((255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255), (255, 0, 255), (0, 0, 0))
TRAINED, MEASURED = 512, 64
BATCH, RATE = 32, 2e-3
QUESTION = "Which colours?"
#: The modules that see, and part -> the options that quantize it alone.
SEEING = ("model.vision_tower.*", "model.multi_modal_projector*")
PARTS: Mapping[str, Mapping[str, Any]] = {
    "text": {"skip": SEEING, "only": ()},
    "vision": {"skip": (), "only": SEEING},
    "both": {"skip": (), "only": ()},
}
FORMS = ("one", "dynamic")
#: Of text, which says nothing of what sees, a few windows.
JUDGED = ValidateOptions(runtimes=("bf16", "reference"), max_tokens=96)


def rows_of_quarters(folder: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """Save `count` pictures with noise in `folder`, each quarter of a colour mixed with another, and make the rows that
    ask for the colours.
    """
    drawn = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        digits = drawn.integers(0, len(COLOURS), 4).tolist()
        others = drawn.integers(0, len(COLOURS), 4).tolist()
        share = drawn.uniform(0.5, 1.0, (4, 1))
        colours = np.array(COLOURS, np.float64)
        quarters = (share * colours[digits] + (1 - share) * colours[others]).reshape(2, 2, 3)
        pixels = quarters.repeat(14, 0).repeat(14, 1) * 0.6 + drawn.normal(50, 12, (28, 28, 3))
        name = f"{seed}-{number}.png"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name)
        rows.append(asking(name, QUESTION, " ".join(map(str, digits))))
    return rows


def learn(path: Path, rows: list[dict[str, Any]], folder: Path, steps: int) -> None:
    """Train the checkpoint at `path` on `rows`, whose pictures are in `folder`, and save it."""
    source = open_source(str(path))
    processor = load_processor(source, load_tokenizer(source))
    inputs = []
    for row in rows:
        chat = row["messages"]
        read = ImageRow(
            where="row", messages=messages("row", chat, content_parts), images=image_files("row", chat, folder)
        )
        inputs.append(processor.inputs(read))
    together = {name: torch.cat([row[name] for row in inputs]) for name in inputs[0]}
    ids = together["input_ids"]
    behind = (ids == PLACEHOLDER).cumsum(1).eq(4) & (ids != PLACEHOLDER)
    together["labels"] = torch.where(behind, ids, -100)

    def draw(generator: torch.Generator) -> dict[str, torch.Tensor]:
        chosen = torch.randint(len(ids), (BATCH,), generator=generator)
        return {name: value[chosen] for name, value in together.items()}

    model: Any = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32)
    fit(model, draw, steps, RATE)
    model.to(torch.bfloat16).save_pretrained(path)


def measure(run: Run, part: str, form: str, rounding: WeightRounding = "nearest") -> dict[str, Any]:
    """The figures of a measured run with one `part` of its model in FP8."""
    options = RescaleOptions(form=(form,), vision=("*",), weight_rounding=rounding, **PARTS[part])
    scales(run.root, options, progress=SILENT)
    images = validate(run.root, options=JUDGED, progress=SILENT).images
    assert images is not None, "there are rows"
    chosen = load_scales(run)
    vision = [name for name in chosen.weights if name in (chosen.vision or ())]
    fp8 = images.runtimes["reference"]
    figures = {
        "gemms": [len(chosen.weights) - len(vision), len(vision)],
        "kl": fp8.kl_mean_nats,
        "kl_p99": fp8.kl_p99_nats,
        "agreement": fp8.top1_agreement,
        "perplexity": [round(images.runtimes[name].perplexity, 4) for name in ("bf16", "reference")],
    }
    print(f"{part}, {form}, {rounding}: {figures}", file=sys.stderr, flush=True)
    return figures


def run_all(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Make the model, and measure each part in each form."""
    path = seeing_checkpoint(folder / "model", "Gemma3Config")
    if not asked.random:
        learn(path, rows_of_quarters(folder, TRAINED, seed=0), folder, asked.steps)
    rows = rows_of_quarters(folder, MEASURED, seed=1)
    text, other = ((DEMO / f"{name}.txt").read_text(encoding="utf-8") for name in ("calibration", "evaluation"))
    (folder / "text.txt").write_text(text[:20_000], encoding="utf-8")
    chats = [{"messages": [{"role": "user", "content": part}]} for part in other[:6_000].split("\n\n")]
    write_rows(folder / "rows.jsonl", rows[: MEASURED // 2])
    write_rows(folder / "held-out.jsonl", [*rows[MEASURED // 2 :], *chats])
    options = CalibrateOptions(
        chat_template=True, samples=64, seq_len=48, vision=("*",), weight_rounding="gptq", form=(FORMS[0],)
    )
    texts = [str(folder / "rows.jsonl"), str(folder / "text.txt")]
    held_out = str(folder / "held-out.jsonl")
    run = calibrate(str(path), texts, folder / "run", held_out, options=options, graph=False, progress=SILENT)
    results = {"both, one, gptq": measure(run, "both", "one", "gptq")}
    return {f"{part}, {form}": measure(run, part, form) for form in FORMS for part in PARTS} | results


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="steps of training")
    parser.add_argument("--random", action="store_true", help="leave the weights random")
    asked = parser.parse_args()
    head = described("vision")
    with TemporaryDirectory() as folder:
        results = run_all(asked, Path(folder))
    return publish(head, {"trained": not asked.random, "steps": asked.steps, "results": results}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
