"""Load both checkpoints of a comparison, and refuse pairs that are not of one model."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...calibrate.checkpoint.companions import VOCABULARY
from ...calibrate.checkpoint.recognizer import CODES, MODELOPT_FILE, QUANTIZATION_KEYS
from ...calibrate.checkpoint.weights import TensorHeader, find_weights, read_headers
from ...calibrate.input.silence import muted
from ...calibrate.input.untrusted import error_text, exists, foreign, read_json
from ...calibrate.model.architecture import read_config, text_fields
from ...calibrate.model.source import load_model, open_source
from ...core.errors import BackendError, InputError
from ...core.files import sha256_file
from ...core.run import Run
from ...quantize.reading.dequantized import recognize
from ...serve.loop.text import ModelFileError, Vocabulary
from ..endpoint.checkpoint import loaded_checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Fields of config.json that two checkpoints of one model share, and what they count.
SHARED = {"vocab_size": "tokens in the vocabulary", "num_hidden_layers": "layers", "hidden_size": "channels"}
#: How the types of codes begin, as safetensors spells them, and what a module's weight is called in some form.
NARROW = (*CODES, "I8", "U8", "I32")
WEIGHTS = ("weight", "weight_packed", "qweight")
#: Of FP8 in blocks, transformers multiplies codes on a GPU alone.
BLOCKS = "fp8"


def check_directory(path: Path, option: str) -> dict[str, Any]:
    """Return the fields of config.json of a checkpoint; raise InputError where `path` holds none, or is a run."""
    subject = f"{option}{path}"
    if path.suffix == ".gguf":
        raise InputError(
            subject, "is a GGUF file, which transformers does not run here", "give a checkpoint of safetensors"
        )
    if not path.is_dir():
        raise InputError(subject, "there is no such directory", "give that of a Hugging Face checkpoint")
    if Run(path).exists():
        raise InputError(subject, "is a run of fp8q, and a checkpoint is wanted here", f"give {path / 'model'}")
    return read_config(path, subject)


def check_same_shape(original: Mapping[str, Any], candidate: Mapping[str, Any], option: str) -> None:
    """Raise InputError where two config.json describe models of different vocabularies, depths or widths."""
    for field, what in SHARED.items():
        ours, theirs = (text_fields(config).get(field, config.get(field)) for config in (original, candidate))
        if ours is not None and theirs is not None and ours != theirs:
            raise InputError(
                option,
                f"has {theirs:,} {what} and the original {ours:,}, so that it is another model",
                "compare checkpoints of one model",
            )


def check_same_tokens(original: Path, candidate: Path, option: str) -> None:
    """Raise InputError where the two tokenizers give a token id different texts."""
    try:
        ours, theirs = (tokenizer_of(path).get_vocab(with_added_tokens=True) for path in (original, candidate))
    except ModelFileError as error:
        raise InputError(error.subject, error.fault, error.remedy) from None
    if different := next((token for token, number in sorted(ours.items()) if theirs.get(token) != number), None):
        there = theirs.get(different)
        raise InputError(
            option,
            f"its tokenizer gives {different!r} the id {'none' if there is None else there}, and the original's "
            f"{ours[different]}: the tokens of one are not those of the other",
            "compare checkpoints of one tokenizer",
        )


def tokenizer_of(directory: Path) -> "Tokenizer":
    """The tokenizer.json of a checkpoint; raises ModelFileError where it is missing or damaged."""
    return Vocabulary.read(directory).tokenizer


def quantization_of(path: Path, config: Mapping[str, Any]) -> str | None:
    """Say how a checkpoint declares itself quantized: `quant_method` and format of config.json; None: it does not."""
    said = next((config[key] for key in QUANTIZATION_KEYS if isinstance(config.get(key), dict)), None)
    if said is None:
        return "modelopt" if (path / MODELOPT_FILE).is_file() else None
    form = said.get("format") or ("blocks" if said.get("weight_block_size") else None)
    return " ".join(str(part) for part in (said.get("quant_method", "unnamed"), form) if part)


def check_codes(path: Path, config: Mapping[str, Any], option: str) -> None:
    """Raise InputError where config.json says that the checkpoint is quantized, and its files hold no codes."""
    said = quantization_of(path, config)
    if said and not any(header.dtype.startswith(NARROW) for header in _headers(path, config).values()):
        raise InputError(
            f"{option}{path}",
            f"config.json says {said}, and no tensor is stored as codes, so that its weights are no quantized ones",
            "take quantization_config out, or quantize the checkpoint again",
        )


def missing_weights(original: Path, candidate: Path, configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The original's weights of modules that the candidate's files have in no form, by their names, sorted."""
    ours, theirs = (_headers(path, config) for path, config in zip((original, candidate), configs, strict=True))
    modules = {name.rpartition(".")[0] for name in theirs if name.rpartition(".")[2] in WEIGHTS}
    return sorted(name for name in ours if name.endswith(".weight") and name.removesuffix(".weight") not in modules)


def _headers(path: Path, config: Mapping[str, Any]) -> dict[str, TensorHeader]:
    return read_headers(find_weights(path, str(path), config.get("transformers_weights")))


def files_digest(path: Path, config: Mapping[str, Any]) -> str:
    """SHA-256 over the digests of config.json, the weights and the tokenizer's files."""
    files = [path / "config.json", *find_weights(path, str(path), config.get("transformers_weights"))]
    files += [
        path / name for name in (*VOCABULARY, "tokenizer_config.json", "chat_template.jinja") if exists(path / name)
    ]
    return hashlib.sha256("".join(f"{file.name} {sha256_file(file)}\n" for file in files).encode()).hexdigest()


def load_candidate(path: Path, option: str, device: str) -> tuple[torch.nn.Module, str | None]:
    """Load a checkpoint with transformers; where it cannot, with fp8q, weights dequantized and inputs in BF16.

    Returns the model, in evaluation mode on `device`, and a note on what of its form was not computed, or None. Raises
    InputError or BackendError of transformers where fp8q does not read the form either.
    """
    config = read_json(path / "config.json")
    try:
        model = _prepared(path, loaded_checkpoint(path, option).to(device), device)
    except (InputError, BackendError) as refused:
        try:
            source = open_source(str(path), fingerprinted=False, recognize=recognize)
            if source.coding is None:
                raise refused
            model = load_model(source, torch.bfloat16, device)
        except (InputError, BackendError):
            raise refused from None
        return model, _weights_alone("transformers does not run this form here, and fp8q dequantizes its weights")
    said = config.get("quantization_config")
    if isinstance(said, dict) and said.get("quant_method") == BLOCKS and not device.startswith("cuda"):
        return model, _weights_alone("transformers multiplies FP8 blocks on a GPU alone, and dequantizes them here")
    return model, None


def _prepared(path: Path, model: torch.nn.Module, device: str) -> torch.nn.Module:
    """Run one token, at which compressed-tensors decompresses the weights, with bars of its own on standard error.

    Raises BackendError where the form does not run: inputs in groups of 128 are no groups of another width.
    """
    with (
        foreign(lambda error: BackendError(path, f"transformers cannot run it ({error_text(error)})")),
        muted(),
        torch.inference_mode(),
    ):
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False)
    return model


def _weights_alone(reason: str) -> str:
    return f"{reason}: inputs stay in BF16, so what is measured is the rounding of the weights alone"
