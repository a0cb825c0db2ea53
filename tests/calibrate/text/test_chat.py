"""Chats are rendered by the tokenizer's own template, in whatever table they come; a row that is no chat is named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fp8q.calibrate.text.chat import messages, renderer
from fp8q.calibrate.text.corpus import encode_texts
from fp8q.calibrate.text.documents import load_documents
from fp8q.calibrate.text.rows import Reading
from fp8q.core.errors import InputError

if TYPE_CHECKING:
    from tests.calibrate.conftest import Hub

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
)
CHATS = [
    [{"role": "user", "content": "What is 6 × 7?"}, {"role": "assistant", "content": "42"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": ""},
    ],
]
RENDERED = ["<s><|user|>What is 6 × 7?\n<|assistant|>42\n", "<s><|system|>Be brief.\n<|user|>Hi\n<|assistant|>\n"]
FORM = 'a list of messages like {"role": "user", "content": "…"}'


def with_template(checkpoint: Path, target: Path, template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    """The tokenizer of a copy of `checkpoint` to which `template` is added."""
    for file in checkpoint.glob("*token*"):
        shutil.copy(file, target)
    shutil.copy(checkpoint / "config.json", target)
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target)
    return loaded


@pytest.fixture
def tokenizer(demo_checkpoint: Path, tmp_path: Path) -> PreTrainedTokenizerBase:
    (tmp_path / "tokenizer").mkdir()
    return with_template(demo_checkpoint, tmp_path / "tokenizer")


@pytest.fixture
def reading(tokenizer: PreTrainedTokenizerBase) -> Reading:
    return Reading(render=renderer(tokenizer, "demo"))


def jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def refusal(spec: Path, reading: Reading) -> str:
    with pytest.raises(InputError) as refused:
        load_documents(str(spec), reading)
    return str(refused.value)


def test_every_table_of_chats_gives_the_same_documents(tmp_path: Path, reading: Reading) -> None:
    rows = [{"id": f"row {number}", "messages": chat} for number, chat in enumerate(CHATS)]
    jsonl(tmp_path / "a.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    jsonl(tmp_path / "b.jsonl", *({"conversations": chat} for chat in CHATS))
    for name in ("a.jsonl", "a.parquet", "saved", "b.jsonl"):
        found = load_documents(str(tmp_path / name), reading)
        assert (found.texts, found.chat) == (RENDERED, True), name


def test_chats_on_the_hub_are_rendered_too(hub: "Hub", reading: Reading) -> None:
    hub.add(
        "datasets/acme/chats",
        {"train.jsonl": "".join(json.dumps({"id": "x", "messages": chat}) + "\n" for chat in CHATS).encode()},
    )
    assert load_documents("acme/chats", reading).texts == RENDERED


def test_chats_in_sharegpts_form_are_renamed(tmp_path: Path, reading: Reading) -> None:
    said = [{"from": "human", "value": "What is 6 × 7?"}, {"from": "gpt", "value": "42"}]
    assert load_documents(str(jsonl(tmp_path / "a.jsonl", {"conversations": said})), reading).texts == RENDERED[:1]


def test_what_else_a_message_holds_goes_to_the_template() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None, "mood": 1}
    assert messages("here", [call]) == [
        {
            "role": "assistant",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
            "mood": 1,
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ({"town": "Oslo"}, {"town": "Oslo"}),
        ('{"town": "Oslo", "days": [1, null, 2.5]}', {"town": "Oslo", "days": [1, None, 2.5]}),
        ('{"query": "{\\"a\\": 1}"}', {"query": '{"a": 1}'}),  # JSON text within is text
        ("{}", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_arguments_of_tool_calls_are_objects_as_such_or_in_json(arguments: object, read: object) -> None:
    call = {"function": {"arguments": arguments, "name": "f"}, "id": "a", "index": None}
    chat = [{"tool_calls": [call], "role": "assistant"}]
    (message,) = messages("here", chat)
    assert message == {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": read}}],
    }
    assert list(message["tool_calls"][0]) == ["id", "type", "function"]  # a template may print the object
    assert list(message["tool_calls"][0]["function"]) == ["name", "arguments"]


def test_a_call_without_a_function_around_it_stays_so() -> None:
    chat = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}]
    assert messages("here", chat) == [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": 1}}]}]


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_names_that_templates_know(name: str) -> None:
    (message,) = messages("here", [{"role": "assistant", "content": "42", name: "6 × 7"}])
    assert (message["reasoning_content"], message["thinking"]) == ("6 × 7", "6 × 7")


def test_parts_that_are_text_are_lines_and_no_calls_are_none() -> None:
    parts = [{"type": "text", "text": "one", "image": None}, {"type": "text", "text": "two"}]
    chat = [{"role": "user", "content": parts, "tool_calls": []}]
    assert messages("here", chat) == [{"role": "user", "content": "one\ntwo"}]


CALLS = '{"function": {"name": "…", "arguments": {…}}}'


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ("[]", f'its tool_calls is "[]"; it must be a list of calls like {CALLS}'),
        (["f"], f'its tool call is "f"; it must be like {CALLS}'),
        (
            [{"function": {"arguments": "{}"}}],
            f'its tool call is {{"function": {{"arguments": "{{}}"}}}}; it must be like {CALLS}',
        ),
        (
            [{"function": {"name": "f", "arguments": "[1]"}}],
            'the arguments of its call of f are "[1]"; they must be an object, as such or in JSON',
        ),
        (
            [{"function": {"name": "f", "arguments": "{'town': 1}"}}],
            "the arguments of its call of f are \"{'town': 1}\"; they must be an object, as such or in JSON",
        ),
        (
            [{"function": {"name": "f", "arguments": '{"a": NaN}'}}],
            'the arguments of its call of f are "{\\"a\\": NaN}"; they must be an object, as such or in JSON',
        ),
        (
            [{"function": {"name": "f", "arguments": 7}}],
            "the arguments of its call of f are 7; they must be an object, as such or in JSON",
        ),
    ],
)
def test_a_tool_call_that_is_none_is_named(calls: object, what: str) -> None:
    with pytest.raises(InputError) as refused:
        messages("here", [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert str(refused.value) == f"here, message 1 (assistant): {what}"


def test_characters_of_no_text_are_found_in_calls_too(tmp_path: Path, reading: Reading) -> None:
    call = {"function": {"name": "f", "arguments": {"town": "a\ud83d"}}}
    path = jsonl(tmp_path / "a.jsonl", {"messages": [{"role": "assistant", "tool_calls": [call]}]})
    assert refusal(path, reading) == (
        f"{path}: line 1, message 1 (assistant): its tool_calls holds half of a surrogate pair, which is no character; "
        "mend it"
    )


def test_a_column_of_text_is_read_where_there_are_no_chats(tmp_path: Path, reading: Reading) -> None:
    found = load_documents(str(jsonl(tmp_path / "a.jsonl", {"text": "one"})), reading)
    assert (found.texts, found.chat) == (["one"], False)


def test_beside_a_column_of_text_chats_come_first_or_last_as_asked(tmp_path: Path, reading: Reading) -> None:
    both = str(jsonl(tmp_path / "a.jsonl", {"text": "one", "messages": CHATS[0]}))
    assert load_documents(both, reading).texts == RENDERED[:1]
    assert (
        load_documents(both, Reading(render=reading.render, chats_first=False)).texts
        == load_documents(both).texts
        == ["one"]
    )


def test_the_template_alone_writes_special_tokens(shared_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    llama = with_template(shared_checkpoint("stories260k"), tmp_path)
    assert llama("Once")["input_ids"][0] == llama.bos_token_id  # a tokenizer that adds one itself
    render = renderer(llama, "stories260k")
    texts = [render("here", chat) for chat in CHATS]
    ids = encode_texts(texts, llama, special_tokens=False)
    assert (ids == llama.bos_token_id).sum() == 2
    expected = [
        token for chat in CHATS for token in cast("list[int]", llama.apply_chat_template(chat, return_dict=False))
    ]
    assert ids.tolist() == expected


def test_a_template_that_asks_for_the_date_is_told_the_same_one_every_day(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    dated = with_template(demo_checkpoint, tmp_path, "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    assert renderer(dated, "demo")("here", CHATS[0]) == "26 Jul 2024: What is 6 × 7?"


def test_a_tokenizer_without_a_template_is_refused(demo_checkpoint: Path) -> None:
    with pytest.raises(InputError) as refused:
        renderer(AutoTokenizer.from_pretrained(demo_checkpoint), "demo")
    assert str(refused.value) == (
        "demo: its tokenizer has no chat template; put the one it was trained with beside config.json as "
        "chat_template.jinja, or give text instead of chats"
    )


def test_named_templates_without_a_default_are_named(demo_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = with_template(demo_checkpoint, tmp_path, "")
    tokenizer.chat_template = {"tool_use": "a", "rag": "b"}
    with pytest.raises(InputError) as refused:
        renderer(tokenizer, "demo")
    assert str(refused.value) == (
        "demo: its tokenizer has the chat templates rag, tool_use, and none that is called default; put the one it was "
        "trained with beside config.json as chat_template.jinja, or give text instead of chats"
    )


def test_without_a_template_the_option_is_named(tmp_path: Path) -> None:
    rows = [{"id": "1", "messages": CHATS[0]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    for path in (jsonl(tmp_path / "a.jsonl", *rows), tmp_path / "a.parquet"):
        assert refusal(path, Reading()) == (
            f"{path}: holds chats, under `messages`; render them by the tokenizer's own template with "
            "--chat-template, or name a column of strings `text`"
        )


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([], f" holds no chat but []; it must hold {FORM}"),
        ("Hi", f' holds no chat but "Hi"; it must hold {FORM}'),
        (["Hi"], f', message 1: is no message but "Hi"; a chat is {FORM}'),
        (
            [CHATS[0][0], {"content": "42"}],
            ', message 2: its role is missing; it must be a string such as "user" or "assistant"',
        ),
        (
            [{"role": 7, "content": "42"}],
            ', message 1: its role is 7; it must be a string such as "user" or "assistant"',
        ),
        ([{"role": "user"}], ", message 1 (user): its content is missing; it must be a string, or parts that are text"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "https://example.org"}]}],
            (
                ', message 1 (user): its content is [{"type": "image", "url": "https://examp…; it must be a string, '
                "or parts that are text"
            ),
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org"}}]}],
            (
                ", message 1 (user): its content has an image as image_url; name a file: a part is like "
                '{"type": "image", "path": "cat.png"}, a file in the folder of the text'
            ),
        ),
        (
            [{"role": "user", "content": "a\ud83d"}],
            ", message 1 (user): its content holds half of a surrogate pair, which is no character; mend it",
        ),
        (
            [{"role": "tool", "content": "42"}],
            ": the tokenizer's chat template refuses it: no tools here; mend the row, or leave it out",
        ),
    ],
)
def test_a_row_that_is_no_chat_is_named(tmp_path: Path, reading: Reading, value: object, what: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHATS[0]}, {"messages": None}, {"messages": value})
    assert refusal(path, reading) == f"{path}: line 3{what}"


def test_a_row_of_a_table_is_named_by_its_number(tmp_path: Path, reading: Reading) -> None:
    datasets.Dataset.from_list(
        [{"messages": CHATS[0]}, {"messages": [{"role": "tool", "content": "42"}]}]
    ).save_to_disk(str(tmp_path / "saved"))
    assert refusal(tmp_path / "saved", reading).startswith(
        f"{tmp_path / 'saved'}: row 2: the tokenizer's chat template refuses it: no tools here; "
    )


def test_a_template_that_reaches_for_the_machine_is_stopped_by_the_sandbox(
    demo_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "evil").mkdir()
    evil = with_template(demo_checkpoint, tmp_path / "evil", "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    path = jsonl(tmp_path / "a.jsonl", {"messages": CHATS[0]})
    assert refusal(path, Reading(render=renderer(evil, "demo"))) == (
        f"{path}: line 1: the tokenizer's chat template refuses it: access to attribute '__class__' of 'str' object "
        "is unsafe.; mend the row, or leave it out"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",  # computed while it is compiled, in one step that no signal interrupts
    ],
)
def test_a_template_that_computes_for_ever_is_stopped(
    tokenizer: PreTrainedTokenizerBase, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8q.calibrate.text.template.START", 0.3)
    tokenizer.chat_template = template
    with pytest.raises(InputError) as refused:
        renderer(tokenizer, "demo")("here", CHATS[0])
    assert str(refused.value) == (
        "here: the tokenizer's chat template refuses it: it was stopped, since it takes longer than any template does, "
        "or crashes; mend the row, or leave it out"
    )
    tokenizer.chat_template = TEMPLATE
    assert renderer(tokenizer, "demo")("here", CHATS[0]) == RENDERED[0]


def test_a_template_that_takes_all_memory_is_stopped(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ messages[0].role * 4000000000 }}"
    with pytest.raises(InputError, match="template refuses it: MemoryError; mend the row"):
        renderer(tokenizer, "demo")("here", CHATS[0])


def test_a_template_renders_as_transformers_does(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{%- for m in messages %}{% if loop.first %}{% continue %}{% endif %}\n  {{ m | tojson(indent=2) }}"
        "{% generation %}{{ m.content | trim | upper }}{% endgeneration %}{{ eos_token }}\n{% endfor %}{{ tools }}"
    )
    expected = tokenizer.apply_chat_template(CHATS[1], tokenize=False)
    assert renderer(tokenizer, "demo")("here", CHATS[1]) == expected
