"""Start and stop `fp8q serve`: keys, addresses, options that cannot be, and what happens to requests at the end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from fp8q.core.errors import InputError
from fp8q.options import ServeOptions
from tests.serve.web.started_server import SECONDS, Held, in_thread, started

if TYPE_CHECKING:
    from pathlib import Path

    from fp8q.core.run import Run

Fp8q = Callable[..., Any]


def test_with_a_key_only_who_has_it_is_answered(counting_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8Q_API_KEY", "secret")
    with in_thread(counting_run.root) as server:
        for headers in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "Bearer \xe9".encode("latin-1")}):
            found = server.client.get("/v1/models", headers=headers)  # type: ignore[arg-type]
            assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")
            assert found.json()["error"]["code"] == "invalid_api_key"
        for given, status in (("Bearer secret", 200), ("bearer secret", 200), ("secret", 401), ("Basic secret", 401)):
            assert server.client.get("/v1/models", headers={"Authorization": given}).status_code == status
        assert [server.client.get(path).status_code for path in ("/", "/health", "/metrics")] == [200, 200, 200]
        assert server.client.get("/openapi.json").status_code == 401
        described = server.client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()
    assert described["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    wanted = {path: "security" in operation for path, each in described["paths"].items() for operation in each.values()}
    assert wanted == {path: path.startswith("/v1/") for path in described["paths"]}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "FP8Q_API_KEY: is set and empty, which would let everybody in; set it to a key, or unset it"),
        ("a b", "FP8Q_API_KEY 'a b': must be of printable ASCII characters, without spaces"),
        ("é", "FP8Q_API_KEY 'é': must be of printable ASCII characters, without spaces"),
    ],
)
def test_a_variable_that_is_no_key_starts_no_server(
    fp8q: Fp8q, counting_run: Run, monkeypatch: pytest.MonkeyPatch, key: str, message: str
) -> None:
    monkeypatch.setenv("FP8Q_API_KEY", key)
    assert fp8q("serve", counting_run.root, "--port", "0").complaint() == message


def test_an_open_server_knows_that_it_is_open(counting_run: Run) -> None:
    with in_thread(counting_run.root, name="counting", host="0.0.0.0") as server:
        assert server.server.is_open


def test_a_stopped_server_answers_who_is_here_and_takes_nobody_else(counting_run: Run) -> None:
    with started(counting_run.root) as served, httpx.Client(base_url=served.url, timeout=SECONDS) as client:
        asked = {"prompt": "t0", "max_tokens": 30, "ignore_eos": True, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=asked) as response:
            pieces = response.iter_text()
            text = next(pieces)
            served.process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n")
        out, err = served.process.communicate(timeout=SECONDS)
        assert (served.process.returncode, out) == (0, "")
        assert err == (
            "fp8q: stopped by SIGTERM; those who are being answered have 30 seconds, and a second signal ends it at "
            "once\n"
        )
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url)


def test_who_is_not_answered_in_time_is_cut_off_and_the_exit_code_says_so(counting_run: Run) -> None:
    with in_thread(counting_run.root, name="counting", grace=0) as server:
        held = Held(server)
        found = list[httpx.Response]()
        waiting = threading.Thread(target=lambda: found.append(server.post(prompt="t1")))
        waiting.start()
        while held.service.load == (0, 0):
            pass
        server.server.stop()
        waiting.join(SECONDS)
        held.release()
    assert (found[0].status_code, found[0].json()["error"]["message"]) == (503, "the server has closed; ask another")
    assert server.cut == 1


def test_an_address_that_is_taken_is_one_line(fp8q: Fp8q, counting_run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert fp8q("serve", counting_run.root, "--port", port).complaint() == (
            f"--host 127.0.0.1 --port {port}: cannot be listened at (Address already in use); name another, or --port "
            "0 for a free one"
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": 65536}, "--port 65536: is no port; give one from 1 to 65535, or 0 for a free one"),
        ({"name": "a b"}, "--name 'a b': must be of printable ASCII characters, without spaces"),
        ({"api_key": ""}, "--api-key '': must be of printable ASCII characters, without spaces"),
    ],
)
def test_options_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        ServeOptions(**given)
    assert str(refused.value) == message


def test_bf16_is_not_put_beside_itself(fp8q: Fp8q, counting_run: Run) -> None:
    assert fp8q("serve", counting_run.root, "--bf16", "--runtime", "bf16").complaint() == (
        "--runtime bf16: is what --bf16 puts beside the FP8 model; leave one of them out"
    )


def test_a_serving_host_needs_the_extra_and_no_torch(
    base_install: Callable[..., Any], counting_run: Run, tmp_path: Path
) -> None:
    found = base_install("serve", counting_run.root)
    assert (found.returncode, found.stdout) == (4, "")
    assert found.stderr == (
        "fp8q: fastapi is not installed and this command needs it; install it with `pip install 'fp8q[serve]'`\n"
    )
