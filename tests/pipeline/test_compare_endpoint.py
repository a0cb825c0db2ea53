"""`fp8q compare ORIGINAL --url URL` on the demo: `fp8q serve` of its FP8 run takes the original's place, and a server
of another tokenizer or model does not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compare import changed_run
from safetensors.torch import load_file, save_file

from fp8q import api
from fp8q.core.errors import GateError, InputError
from fp8q.core.run import Run
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.pair.document import check_pair
from tests.calibrate.conftest import Notebook
from tests.serve.web.started_server import Thread, in_thread
from tests.stand_in.loopback import answering

WINDOWS, CONTEXT = 12, 48
BOTH = "--url http://127.0.0.1:9 and --model x"


@pytest.fixture(scope="module")
def server(demo_run: Run) -> Iterator[Thread]:
    with in_thread(demo_run.root) as found:
        yield found


@pytest.fixture
def options(demo_texts: Any, tmp_path: Path) -> api.PairOptions:
    return api.PairOptions(data=str(demo_texts.evaluation), out=tmp_path / "out", context=CONTEXT, max_tokens=2_000)


def asked(server: Thread, **more: Any) -> api.CompareOptions:
    return api.CompareOptions(url=str(server.client.base_url).rstrip("/"), windows=WINDOWS, **more)


@pytest.mark.quick
def test_a_served_fp8_model_takes_its_originals_place(
    server: Thread, demo_run: Run, demo_checkpoint: Path, options: api.PairOptions, tmp_path: Path
) -> None:
    found = api.compare_endpoint(demo_checkpoint, asked(server), options)
    check_pair(found)
    assert (found.passes, found.causes, found.candidate.loaded_by) == (True, [], "its server")
    assert re.fullmatch(r"\S+ at http://127.0.0.1:\d+", found.candidate.name)
    mine, validated = found.runtimes["candidate"], load_accuracy(demo_run).runtimes["onnxruntime"]
    assert mine.kl_mean_nats is not None
    assert validated.kl_mean_nats is not None
    assert 0.3 * validated.kl_mean_nats < mine.kl_mean_nats < 3 * validated.kl_mean_nats, "FP8, and no more than that"
    assert 0 < found.kl_nats.low < found.kl_nats.mean < found.kl_nats.high
    tokens = np.load(tmp_path / "out" / "tokens.npz")
    losses, original = tokens["candidate"], tokens["bf16"]
    assert np.isfinite(losses).sum() == np.isfinite(original).sum() == found.protocol.tokens
    rise = np.expm1((losses - original)[np.isfinite(losses)].mean(dtype=np.float64))
    assert mine.perplexity_increase == pytest.approx(rise, abs=1e-6)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "lower bound" in page
    assert "<h2>Modules</h2>" not in page


@pytest.mark.slow
def test_an_original_by_layers_gives_the_numbers_of_the_whole(
    server: Thread, demo_checkpoint: Path, options: api.PairOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory does not hold it, by itself: 4 bytes for each of the demo's 3,475,712 weights."""
    report = Notebook()
    out = options.out
    assert out is not None
    whole = api.compare_endpoint(demo_checkpoint, asked(server), replace(options, stream=False))
    expected = np.load(out / "tokens.npz")
    monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device: 15_000_000)
    monkeypatch.setattr("fp8q.stages.compare_endpoint.original_openers", lambda original: {})
    by_layers = api.compare_endpoint(
        demo_checkpoint, asked(server), replace(options, out=out.with_name("by layers")), report
    )
    assert report.lines[0] == (
        "--stream: the original in FP32 takes 0.0139 GB, and 80% of the memory available is 0.012 GB: comparing layer "
        "by layer"
    )
    tokens = np.load(out.with_name("by layers") / "tokens.npz")
    for name in ("bf16", "fp32", "candidate"):
        np.testing.assert_allclose(tokens[name], expected[name], atol=1e-3, equal_nan=True)
    assert by_layers.kl_nats.mean == pytest.approx(whole.kl_nats.mean, rel=1e-2)
    assert not (out.with_name("by layers") / ".compare.work").exists()


