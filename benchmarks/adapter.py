"""An adapter in FP8: merged into the weights before they are quantized, or beside the base's codes.

    python benchmarks/adapter.py [MODEL=CALIBRATION,EVALUATION …] [--windows 40] [--context 256]

For each model a LoRA of rank 16 over all linear layers is trained on stories (`../shared`), of which the models, that
were trained on Python, know nothing; the last tenth is held out to be evaluated on. Without `../shared` CALIBRATION and
EVALUATION are what is trained and evaluated on. Runs are calibrated on the training text.

KL(yardstick || FP8), all else in FP32: the yardstick is the base with the adapter beside it, in FP32 as both are
stored. Beside it stands what the merge's rounding to BF16 loses alone, and what the base loses with scales that serve
the adapter too. Prints one JSON line.
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loaded_runtimes import compare_runtimes
from models import SHARED, ModelTexts, main_of

from fp8q.calibrate.model.source import Source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text import corpus
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import AdapterMode, CalibrateOptions, SourceOptions
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.compare import Forward
from fp8q.validate.accuracy.runtimes import float_model

SAMPLES = 32
STORIES, HELD_OUT = SHARED / "data" / "tinystories-train-1000.txt", 0.1
RANK, STEPS, ROWS, LENGTH, RATE = 16, 120, 8, 128, 2e-3


def texts(model: ModelTexts, folder: Path) -> ModelTexts:
    """`model` with the texts to train and to evaluate on."""
    if not STORIES.is_file():
        return model
    whole = STORIES.read_text(encoding="utf-8")
    end = whole.rindex("\n", 0, int((1 - HELD_OUT) * len(whole)))
    for name, part in (("train.txt", whole[:end]), ("held-out.txt", whole[end:])):
        (folder / name).write_text(part, encoding="utf-8")
    return replace(model, data=str(folder / "train.txt"), eval_data=str(folder / "held-out.txt"))


def trained(model: ModelTexts, folder: Path) -> Path:
    """A LoRA of `model` over all linear layers, trained on its text for about a minute."""
    import peft
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32)
    wanted = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, wanted)
    ids = corpus.encode_texts(corpus.load_texts(model.data), load_tokenizer(sources.opened(model.directory)))
    windows = torch.from_numpy(np.ascontiguousarray(ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)))
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], RATE, weight_decay=0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        rows = windows[torch.randint(len(windows), (ROWS,))]
        loss = adapted(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    adapted.save_pretrained(str(folder))
    return folder


def made(source: Source, model: ModelTexts, folder: Path, context: int) -> Run:
    """The run of `source`, without graphs."""
    notes, run = Notes(SILENT), Run(folder)
    options = CalibrateOptions(samples=SAMPLES, seq_len=context)
    collected = corpus_stage.collect(source, load_tokenizer(source), model.data, model.eval_data, options, notes)
    corpus_stage.write_corpus(run, source, collected, notes)
    measure_stage.measure(run, source, options, notes)
    quantize_stage.quantize(run, source, sources.gemms_of(source, options), options, notes)
    return run


def fp8(run: Run, adapter: str | None = None) -> Forward:
    """The FP8 reference of `run` in FP32, with that adapter on."""
    model = load_reference(run.model, "exact", torch.float32, adapter=adapter).model
    return lambda ids: model(input_ids=torch.from_numpy(ids)).logits


def measure(model: ModelTexts, windows: int, context: int) -> Mapping[str, Any]:
    """Perplexities of base and adapter, and what FP8 costs each way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = texts(model, folder)
        adapter = trained(model, folder / "stories")

        def opened(mode: AdapterMode) -> Source:
            return sources.opened(model.directory, SourceOptions(adapter=(adapter,), adapter_mode=mode))

        base, merged, both = sources.opened(model.directory), opened("merge"), opened("beside")
        runs = {
            "alone": made(base, model, folder / "alone", context),
            "merged": made(merged, model, folder / "merged", context),
            "beside": made(both, model, folder / "beside", context),
        }
        # what the base's own scales would do to the adapter
        (runs["alone"].model / "adapters").symlink_to(runs["beside"].model / "adapters")
        tokens = corpus.encode_texts(corpus.load_texts(model.eval_data), load_tokenizer(base))[: windows * context]
        evaluation = cut(tokens, model.eval_data, context, context)
        of_adapter: dict[str, Forward] = {
            "bf16": float_model(both.variants[1], torch.float32, "cpu"),
            "merged, BF16 weights": float_model(merged, torch.float32, "cpu"),
            "merged": fp8(runs["merged"]),
            "beside": fp8(runs["beside"], adapter.name),
            "beside, scales of the base alone": fp8(runs["alone"], adapter.name),
        }
        of_base: dict[str, Forward] = {
            "bf16": float_model(base, torch.float32, "cpu"),
            "base": fp8(runs["alone"]),
            "base, scales that serve the adapter": fp8(runs["beside"]),
        }
        size = base.text_config.vocab_size
        found = [compare_runtimes(evaluation, runtimes, size, SILENT)[0].runtimes for runtimes in (of_adapter, of_base)]
    kl = {name: runtime.kl_mean_nats for each in found for name, runtime in each.items() if name != "bf16"}
    return {
        "perplexity": {"adapter": found[0]["bf16"].perplexity, "base": found[1]["bf16"].perplexity},
        "perplexity_increase": {
            name: runtime.perplexity_increase for each in found for name, runtime in each.items() if name != "bf16"
        },
        "kl_mean_nats_times_1e6": {name: round(1e6 * (value or 0.0), 2) for name, value in kl.items()},
    }


if __name__ == "__main__":
    sys.exit(main_of("adapter", __doc__, measure, "demo", "llama"))
