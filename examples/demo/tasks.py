"""Make lm-eval tasks of any text, which need no hub: questions of multiple choice, and words to finish.

    python examples/demo/tasks.py OUT [--text examples/demo/evaluation.txt] [--questions 400]

OUT becomes a folder for `fp8q evaluate RUN --tasks next_line,word --include-path OUT`:

    next_line      which of four lines comes next: the text's own, or one of three from elsewhere in it
    word           the rest of a word, generated greedily
    word_sampled   the same, drawn at temperature 0.8, so that the answers depend on the seed

A question shows the 400 characters before it. The same text, number and seed give the same bytes.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Place = TypeVar("Place")
HERE = Path(__file__).parent
#: Characters of the text that a question shows, letters of a word that it shows, and the fewest that a word has.
SHOWN, BEGUN, WORD = 400, 3, 6
CHOICES = 4
#: What ends a word: whatever may stand behind one.
ENDS = ["\n", " ", "(", ")", ".", ",", ":", "=", "[", "]", "'", '"']

NEXT_LINE = """\
task: next_line
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{shown}}}}"
doc_to_choice: "{{{{lines}}}}"
doc_to_target: right
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""
WORDS = """\
task: word
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{shown}}}}"
doc_to_target: rest
generation_kwargs:
  until: {ends}
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""
WORDS_SAMPLED = """\
include: word.yaml
task: word_sampled
generation_kwargs:
  until: {ends}
  max_gen_toks: 8
  do_sample: true
  temperature: 0.8
"""


def next_lines(text: str, count: int, draw: random.Random) -> list[dict[str, object]]:
    """Questions of multiple choice, `count` evenly spaced: the place of the right line is drawn."""
    ends = [match.end() for match in re.finditer(r"\n(?=[^\n]*\S)", text) if match.end() > SHOWN]
    lines = sorted({text[end:].split("\n", 1)[0] for end in ends})
    questions = list[dict[str, object]]()
    for end in evenly(ends, count):
        right = text[end:].split("\n", 1)[0]
        choices = [*draw.sample([line for line in lines if line != right], CHOICES - 1), right]
        draw.shuffle(choices)
        questions.append({"shown": text[end - SHOWN : end], "lines": choices, "right": choices.index(right)})
    return questions


def words(text: str, count: int) -> list[dict[str, object]]:
    """Questions that a word answers, `count` evenly spaced: one that the text before it has too, whose first letters
    are shown.
    """
    found = [
        match
        for match in re.finditer(rf"\b\w{{{WORD},}}\b", text)
        if match.start() > SHOWN and match[0] in text[match.start() - SHOWN : match.start()]
    ]
    return [
        {"shown": text[match.start() + BEGUN - SHOWN : match.start() + BEGUN], "rest": match[0][BEGUN:]}
        for match in evenly(found, count)
    ]


def evenly(places: Sequence[Place], count: int) -> list[Place]:
    """`count` of `places`, evenly spaced; all where there are fewer."""
    count = min(count, len(places))
    return [places[number * len(places) // count] for number in range(count)]


def write_tasks(out: Path, text: str, count: int, seed: int = 0) -> None:
    """Write the task files and their questions into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    ends = json.dumps(ENDS)
    for name, form, questions in (
        ("next_line", NEXT_LINE, next_lines(text, count, random.Random(seed))), ("word", WORDS, words(text, count)),
    ):  # fmt: skip
        data = out.resolve() / f"{name}.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in questions), encoding="utf-8")
        (out / f"{name}.yaml").write_text(form.format(data=json.dumps(str(data)), ends=ends), encoding="utf-8")
    (out / "word_sampled.yaml").write_text(WORDS_SAMPLED.format(ends=ends), encoding="utf-8")


def main() -> None:
    """Read the arguments, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--text", type=Path, default=HERE / "evaluation.txt")
    parser.add_argument("--questions", type=int, default=400)
    options = parser.parse_args()
    write_tasks(options.out, options.text.read_text(encoding="utf-8"), options.questions)
    print(f"{options.out}: next_line, word, word_sampled; fp8q evaluate RUN --tasks word --include-path {options.out}")


if __name__ == "__main__":
    main()
