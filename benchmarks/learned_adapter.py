"""What `fp8q distill --train adapter` wins back beside an FP8 model that stays as it is.

    python benchmarks/learned_adapter.py [MODEL=CALIBRATION,EVALUATION …] [--windows 20] [--context 512] [--learned 400]
        [--rank 16]

The runs, the text and the measure are those of `distill.py`: weights rounded by `sequential`, activations in two codes
and in one; Python's standard library without the demo's texts, here `--learned` windows of it; KL(BF16 || FP8) in FP32
on the evaluation text and on text of another domain, before and with the adapter on, in nats × 10⁶. Limit: nothing gets
worse by more than 2 %. Prints one JSON line; exit status 1 when it is not met.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from distill import FORMS, LIMIT_RATIO, OTHER, domain_text
from models import ModelTexts, model_arguments, small_models
from result import described, publish

from fp8q import api
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, DistillOptions, ExportOptions
from fp8q.quantize.learning.document import AdapterLearning
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward, compare_runtimes
from fp8q.validate.accuracy.perplexity import Evaluation, cut
from fp8q.validate.accuracy.runtimes import float_model


def fp8_model(run: Run, adapter: Path | None) -> Forward:
    """The FP8 reference of `run` in FP32, with that adapter on."""
    model = load_reference(run.model, "exact", torch.float32, adapter=adapter).model
    return lambda ids: model(input_ids=torch.from_numpy(ids)).logits


def divergences(run: Run, texts: dict[str, Evaluation]) -> dict[str, dict[str, float]]:
    """KL of the FP8 reference of `run` from its float model on each text, without and with the adapter, × 10⁶."""
    source = sources.source_of(run)
    runtimes: dict[str, Forward] = {"bf16": float_model(source, torch.float32, "cpu")}
    for name, adapter in (("before", None), ("after", run.adapter)):
        runtimes[name] = fp8_model(run, adapter)
    size, found = source.text_config.vocab_size, dict[str, dict[str, float]]()
    for text, evaluation in texts.items():
        accuracy = compare_runtimes(evaluation, runtimes, size, SILENT)[0].runtimes
        for name in ("before", "after"):
            found.setdefault(name, {})[text] = round(1e6 * (accuracy[name].kl_mean_nats or 0.0), 1)
    return found


def measure(model: ModelTexts, asked: argparse.Namespace) -> dict[str, Any]:
    """KL before and after learning, by form."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), dict[str, Any]()
        tokenizer = load_tokenizer(sources.opened(model.directory))
        read = {"own": model.eval_data} | ({"other": str(OTHER)} if OTHER.is_file() else {})
        texts = {}
        for kind, path in read.items():
            ids = corpus.encode_texts(corpus.load_texts(path), tokenizer)[: asked.windows * asked.context]
            texts[kind] = cut(ids, path, asked.context, asked.context)
        data = domain_text(folder)
        for form, terms in FORMS.items():
            options = CalibrateOptions(
                seq_len=asked.context,
                weight_rounding="sequential",
                activation_terms=terms,  # type: ignore[arg-type]
            )
            exported = ExportOptions(graph=False)
            run = api.calibrate(
                model.directory, model.data, folder / form, model.eval_data, options, exported, SILENT
            )  # fmt: skip
            begun = time.monotonic()
            learning = DistillOptions(
                train="adapter", samples=asked.learned, epochs=1.0, rank=asked.rank, alpha=2 * asked.rank
            )  # fmt: skip
            learned = api.distill(run.root, str(data), learning, SILENT)
            assert isinstance(learned, AdapterLearning), "an adapter was asked for"
            seconds = round(time.monotonic() - begun)
            found[form] = divergences(run, texts) | {
                "held_out": [(moment.step, round(1e6 * moment.kl, 1)) for moment in learned.moments],
                "tokens": learned.tokens,
                "parameters": learned.parameters,
                "seconds": seconds,
            }
            print(model.name, form, found[form], file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run, print, judge."""
    options = model_arguments(__doc__, windows=20, context=512, learned=400, rank=16).parse_args()
    head, results = described("learned_adapter"), {}
    for model in options.models or small_models("demo"):
        results[model.name] = measure(model, options)
    over = [
        f"{model}, {form}, {text} text: {after} from {found['before'][text]}"
        for model, forms in results.items()
        for form, found in forms.items()
        for text, after in found["after"].items()
        if after > LIMIT_RATIO * found["before"][text]
    ]
    figures = {"windows": options.windows, "context": options.context, "rank": options.rank, "results": results}
    return publish(head, {**figures, "missed": over, "passed": not over}, options.save)


if __name__ == "__main__":
    sys.exit(main())
