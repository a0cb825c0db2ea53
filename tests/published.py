"""Small random checkpoints of classes that models are published under, which `convert_classes` shrinks."""

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from convert_classes import classes, configuration
from published_sizes import VOCABULARIES
from transformers import PreTrainedModel

from .mixtures import DEMO, SMALL

#: Step 3.7's class, its language model with a limit on the gates of its last layer alone, and stacks of gate and up.
STEP: tuple[str, dict[str, Any]] = (
    "Step3p7ForConditionalGeneration",
    {"mlp_layer_types": ["sparse", "sparse"], "swiglu_limits": [0.0, 0.2]},
)
#: MiniMax-M3's class that sees, whose files have gate and up of shared experts apart.
MINIMAX: tuple[str, dict[str, Any]] = ("MiniMaxM3SparseForConditionalGeneration", {})

#: ERNIE 4.5 VL's: experts of text and experts of images, of other sizes, in one list of the files.
ERNIE: tuple[str, dict[str, Any]] = ("Ernie4_5_VLMoeForConditionalGeneration", {})


def random_class(path: Path, name: str, text: dict[str, Any], original: bool = True) -> Path:
    """A checkpoint of transformers' class `name` in the small configuration that benchmarks have of it, whose language
    model has the fields `text`; under the `original` names, or with all experts of a module in one tensor.
    """
    torch.manual_seed(0)
    config = configuration(name, classes()[name], dict.fromkeys(VOCABULARIES, SMALL["vocab_size"]))
    vars(config.get_text_config()).update(text)
    model: PreTrainedModel = getattr(transformers, name)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.1)
    torch.nn.Module.to(model, torch.bfloat16).save_pretrained(path, save_original_format=original)
    shutil.copyfile(DEMO / "tokenizer.json", path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return path
