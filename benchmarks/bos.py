"""Are windows that begin with BOS what a model is served, and what does it cost to leave it out?

    python benchmarks/bos.py [--windows 48] [--context 128] [--steps 200]

Of models that were trained with BOS and whose tokenizer adds it: `stories260k`, by its author, BOS before each story;
the demo, BOS before each file; and the demo adapted here, `--steps` steps of four texts of which each begins with BOS,
so that it leans on it as large models do. Each is measured and evaluated in three ways, on the same text: windows cut
with `--bos auto`, windows cut with `--bos never`, and as a server does it, which has nothing to do with windows: the
text of one window at a time as a prompt of its own, by the tokenizer as it comes.

Perplexity is exp of the mean negative log-likelihood over the text's tokens, BOS left out; windows that begin without
have a token less to score. Statistics: of every tensor, amax over that of serving, and how far its distribution of
magnitudes is from that of serving: the area between the two cumulative distributions over log2 |x|, in octaves. The
ceiling: serving is 0 from itself. Prints one JSON line; exit status 1 when `auto` is not serving.
"""

import argparse
import json
import math
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from models import DEMO, ModelTexts, small_models
from result import ROOT, arguments, described, publish
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fp8q.calibrate.measure.histogram import Histogram
from fp8q.calibrate.measure.observe import Watch, probe_groups
from fp8q.calibrate.measure.scoring import log_softmax, losses
from fp8q.calibrate.measure.statistics import TensorStatistics
from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.calibrate.text.corpus import encode_texts, windows
from fp8q.calibrate.text.evaluation import cut
from fp8q.calibrate.text.packing import prefix_of

Prompts = Sequence[npt.NDArray[np.int64]]
#: How far `auto` may be from serving: in perplexity, a fraction, and in octaves, the mean over the tensors. What is
#: left is the text at the edges of windows: half a word is other tokens where it is a text of its own (`retokenized`).
LIMITS = {"perplexity": 0.01, "octaves": 0.005}


def opening(folder: Path) -> Path:
    """The demo, its tokenizer putting BOS in front."""
    copy = Path(shutil.copytree(DEMO / "checkpoint", folder / "demo"))
    tokenizer = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    tokenizer["post_processor"]["special_tokens"] = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return copy


