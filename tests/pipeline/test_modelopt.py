"""A run in ModelOpt's layout, in every command that runs a model: as the same run in compressed-tensors' layout."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8q import api
from fp8q.core.run import Run
from fp8q.options.scales import Layout
from tests.serve.web.started_server import in_thread

from ..command_result import Result
from ..conftest import KeepingGraphs, Texts

pytestmark = pytest.mark.slow

#: Windows of 256 tokens that are scored, and those that a server is sent.
WINDOWS = 10
SENT = 4
PROMPT = "def read_file(path):"


def remade(demo_run: Run, folder: Path, layout: Layout) -> Run:
    """The demo's run with one scale for each weight, in `layout`."""
    made = Run(Path(shutil.copytree(demo_run.root, folder / "run")))
    api.scales(made.root, api.RescaleOptions(weight_scale="tensor", form=("one",), layout=layout))
    return made


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory, keeping_graphs: KeepingGraphs) -> Run:
    made = remade(demo_run, tmp_path_factory.mktemp("modelopt"), "modelopt")
    with keeping_graphs():
        api.export(made.root)
    runtimes = ("bf16", "reference", "onnxruntime")
    api.validate(made.root, None, api.ValidateOptions(runtimes, max_tokens=WINDOWS * 256))
    return made


@pytest.fixture(scope="module")
def twin(demo_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In compressed-tensors' layout, without a graph of its own."""
    made = remade(demo_run, tmp_path_factory.mktemp("compressed-tensors"), "compressed-tensors")
    api.validate(made.root, None, api.ValidateOptions(("bf16", "reference"), max_tokens=WINDOWS * 256))
    return made


def test_validating_finds_what_it_finds_of_the_other_layout(run: Run, twin: Run) -> None:
    here, there = (json.loads(each.accuracy.read_text(encoding="utf-8"))["runtimes"] for each in (run, twin))
    assert here["reference"] == there["reference"]
    assert here["onnxruntime"]["perplexity"] == pytest.approx(here["reference"]["perplexity"], rel=0.01)


def test_the_reference_writes_the_text_of_the_other_layout_and_the_graph_answers(
    run: Run, twin: Run, fp8q: Callable[..., Result]
) -> None:
    words = ("--prompt", PROMPT, "--max-tokens", 8)
    texts = [fp8q("generate", each.root, "--runtime", "reference", *words) for each in (run, twin)]
    assert (texts[0].code, texts[0].out) == (0, texts[1].out)
    graph = fp8q("generate", run.root, *words)
    assert graph.code == 0
    assert len(graph.out) > 8


def test_the_model_that_is_served_is_the_one_that_was_validated(run: Run, fp8q: Callable[..., Result]) -> None:
    with in_thread(run.root) as server:
        done = fp8q("compare", run.root, "--url", server.client.base_url, "--windows", SENT, "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)
    assert (shown["verdict"], shown["runtimes"][0]["runtime"]) == ("validated", "onnxruntime")


def test_compared_with_the_original_it_loses_what_the_other_layout_loses_and_the_reference(
    run: Run, twin: Run, demo_checkpoint: Path, demo_texts: Texts, tmp_path: Path, fp8q: Callable[..., Result]
) -> None:
    """Inputs are rounded in either layout: transformers' KL is the reference's on the same text, but for the BF16 that
    it divides in.
    """
    shown = []
    for compared, name in ((run, "here"), (twin, "there")):
        words = ("--data", demo_texts.evaluation, "--context", 256, "--max-tokens", WINDOWS * 256)
        done = fp8q("compare", demo_checkpoint, "--model", compared.model, *words, "--out", tmp_path / name, "--json")
        assert done.code == 0, done.err
        shown.append(json.loads(done.out))
    here, there = shown
    assert (here["candidate"]["quantization"], here["candidate"]["loaded_by"]) == ("modelopt", "transformers")
    assert here["notes"] == ["transformers knows no ModelOpt, and gets these codes and scales as compressed-tensors"]
    assert here["runtimes"] == there["runtimes"]
    reference = json.loads(run.accuracy.read_text(encoding="utf-8"))["runtimes"]["reference"]
    assert here["kl_nats"]["mean"] == pytest.approx(reference["kl_mean_nats"], rel=0.25)


def test_transformers_is_given_what_it_knows_in_the_place_of_a_server(run: Run, fp8q: Callable[..., Result]) -> None:
    done = fp8q("compare", run.root, "--model", run.model, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["verdict"] == "validated"
