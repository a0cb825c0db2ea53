"""What `fp8q distill` wins back, from the codes of `sequential` rounding.

    python benchmarks/distill.py [MODEL=CALIBRATION,EVALUATION …] [--windows 20] [--context 512] [--learned 1600]
        [--small demo …] [--forms "two codes" …] [--ways "end to end" …]

A run of each model is made with its weights rounded by `sequential` and activations in two codes, and in one. Then it
learns, in each of `WAYS`, from text of the domain: Python's standard library, without the files that the demo's texts
are from (`examples/demo/train.py`), in `--learned` windows; stories260k from its calibration text. KL(BF16 || FP8) in
FP32 on the evaluation text, before and after, in nats × 10⁶, and on text of another domain (Wikipedia, where
`../shared` is). Limits: the demo in two codes at most 300, from 1,600 windows or more; nothing gets worse by more than
2 %. Prints one JSON line; exit status 1 when one is not met.
"""

import argparse
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from loaded_runtimes import compare_runtimes
from models import DEMO, SHARED, ModelTexts, model_arguments, small_models
from result import described, publish

from fp8q import api
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.calibrate.text.evaluation import Evaluation, cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, DistillOptions, ExportOptions
from fp8q.quantize.learning.document import Distillation
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward
from fp8q.validate.accuracy.runtimes import float_model

LIMIT_DEMO, LIMIT_RATIO, ENOUGH = 300.0, 1.02, 1600
OTHER = SHARED / "data" / "wikitext-2-raw-test.txt"
FORMS: Mapping[str, int] = {"two codes": 2, "one code": 1}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "end to end": {},
    "layer by layer": {"stream": True},
    "layer by layer, then end to end": {"stream": True, "end_to_end": True},
    "an adapter": {"train": "adapter"},
    "end to end, scales learned too": {"scales": "learned"},
    "end to end, gradients in E5M2": {"gradients": "e5m2"},
    "end to end, gradients in E4M3": {"gradients": "e4m3"},
}


def domain_text(model: ModelTexts, folder: Path) -> str:
    """The files of the standard library that the demo's texts are not from, in the order of their paths; of a model of
    stories its calibration text.
    """
    if "stories" in model.name:
        return model.data
    texts = runpy.run_path(str(DEMO / "train.py"))["Texts"].read()
    files = sorted(texts.training, key=lambda file: file[0])
    path = folder / "domain.txt"
    path.write_text("\n\n".join(text for _, text in files), encoding="utf-8")
    return str(path)


def evaluations(model: ModelTexts, asked: argparse.Namespace) -> dict[str, Evaluation]:
    """The evaluation text of `model`, and text of another domain."""
    tokenizer = load_tokenizer(sources.opened(model.directory))
    read = {"own": model.eval_data} | ({"other": str(OTHER)} if OTHER.is_file() else {})
    texts = {}
    for kind, path in read.items():
        ids = corpus.encode_texts(corpus.load_texts(path), tokenizer)[: asked.windows * asked.context]
        texts[kind] = cut(ids, path, asked.context, asked.context)
    return texts


def calibrated(model: ModelTexts, form: str, asked: argparse.Namespace, folder: Path) -> Run:
    """A run of `model` by `sequential` rounding, without graphs."""
    options = CalibrateOptions(
        seq_len=asked.context,
        weight_rounding="sequential",
        activation_terms=FORMS[form],  # type: ignore[arg-type]
    )
    texts, graph = (model.data, folder / form, model.eval_data), ExportOptions(graph=False)
    return api.calibrate(model.directory, *texts, options, graph, SILENT)


def divergences(run: Run, texts: Mapping[str, Evaluation], adapter: Path | None = None) -> dict[str, float]:
    """KL of the FP8 reference of `run`, with that adapter on, from its float model on each text, in nats × 10⁶; all in
    FP32.
    """
    source = sources.source_of(run)
    model = load_reference(run.model, "exact", torch.float32, adapter=adapter).model
    runtimes: dict[str, Forward] = {
        "bf16": float_model(source, torch.float32, "cpu"),
        "fp8": lambda ids: model(input_ids=torch.from_numpy(ids)).logits,
    }
    size, found = source.text_config.vocab_size, {}
    for name, evaluation in texts.items():
        accuracy = compare_runtimes(evaluation, runtimes, size, SILENT)[0].runtimes["fp8"]
        found[name] = round(1e6 * (accuracy.kl_mean_nats or 0.0), 1)
    return found


def measure(model: ModelTexts, asked: argparse.Namespace) -> dict[str, Any]:
    """KL before and after learning, by form and way."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), dict[str, Any]()
        texts, data = evaluations(model, asked), domain_text(model, folder)
        for form in asked.forms:
            begun = calibrated(model, form, asked, folder)
            before = divergences(begun, texts)
            for way in asked.ways:
                run, start = Run(Path(shutil.copytree(begun.root, folder / way))), time.monotonic()
                options = DistillOptions(samples=asked.learned, epochs=1.0, **WAYS[way])
                learned = api.distill(run.root, data, options, SILENT)
                seconds, adapter = round(time.monotonic() - start), run.adapter if run.adapter.exists() else None
                found[f"{form}, {way}"] = {
                    "before": before,
                    "after": divergences(run, texts, adapter),
                    "held_out": [(moment.step, round(1e6 * moment.kl, 1)) for moment in learned.moments],
                    "tokens": learned.tokens,
                    "changed": round(learned.changed, 4) if isinstance(learned, Distillation) else 0,
                    "seconds": seconds,
                }
                print(model.name, form, way, found[f"{form}, {way}"], file=sys.stderr, flush=True)
                shutil.rmtree(run.root)
    return found


def missed(results: Mapping[str, Mapping[str, Any]], learned: int) -> list[str]:
    """The limits that are not met, from so many windows."""
    lines = []
    for model, forms in results.items():
        for form, found in forms.items():
            for text, after in found["after"].items():
                if after > LIMIT_RATIO * found["before"][text]:
                    lines.append(f"{model}, {form}, {text} text: {after} from {found['before'][text]}")
    for way, found in results.get("demo", {}).items():
        if learned >= ENOUGH and way == "two codes, end to end" and found["after"]["own"] > LIMIT_DEMO:
            lines.append(f"demo, {way}: {found['after']['own']} (at most {LIMIT_DEMO:g})")
    return lines


def main() -> int:
    """Run, print, judge."""
    parser = model_arguments(__doc__, windows=20, context=512, learned=1600)
    parser.add_argument("--small", nargs="+", default=["demo"], help="names of small models, where none is given")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["end to end"])
    options = parser.parse_args()
    head, results = described("distill"), {}
    for model in options.models or small_models(*options.small):
        results[model.name] = measure(model, options)
    over = missed(results, options.learned)
    figures = {"windows": options.windows, "context": options.context, "results": results}
    return publish(head, {**figures, "missed": over, "passed": not over}, options.save)


if __name__ == "__main__":
    sys.exit(main())
