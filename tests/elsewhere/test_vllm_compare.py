"""`fp8q compare` asks vLLM's own server: with the plugin, without it, of the original, of another seed's model, and
with a tokenizer or chat template that is not the run's.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from compare import CASES, SERVE, Models, asked
from models import small_models
from vllm_jobs import installed_plugin
from vllm_server import UnsupportedError, Vllm, vllm_server

from fp8q import api
from fp8q.core.errors import BackendError, InputError

from .packages import site_packages

WINDOWS, CONTEXT = 12, 128
#: The end of a sentence of a model that passes.
POWER = r"further than \S+ nats of KL, \S+% flips or \S+% of perplexity would not pass"
#: The whole sentence of some cases.
SENTENCES = {
    "the checkpoint": rf"the validated model: \S+ nats of KL from onnxruntime; {POWER}",
    "without the plugin": r"the model, but in one term where two were validated: \S+ nats of KL from one-term",
    "the original": r"the model, but in BF16: \S+ nats of KL from bf16",
    "BOS left out": (
        r"another tokenizer or BOS: it reads a text with '.*' as token 1 of 15, where the run has '<s>'; by the run's "
        rf"tokens, the validated model: \S+ nats of KL from onnxruntime; {POWER}"
    ),
    "another template": (
        r"another chat template: it reads a chat with '.*' as token 2 of \d+, where the run has '.*'; by the run's "
        rf"tokens, the validated model: \S+ nats of KL from onnxruntime; {POWER}"
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The demo in two terms and in one, and what is served in their place."""
    options = argparse.Namespace(windows=WINDOWS, context=CONTEXT, samples=16)
    return Models(small_models("demo")[0], tmp_path_factory.mktemp("compared") / "demo", options)


@pytest.fixture(scope="module")
def vllm(home_of: Callable[[str], Path], vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    """vLLM's interpreter, what its server imports, and the plugin."""
    server = site_packages(home_of("vllm-server"))
    return Vllm(vllm_python, server, installed_plugin(vllm_python, tmp_path_factory.mktemp("installed")))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.server != SERVE])
def test_compare_tells_what_vllm_serves(name: str, models: Models, vllm: Vllm, tmp_path: Path) -> None:
    try:
        found = asked(CASES[name], models, vllm, tmp_path / "asked")
    except UnsupportedError as error:
        pytest.skip(f"an FP8 cache: vLLM {error}")
    assert found["right"], found["sentence"]
    assert re.fullmatch(SENTENCES.get(name, ".*"), found["sentence"]), found["sentence"]
    assert (found["form"], found["positions"]) == ("prompt_logprobs", WINDOWS * (CONTEXT - 1))
    # its models, texts, and where these are read well a chat; where it is no implementation, some without the BOS
    others = 4 if found["verdict"].startswith(("other-a", "other-m")) else 0
    assert found["requests"] == WINDOWS + 3 + others - (name == "BOS left out")


def test_a_server_with_less_is_compared_by_less_and_one_that_does_not_answer_is_named(
    models: Models, vllm: Vllm, tmp_path: Path
) -> None:
    """vLLM with room for two log-probabilities, and for half a window."""
    run, words = models.run("two").root, ("--max-logprobs", "2", "--max-model-len", "64")
    with vllm_server(vllm, models.run("two").model, True, tmp_path / "log.txt", words) as url:
        found = api.compare(run, api.CompareOptions(url=url, windows=WINDOWS))
        with pytest.raises(InputError) as unknown:
            api.compare(run, api.CompareOptions(url=url, served="other"))
    with pytest.raises(BackendError) as down:
        api.compare(run, api.CompareOptions(url=url))
    assert (found.verdict, found.form) == ("validated", "text")
    assert found.sent < WINDOWS * 8 * 64
    assert str(unknown.value) == f"{url}: serves demo, and not --served other; name one with --served"
    assert str(down.value) == f"{url}: no server answers there; start it, or give its address with --url"
