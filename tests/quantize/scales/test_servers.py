"""The table of what servers compute, held against the rules of the lint, the documents and the help of `--for`."""

import re
from pathlib import Path
from typing import get_args

import pytest

from fp8q.options import CheckpointServer, Kind, Server
from fp8q.options.calibrate import WITH_SECOND_CODES
from fp8q.quantize.lint.check import SERVER_RULES
from fp8q.quantize.lint.servers import TITLES
from fp8q.quantize.scales.servers import (
    MODELOPT_GRANULARITY,
    ONE_CODE_IN_EXPERTS,
    computed,
    computes,
    need_the_plugin,
)

ROOT = Path(__file__).resolve().parents[3]
KINDS: tuple[Kind, ...] = get_args(Kind)
SERVERS: tuple[Server | CheckpointServer, ...] = (*get_args(Server), *get_args(CheckpointServer))
#: The names of docs/forms.md -> the servers of the table.
NAMED = {
    "SGLang": "sglang",
    "transformers": "transformers",
    "TensorRT-LLM": "tensorrt-llm",
    "TensorRT(-RTX)": "tensorrt",
}


@pytest.mark.parametrize(
    ("server", "forms"),
    [
        ("tensorrt", "one tail two bf16"),
        ("vllm-plugin", "one tail two dynamic block bf16"),
        ("vllm", "one dynamic block bf16"),
        ("sglang", "one dynamic block bf16"),
        ("transformers", "one dynamic block bf16"),
        ("tensorrt-llm", "dynamic block"),
        ("any", "one bf16"),
    ],
)
def test_a_server_computes_these_forms_as_they_are(server: Server, forms: str) -> None:
    assert {kind for kind in KINDS if computes(server, kind)} == set(forms.split())


def test_every_server_says_something_of_every_form_and_takes_it_for_one_that_it_computes() -> None:
    for server in SERVERS:
        taken = [computed(server, kind) for kind in KINDS]
        assert all(kind is None or computes(server, kind) for kind in taken)
    assert all(computes(server, "one") for server in ONE_CODE_IN_EXPERTS)


@pytest.mark.parametrize(
    ("server", "forms"),
    [
        ("tensorrt", "one"),
        ("vllm-plugin", "one dynamic"),
        ("vllm", "one dynamic"),
        ("sglang", "one"),
        ("transformers", ""),
        ("tensorrt-llm", "one dynamic"),
        ("any", ""),
    ],
)
def test_a_server_computes_these_forms_of_modelopts_layout(server: Server, forms: str) -> None:
    """Of a scale for each weight with static inputs, and one for each channel with one for each token."""
    assert {kind for kind in KINDS if computed(server, kind, "modelopt") == kind} == set(forms.split())
    assert set(forms.split()) <= MODELOPT_GRANULARITY.keys()


def test_second_codes_are_left_out_but_by_graphs_and_by_the_plugin() -> None:
    for kind in ("two", "tail"):
        assert {server for server in SERVERS if computed(server, kind) == "one"} == {
            "vllm", "sglang", "transformers", "any"
        }  # fmt: skip
    assert set(WITH_SECOND_CODES) == {server for server in get_args(Server) if computes(server, "tail")}
    assert all(computes(server, "bf16") for server in get_args(Server)), "in the place of a tail"
    assert need_the_plugin(["one", "tail"])
    assert not need_the_plugin(["one", "dynamic", "bf16"])


def test_the_rule_of_second_codes_is_of_the_servers_that_take_them_for_one_code() -> None:
    named = {server for server, title in TITLES.items() if title in SERVER_RULES["S113"].applies_to}
    assert named == {server for server in get_args(CheckpointServer) if computed(server, "two") == "one"}


def test_the_docs_name_no_server_that_does_not_compute_a_form() -> None:
    page = (ROOT / "docs/forms.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)(?::N)?` \|.*\| ([^|]*) \|$", page.partition("## ")[0], re.MULTILINE)
    assert [kind for kind, _ in rows] == ["one", "dynamic", "block", "tail", "two", "bf16"]
    for kind, readers in rows:
        for title, server in NAMED.items():
            assert title not in readers.split(", ") or computes(server, kind), (kind, title)  # type: ignore[arg-type]
        assert ("`fp8q-vllm`" in readers) == need_the_plugin([kind])
        assert "vLLM" in readers
