"""Ask real servers with `fp8q compare`, and hold its verdicts against what they serve, on a CPU.

    python benchmarks/compare.py [MODEL=CALIBRATION,EVALUATION …] --vllm HOME --server HOME [--keep FOLDER]
        [--cases PART …] [--windows 32] [--context 128] [--samples 32] [--save compare]

`--vllm`, `--server`: the environments that `make test-elsewhere` leaves in `.venv/vllm` and `.venv/vllm-server`. Of
each model a copy, whose tokenizer sets a BOS and which has a chat template, goes into a run in two terms rounded by
GPTQ, and into one in one term. `fp8q serve` and vLLM's own server answer for them, for the original in BF16, for a
model of the same shape from another seed, with a cache in FP8, and for copies whose tokenizer sets no BOS or whose
template is another. `--keep`: a killed call goes on there, on the same commit. `fp8q serve` reads a prompt token by
token, and is asked for fewer windows. Prints one JSON line; exit status 1 where a verdict is wrong: neither the
expected one nor that it cannot be told.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import ModelTexts, model_arguments, small_models
from result import commit, described, publish
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from vllm_jobs import installed_plugin
from vllm_server import Vllm, vllm_server

from fp8q import api
from fp8q.core.files import sha256_file
from fp8q.core.run import Run

#: Chats by turns of a name and what it said, and the same with other words.
TEMPLATE = (
    "{% for each in messages %}{{ bos_token }}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
OTHER_TEMPLATE = TEMPLATE.replace("{{ each.role }}: ", "[{{ each.role }}] ")
#: Characters of the evaluation text that are validated on, and that the other seed is trained on.
EVALUATED, TRAINED = 30_000, 40_000


@dataclass(frozen=True)
class Case:
    """A server: its `model` among the folders of `Models`, and its kind, with further words; the `run` that it is
    compared with, and by how many windows (None: as asked for); the verdict, and a part of its sentence.
    """

    server: str
    model: str
    verdict: str
    told: str
    run: str = "two"
    words: tuple[str, ...] = ()
    windows: int | None = None


PLUGIN, ALONE, SERVE = "vLLM with fp8q-vllm", "vLLM", "fp8q serve"
CASES = {
    "the run": Case(SERVE, "two", "validated", "the validated model", windows=8),
    "the run, BOS left out": Case(SERVE, "two, no BOS", "other-prompt", "another tokenizer or BOS", windows=4),
    "the run, another template": Case(SERVE, "two, other template", "other-prompt", "another chat template", windows=4),
    "the checkpoint": Case(PLUGIN, "two", "validated", "the validated model"),
    "without the plugin": Case(ALONE, "two", "other-arithmetic", "but in one term where two were validated"),
    "the original": Case(ALONE, "source", "other-arithmetic", "but in BF16"),
    "cache in FP8": Case(
        PLUGIN, "two", "other-arithmetic", "that the run does not have", words=("--kv-cache-dtype", "fp8")
    ),
    "another seed": Case(ALONE, "seed", "other-model", "another model"),
    "BOS left out": Case(PLUGIN, "two, no BOS", "other-prompt", "another tokenizer or BOS"),
    "another template": Case(PLUGIN, "two, other template", "other-prompt", "another chat template"),
    "one term was validated": Case(ALONE, "one", "validated", "the validated model", "one"),
    "one term, the original": Case(ALONE, "source", "other-arithmetic", "but in BF16", "one"),
}


def with_bos(tokenizer: dict[str, Any], token: str, number: int) -> dict[str, Any]:
    """A tokenizer.json that sets `token` before a text."""
    fields = dict(tokenizer["post_processor"])
    fields["single"] = [{"SpecialToken": {"id": token, "type_id": 0}}, *fields["single"]]
    fields["special_tokens"] = {token: {"id": token, "ids": [number], "tokens": [token]}}
    return tokenizer | {"post_processor": fields}


def opened(texts: ModelTexts, folder: Path) -> Path:
    """A copy of the checkpoint with a chat template, and a tokenizer that sets its BOS."""
    source = Path(texts.directory)
    folder.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, folder / path.name)
    token = AutoTokenizer.from_pretrained(source).bos_token
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    number = next(each["id"] for each in tokenizer["added_tokens"] if each["content"] == token)
    if not any("SpecialToken" in each for each in tokenizer["post_processor"]["single"]):
        (folder / "tokenizer.json").write_text(json.dumps(with_bos(tokenizer, token, number)), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def without_bos(folder: Path) -> str:
    """The tokenizer.json in `folder` without its BOS."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    fields = tokenizer["post_processor"]
    fields["single"] = [each for each in fields["single"] if "SpecialToken" not in each]
    return json.dumps(tokenizer)


def changed_run(run: Run, folder: Path, name: str, content: str) -> Path:
    """A copy of `run` whose checkpoint has another file `name`, as one made of a source with that file."""
    copy = Run(Path(shutil.copytree(run.root, folder)))
    file = copy.model / name
    before = sha256_file(file)
    file.write_text(content, encoding="utf-8")
    record = copy.record_file.read_text(encoding="utf-8")
    copy.record_file.write_text(record.replace(before, sha256_file(file)), encoding="utf-8")
    return copy.root