@pytest.mark.slow
def test_the_command_says_it_and_a_stricter_limit_fails(
    server: Thread, demo_checkpoint: Path, options: api.PairOptions, fp8q: Callable[..., Any]
) -> None:
    words: tuple[object, ...] = ("compare", demo_checkpoint, "--url", str(server.client.base_url), "--windows", WINDOWS)
    words += ("--data", options.data, "--out", options.out, "--context", CONTEXT, "--max-tokens", 2_000)
    found = fp8q(*words, "--json")
    shown = json.loads(found.out)
    assert found.code == (0 if shown["passes"] else 3)
    assert shown["candidate"]["loaded_by"] == "its server"
    assert fp8q(*words, "--max-kl", 1e-6).code == 3


@pytest.mark.slow
def test_a_server_without_the_bos_is_told(
    demo_run: Run, demo_checkpoint: Path, options: api.PairOptions, tmp_path: Path
) -> None:
    """Texts are read as other tokens, where log-probabilities by ids show nothing."""
    tokenizer = json.loads((demo_run.model / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["normalizer"] = {"type": "Lowercase"}
    with in_thread(changed_run(demo_run, tmp_path / "run", "tokenizer.json", json.dumps(tokenizer))) as server:
        found = api.compare_endpoint(demo_checkpoint, asked(server), options)
    assert [cause.rule for cause in found.causes] == ["other-prompt"]
    assert "the original" in found.causes[0].fault
    with pytest.raises(GateError, match="another tokenizer or BOS"):
        check_pair(found)


@pytest.mark.slow
def test_another_original_is_no_original(
    server: Thread, demo_checkpoint: Path, options: api.PairOptions, tmp_path: Path
) -> None:
    """The server's model is compared with one whose last layer has other weights: flips and KL are large."""
    other = tmp_path / "other"
    other.mkdir()
    for file in demo_checkpoint.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            changed = {
                name: value.flip(0).contiguous() if "layers.3.mlp" in name else value for name, value in tensors.items()
            }
            save_file(changed, other / file.name, {"format": "pt"})
        else:
            (other / file.name).write_bytes(file.read_bytes())
    found = api.compare_endpoint(other, asked(server), options)
    assert found.kl_nats.low > 0.1
    assert found.flips.low > 0.1
    assert found.verdict.kind == "worse"


@pytest.mark.quick
def test_what_cannot_be_compared_is_refused(demo_checkpoint: Path, options: api.PairOptions) -> None:
    """A server that generates text alone, and options that no server has."""

    def text_alone(method: str, path: str, body: bytes, headers: Message) -> tuple[int, dict[str, str], bytes]:
        if path == "/v1/models":
            return 200, {}, json.dumps({"data": [{"id": "m"}]}).encode()
        asked = json.loads(body)
        prompts = asked["prompt"] if isinstance(asked["prompt"][0], str) else [asked["prompt"]]
        choices = [{"index": number, "text": " the"} for number, _ in enumerate(prompts)]
        return 200, {}, json.dumps({"choices": choices}).encode()

    with answering(text_alone) as url, pytest.raises(InputError) as refused:
        api.compare_endpoint(demo_checkpoint, api.CompareOptions(url=url), options)
    assert str(refused.value) == (
        f"{url}: gives no log-probabilities of a prompt's tokens (prompt_logprobs: no prompt_logprobs; echo: no "
        "logprobs.tokens), and perplexity needs them; vLLM, SGLang and `fp8q serve` give them; or compare it with a run"
    )
    assert not Path(str(options.out)).exists(), "refused before the original runs"


@pytest.mark.quick
@pytest.mark.parametrize(("words", "told"), [
    (("--module-windows", 1), "--module-windows 1: is for two checkpoints: no server shows its modules; leave it out"),
    (("--model", "x"), f"{BOTH}: give one of them, a server's address or a checkpoint's directory"),
])  # fmt: skip
def test_options_of_two_checkpoints_are_refused_for_a_server(
    demo_checkpoint: Path, fp8q: Callable[..., Any], words: tuple[object, ...], told: str
) -> None:
    found = fp8q("compare", demo_checkpoint, "--url", "http://127.0.0.1:9", *words)
    assert (found.code, found.err.splitlines()[-1]) == (2, f"fp8q: {told}")
