"""lm-eval (EleutherAI's lm-evaluation-harness) from local files alone: on what `fp8q.api.load` gives, and on `model/`
beside the source, by transformers; and what its perplexities are in fp8q's terms.

lm-eval scores every token of a text and gives the first its BOS to go by; fp8q scores a token by those before it in its
window. So `fp8q validate --context 257 --stride 256` of a text that begins with BOS, and lm-eval with `max_length=256`
of the same text without it, score the same tokens by the same ones. A document that fits one window is scored whole
after BOS, whatever `max_length` is; and so fp8q scores it where its windows begin with BOS, as they do of a tokenizer
that adds it.
"""

import functools
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

import fp8q
from fp8q import api
from fp8q.calibrate.model.source import open_source
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import Reference, load_reference
from fp8q.stages.corpus import load_tokens
from fp8q.validate.accuracy.compare import Forward
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.accuracy.runtimes import float_model, logits_of

from .conftest import SCORED

TASKS = Path(__file__).with_name("tasks")
LOADED = Path(__file__).with_name("lm_eval_loaded.py")
#: The repository is the package.
ROOT = Path(fp8q.__file__).parent
LIFE_S = 600


@dataclass(frozen=True)
class Evaluated:
    """What lm-eval found: task -> metric -> value, and task -> the negative log-likelihood of each document, nats."""

    results: dict[str, dict[str, float]]
    nats: dict[str, np.ndarray]


#: The same of one of the models that it is asked about, by name.
Evaluate = Callable[[str], Evaluated]


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


def lm_eval(home: Path, folder: Path, model: Path, tasks: str, more: str = "") -> Evaluated:
    """What lm-eval of the environment at `home` finds by `tasks` on the texts in `folder`, of the checkpoint `model` in
    transformers. `more`: of the model's arguments.
    """
    out = folder / f"{model.parent.name}{more}.json"
    run_in(folder, [
        home / "bin" / "lm_eval", "--model", "hf", "--model_args",
        f"pretrained={model},softmax_dtype=float32,max_length={SCORED}{more}",
        "--tasks", tasks, "--include_path", TASKS, "--device", "cpu", "--batch_size", "8",
        "--log_samples", "--output_path", out,
    ])  # fmt: skip
    (written,) = folder.glob(f"{out.stem}_*.json")
    stamp = written.stem.removeprefix(f"{out.stem}_")
    samples = {
        task: [json.loads(line) for line in (folder / f"samples_{task}_{stamp}.jsonl").read_text("utf-8").splitlines()]
        for task in tasks.split(",")
    }
    return evaluated_of(json.loads(written.read_text(encoding="utf-8"))["results"], samples)


def lm_eval_loaded(home: Path, folder: Path, run: Run, tasks: str) -> Evaluated:
    """What it finds of the model that `fp8q.api.load` gives of `run`."""
    (folder / "path").mkdir(exist_ok=True)
    if not (folder / "path" / "fp8q").exists():
        (folder / "path" / "fp8q").symlink_to(ROOT)
    out = folder / f"{run.root.parent.name}-loaded.json"
    command: list[str | Path] = [home / "bin" / "python", LOADED, run.root, str(SCORED), tasks, TASKS, out]
    run_in(folder, command, PYTHONPATH=str(folder / "path"))
    found = json.loads(out.read_text(encoding="utf-8"))
    return evaluated_of(found["results"], found["samples"])


def run_in(folder: Path, command: Sequence[str | Path], **environment: str) -> None:
    """Run a command of lm-eval's environment in `folder`, without a network."""
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=LIFE_S, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr[-4000:]


def evaluated_of(results: dict[str, dict[str, float]], samples: dict[str, list[dict[str, Any]]]) -> Evaluated:
    """Take results and samples as lm-eval writes them."""
    nats = {
        task: np.array([-float(each["filtered_resps"][0]) for each in sorted(rows, key=lambda row: row["doc_id"])])
        for task, rows in samples.items()
    }
    return Evaluated(results, nats)


@pytest.fixture(scope="module")
def evaluated(
    home_of: Callable[[str], Path], texts: Texts, demo_checkpoint: Path, demo_validated: Run, demo_in_two_terms: Run
) -> Evaluate:
    """Both tasks, of the source in BF16 and of `model/` in FP32 by transformers, and of both runs as fp8q loads them.

    In BF16 arithmetic two implementations of one term differ as much as either from BF16: whose sums are rounded
    otherwise, whose codes are others (docs/numbers.md). In FP32 they are the same but for few codes.
    """
    home, tasks = home_of("lm-eval"), "fp8q_documents,fp8q_text"
    jobs: dict[str, Callable[[], Evaluated]] = {
        "bf16": lambda: lm_eval(home, texts.folder, demo_checkpoint, tasks, ",dtype=bfloat16"),
        "transformers": lambda: lm_eval(home, texts.folder, demo_validated.model, tasks, ",dtype=float32"),
        "one term": lambda: lm_eval_loaded(home, texts.folder, demo_validated, tasks),
        "two terms": lambda: lm_eval_loaded(home, texts.folder, demo_in_two_terms, tasks),
    }
    return functools.cache(lambda name: jobs[name]())


