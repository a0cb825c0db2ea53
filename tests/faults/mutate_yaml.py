"""Mutations of a YAML file of lm-eval's: another value, another key, a tag, or no YAML."""

import random

from mutate_bytes import mutate_bytes

VALUES = (
    "5", "-1", "1.5", "1e999", ".nan", "true", "null", "[]", "{}", "[a, b]", "{a: b}", "x", "''", '"\\u001b[2J"',
    "!function os.system", "!function nowhere.name", "!!python/name:os.system x", "&a [*a]", "*nobody", "2001-01-01",
    "word", "../../x", "/dev/zero", "'{{ 1 / 0 }}'", "'{{ cycler.__init__.__globals__.os.getcwd() }}'", "'{% for %}'",
    "'{{ nobody }}'", "'{{ 9 ** 9 ** 9 }}'", "1" + "0" * 400, "long " * 5000, "[" * 2000,
)  # fmt: skip
KEYS = (
    "task", "group", "tag", "class", "include", "dataset_path", "dataset_name", "dataset_kwargs", "test_split",
    "output_type", "doc_to_text", "doc_to_choice", "doc_to_target", "process_docs", "process_results", "metric_list",
    "generation_kwargs", "filter_list", "fewshot_split", "num_fewshot", "repeats", "metadata", "unsafe_code", "x",
)  # fmt: skip


def mutate_yaml(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A description, and the file with one line another, more, fewer, or its bytes changed."""
    lines = content.decode().splitlines()
    at = draw.randrange(len(lines))
    key = lines[at].partition(":")[0]
    new, other = draw.choice(VALUES), draw.choice(KEYS)
    forms = {
        f"{key.strip()}: {new[:30]}": [*lines[:at], f"{key}: {new}", *lines[at + 1 :]],
        f"{other}: {new[:30]}": [*[line for line in lines if not line.startswith(f"{other}:")], f"{other}: {new}"],
        f"{key.strip()} gone": lines[:at] + lines[at + 1 :],
        f"{key.strip()} twice": [*lines, lines[at]],
        "a tab": [*lines[:at], f"\t{lines[at]}", *lines[at + 1 :]],
    }
    what = draw.choice([*list(forms)[:2] * 3, *list(forms)[2:], "bytes"])
    return mutate_bytes(draw, content) if what == "bytes" else (what, "\n".join([*forms[what], ""]).encode())
