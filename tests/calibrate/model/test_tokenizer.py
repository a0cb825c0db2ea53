"""A text is calibrated on the tokens that it is served as, whichever of a checkpoint's two tokenizers that takes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fp8q.calibrate.model.adapter_base import adapter_remarks, with_adapters
from fp8q.calibrate.model.source import Source
from fp8q.calibrate.model.tokenizer import auto_of, load_tokenizer, stored_tokenizer
from fp8q.quantize.checkpoint.tokenizer_files import (
    calibrated_remark,
    difference_in_vllm,
    write_companions,
    written_remark,
)
from fp8q.quantize.checkpoint.writer import write_config
from fp8q.serve.loop.text import Vocabulary
from tests.calibrate.conftest import Notebook
from tests.two_tokenizers import two_tokenizers

TEXT = "1969 twelve, 12345 and don't"
#: What Qwen2's rules in transformers read as other tokens than `two_tokenizers` do: digits one by one, and é as one
#: code point. They add <|endoftext|> to the vocabulary.
KINDS = (
    "numbers, several spaces, ends of lines, é as two code points, indented code and the special token <|endoftext|>"
)

Checkpoint = Callable[[str, str], Source]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint("Qwen2Config", "GPT2Tokenizer")`: `two_tokenizers` of these."""
    return lambda config, kind: two_tokenizers(tmp_path_factory.mktemp("tokens") / "model", config, kind)


def by_file(directory: Path) -> list[int]:
    return list(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(TEXT).ids)


def by_auto(directory: Path) -> list[int]:
    return list(auto_of(directory)(TEXT)["input_ids"])


def written(source: Source, directory: Path) -> tuple[Path, str | None]:
    """A directory with the configuration and the companions of `source`, and what was noted."""
    directory.mkdir()
    write_config(source, directory, None)
    remaining = write_companions(source, directory)
    return directory, written_remark(remaining) if remaining else None


def test_the_file_tokenizes_unless_the_other_is_chosen(checkpoint: Checkpoint) -> None:
    source, notes = checkpoint("Qwen2Config", "PreTrainedTokenizerFast"), Notebook()
    assert by_auto(source.path) != by_file(source.path)
    assert load_tokenizer(source, notes)(TEXT)["input_ids"] == by_file(source.path)
    assert load_tokenizer(replace(source, tokenizer="auto"), notes)(TEXT)["input_ids"] == by_auto(source.path)
    example = (
        f"{source.path}: {KINDS}: '1969 twelve' is 1 9 6 9 Ġt w e l … by AutoTokenizer, which vLLM uses, and 196 9 "
        "Ġt w e l v e by tokenizer.json; "
    )
    assert notes.lines == [
        f"{example}tokenizer.json is calibrated, validated and served (--tokenizer auto takes the other)",
        f"{example}--tokenizer auto takes the first, and writes it to model/ as tokenizer.json",
    ]


@pytest.mark.parametrize(
    ("config", "kind"),
    [("LlamaConfig", "GPT2Tokenizer"), ("GPTNeoXConfig", "GPTNeoXTokenizer"), ("LlamaConfig", "Qwen2Tokenizer")],
)
def test_both_read_what_is_written_as_the_file_has_it(
    checkpoint: Checkpoint, tmp_path: Path, config: str, kind: str
) -> None:
    source = checkpoint(config, kind)
    assert by_auto(source.path) != by_file(source.path)
    directory, note = written(source, tmp_path / "model")
    assert note is None
    assert by_auto(directory) == by_file(directory) == by_file(source.path)