def another_seed(texts: ModelTexts, source: Path, folder: Path, steps: int = 8) -> Path:
    """A model of the same shape and tokenizer, trained for a moment from another seed."""
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)
    ids = torch.tensor(tokenizer(Path(texts.data).read_text(encoding="utf-8")[:TRAINED])["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        batch = ids[step * 512 : (step + 1) * 512].view(4, 128)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    shutil.copytree(source, folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@dataclass
class Models:
    """What is served of one model, made in `folder` when it is first asked for and kept there."""

    texts: ModelTexts
    folder: Path
    options: argparse.Namespace

    def run(self, kind: str) -> Run:
        """The run in two terms or one, validated."""
        return Run(self._made(kind, lambda folder: self._calibrated(kind, folder)) / "run")

    def root(self, model: str) -> Path:
        """The run or checkpoint that is served under this name in `CASES`."""
        if model == "source":
            return self._made(model, lambda folder: opened(self.texts, folder))
        if model == "seed":
            return self._made(model, lambda folder: another_seed(self.texts, self.root("source"), folder))
        kind, _, change = model.partition(", ")
        if not change:
            return self.run(kind).root
        run = self.run(kind)
        name, content = {
            "no BOS": ("tokenizer.json", without_bos(run.model)),
            "other template": ("chat_template.jinja", OTHER_TEMPLATE),
        }[change]
        return self._made(model, lambda folder: changed_run(run, folder, name, content))

    def _calibrated(self, kind: str, folder: Path) -> None:
        folder.mkdir()
        evaluation = folder / "evaluation.txt"
        text = Path(self.texts.eval_data).read_text(encoding="utf-8")
        evaluation.write_text(text[:EVALUATED], encoding="utf-8")
        chosen = api.CalibrateOptions(
            samples=self.options.samples, seq_len=self.options.context, weight_rounding="gptq",
            activation_terms=2 if kind == "two" else 1,
        )  # fmt: skip
        run = api.calibrate(str(self.root("source")), self.texts.data, folder / "run", str(evaluation), chosen)
        api.validate(run.root)

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        path, partial = self.folder / name, self.folder / f"{name} (not finished)"
        if not path.exists():
            shutil.rmtree(partial, ignore_errors=True)
            self.folder.mkdir(parents=True, exist_ok=True)
            make(partial)
            partial.rename(path)
        return path


@contextmanager
def fp8q_serve(root: Path) -> Iterator[str]:
    """The address of `fp8q serve` of the run in `root`, until the block ends."""
    command = [sys.executable, "-m", "fp8q", "serve", str(root), "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.kill()
        process.wait()


def asked(case: Case, models: Models, vllm: Vllm, folder: Path) -> dict[str, Any]:
    """The verdict on one server, and what it took; `folder` gets a copy of the run, since one call works in a run."""
    shutil.rmtree(folder, ignore_errors=True)
    run, model = Run(Path(shutil.copytree(models.run(case.run).root, folder / "run"))), models.root(case.model)
    log = folder / "log.txt"
    begun = time.monotonic()
    if case.server == SERVE:
        server = fp8q_serve(model)
    else:
        checkpoint = Run(model).model if (model / "run.json").exists() else model
        server = vllm_server(vllm, checkpoint, case.server == PLUGIN, log, case.words)
    with server as url:
        started = time.monotonic()
        found = api.compare(
            run.root, api.CompareOptions(url=url, windows=case.windows or models.options.windows, timeout=600)
        )
        seconds = time.monotonic() - started
    nearest = found.runtimes[0]
    assert nearest.kl_nats is not None, "both servers give log-probabilities"
    right = found.verdict == case.verdict and case.told in found.sentence
    return {
        "expected": case.verdict, "verdict": found.verdict, "right": right, "open": found.verdict == "undecided",
        "sentence": found.sentence,
        "form": found.form, "requests": found.requests, "sent": found.sent, "positions": found.positions,
        "seconds": round(seconds, 1), "start_seconds": round(started - begun, 1), "nearest": nearest.runtime,
        "kl": round(nearest.kl_nats.mean * 1e6, 1), "flips": round(nearest.flips.mean, 4),
        "from_runtimes": {each.runtime: round(each.kl_nats.mean * 1e6, 1) for each in found.runtimes if each.kl_nats},
    }  # fmt: skip


def measure(texts: ModelTexts, keep: Path, vllm: Vllm, options: argparse.Namespace) -> dict[str, Any]:
    """Every case of one model; those that this commit asked before are read."""
    models, found = Models(texts, keep / texts.name, options), {}
    for name, case in CASES.items():
        if options.cases and not any(re.search(part, name) for part in options.cases):
            continue
        file = keep / texts.name / f"{name}.json"
        if not file.exists():
            answer = asked(case, models, vllm, keep / texts.name / f"asked {name}")
            file.write_text(json.dumps(answer), encoding="utf-8")
        found[name] = {"server": case.server} | json.loads(file.read_text(encoding="utf-8"))
        print(f"{texts.name}: {case.server}: {name}: {found[name]}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Ask, judge, print."""
    parser = model_arguments(__doc__, windows=32, context=128, samples=32)
    for name, what in (("vllm", "vLLM"), ("server", "what its server imports")):
        parser.add_argument(f"--{name}", type=Path, metavar="HOME", required=True, help=f"the environment with {what}")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="a killed call goes on there")
    parser.add_argument("--cases", nargs="+", metavar="PART", help="those alone whose name holds one of these")
    options = parser.parse_args()
    head = described("compare")
    with tempfile.TemporaryDirectory() as directory:
        keep = (options.keep or Path(directory)) / commit()
        python = options.vllm / "bin" / "python"
        packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(options.server)}))
        vllm = Vllm(python, packages, installed_plugin(python, Path(directory)))
        models = options.models or small_models("demo", "llama", "qwen2", "gemma", "opt")
        results = {texts.name: measure(texts, keep, vllm, options) for texts in models}
    figures = {name: getattr(options, name) for name in ("samples", "windows", "context")}
    passed = all(row["right"] or row["open"] for rows in results.values() for row in rows.values())
    return publish(head, {**figures, "results": results, "passed": passed}, options.save)


if __name__ == "__main__":
    sys.exit(main())
