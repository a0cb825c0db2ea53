"""Small models that see: random checkpoints of published classes with a processor of images, pictures, and rows of
chats about them. Run by the others, and not by itself.

The demo's tokenizer gets the tokens that a processor needs in the place of its last merges, whose ids are the model's.
Processors are described by files as published checkpoints have them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from unseen_architectures import random_checkpoint

#: The token that stands for an embedding of an image: the last of the vocabulary.
PLACEHOLDER = 2047
#: The template of a chat with parts; `IMAGE` stands for the text that marks an image.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
#: Of each configuration: the tokens in the place of the last ids, by their names in the tokenizer's configuration; the
#: mark of an image in the template; the processor's files.
PROCESSORS: dict[str, tuple[dict[str, str], str, dict[str, dict[str, Any]]]] = {
    "Gemma3Config": (
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        {
            "preprocessor_config.json": {
                "image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor",
                "size": {"height": 28, "width": 28},
            },
            "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        },
    ),
    "LlavaConfig": (
        {"image_token": "<image>"},
        "<image>",
        {
            "preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor",
                "size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28},
            },
            "processor_config.json": {
                "processor_class": "LlavaProcessor", "patch_size": 14, "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default", "image_token": "<image>",
            },
        },
    ),
}  # fmt: skip


def seeing_checkpoint(path: Path, config: str) -> Path:
    """A random checkpoint of the configuration, with tokenizer, chat template and processor."""
    special, mark, files = PROCESSORS[config]
    random_checkpoint(path, config, image_token_index=PLACEHOLDER)
    with_tokens(path, special)
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("IMAGE", mark), encoding="utf-8")
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path


def with_tokens(path: Path, special: dict[str, str]) -> None:
    """Put `special` tokens in the place of the last of the vocabulary in `path`."""
    file = path / "tokenizer.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    model = fields["model"]
    first = len(model["vocab"]) - len(special)
    merged = {"".join(pair) for pair in model["merges"]}
    gone = {token for token, number in model["vocab"].items() if number >= first}
    assert gone <= merged
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < first}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in gone]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    fields["added_tokens"] += [
        {"id": number, "content": token} | plain for number, token in enumerate(special.values(), first)
    ]
    file.write_text(json.dumps(fields), encoding="utf-8")
    config: dict[str, Any] = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>"}
    config["extra_special_tokens"] = special
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (40, 32)) -> Path:
    """Save noise of bright and dark patches, of `size`, in the format of the suffix."""
    drawn = np.random.default_rng(seed)
    cells = drawn.integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    Image.fromarray(cells.repeat(8, 0).repeat(8, 1)).save(path)
    return path


def asking(
    name: str, question: str = "What is in the picture?", answer: str = "Some coloured squares."
) -> dict[str, Any]:
    """A row that asks about the picture `name`."""
    content = [{"type": "image", "path": name}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write `rows` as JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path