def test_where_transformers_has_its_way_all_the_same_it_is_noted(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("Qwen2Config", "PreTrainedTokenizerFast")
    directory, note = written(source, tmp_path / "model")
    assert note == (
        f"model/tokenizer.json: vLLM reads other tokens than were calibrated, of {KINDS}, since transformers has rules "
        "of its own for this type of model: send it token ids, or calibrate with --tokenizer auto"
    )
    remaining = difference_in_vllm(source)
    assert remaining is not None
    assert calibrated_remark("demo", remaining) == (
        f"demo: vLLM reads other tokens than are calibrated, of {KINDS}: '1969 twelve' is 1 9 6 9 Ġt w e l … by "
        "AutoTokenizer, which vLLM uses, and 196 9 Ġt w e l v e by tokenizer.json; --tokenizer auto calibrates those "
        "that vLLM reads"
    )
    assert difference_in_vllm(replace(source, tokenizer="auto")) is None
    config = "tokenizer_config.json"
    assert (directory / config).read_bytes() == (source.path / config).read_bytes()
    assert stored_tokenizer(directory)(TEXT)["input_ids"] == by_file(source.path)


@pytest.mark.parametrize(("config", "kind"), [("Qwen2Config", "Qwen2Tokenizer"), ("LlamaConfig", "GPT2Tokenizer")])
def test_the_other_becomes_the_file_where_it_is_chosen(
    checkpoint: Checkpoint, tmp_path: Path, config: str, kind: str
) -> None:
    source = replace(checkpoint(config, kind), tokenizer="auto")
    directory, note = written(source, tmp_path / "model")
    assert note is None
    assert by_auto(directory) == by_file(directory) == by_auto(source.path) != by_file(source.path)


def test_where_both_agree_the_files_stay_as_they_are(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, notes = checkpoint("LlamaConfig", "PreTrainedTokenizerFast"), Notebook()
    load_tokenizer(source, notes)
    directory, note = written(source, tmp_path / "model")
    assert (note, notes.lines) == (None, [])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (directory / name).read_bytes() == (source.path / name).read_bytes()


def test_statistics_of_one_tokenizer_are_not_those_of_the_other(checkpoint: Checkpoint) -> None:
    source = checkpoint("Qwen2Config", "Qwen2Tokenizer")
    assert replace(source, tokenizer="auto").tokenizer_fingerprint != source.tokenizer_fingerprint


@pytest.fixture
def adapted(checkpoint: Checkpoint, tmp_path: Path, made_adapter: Callable[..., Path]) -> tuple[Source, Path]:
    """A model with a template and a licence, and an adapter of it that was trained with one token, </s>, less."""
    source = checkpoint("LlamaConfig", "PreTrainedTokenizerFast")
    (source.path / "chat_template.jinja").write_text("base")
    (source.path / "LICENSE").write_text("of the base")
    return source, made_adapter(source.path, tmp_path / "style", r=2, lora_alpha=4, target_modules=["q_proj"])


def test_a_merged_adapters_tokenizer_template_and_end_of_a_text_are_taken(
    adapted: tuple[Source, Path], tmp_path: Path
) -> None:
    source, adapter = adapted
    assert adapter_remarks(with_adapters(source, [adapter], "merge")) == []
    tokenizer = load_tokenizer(source)
    tokenizer.add_special_tokens({"eos_token": "line"})
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(adapter)
    (adapter / "LICENSE").write_text("of the adapter")
    merged = with_adapters(source, [adapter], "merge")
    assert adapter_remarks(merged) == [
        f"--adapter {adapter}: its own chat template and end of a text (line) is taken, which is not the base's"
    ]
    assert load_tokenizer(merged).get_chat_template() == "{{ messages }}"
    directory, _ = written(merged, tmp_path / "model")
    assert (directory / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (directory / "LICENSE").read_text() == "of the base"
    end = Tokenizer.from_file(str(adapter / "tokenizer.json")).token_to_id("line")
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [1, end]
    assert Vocabulary.read(directory).end == {1, end}
    beside = with_adapters(source, [adapter], "beside")
    (remark,) = adapter_remarks(beside)
    assert remark == (
        f"--adapter {adapter}: has a chat template and end of a text (line) of its own, which is left aside: base and "
        "adapters are served by the base's"
    )
    assert load_tokenizer(beside).get_chat_template() == "base"


def test_an_adapters_template_alone_is_taken_too(adapted: tuple[Source, Path], tmp_path: Path) -> None:
    source, adapter = adapted
    before = with_adapters(source, [adapter], "merge").fingerprint
    (adapter / "chat_template.jinja").write_text("of the adapter")
    merged = with_adapters(source, [adapter], "merge")
    assert merged.fingerprint != before
    assert load_tokenizer(merged).get_chat_template() == "of the adapter"
    directory, _ = written(merged, tmp_path / "model")
    assert (directory / "chat_template.jinja").read_text() == "of the adapter"
    assert (directory / "tokenizer.json").read_bytes() == (source.path / "tokenizer.json").read_bytes()
