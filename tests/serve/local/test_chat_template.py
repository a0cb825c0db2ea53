from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fp8q.calibrate.text.template import DATE, _plain, _renderer
from fp8q.core.errors import InputError
from fp8q.serve.local.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<é>"}]
#: What templates in use ask of transformers beside Jinja.
FEATURES = """{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
{{ bos_token + message.content | tojson }}
    {% generation %}said{% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{ strftime_now("%Y") }}{% endif %}"""
TOLD = {"bos_token": "<s>", "add_generation_prompt": True}


def test_without_transformers_the_sandbox_renders_the_same() -> None:
    messages = [{"role": "system", "content": "x"}, *MESSAGES]
    expected = _renderer()(FEATURES, DATE, messages=messages, **TOLD)
    assert expected.startswith('<s>"<é>"')
    assert expected.endswith("2024")
    assert _plain(FEATURES, DATE, messages=messages, **TOLD) == expected


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('no') }}", "{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"]
)
def test_the_sandbox_refuses_what_transformers_refuses(source: str) -> None:
    for render in (_renderer(), _plain):
        with pytest.raises(Exception, match="no|unsafe|not safe|immutable"):
            render(source, DATE, messages=list(MESSAGES))


def write(directory: Path, **config: Any) -> ChatTemplate:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return ChatTemplate(directory)


def test_the_template_and_its_tokens_are_found_wherever_they_are(tmp_path: Path) -> None:
    short = "{{ bos_token }}{{ messages[0].content }}"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": short}]
    for given in (short, named):
        found = write(tmp_path, chat_template=given, bos_token={"content": "<s>"}, eos_token="</s>")
        assert found.render(MESSAGES) == "<s><é>"
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}!")
    assert write(tmp_path, chat_template=short, eos_token="</s>").render(MESSAGES) == "</s>!"


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    def message() -> str:
        with pytest.raises(InputError) as raised:
            ChatTemplate(tmp_path)
        return str(raised.value)

    template, config = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    template.write_bytes(b"a\xff")
    assert message() == (
        f"{template}: is no text in UTF-8 ('utf-8' codec can't decode byte 0xff in position 1: invalid start byte); "
        "copy it again from the model"
    )
    config.write_text("[" * 100_000)
    assert message().startswith(f"{config}: is not JSON (maximum recursion depth exceeded")


def test_a_template_that_refuses_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        write(tmp_path, chat_template="{{ raise_exception('only\\nusers') }}").render(MESSAGES)
    assert str(raised.value) == "the chat template refuses these messages: only users"


@pytest.mark.parametrize("given", [None, 7, [], ["x"]])
def test_no_template_is_said(tmp_path: Path, given: object) -> None:
    with pytest.raises(InputError) as raised:
        write(tmp_path, chat_template=given)
    assert str(raised.value) == (
        f"{tmp_path}: its tokenizer has no chat template; give the one that the model was trained with as "
        "--template FILE, or generate without a chat"
    )


def test_named_templates_without_a_default_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        write(tmp_path, chat_template=[{"name": "tool_use", "template": "x"}, {"name": "rag", "template": "y"}])
    assert str(raised.value) == (
        f"{tmp_path}: its tokenizer has the chat templates rag, tool_use, and none that is called default; give the "
        "one that the model was trained with as --template FILE, or generate without a chat"
    )


def test_templates_lie_in_files_in_a_list_or_in_a_processors_file(tmp_path: Path) -> None:
    """In the order in which transformers looks; the last is of processors of images."""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert write(tmp_path).render(MESSAGES) == "of a processor"
    listed = [{"name": "rag", "template": "x"}, {"name": "default", "template": "listed"}]
    assert write(tmp_path, chat_template=listed).render(MESSAGES) == "listed"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("named")
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert ChatTemplate(tmp_path).render(MESSAGES) == "a file"
    assert ChatTemplate(tmp_path, tmp_path / "additional_chat_templates" / "rag.jinja").render(MESSAGES) == "named"


def test_a_template_whose_name_is_no_text_is_none(tmp_path: Path) -> None:
    listed: list[object] = [
        {"name": [], "template": {}},
        {"name": ["default"], "template": "x"},
        {"name": "rag"},
        "rag",
    ]
    with pytest.raises(InputError, match="its tokenizer has no chat template"):
        write(tmp_path, chat_template=listed)
    assert write(tmp_path, chat_template=[*listed, {"name": "default", "template": "y"}]).render(MESSAGES) == "y"


def test_a_pipe_in_the_place_of_a_template_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    pipe = tmp_path / "additional_chat_templates" / "rag.jinja"
    os.mkfifo(pipe)
    with pytest.raises(InputError) as raised:
        write(tmp_path)
    assert str(raised.value) == f"{pipe}: is a pipe; copy it again from the model"