def adapted(model: Path, folder: Path, steps: int, length: int = 128) -> Path:
    """The demo after so many steps on texts from the middle of files, each after BOS; the files are those that the demo
    was trained on, none of its calibration or evaluation text.
    """
    read = runpy.run_path(str(ROOT / "examples" / "demo" / "train.py"), run_name="train")["Texts"].read
    torch.manual_seed(0)
    copy = Path(shutil.copytree(model, folder / "adapted"))
    tokenizer = AutoTokenizer.from_pretrained(copy)
    ids = torch.from_numpy(encode_texts([text for _, text in read().training[:200]], tokenizer))
    ids = ids[ids != tokenizer.bos_token_id]
    trained = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=5e-4, weight_decay=0.0)
    for step in range(steps):
        places = torch.randint(0, len(ids) - length, (4,))
        text = torch.stack([ids[place : place + length - 1] for place in places.tolist()])
        batch = torch.cat([torch.full((4, 1), tokenizer.bos_token_id), text], 1)
        optimizer.param_groups[0]["lr"] = 5e-4 * min(1, (step + 1) / 30) * (1 - step / steps)
        loss = trained(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
    trained.eval().to(torch.bfloat16).save_pretrained(copy)
    return copy


def nll(model: PreTrainedModel, prompts: Prompts, scored: Sequence[npt.NDArray[np.bool_]]) -> tuple[float, int]:
    """Sum of the negative log-likelihood in nats of the tokens that are `scored`, and how many they are."""
    total, tokens = 0.0, 0
    for ids, which in zip(prompts, scored, strict=True):
        with torch.inference_mode():
            log_q = log_softmax(model(input_ids=torch.from_numpy(ids[None])).logits[0, :-1])
        kept = torch.from_numpy(which[1:])
        total += float(losses(log_q, torch.from_numpy(ids[1:]))[kept].sum(dtype=torch.float64))
        tokens += int(kept.sum())
    return total, tokens


def statistics(model: PreTrainedModel, prompts: Prompts) -> dict[str, TensorStatistics]:
    """What the prompts, one at a time, put into every tensor that could be quantized."""
    modules = observed_gemms(model)
    watch = Watch(model, modules, probe_groups(model, modules), len(prompts), None)
    for number, ids in enumerate(prompts):
        watch.forward(torch.from_numpy(ids[None]), number)
    return dict(watch.statistics())


def octaves(one: Histogram, other: Histogram) -> float:
    """The area between the cumulative distributions of log2 |x|, zeros and what is no number left out."""
    patterns = np.arange(1, 0x7F80, dtype=np.int16)
    cumulative = []
    for histogram in (one, other):
        counts = np.zeros(len(patterns))
        inside = (histogram.bits > 0) & (histogram.bits < 0x7F80)
        counts[histogram.bits[inside] - 1] = histogram.counts[inside]
        cumulative.append(np.cumsum(counts) / counts.sum())
    values = torch.from_numpy(patterns).view(torch.bfloat16).double().numpy()
    return float((np.abs(cumulative[0] - cumulative[1])[:-1] * np.diff(np.log2(values))).sum())


def compared(found: dict[str, TensorStatistics], served: dict[str, TensorStatistics]) -> dict[str, Any]:
    """How far what was `found` is from what is `served`."""
    ratios = {name: float(found[name].amax_channels.max() / one.amax_channels.max()) for name, one in served.items()}
    distances = {name: octaves(found[name].histogram, one.histogram) for name, one in served.items()}
    furthest = max(distances, key=lambda name: distances[name])
    return {
        "amax_ratio_least": round(min(ratios.values()), 4),
        "amax_ratio_most": round(max(ratios.values()), 4),
        "octaves_mean": round(float(np.mean(list(distances.values()))), 4),
        "octaves_most": round(distances[furthest], 4),
        "furthest": furthest,
    }


def texts_of(windows: npt.NDArray[np.int64], prefix: tuple[int, ...], tokenizer: PreTrainedTokenizerBase) -> Prompts:
    """The text of each window as a prompt of its own, as the tokenizer has it."""
    decoded = [str(tokenizer.decode(ids[len(prefix) :].tolist())) for ids in windows]
    return [np.array(tokenizer(text)["input_ids"], np.int64) for text in decoded]


@contextmanager
def models(steps: int) -> Iterator[list[tuple[str, ModelTexts]]]:
    """The models, each with its texts."""
    with tempfile.TemporaryDirectory() as folder:
        begun, demo = time.monotonic(), opening(Path(folder))
        other = adapted(demo, Path(folder), steps)
        print(f"adapted in {time.monotonic() - begun:.0f} s", file=sys.stderr)
        texts = str(DEMO / "calibration.txt"), str(DEMO / "evaluation.txt")
        found = [(texts.name, texts) for texts in small_models("stories260k")]
        yield [*found, ("demo", ModelTexts(str(demo), *texts)), ("demo, adapted", ModelTexts(str(other), *texts))]


def benchmark(texts: ModelTexts, options: argparse.Namespace) -> dict[str, Any]:
    """One model."""
    tokenizer = AutoTokenizer.from_pretrained(texts.directory)
    model = AutoModelForCausalLM.from_pretrained(texts.directory, dtype=torch.bfloat16).eval()
    prefix, size = prefix_of(tokenizer), options.context
    ids, evaluated = (
        encode_texts([Path(path).read_text(encoding="utf-8")], tokenizer) for path in (texts.data, texts.eval_data)
    )
    ids, evaluated = ids[: (options.windows + 1) * size], evaluated[: options.windows * size]
    count = len(ids) // size - 1
    calibration = {
        "auto": list(windows(ids, size, count, None, prefix)),
        "never": list(windows(ids, size, count)),
    }
    evaluation = {
        "auto": cut(evaluated, "", size, size - len(prefix), prefix),
        "never": cut(evaluated, "", size, size),
    }
    served = texts_of(np.array(calibration["auto"]), prefix, tokenizer)
    measured = statistics(model, served)
    prompts = texts_of(evaluation["auto"].ids, prefix, tokenizer)
    total, tokens = nll(model, prompts, [np.arange(len(ids)) >= len(prefix) for ids in prompts])
    other = sum(ids.tolist() != its.tolist() for ids, its in zip(prompts, evaluation["auto"].ids, strict=True))
    found: dict[str, Any] = {
        "retokenized": round(other / len(prompts), 3),
        "served": {"perplexity": round(math.exp(total / tokens), 4), "tokens": tokens},
    }
    for name, its in evaluation.items():
        total, tokens = nll(model, list(its.ids), list(its.scored))
        found[name] = {"perplexity": round(math.exp(total / tokens), 4), "tokens": tokens}
        found[name] |= compared(statistics(model, calibration[name]), measured)
    return {"prefix": list(prefix), "windows": count, **found}


def main() -> int:
    """Run, print, judge."""
    parser = arguments(__doc__)
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    head, results = described("bos"), {}
    with models(options.steps) as found:
        for name, texts in found:
            results[name] = benchmark(texts, options)
            print(name, results[name], file=sys.stderr, flush=True)
    passed = all(
        abs(one["auto"]["perplexity"] / one["served"]["perplexity"] - 1) <= LIMITS["perplexity"]
        and one["auto"]["octaves_mean"] <= LIMITS["octaves"]
        for one in results.values()
    )
    figures = {"windows": options.windows, "context": options.context, "steps": options.steps, "limits": LIMITS}
    return publish(head, {**figures, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
