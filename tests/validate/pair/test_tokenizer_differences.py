"""Tokenizers compared by what they read and write: each change of a rule is said, and another spelling is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8q.validate.pair.document import Cause
from fp8q.validate.pair.tokenizer_differences import tokenizer_differences
from tests.validate.pair.damaged import edit_json

POSITIONS = 512
Fields = dict[str, Any]


@pytest.fixture
def differences(shared_checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[..., list[Cause]]:
    """Change a file of a copy of a checkpoint's tokenizer, and compare it with the original."""

    def compare(name: str, file: str, change: Callable[[Fields], object]) -> list[Cause]:
        original, candidate = shared_checkpoint(name), tmp_path / "candidate"
        shutil.copytree(original, candidate, ignore=shutil.ignore_patterns("*.safetensors"))
        edit_json(candidate / file, change)
        return [*tokenizer_differences(original, candidate, ["Once upon a time"], POSITIONS)]

    return compare


def truncation(length: int) -> Fields:
    """The setting of tokenizer.json that cuts texts."""
    return {"direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": 0}


def padding(strategy: object) -> Fields:
    """The setting of tokenizer.json that fills texts up."""
    return {
        "strategy": strategy, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>",
    }  # fmt: skip


def added(content: str, number: int, **flags: bool) -> Fields:
    """An added token."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": content} | usual | flags


@pytest.mark.parametrize(
    ("change", "subject", "fault"),
    [
        (
            lambda fields: fields.update(decoder=None),
            "tokenizer.json",
            (
                "writes the tokens 19 6 9 Ġt w el ve as '19 6 9 Ġt w el ve', and the original's as '1969 twelve': "
                "answers are other texts"
            ),
        ),
        (
            lambda fields: fields.update(truncation=truncation(16)),
            "tokenizer.json: truncation",
            "cuts every text to 16 tokens in servers that read the file as it is, and the original's does not",
        ),
        (
            lambda fields: fields.update(padding=padding({"Fixed": 64})),
            "tokenizer.json: padding",
            "fills every text up by {'Fixed': 64} in servers that read the file as it is, and the original's does not",
        ),
        (
            lambda fields: fields["model"].update(dropout=0.5),
            "tokenizer.json: dropout",
            "leaves out merges at random, 0.5 of them: no two prompts agree",
        ),
    ],
)
def test_a_changed_setting_is_said(
    differences: Callable[..., list[Cause]], change: Callable[[Fields], object], subject: str, fault: str
) -> None:
    first = differences("llama", "tokenizer.json", change)[0]
    assert (first.severity, first.subject) == ("error", subject)
    assert first.fault == fault


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda fields: fields.update(normalizer={"type": "Lowercase"}), id="lower case"),
        pytest.param(lambda fields: fields.update(normalizer={"type": "NFKC"}), id="NFKC"),
        pytest.param(lambda fields: fields.update(normalizer={"type": "NFC"}), id="NFC"),
        pytest.param(lambda fields: fields.update(normalizer={"type": "StripAccents"}), id="accents"),
        pytest.param(lambda fields: fields["pre_tokenizer"].update(add_prefix_space=True), id="prefix space"),
        pytest.param(lambda fields: fields["pre_tokenizer"].update(use_regex=False), id="regex"),
        pytest.param(lambda fields: fields["model"].update(merges=fields["model"]["merges"][:-500]), id="merges"),
        pytest.param(lambda fields: fields["added_tokens"][1].update(special=False), id="not special"),
        pytest.param(lambda fields: fields["added_tokens"][1].update(lstrip=True), id="strips spaces"),
        pytest.param(lambda fields: fields["added_tokens"].append(added("the", 400)), id="a word is special"),
        pytest.param(
            lambda fields: fields["post_processor"].update(
                single=[{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                special_tokens={"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
            ),
            id="BOS",
        ),
    ],
)
def test_a_rule_that_reads_or_writes_otherwise_is_an_error(
    differences: Callable[..., list[Cause]], change: Callable[[Fields], object]
) -> None:
    causes = differences("llama", "tokenizer.json", change)
    assert causes[0].severity == "error"
    assert causes[0].subject == "tokenizer.json"


@pytest.mark.parametrize(
    ("change", "subject"),
    [
        (lambda fields: fields.update(eos_token="<s>"), "tokenizer_config.json: eos_token"),
        (lambda fields: fields.update(eos_token=""), "tokenizer_config.json: eos_token"),
        (lambda fields: fields.update(bos_token="</s>"), "tokenizer_config.json: bos_token"),
        (lambda fields: fields.update(model_max_length=64), "tokenizer_config.json: model_max_length"),
        (lambda fields: fields.update(pad_token="the"), "tokenizer_config.json"),
    ],
)
def test_a_changed_setting_of_transformers_is_an_error(
    differences: Callable[..., list[Cause]], change: Callable[[Fields], object], subject: str
) -> None:
    causes = differences("llama", "tokenizer_config.json", change)
    assert [(cause.severity, cause.subject) for cause in causes] == [("error", subject)]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer.json", lambda fields: None),
        ("tokenizer.json", lambda fields: fields.update(truncation=truncation(POSITIONS))),
        ("tokenizer.json", lambda fields: fields.update(padding=padding("BatchLongest"))),
        ("tokenizer.json", lambda fields: fields["model"].update(merges=[*map(tuple, fields["model"]["merges"])])),
        ("tokenizer_config.json", lambda fields: fields.update(model_max_length=10**30, padding_side="left")),
        (
            "tokenizer_config.json",
            lambda fields: fields.update(pad_token="</s>", tokenizer_class="PreTrainedTokenizerFast"),
        ),
        ("tokenizer_config.json", lambda fields: fields.update(clean_up_tokenization_spaces=False)),
    ],
)
def test_another_spelling_is_no_difference(
    differences: Callable[..., list[Cause]], file: str, change: Callable[[Fields], object]
) -> None:
    assert differences("llama", file, change) == []


def test_a_tokenizer_that_transformers_wrote_again_is_no_difference(
    shared_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    original = shared_checkpoint("stories260k")
    tokenizer = AutoTokenizer.from_pretrained(original)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path / "candidate")
    shutil.copy(original / "config.json", tmp_path / "candidate")
    causes = [*tokenizer_differences(original, tmp_path / "candidate", ["Once upon a time"], POSITIONS)]
    assert [cause for cause in causes if cause.severity == "error"] == []


def test_rules_of_another_spelling_are_a_warning(differences: Callable[..., list[Cause]]) -> None:
    never = {"type": "Replace", "pattern": {"String": "zzzzzz"}, "content": "y"}
    (cause,) = differences("llama", "tokenizer.json", lambda fields: fields.update(normalizer=never))
    assert cause.severity == "warning"
    assert str(cause) == (
        "tokenizer.json: normalizer: is not the original's, though all samples are read and written alike; copy the "
        "original's tokenizer files beside the weights"
    )
