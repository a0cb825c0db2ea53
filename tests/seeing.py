"""Checkpoints, pictures and rows of small models that see, in a folder; transformers' own inputs of rows, and what
reaches modules.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from seeing_models import PROCESSORS, asking, picture, seeing_checkpoint, write_rows
from transformers import AutoProcessor

#: The pictures of `seeing_folder`.
PICTURES = 12


def seeing_folder(folder: Path, words: str) -> None:
    """Write to `folder` a checkpoint of each of `PROCESSORS`, pictures, rows that ask about them, and texts of
    `words`.
    """
    for config in PROCESSORS:
        seeing_checkpoint(folder / config, config)
    for number in range(PICTURES):
        picture(folder / f"{number}.png", number, (40 + 8 * (number % 3), 32))
    (folder / "text.txt").write_text(words[:10_000], encoding="utf-8")
    rows = [asking(f"{number}.png", f"What is in picture {number}?") for number in range(PICTURES)]
    plain = [{"messages": [{"role": "user", "content": text}]} for text in words[10_000:].split("\n\n")]
    write_rows(folder / "images.jsonl", rows)
    write_rows(folder / "mixed.jsonl", [*rows[:6], *plain, *rows[6:]])
    write_rows(folder / "plain.jsonl", plain)


def transformers_inputs(model: Path, rows: list[dict[str, Any]], folder: Path) -> list[Mapping[str, torch.Tensor]]:
    """The inputs that transformers' own processor makes of rows, by its own reading of template and images."""
    processor: Any = AutoProcessor.from_pretrained(model)
    made = []
    for row in rows:
        chat = json.loads(json.dumps(row["messages"]))
        chat[0]["content"][0]["path"] = str(folder / chat[0]["content"][0]["path"])
        made.append(processor.apply_chat_template(chat, tokenize=True, return_dict=True, return_tensors="pt"))
    return made


@contextmanager
def inputs_watched(model: torch.nn.Module, names: list[str]) -> Iterator[dict[str, list[float]]]:
    """The largest magnitude of the input of each module, of one pass after the other."""
    amax: dict[str, list[float]] = defaultdict(list)

    def watch(name: str) -> Callable[..., None]:
        return lambda module, inputs: amax[name].append(float(inputs[0].abs().max()))

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        yield amax
    finally:
        for handle in handles:
            handle.remove()
