"""`fp8q compare` on the finished demo: `fp8q serve` is the model that was validated, the original is not, and neither
is a server whose tokenizer or chat template is another.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from compare import changed_run, with_bos, without_bos

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from tests.noise import OTHER_SUMS, mean_noise
from tests.pipeline.other_models import SHARE
from tests.serve.web.started_server import Thread, in_thread, started

pytestmark = pytest.mark.slow

WINDOWS = 4


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A copy, to write in."""
    return Run(Path(shutil.copytree(demo_run.root, tmp_path_factory.mktemp("compare") / "run")))


@pytest.fixture(scope="module")
def server(run: Run) -> Iterator[Thread]:
    with in_thread(run.root) as found:
        yield found


def test_fp8q_serve_is_the_validated_model_and_no_torch_is_needed(
    run: Run, server: Thread, base_install: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """It is ONNX Runtime's own arithmetic, so its distance from that runtime is that of codes which round the other way
    where sums have another order.
    """
    url = f"{server.client.base_url}".rstrip("/") + "/v1"
    done = base_install("compare", run.root, "--url", url, "--windows", str(WINDOWS), "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert (shown["verdict"], shown["form"], shown["requests"]) == ("validated", "prompt_logprobs", WINDOWS + 5)
    first = shown["runtimes"][0]
    assert (first["runtime"], first["validated"]) == ("onnxruntime", True)
    assert first["kl_nats"]["mean"] < SHARE * shown["runtimes"][1]["kl_nats"]["mean"]
    noise = mean_noise(first["loss_difference_nats"], shown["positions"])
    assert shown["perplexity"]["mean"] == pytest.approx(first["perplexity"], rel=noise + OTHER_SUMS)
    assert json.loads(run.comparison.read_text(encoding="utf-8")) == shown
    assert run.record().stages["compare"].outputs.keys() == {"compare.json"}


def test_the_source_is_told_as_bf16_by_exit_code_3(run: Run, demo_checkpoint: Path, fp8q: Callable[..., Any]) -> None:
    found = fp8q("compare", run.root, "--model", demo_checkpoint, "--windows", WINDOWS)
    assert found.code == 3
    assert found.err.splitlines()[-1].startswith(f"fp8q: {demo_checkpoint}: the model, but in BF16: ")
    assert "distance from the run's runtimes" in found.out


def test_the_checkpoint_through_transformers_is_the_validated_model(run: Run) -> None:
    """transformers is another implementation, with GEMMs and cache of its own: BF16 is farthest from it."""
    found = api.compare(run.root, api.CompareOptions(model=run.model, windows=WINDOWS))
    assert found.runtimes[-1].runtime == "bf16"
    assert found.verdict in ("validated", "undecided", "other-arithmetic")
    assert (found.form, found.requests) == ("transformers", 0)


TEMPLATE = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def opened(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of a demo whose tokenizer sets `<s>` before a text and has a chat template."""
    folder, model = tmp_path_factory.mktemp("opened"), demo_run.model
    tokenizer, config = (json.loads((model / f"{name}.json").read_text()) for name in ("tokenizer", "tokenizer_config"))
    begun = changed_run(demo_run, folder / "begun", "tokenizer.json", json.dumps(with_bos(tokenizer, "<s>", 0)))
    chats = json.dumps(config | {"chat_template": TEMPLATE})
    return Run(changed_run(Run(begun), folder / "run", "tokenizer_config.json", chats))


@pytest.mark.parametrize(("bos", "template", "told"), [
    (("<s>", 0), None, None),
    (None, None, (
        r"another tokenizer or BOS: it reads 4 texts as 64 tokens, which the run's tokenizer reads as 68; by the run's "
        r"tokens, the validated model: \S+ nats of KL from onnxruntime; further than .* would not pass"
    )),
    (("</s>", 1), None, (
        r"another tokenizer or BOS: behind texts the next token's log-probability is \S+ nats from the one behind the "
        r"run's tokens of them; by the run's tokens, the validated model: .*"
    )),
    (("<s>", 0), TEMPLATE.replace("{{ each.role }}: ", "[{{ each.role }}] said "), (
        r"another chat template: it reads a chat as \d+ tokens, which is \d+ by the run's template; by the run's "
        r"tokens, the validated model: .*"
    )),
])  # fmt: skip
def test_a_server_that_begins_texts_or_chats_otherwise_is_told(
    opened: Run, bos: tuple[str, int] | None, template: str | None, told: str | None, tmp_path: Path
) -> None:
    """Each is a `fp8q serve` of the same weights: right, without a BOS, with another, and with another template."""
    tokenizer = json.loads(without_bos(opened.model))
    content = json.dumps(with_bos(tokenizer, *bos) if bos else tokenizer)
    (file := tmp_path / "template.jinja").write_text(template or TEMPLATE)
    with in_thread(changed_run(opened, tmp_path / "run", "tokenizer.json", content), template=file) as server:
        url = str(server.client.base_url)
        found = api.compare(opened.root, api.CompareOptions(url=url, windows=2))
    assert found.verdict == ("other-prompt" if told else "validated")
    assert re.fullmatch(told or "the validated model: .*", found.sentence), found.sentence


def test_a_server_that_is_down_or_unknown_ends_the_command(run: Run, server: Thread, fp8q: Callable[..., Any]) -> None:
    url, free = str(server.client.base_url).rstrip("/"), f"http://127.0.0.1:{unused_port()}"
    for words, code, told in (
        (("--url", free), 4, f"{free}: no server answers there; start it, or give its address with --url"),
        (("--url", url, "--served", "other"), 2, f"{url}: serves .*, and not --served other; name one with --served"),
        (("--url", f"{url}/metrics"), 2, f"{url}/metrics: .*"),
    ):
        found = fp8q("compare", run.root, *words)
        assert found.code == code
        assert re.fullmatch(f"fp8q: {told}", found.err.splitlines()[-1]), found.err


def test_a_server_that_hangs_is_waited_for_so_long(run: Run, fp8q: Callable[..., Any]) -> None:
    with started(run.root) as server:
        server.process.send_signal(signal.SIGSTOP)
        found = fp8q("compare", run.root, "--url", server.url, "--timeout", 1)
        server.process.send_signal(signal.SIGCONT)
    assert found.code == 4
    assert found.err.splitlines()[-1] == (
        f"fp8q: {server.url}: did not answer within 1 seconds; give it longer with --timeout, or ask less with "
        "--windows"
    )


def unused_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


BOTH = "--url http://a and --model b: give one of them, a server's address or a checkpoint's directory"


@pytest.mark.parametrize(("fields", "told"), [
    ({}, "neither --url nor --model: give one of them, a server's address or a checkpoint's directory"),
    ({"url": "http://a", "model": Path("b")}, BOTH),
    ({"model": Path("nowhere")}, "--model nowhere: there is no such directory; give that of a checkpoint"),
])  # fmt: skip
def test_one_of_a_server_and_a_checkpoint_is_named(run: Run, fields: dict[str, object], told: str) -> None:
    with pytest.raises(InputError) as refused:
        api.compare(run.root, api.CompareOptions(**fields))  # type: ignore[arg-type]
    assert str(refused.value) == told
