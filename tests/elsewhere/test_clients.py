"""Benchmarks and clients of OpenAI's API against `fp8q serve`, as they are: one server, one environment.

The answers that clients get are those of a plain request, benchmarks lose none, and lm-eval's two ways to ask for a
continuation's log-probability, as token ids in a batch (`local-completions`) and as texts by `text_offset` (`gguf`),
find the same number. Nothing here needs a network. `vllm bench serve` is in vLLM's environment.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fp8q import api

from ..conftest import Texts
from ..serve.web.started_server import started
from .client_calls import MODEL, PROMPT, TOKENS

pytestmark = pytest.mark.xdist_group("clients")

CALLS = Path(__file__).with_name("client_calls.py")
LIFE_S = 300
#: Tasks of lm-eval on `rows.jsonl`: the likelier of two continuations, and a text.
CHOICE = """task: clients_choice
output_type: multiple_choice
doc_to_choice: ["read the file.", "zebra xylophone"]
doc_to_target: 0
target_delimiter: " "
metric_list: [{metric: acc}]
"""
TEXT = """task: clients_text
output_type: generate_until
doc_to_target: ""
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
DATA = (
    'dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\ndoc_to_text: "{{text}}"\n'
)
#: None ends in white space, which lm-eval's `local-completions` counts among the answer, and its `gguf` does not.
ROWS = ('def read_file(path):\n    """', "# This function will", 'import os\n\ndef main():\n    """', "class Reader: #")
COMMIT = "0" * 40


@dataclass(frozen=True)
class Clients:
    """A server at `url`, a `tokenizer`, and the environment of its clients, which work in `folder`."""

    url: str
    tokenizer: Path
    home: Path
    folder: Path

    def run(self, *words: object, python: Path | None = None) -> str:
        """Run a script of the environment, without a network; return what it prints."""
        offline = {
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(self.folder / "cache"),
            "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1",
        }  # fmt: skip
        done = subprocess.run(
            [str(python or self.home / "bin" / "python"), *map(str, words)],
            cwd=self.folder, capture_output=True, text=True, timeout=LIFE_S, env=os.environ | offline,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def script(self, name: str, *words: object) -> str:
        return self.run(self.home / "bin" / name, *words)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Texts
) -> Iterator[tuple[str, Path]]:
    """The demo, with a template that writes what was said; and its tokenizer."""
    folder = tmp_path_factory.mktemp("clients")
    template = folder / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    run = api.calibrate(
        str(demo_checkpoint), str(demo_texts.calibration), folder / "run",
        options=api.CalibrateOptions(samples=4, seq_len=64),
    )  # fmt: skip
    with started(run.root, "--name", MODEL, "--template", str(template)) as found:
        yield found.url, run.model


@pytest.fixture
def clients(server: tuple[str, Path], home_of: Callable[[str], Path], tmp_path: Path) -> Clients:
    return Clients(*server, home_of("clients"), tmp_path)


@pytest.fixture(scope="module")
def told(server: tuple[str, Path]) -> str:
    """The answer to a plain request."""
    asked = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    return str(httpx.post(f"{server[0]}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"])


@pytest.mark.parametrize(
    ("client", "more"),
    [
        ("openai", {"tokens": TOKENS, "tools": "length", "too_long": "context_length_exceeded"}),
        ("litellm", {"again": TOKENS, "too_long": 400}),
        ("langchain", {"tools": "length", "too_long": ["OpenAIContextOverflowError"] * 2}),
        ("llamaindex", {}),
    ],
)
def test_a_client_gets_the_text_of_a_plain_request(
    clients: Clients, told: str, client: str, more: dict[str, Any]
) -> None:
    """Of a prompt and of a chat, whole and as a stream; calls of tools are sent back, and what is too long is told."""
    answers = json.loads(clients.run(CALLS, client, clients.url).splitlines()[-1])
    texts = {"text", "chat", "stream"} | ({"batch"} if client == "langchain" else set())
    assert answers == dict.fromkeys(texts, told) | more


@pytest.mark.parametrize("form", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_loses_no_request(clients: Clients, form: str) -> None:
    out = clients.folder / "guidellm.json"
    clients.script(
        "guidellm", "run", "--backend", f"kind=openai_http,target={clients.url},request_format={form}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--tokenizer", f"kind=huggingface_auto,model={clients.tokenizer}",
        "--output", f"kind=json,path={out}", "--disable-progress",
    )  # fmt: skip
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    counts = benchmark["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (6, 0)


def test_aiperf_loses_no_request(clients: Clients) -> None:
    """Without a network it finds tokenizers in the hub's cache alone."""
    cache = clients.folder / "cache" / "hub" / "models--someone--demo"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(COMMIT)
    snapshot = cache / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).write_bytes((clients.tokenizer / name).read_bytes())
    clients.script(
        "aiperf", "profile", "--model", MODEL, "--url", clients.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", "someone/demo", "--concurrency", 2, "--request-count", 6, "--synthetic-input-tokens-mean", 32,
        "--output-tokens-mean", 8, "--extra-inputs", "ignore_eos:true", "--artifact-dir", clients.folder / "aiperf",
        "--ui", "none",
    )  # fmt: skip
    found = json.loads((clients.folder / "aiperf" / "profile_export_aiperf.json").read_text())
    assert (found["request_count"]["avg"], found["error_summary"]) == (6, [])
    assert found["usage_completion_tokens"]["sum"] == 48  # as the server counts; texts may be read as fewer


def test_lm_eval_finds_the_same_by_ids_in_a_batch_and_by_the_offsets_of_texts(clients: Clients) -> None:
    (clients.folder / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    for name, task in (("choice", CHOICE), ("text", TEXT)):
        (clients.folder / f"{name}.yaml").write_text(task + DATA)
    ids = f"model={MODEL},base_url={clients.url}/v1/completions,tokenizer={clients.tokenizer},max_length=512"
    found = {}
    for model, arguments, more, tasks in (
        ("local-completions", ids, ("--batch_size", 4), "clients_choice,clients_text"),
        ("gguf", f"base_url={clients.url}", (), "clients_choice"),
    ):
        clients.script(
            "lm_eval", "run", "--model", model, "--model_args", arguments, *more, "--tasks", tasks,
            "--include_path", ".", "--output_path", model, "--log_samples",
        )  # fmt: skip
        (samples,) = (clients.folder / model).rglob("samples_clients_choice_*.jsonl")
        rows = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
        found[model] = [float(answer[0][0]) for row in rows for answer in row]
    assert len(found["gguf"]) == 2 * len(ROWS)
    assert found["local-completions"] == pytest.approx(found["gguf"], abs=1e-3)
    assert all(likely > other + 10 for likely, other in zip(found["gguf"][::2], found["gguf"][1::2], strict=True))


def test_vllms_benchmark_loses_no_request(
    server: tuple[str, Path], home_of: Callable[[str], Path], vllm_python: Path, tmp_path: Path
) -> None:
    clients = Clients(*server, home_of("vllm"), tmp_path)
    run = "import sys; from vllm.benchmarks.serve import add_cli_args, main; import argparse; "
    run += "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args(sys.argv[1:]))"
    clients.run(
        "-c", run, "--backend", "openai", "--base-url", clients.url, "--model", MODEL, "--tokenizer",
        clients.tokenizer, "--dataset-name", "random", "--random-input-len", 16, "--random-output-len", 8,
        "--num-prompts", 6, "--ignore-eos", "--save-result", "--result-filename", "vllm.json",
        python=vllm_python,
    )  # fmt: skip
    found = json.loads((tmp_path / "vllm.json").read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (6, 0, 48)
