"""The examples of the rules for graphs: every rule has one, which breaks it with the words that are printed."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from google.protobuf import text_format

from fp8q.export.lint.check import RULES, lint_file, lint_graph
from fp8q.export.lint.rules import Expectation
from fp8q.export.onnx_file.loading import load_graph
from fp8q.options import BF16, TWO

PAGE = Path(__file__).with_name("examples.md")
#: What the page says that scales.json and the checkpoint hold.
PROMISED, WEIGHT_SCALES = {"up": 0.5}, {"up": np.ones(16, np.float32)}
#: And attention.json, for the rule about attention alone.
ATTENTION = {"F212": {"attend.attention_scores": (0.5, 0.5)}}
#: And of two terms, and of weights alone, for the rules about those.
FORMS = {"F214": {"up": TWO}, "F215": {"up": BF16}}
#: And of a cache, for its rule.
CACHE = {"F318": {"attend.k": np.array([0.25, 0.5], np.float32).reshape(2, 1, 1)}}


@dataclass(frozen=True)
class Section:
    """A rule's section: its title, the difference to the good graph, and what the lint says of that."""

    title: str
    difference: list[str]
    findings: list[str]


def blocks() -> tuple[str, list[Section]]:
    """The good graph, and the sections."""
    head, *parts = PAGE.read_text(encoding="utf-8").split("\n### ")
    (good,) = re.findall(r"```onnx\n(.*?)```", head, re.DOTALL)
    return good, [section(part) for part in parts]


def section(part: str) -> Section:
    match = re.fullmatch(r"(.+?)\n\n```diff\n(.*?)\n```\n\n```text\n(.*?)\n```\n(?:\n## .*)?\n*", part, re.DOTALL)
    assert match, f"the section {part[:60]!r} has another form"
    return Section(match[1], match[2].split("\n"), match[3].split("\n"))


GOOD, SECTIONS = blocks()


def changed(difference: list[str]) -> str:
    """The good graph with a difference applied: what follows removed lines takes their place, what follows none stands
    before the line it names.
    """
    lines = GOOD.split("\n")
    at = None
    for line in difference:
        sign, text = line[:1], line[1:]
        if sign in ("-", " "):
            at = lines.index(text)
            if sign == "-":
                del lines[at]
            else:
                at += 1
        else:
            assert sign == "+"
            assert at is not None, "a difference begins with a line of the good graph"
            lines.insert(at, text)
            at += 1
    return "\n".join(lines)


def undotted(word: re.Match[str]) -> str:
    return word[0] if re.search(r"\.[A-Z]", word[0]) else word[0].replace(".", "__dot__")  # but an operator's domain


def write(text: str, directory: Path) -> Path:
    """The graph of a text in ONNX's own syntax, which has no dots in names, and its safetensors file, whose data begin
    at byte 256.
    """
    parts = text.split('"')  # the dots inside quotes are file names'
    dotted = '"'.join(
        re.sub(r"[A-Za-z_][\w.]*", undotted, part) if index % 2 == 0 else part for index, part in enumerate(parts)
    )
    model = text_format.Parse(
        text_format.MessageToString(onnx.parser.parse_model(dotted)).replace("__dot__", "."), onnx.ModelProto()
    )
    (directory / "model.onnx").write_bytes(model.SerializeToString())
    entries = {
        "up.weight_scale": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]},
        "up.weight": {"dtype": "F8_E4M3", "shape": [16, 32], "data_offsets": [64, 576]},
    }
    header = json.dumps(entries).ljust(248).encode()
    assert len(header) == 248
    (directory / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + WEIGHT_SCALES["up"].tobytes() + bytes(512)
    )
    return directory / "model.onnx"


def test_every_rule_has_an_example_in_order() -> None:
    assert [entry.title for entry in SECTIONS] == [f"{number} {RULES[number].name}" for number in sorted(RULES)]


@pytest.mark.parametrize("entry", SECTIONS, ids=lambda entry: entry.title)
def test_the_example_breaks_its_rule_with_the_words_that_are_printed(entry: Section, tmp_path: Path) -> None:
    number = entry.title.partition(" ")[0]
    path = write(changed(entry.difference), tmp_path)
    inputs = {name: scale for name, scale in PROMISED.items() if FORMS.get(number, {}).get(name) != BF16}
    promise = Expectation(
        inputs,
        WEIGHT_SCALES,
        ATTENTION.get(number, {}),
        CACHE.get(number, {}),
        FORMS.get(number, {}),
    )
    found = lint_graph(load_graph(path), promise if RULES[number].applies_to == "a run's graph" else None)
    assert [f"{finding.severity:<8}{finding}" for finding in found if finding.rule == number] == entry.findings


def test_the_good_graph_is_good(tmp_path: Path) -> None:
    assert lint_file(write(GOOD, tmp_path)) == []
    # it is a layer, not a whole model
    assert {finding.rule for finding in lint_file(tmp_path / "model.onnx", PROMISED, WEIGHT_SCALES)} == {"F306"}


@pytest.mark.parametrize("finding", [finding for entry in SECTIONS for finding in entry.findings])
def test_every_finding_ends_with_what_to_do(finding: str) -> None:
    what, _, remedy = finding.rpartition("; ")
    assert what
    assert re.match(
        r"(let|quantize|store|keep|set|leave|take|use|dequantize|move|run|calibrate"
        r"|export|write|express|name|give|make|rename|put|copy|drop|state|the engine)\b",
        remedy,
    )
