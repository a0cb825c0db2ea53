"""lm-eval (EleutherAI's lm-evaluation-harness) on `model/` beside the source, by transformers, from local files alone;
and what its perplexities are in fp8q's terms.

lm-eval scores every token of a text and gives the first its BOS to go by; fp8q scores a token by those before it in its
window. So `fp8q validate --context 257 --stride 256` of a text that begins with BOS, and lm-eval with `max_length=256`
of the same text without it, score the same tokens by the same ones. A document that fits one window is scored whole
after BOS, whatever `max_length` is; and so fp8q scores it where its windows begin with BOS, as they do of a tokenizer
that adds it.
"""

import json
import math
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from fp8q import api
from fp8q.calibrate.model.source import open_source
from fp8q.core.run import Run
from fp8q.stages.corpus import load_tokens
from fp8q.validate.accuracy.compare import Forward
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.accuracy.runtimes import float_model, reference

from .conftest import SCORED

TASKS = Path(__file__).with_name("tasks")
LIFE_S = 600

#: `evaluated(model)`: task -> metric -> value.
Evaluate = Callable[[Path], dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Texts:
    """What lm-eval reads, in `folder`: `documents`, each within a window, and one long `text`."""

    folder: Path
    documents: list[str]
    text: str
    tokenizer: Any

    def tokens(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


def nll_nats(results: dict[str, float], texts: Sequence[str]) -> float:
    """All of the negative log-likelihood in nats that lm-eval found in `texts`.

    `byte_perplexity` is exp of it over the bytes of UTF-8; `word_perplexity` over the words, which are what lies
    between white space, one more at each end that is white. Over the tokens it is perplexity as fp8q has it.
    """
    total = math.log(results["byte_perplexity,none"]) * sum(len(text.encode()) for text in texts)
    words = sum(len(text.split()) + text[:1].isspace() + text[-1:].isspace() for text in texts)
    assert math.log(results["word_perplexity,none"]) * words == pytest.approx(total)
    return total


def documents_of(text: str, tokens: Callable[[str], list[int]]) -> list[str]:
    """The paragraphs of `text`, as many together as have fewer tokens than a window; longer ones are left out."""
    documents = [""]
    for paragraph in text.split("\n\n"):
        if len(tokens(documents[-1] + paragraph)) >= SCORED:
            documents.append("")
        documents[-1] += paragraph + "\n\n"
    return [document for document in documents if document and len(tokens(document)) < SCORED]


@pytest.fixture(scope="module")
def texts(
    tmp_path_factory: pytest.TempPathFactory, demo_validated: Run, demo_checkpoint: Path, demo_texts: Any
) -> Texts:
    """The tokens that `fp8q validate` scored, as text, and its paragraphs."""
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    ids = load_tokens(demo_validated, demo_validated.evaluation)
    scored = ids[1 : load_accuracy(demo_validated).protocol.tokens + 1].tolist()
    text = str(tokenizer.decode(scored))
    found = Texts(tmp_path_factory.mktemp("texts"), [], text, tokenizer)
    assert (ids[0], found.tokens(text)) == (tokenizer.bos_token_id, scored)
    found.documents.extend(documents_of(text, found.tokens))
    for name, rows in (("documents", found.documents), ("text", [text])):
        (found.folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return found


def lm_eval(home: Path, folder: Path, model: Path, tasks: str, more: str = "") -> dict[str, dict[str, float]]:
    """What lm-eval of the environment at `home` finds by `tasks` on the texts in `folder`: task -> metric -> value.
    `more`: of the model's arguments.
    """
    out = folder / f"{model.parent.name}.json"
    command: list[str | Path] = [
        home / "bin" / "lm_eval", "--model", "hf", "--model_args",
        f"pretrained={model},dtype=bfloat16,softmax_dtype=float32,max_length={SCORED}{more}",
        "--tasks", tasks, "--include_path", TASKS, "--device", "cpu", "--batch_size", "8", "--output_path", out,
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIFE_S, env=os.environ | offline)
    assert done.returncode == 0, done.stderr[-4000:]
    (written,) = folder.glob(f"{out.stem}*.json")
    found: dict[str, dict[str, float]] = json.loads(written.read_text())["results"]
    return found


@pytest.fixture(scope="module")
def evaluated(home_of: Callable[[str], Path], texts: Texts) -> Evaluate:
    """Both tasks of a checkpoint, by lm-eval."""
    return lambda model: lm_eval(home_of("lm-eval"), texts.folder, model, "fp8q_documents,fp8q_text")


@pytest.fixture(scope="module")
def bf16(evaluated: Evaluate, demo_checkpoint: Path) -> dict[str, dict[str, float]]:
    return evaluated(demo_checkpoint)


@pytest.fixture(scope="module")
def fp8(evaluated: Evaluate, demo_validated: Run) -> dict[str, dict[str, float]]:
    return evaluated(demo_validated.model)


def after_bos(forward: Forward, texts: Texts) -> float:
    """The negative log-likelihood in nats of all documents, each after BOS."""
    total = 0.0
    for document in texts.documents:
        ids = np.array([[texts.tokenizer.bos_token_id, *texts.tokens(document)]])
        with torch.inference_mode():
            logits = forward(ids)[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(ids[0, 1:]), reduction="sum"))
    return total


#: The same sums in batches of another shape; and of FP8, products of another implementation.
LIMITS = {"bf16": 1e-3, "reference": 5e-3}


def test_validates_perplexity_is_lm_evals_of_the_same_text(
    bf16: Any, fp8: Any, demo_validated: Run, texts: Texts
) -> None:
    accuracy = load_accuracy(demo_validated)
    for name, results in (("bf16", bf16), ("reference", fp8)):
        perplexity = math.exp(nll_nats(results["fp8q_text"], [texts.text]) / accuracy.protocol.tokens)
        assert perplexity == pytest.approx(accuracy.runtimes[name].perplexity, rel=LIMITS[name])


def test_documents_that_fit_a_window_are_scored_whole_after_bos(
    bf16: Any, fp8: Any, demo_validated: Run, demo_checkpoint: Path, texts: Texts
) -> None:
    assert len(texts.documents) > 20
    tokens = sum(len(texts.tokens(document)) for document in texts.documents)
    runtimes = {
        "bf16": (bf16, float_model(open_source(str(demo_checkpoint)), torch.bfloat16, "cpu")),
        "reference": (fp8, reference(demo_validated, "cpu")),
    }
    for name, (results, forward) in runtimes.items():
        theirs = nll_nats(results["fp8q_documents"], texts.documents)
        assert math.exp((theirs - after_bos(forward, texts)) / tokens) == pytest.approx(1, rel=LIMITS[name])


def test_windows_that_begin_with_bos_are_scored_as_lm_eval_scores_documents(
    home_of: Callable[[str], Path], opening_demo: Path, demo_texts: Any, tmp_path: Path, keeping_graphs: Any
) -> None:
    """Of a tokenizer that adds BOS, by default: documents that each fill a window behind it.

    Perplexity by word is exp of the nats over the words, ours over the tokens that the protocol says were scored, which
    are all but BOS: `nll_nats` turns the one into the other. Of such a tokenizer lm-eval would put two in front, its
    own and the tokenizer's, and score the second; `add_bos_token=False` leaves its own.
    """
    tokenizer = AutoTokenizer.from_pretrained(opening_demo)

    def tokens(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    ids = tokens(demo_texts.evaluation.read_text(encoding="utf-8"))[:10_000]
    width = SCORED - 1
    cut = [str(tokenizer.decode(ids[place : place + width])) for place in range(0, len(ids) - width, width)]
    documents = [text for text in cut if len(tokens(text)) == width]  # at an edge a text may be other tokens
    assert len(documents) > 20
    rows = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    (tmp_path / "documents.jsonl").write_text(rows, encoding="utf-8")
    options = api.CalibrateOptions(kv_cache="fp8", samples=4, seq_len=SCORED)
    evaluation = tmp_path / "documents.jsonl"
    with keeping_graphs():
        run = api.calibrate(str(opening_demo), str(demo_texts.calibration), tmp_path / "run", str(evaluation), options)
    accuracy = api.validate(run.root, options=api.ValidateOptions(runtimes=("bf16",)))
    assert (accuracy.protocol.bos, accuracy.protocol.tokens) == ("auto", width * len(documents))
    theirs = lm_eval(home_of("lm-eval"), tmp_path, opening_demo, "fp8q_documents", ",add_bos_token=False")[
        "fp8q_documents"
    ]
    perplexity = math.exp(nll_nats(theirs, documents) / accuracy.protocol.tokens)
    assert perplexity == pytest.approx(accuracy.runtimes["bf16"].perplexity, rel=LIMITS["bf16"])
