"""`fp8q push`: nothing is sent unless that is asked for, a stand-in hub gets all of model/, and no token is shown."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8q.core.errors import BackendError, InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import PushOptions
from fp8q.quantize.checkpoint.card_additions import ACCURACY, NOT_EVALUATED
from fp8q.stages.push import card_remarks, push_checkpoint

from .stand_in_hub import COMMIT, UploadHub, upload_hub

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345"
FILES = {
    "README.md": b"---\ntags: [fp8]\n---\n# model\n",
    "config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 40,
    "adapters/style[1]/adapter_config.json": b"{}",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    """A running hub that this process's clients use, with its token in the environment."""
    with upload_hub(TOKEN) as served:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield served


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose model/ holds `FILES`, and leftovers that are hidden."""
    for name, content in {**FILES, ".half.partial": b"x", ".git/config": b"x"}.items():
        path = tmp_path / "run" / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr("fp8q.stages.push.checked_model", lambda run: {})
    return Run(tmp_path / "run")


def test_without_yes_nothing_is_sent(run: Run, hub: UploadHub) -> None:
    pushed = push_checkpoint(run, PushOptions("owner/name"), SILENT)
    assert hub.asked == []
    assert pushed.url is None
    assert dict(pushed.files) == {name: len(content) for name, content in FILES.items()}
    assert pushed.bytes == 10_240 + 28 + 2 + 2


def test_with_yes_all_files_arrive(run: Run, hub: UploadHub) -> None:
    pushed = push_checkpoint(run, PushOptions("owner/name", yes=True), SILENT)
    assert hub.files == FILES
    assert pushed.url == f"{hub.address}/owner/name/commit/{COMMIT}"
    assert [made["visibility"] for made in hub.created] == ["private"]


def test_a_link_to_what_a_stage_wrote_is_sent_as_the_file_it_leads_to(
    run: Run, hub: UploadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run.model / "config.json"
    config.rename(run.root / "moved.json")
    config.symlink_to("../moved.json")
    monkeypatch.setattr("fp8q.stages.push.checked_model", lambda run: {"model/config.json": "its SHA-256"})
    push_checkpoint(run, PushOptions("owner/name", yes=True), SILENT)
    assert hub.files == FILES


@pytest.mark.parametrize("target", ["../../secret", "../adapters", "nowhere"])
def test_any_other_link_is_refused(run: Run, hub: UploadHub, target: str) -> None:
    (run.root.parent / "secret").write_text("secret")
    (run.root / "adapters").mkdir()
    link = run.model / "notes.txt"
    link.symlink_to(target)
    with pytest.raises(InputError) as raised:
        push_checkpoint(run, PushOptions("owner/name", yes=True), SILENT)
    assert str(raised.value) == (
        f"{link}: is a link, and no stage of this run wrote what it leads to; put the file in its place"
    )
    assert hub.asked == []


def test_a_public_repository_is_asked_for(run: Run, hub: UploadHub) -> None:
    push_checkpoint(run, PushOptions("owner/name", yes=True, public=True), SILENT)
    assert [made.get("visibility", "public") for made in hub.created] == ["public"]


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (403, InputError, "the hub refuses to write there (HTTP 403); log in by `hf auth login`"),
        (404, InputError, "the hub has no such repository or branch (HTTP 404); check --repo and --revision"),
        (500, BackendError, "the hub answers HTTP 500; push again"),
    ],
)
def test_a_refusal_is_one_line_without_the_token(
    status: int, kind: type[Exception], told: str, run: Run, hub: UploadHub,
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    hub.refuses = status
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client tries again after errors of servers
    with caplog.at_level(logging.DEBUG), pytest.raises(kind) as raised:
        push_checkpoint(run, PushOptions("owner/name", yes=True), SILENT)
    assert told in str(raised.value)
    shown = "".join((str(raised.value), repr(raised.value), caplog.text, *capfd.readouterr()))
    assert TOKEN not in shown
    assert hub.files == {}


def test_a_wrong_token_is_refused_without_showing_it(run: Run, hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(InputError) as raised:
        push_checkpoint(run, PushOptions("owner/name", yes=True), SILENT)
    assert "(HTTP 401)" in str(raised.value)
    assert "hf_another" not in str(raised.value)


def test_a_hub_that_does_not_answer_is_told(run: Run, hub: UploadHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BackendError, match="the hub cannot be reached; connect, and push again"):
        push_checkpoint(run, PushOptions("owner/name", yes=True), SILENT)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (PushOptions(), "goes to no repository: none is named; give --repo owner/name"),
        (PushOptions("../up"), "--repo ../up: is no name of a repository; give one such as owner/name"),
    ],
)
def test_no_name_or_a_wrong_one_is_refused(options: PushOptions, told: str, run: Run) -> None:
    with pytest.raises(InputError) as raised:
        push_checkpoint(run, options, SILENT)
    assert told in str(raised.value)


def test_what_the_card_lacks_is_said(run: Run) -> None:
    assert card_remarks(run) == ()
    run.card.write_text(f"{ACCURACY}\n{NOT_EVALUATED}", encoding="utf-8")
    accuracy, tasks = card_remarks(run)
    assert accuracy == "the card says nothing of accuracy: `fp8q validate RUN` writes it there"
    assert tasks == "the card has no tasks: `fp8q evaluate RUN --tasks TASKS` writes their scores there"
    run.card.unlink()
    assert card_remarks(run) == ("there is no model card (README.md)",)


@pytest.mark.slow
def test_the_command_lists_what_a_run_would_send(fp8q: Callable[..., Any], demo_run: Run) -> None:
    shown = fp8q("push", demo_run.root, "--repo", "owner/name")
    assert (shown.code, shown.err) == (0, "")
    lines = shown.out.splitlines()
    assert lines[0].startswith("owner/name: ")
    assert any(line.startswith("  config.json (") for line in lines)
    assert lines[-1] == "nothing was sent: --yes uploads them"
