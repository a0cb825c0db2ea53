"""The models that benchmarks of accuracy look at, each with its texts: `MODEL=CALIBRATION,EVALUATION`."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from result import ROOT, arguments, described, publish

DEMO, SHARED = ROOT / "examples" / "demo", ROOT.parent / "shared"
_PYTHON = ("python-calibration.txt", "python-evaluation.txt")
_STORIES = ("tinystories-train-1000.txt", "tinystories-valid-excerpt.txt")


@dataclass(frozen=True)
class ModelTexts:
    """A checkpoint's directory and the texts it is calibrated and evaluated on."""

    directory: str
    data: str
    eval_data: str

    @property
    def name(self) -> str:
        """What results call it."""
        path = Path(self.directory).resolve()
        return path.parent.name if path.name == "checkpoint" else path.name


def model_texts(spec: str) -> ModelTexts:
    """MODEL=CALIBRATION,EVALUATION, as an argument's type."""
    directory, equals, texts = spec.partition("=")
    data, comma, eval_data = texts.partition(",")
    if not (equals and comma):
        raise ValueError(spec)
    return ModelTexts(directory, data, eval_data)


def small_models(*names: str) -> list[ModelTexts]:
    """Of the small trained models those of `names` that are here: the demo always, others where `../shared` is."""
    found = [ModelTexts(str(DEMO / "checkpoint"), str(DEMO / "calibration.txt"), str(DEMO / "evaluation.txt"))]
    for name in names:
        texts = (str(SHARED / "data" / text) for text in (_STORIES if name == "stories260k" else _PYTHON))
        if (SHARED / "checkpoints" / name).is_dir():
            found.append(ModelTexts(str(SHARED / "checkpoints" / name), *texts))
    return found if "demo" in names else found[1:]


def cut_text(texts: ModelTexts, tokens: int, folder: Path) -> Path:
    """As much of the evaluation text as the checkpoint's tokenizer makes `tokens` of, in a file in `folder`."""
    from transformers import AutoTokenizer

    text = Path(texts.eval_data).read_text(encoding="utf-8")
    ends = AutoTokenizer.from_pretrained(texts.directory)(text, return_offsets_mapping=True)["offset_mapping"]
    path = folder / Path(texts.eval_data).name
    path.write_text(text[: ends[min(tokens, len(ends)) - 1][1]], encoding="utf-8")
    return path


def model_arguments(doc: str | None, windows: int = 40, context: int = 256, **counts: int) -> argparse.ArgumentParser:
    """Make the parser of a benchmark of models, with `--windows`, `--context` and an option for each of `counts`.

    The numbers are the options' defaults.
    """
    parser = arguments(doc)
    parser.add_argument("models", nargs="*", type=model_texts, metavar="MODEL=CALIBRATION,EVALUATION")
    for name, default in {"windows": windows, "context": context, **counts}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser


def main_of(
    benchmark: str,
    doc: str | None,
    measure: Callable[[ModelTexts, int, int], Any],
    *names: str,
    windows: int = 40,
    context: int = 256,
) -> int:
    """What a benchmark does that measures models alike: `measure(model, windows, context)` for each that was given, or
    those of `names` that are here, by default on so many windows of so many tokens; its exit status.
    """
    asked = model_arguments(doc, windows, context).parse_args()
    head, models = described(benchmark), asked.models or small_models(*names)
    results = {model.name: measure(model, asked.windows, asked.context) for model in models}
    return publish(head, {"windows": asked.windows, "context": asked.context, "results": results}, asked.save)
