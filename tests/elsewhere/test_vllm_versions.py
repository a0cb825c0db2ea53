"""`integrations/vllm` in a vLLM that it was not tried with: it warns by name, or refuses by name, and runs nothing
wrong. The real vLLM is there, under another version's number, and without one part of it.
"""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from fp8q_vllm import TRIED, interface
from vllm_jobs import LIFE_S, installed_plugin

from fp8q import api
from fp8q.core.run import Run

from ..conftest import Texts, WithoutGraphs

SCRIPT = Path(__file__).with_name("vllm_other_version.py")
#: A private part, which vLLM may rename without a word.
PRIVATE = "vllm.model_executor.models.utils:WeightsMapper._map_name"


@dataclass(frozen=True)
class Opened:
    """What vLLM answered, and what it and the plugin logged."""

    answer: dict[str, str]
    log: str


@pytest.fixture(scope="module")
def opened(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Opened]:
    """`opened(run, "0.33.1", part)`: the run's checkpoint in a vLLM of that number without that part."""
    plugin = installed_plugin(vllm_python, tmp_path_factory.mktemp("installed"))

    def open_in(run: Run, version: str = "0.32.0", part: str = "") -> Opened:
        environment = os.environ | {"PYTHONPATH": str(plugin), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(
            [vllm_python, "-P", SCRIPT, run.model, version, part],
            capture_output=True, check=False, text=True, timeout=LIFE_S, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
        return Opened(json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr)

    return open_in


@pytest.fixture(scope="module")
def quantized_demo(
    tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Texts, without_graphs: WithoutGraphs
) -> Callable[[Literal[1, 2]], Run]:
    """`quantized_demo(2)`: the demo with so many terms."""

    def calibrate(terms: Literal[1, 2]) -> Run:
        out, texts = tmp_path_factory.mktemp("run") / "run", (str(demo_texts.calibration), str(demo_texts.evaluation))
        options = api.CalibrateOptions(samples=4, seq_len=64, activation_terms=terms)
        with without_graphs():
            return api.calibrate(str(demo_checkpoint), texts[0], out, texts[1], options)

    return calibrate


@pytest.fixture(scope="module")
def two(quantized_demo: Callable[[Literal[1, 2]], Run]) -> Run:
    return quantized_demo(2)


def test_a_version_that_was_not_tried_is_named_and_goes_on(opened: Callable[..., Opened], two: Run) -> None:
    found = opened(two, "0.33.1")
    assert found.answer == {"quantization": "fp8q"}
    assert (
        f"fp8q-vllm was tried with vLLM {', '.join(TRIED)}, and this is 0.33.1: hold what it answers against the run "
        "with `fp8q validate`, or install a version that was tried"
    ) in found.log


def test_without_a_part_that_it_builds_on_two_terms_are_refused_and_all_else_is_served(
    opened: Callable[..., Opened], two: Run, quantized_demo: Callable[[Literal[1, 2]], Run]
) -> None:
    found = opened(two, "0.40.0", PRIVATE)
    assert (
        f"fp8q-vllm 0.2.0 was tried with vLLM 0.32, and in this vLLM, 0.40.0, there is no {PRIVATE}: install a vLLM "
        "that was tried, or the fp8q-vllm of a later fp8q. This checkpoint has inputs in two terms; VLLM_PLUGINS=none "
        "leaves the plugin out, and runs one term"
    ) in found.answer["error"]
    assert "Traceback" not in found.log
    assert "; checkpoints with inputs in two terms are refused" in found.log
    assert opened(quantized_demo(1), "0.40.0", PRIVATE).answer == {"quantization": "compressed-tensors"}


def test_where_two_terms_cannot_be_told_from_others_nothing_is_served(opened: Callable[..., Opened], two: Run) -> None:
    part = interface.QUESTION[0]
    assert opened(two, "0.8.0", part).answer["error"] == (
        f"RuntimeError: fp8q-vllm 0.2.0 was tried with vLLM 0.32, and in this vLLM, 0.8.0, there is no {part}: install "
        "a vLLM that was tried, or the fp8q-vllm of a later fp8q. It cannot even tell which checkpoints have inputs in "
        "two terms, so nothing is served; VLLM_PLUGINS=none leaves the plugin out, and runs one term"
    )