@pytest.fixture(scope="module")
def forwards(demo_checkpoint: Path, demo_validated: Run, demo_in_two_terms: Run) -> Callable[[str], Forward]:
    """What lm-eval's models should be, by name, and what they should not."""

    def loaded(run: Run, dtype: torch.dtype = torch.bfloat16) -> Reference:
        return load_reference(run.model, "fast" if dtype == torch.bfloat16 else "exact", dtype)

    def first_terms() -> Forward:
        reference = loaded(demo_in_two_terms)
        reference.take_first_terms()
        return logits_of(reference)

    source = open_source(str(demo_checkpoint))
    made: dict[str, Callable[[], Forward]] = {
        "bf16": lambda: float_model(source, torch.bfloat16, "cpu"),
        "transformers": lambda: logits_of(loaded(demo_validated, torch.float32)),
        "one term": lambda: logits_of(loaded(demo_validated)),
        "two terms": lambda: logits_of(loaded(demo_in_two_terms)),
        "first of two terms": first_terms,
    }
    return functools.cache(lambda name: made[name]())


def after_bos(forward: Forward, texts: Texts, count: int = 1) -> np.ndarray:
    """The negative log-likelihood in nats of each document, after `count` of BOS."""
    total = []
    for document in texts.documents:
        ids = np.array([[texts.tokenizer.bos_token_id] * count + texts.tokens(document)])
        with torch.inference_mode():
            logits = forward(ids)[0, count - 1 : -1].float()
        scored = torch.from_numpy(ids[0, count:])
        total.append(float(torch.nn.functional.cross_entropy(logits, scored, reduction="sum")))
    return np.array(total)


#: lm-eval's perplexity over ours, less one. Two BF16 kernels differ by 3e-4 at some 10,000 tokens, as far as chance
#: goes (each has a standard error of 1.7e-4 from FP32); the next runtime's is 1.25e-3 away (BF16's from two terms).
SAME_PERPLEXITY = 7e-4
#: The runs, lm-eval's name of the model that is loaded, and ours of the runtime.
PERPLEXITIES = [("demo_validated", "bf16", "bf16"), ("demo_validated", "one term", "reference")]
PERPLEXITIES += [("demo_in_two_terms", "two terms", "reference")]


@pytest.mark.parametrize(("run", "model", "runtime"), PERPLEXITIES)
def test_validates_perplexity_is_lm_evals_of_the_same_text(
    run: str, model: str, runtime: str, evaluated: Evaluate, texts: Texts, request: pytest.FixtureRequest
) -> None:
    """And another runtime's is not: BF16 for FP8, or one term for two."""
    accuracy = load_accuracy(request.getfixturevalue(run))
    perplexity = math.exp(nll_nats(evaluated(model).results["fp8q_text"], [texts.text]) / accuracy.protocol.tokens)
    near = {name: abs(perplexity / each.perplexity - 1) < SAME_PERPLEXITY for name, each in accuracy.runtimes.items()}
    one_term = run == "demo_validated" and runtime == "reference"
    assert near == {name: name == runtime or (one_term and name == "one-term") for name in accuracy.runtimes}


#: For each of lm-eval's models other ones, which must be further from it than `DOCUMENT` (they are 0.0049 at least),
#: and it itself nearer (0.0014 at most): |difference| of a document's loss, in nats a token.
DOCUMENTS = {
    "bf16": ("one term", "two terms"),
    "one term": ("bf16", "two terms"),
    "two terms": ("bf16", "first of two terms"),
    "transformers": ("bf16", "two terms"),
}
DOCUMENT = 0.0025


@pytest.mark.parametrize("model", DOCUMENTS)
def test_documents_that_fit_a_window_are_scored_whole_after_bos(
    model: str, evaluated: Evaluate, forwards: Callable[[str], Forward], texts: Texts
) -> None:
    """Each document by itself, so that losses that make up for each other count; other models fail it."""
    assert len(texts.documents) > 20
    found, others = evaluated(model), DOCUMENTS[model]
    theirs = found.nats["fp8q_documents"]
    assert theirs.sum() == pytest.approx(nll_nats(found.results["fp8q_documents"], texts.documents))
    tokens = sum(len(texts.tokens(document)) for document in texts.documents)
    distances = {name: np.abs(theirs - after_bos(forwards(name), texts)).sum() / tokens for name in (model, *others)}
    assert distances[model] < DOCUMENT < min(distances[name] for name in others)


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
    theirs = lm_eval(
        home_of("lm-eval"), tmp_path, opening_demo, "fp8q_documents", ",dtype=bfloat16,add_bos_token=False"
    )
    nats = nll_nats(theirs.results["fp8q_documents"], documents) / accuracy.protocol.tokens
    assert math.exp(nats) == pytest.approx(accuracy.runtimes["bf16"].perplexity, rel=SAME_PERPLEXITY)
    source = float_model(open_source(str(opening_demo)), torch.float32, "cpu")
    twice = after_bos(source, Texts(tmp_path, documents, "", tokenizer), count=2).sum() / accuracy.protocol.tokens
    assert math.exp(abs(nats - twice)) - 1 > 2 * SAME_PERPLEXITY  # which BOS of its own would have been
