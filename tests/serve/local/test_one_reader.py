"""Calibration, `fp8q serve` and transformers read a chat, its special tokens and the end of an answer alike."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from fp8q.calibrate.model.source import Source
from fp8q.calibrate.model.tokenizer import auto_of, chosen
from fp8q.calibrate.text.chat import messages, renderer
from fp8q.calibrate.text.template import DATE, _plain
from fp8q.quantize.checkpoint.tokenizer_files import write_companions
from fp8q.serve.local.chat_template import ChatTemplate
from fp8q.serve.loop.text import Vocabulary, special_tokens

#: All that a template may ask of a chat and of the tokenizer.
TEMPLATE = (
    "{{ bos_token }}{% if tools is not none %}tools{% endif %}{% for m in messages %}{{ m.role }}|{{ m.content }}"
    "{% if m.reasoning_content is defined %}<{{ m.reasoning_content }}{{ m.thinking }}>{% endif %}{{ m.name }}"
    "{% for c in m.tool_calls %}{{ c | tojson }}{{ c.function.arguments.items() | list }}{% endfor %}"
    "{{ m.tool_call_id }}{{ eos_token }}{% endfor %}{{ unk_token }}{{ pad_token }}{{ image_token }}{{ cls_token }}"
)
SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<|im_end|>"]
#: A folder takes a second or more: what fails is not made smaller.
DRAWN = (Phase.explicit, Phase.reuse, Phase.generate)
NAMES = ["bos_token", "eos_token", "unk_token", "pad_token", "image_token"]


def tokenizer_in(directory: Path) -> None:
    """Bytes, with special tokens of which the last two are no part of tokenizer.json."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(letters))}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL[:3]])
    made.save(str(directory / "tokenizer.json"))


texts = st.sampled_from(SPECIAL)
added = texts.map(lambda text: {"__type": "AddedToken", "content": text, "special": True})
named = st.dictionaries(st.sampled_from(NAMES), st.one_of(st.none(), texts, added))
plain_named = st.dictionaries(
    st.sampled_from(NAMES), st.one_of(st.none(), texts, texts.map(lambda text: {"content": text, "lstrip": False}))
)
more: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {},
        {"additional_special_tokens": ["<|im_end|>"]},
        {"extra_special_tokens": ["<|im_end|>"]},
        {"extra_special_tokens": {"image_token": "<|im_end|>", "boi_token": "<s>"}},
        {"added_tokens_decoder": {"256": {"content": "<s>", "special": True}}},
    ]
)
classes = st.sampled_from(["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"])
words = st.text("aé\u0301狐 {\n\"'", max_size=6)
arguments = st.dictionaries(words, st.one_of(words, st.integers(-9, 9), st.none(), st.lists(words, max_size=2)))
called = st.one_of(arguments, arguments.map(json.dumps), st.sampled_from(["", None]))
calls = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"arguments": called, "name": words})},
    optional={"id": words, "index": st.just(0)},
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": words}), max_size=3)
said = st.fixed_dictionaries(
    {"content": st.one_of(words, parts), "role": st.sampled_from(["user", "assistant", "tool"])},
    optional={"name": st.one_of(st.none(), words), "tool_call_id": words, "tool_calls": st.lists(calls, max_size=2)}
    | dict.fromkeys(["reasoning_content", "reasoning", "thinking"], st.one_of(st.none(), words)),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), phases=DRAWN)
@given(named, st.one_of(st.none(), plain_named), more, classes, st.lists(said, min_size=1, max_size=3))
def test_a_chat_is_the_same_text_and_tokens_wherever_it_is_read(
    config: dict[str, Any], older: dict[str, Any] | None, extra: dict[str, Any], kind: str, chat: list[Any]
) -> None:
    with TemporaryDirectory() as made:
        source, model = Path(made) / "source", Path(made) / "model"
        source.mkdir()
        model.mkdir()
        tokenizer_in(source)
        fields = {"model_type": "llama", "vocab_size": 300, "max_position_embeddings": 9, "eos_token_id": 5}
        for directory in (source, model):
            (directory / "config.json").write_text(json.dumps(fields))
        written = {**config, **extra, "tokenizer_class": kind, "chat_template": TEMPLATE}
        (source / "tokenizer_config.json").write_text(json.dumps(written))
        if older is not None:
            (source / "special_tokens_map.json").write_text(json.dumps(older))
        opened = SimpleNamespace(
            path=source, companions={file.name: file for file in source.iterdir() if file.name != "config.json"},
            merged=None, tokenizer="file", trust_remote_code=False, name="drawn",
        )  # fmt: skip
        tokenizer = chosen(auto_of(source), source, "file")
        write_companions(cast("Source", opened), model)
        calibrated = renderer(tokenizer, "drawn")("here", chat)
        note(f"{config} {older} {extra} {kind}")
        assert ChatTemplate(model).render(chat) == calibrated
        assert special_tokens(model) == tokenizer.special_tokens_map
        assert tokenizer.apply_chat_template(messages("here", chat), tokenize=False) == calibrated
        assert _plain(TEMPLATE, DATE, messages=messages("here", chat), **special_tokens(model)) == calibrated
        vocabulary = Vocabulary.read(model)
        ids = tokenizer(calibrated, add_special_tokens=False)["input_ids"]
        assert vocabulary.encode(calibrated, special_tokens=False) == ids
        end = None if tokenizer.eos_token is None else vocabulary.tokenizer.token_to_id(tokenizer.eos_token)
        assert vocabulary.end == {5} | ({end} if end is not None else set())
