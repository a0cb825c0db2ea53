"""Load both checkpoints of a comparison, and refuse pairs that are not of one model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...calibrate.checkpoint.companions import companion_files
from ...calibrate.checkpoint.config_fields import check_sizes
from ...calibrate.checkpoint.recognizer import CODES, MODELOPT_FILE, QUANTIZATION_KEYS
from ...calibrate.checkpoint.weights import find_weights, read_headers
from ...calibrate.input.silence import muted
from ...calibrate.input.untrusted import error_text, foreign, read_json
from ...calibrate.model.architecture import read_config, text_fields
from ...calibrate.model.source import Source, combined_digest, file_digests, load_model, open_source
from ...core.errors import BackendError, Fp8qError, InputError
from ...core.files import Strict, sha256_file
from ...core.headers import StoredTensor
from ...core.reporter import Reporter
from ...core.run import Run
from ...quantize.reading.dequantized import recognize
from ...quantize.reading.modelopt import MODELOPT
from ..endpoint.transformers_loader import TransformersLoader
from .document import CheckpointIdentity, LoadedBy
from .tokenizer_differences import TokenizerFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedConfig

#: Fields of the configurations that two checkpoints of one model share, and what they count.
SHARED = {"vocab_size": "tokens in the vocabulary", "num_hidden_layers": "layers", "hidden_size": "channels"}
#: How the types of codes begin, as safetensors spells them, and what a module's weight is called in some form.
NARROW = (*CODES, "I8", "U8", "I32")
WEIGHTS = ("weight", "weight_packed", "qweight")
#: What a note says of a form whose inputs are not coded here.
WEIGHTS_ALONE = "inputs stay in BF16, so what is measured is the rounding of the weights alone"
#: What a note says of ModelOpt's form.
IN_OTHER_FORM = "transformers knows no ModelOpt, and gets these codes and scales as compressed-tensors"
#: What a note says of an original in codes.
ORIGINAL_IN_CODES = "the original is in codes, and counts by the values of its weights, with inputs in BF16"
#: Of FP8 in blocks, transformers multiplies codes on a GPU alone.
BLOCKS = "fp8"


def check_directory(path: Path, option: str) -> dict[str, Any]:
    """Return the fields of config.json of a checkpoint; raise InputError where `path` holds none, or is a run, and for
    sizes that its weights cannot have, of which transformers would make lists without end.
    """
    subject = f"{option}{path}"
    if path.suffix == ".gguf":
        raise InputError(
            subject, "is a GGUF file, which transformers does not run here", "give a checkpoint of safetensors"
        )
    if not path.is_dir():
        raise InputError(subject, "there is no such directory", "give that of a Hugging Face checkpoint")
    if Run(path).exists():
        raise InputError(subject, "is a run of fp8q, and a checkpoint is wanted here", f"give {path / 'model'}")
    fields = read_config(path, subject)
    shapes = [header.shape for header in weight_headers(path, fields).values()]
    for part in (fields, text_fields(fields)):
        check_sizes(path / "config.json", part, shapes)
    return fields


def check_same_shape(original: "PreTrainedConfig", candidate: "PreTrainedConfig", option: str) -> None:
    """Raise InputError where the configurations of two language models differ in vocabulary, depth or width."""
    for field, what in SHARED.items():
        ours, theirs = (getattr(config, field, None) for config in (original, candidate))
        if ours is not None and theirs is not None and ours != theirs:
            raise InputError(
                option,
                f"has {theirs:,} {what} and the original {ours:,}, so that it is another model",
                "compare checkpoints of one model",
            )


def check_same_tokens(original: Path, candidate: Path, option: str) -> None:
    """Raise InputError where the two tokenizers give a token id different texts."""
    ours, theirs = (tokenizer_of(path).get_vocab(with_added_tokens=True) for path in (original, candidate))
    if different := next((token for token, number in sorted(ours.items()) if theirs.get(token) != number), None):
        there = theirs.get(different)
        raise InputError(
            option,
            f"its tokenizer gives {different!r} the id {'none' if there is None else there}, and the original's "
            f"{ours[different]}: the tokens of one are not those of the other",
            "compare checkpoints of one tokenizer",
        )


def tokenizer_of(directory: Path) -> "Tokenizer":
    """The tokenizer.json of a checkpoint; raises InputError where it is missing or damaged."""
    return TokenizerFile.read(directory).tokenizer


def quantization_of(path: Path, config: Mapping[str, Any]) -> str | None:
    """Say how a checkpoint declares itself quantized: `quant_method` and format of config.json; None: it does not."""
    said = next((config[key] for key in QUANTIZATION_KEYS if isinstance(config.get(key), dict)), None)
    if said is None:
        if (path / MODELOPT_FILE).is_file():
            return MODELOPT.form
        return None
    form = said.get("format") or ("blocks" if said.get("weight_block_size") else None)
    return " ".join(str(part) for part in (said.get("quant_method", "unnamed"), form) if part)


def check_codes(path: Path, config: Mapping[str, Any], option: str) -> None:
    """Raise InputError where config.json says that the checkpoint is quantized, and its files hold no codes."""
    said = quantization_of(path, config)
    if said and not any(header.dtype.startswith(NARROW) for header in weight_headers(path, config).values()):
        raise InputError(
            f"{option}{path}",
            f"config.json says {said}, and no tensor is stored as codes, so that its weights are no quantized ones",
            "take quantization_config out, or quantize the checkpoint again",
        )


def coded_modules(path: Path, config: Mapping[str, Any]) -> set[str]:
    """The modules whose weights the files of a checkpoint hold as codes, by the names there."""
    headers = weight_headers(path, config).items()
    return {name.rpartition(".")[0] for name, header in headers if header.dtype.startswith(NARROW)}


def missing_weights(original: Path, candidate: Path, configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The original's weights of modules that the candidate's files have in no form, by their names, sorted."""
    ours, theirs = (weight_headers(path, config) for path, config in zip((original, candidate), configs, strict=True))
    modules = {name.rpartition(".")[0] for name in theirs if name.rpartition(".")[2] in WEIGHTS}
    return sorted(name for name in ours if name.endswith(".weight") and name.removesuffix(".weight") not in modules)


def weight_headers(path: Path, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The headers of the tensors in the weight files of a checkpoint, by name."""
    return read_headers(_weight_files(path, config))


def _weight_files(path: Path, config: Mapping[str, Any]) -> tuple[Path, ...]:
    return find_weights(path, str(path), config.get("transformers_weights"))


def identify(path: Path, config: Mapping[str, Any], report: Reporter) -> CheckpointIdentity:
    """Identify the checkpoint in `path` by all files that a comparison reads: weights, config.json and companions."""
    files = [path / "config.json", *_weight_files(path, config)]
    if (path / MODELOPT_FILE).is_file():
        files.append(path / MODELOPT_FILE)
    companions = {name: sha256_file(file) for name, file in companion_files(path).items()}
    digest = combined_digest(file_digests(files, report) | companions)
    return CheckpointIdentity(name=path.resolve().name, sha256=digest, quantization=quantization_of(path, config))


class CandidateLoading(Strict):
    """By whom a candidate was loaded, and what of its form is not computed, if anything."""

    loaded_by: LoadedBy
    note: str | None = None


@dataclass(frozen=True)
class LoadedCandidate:
    """A candidate that was loaded, in evaluation mode."""

    model: torch.nn.Module
    loading: CandidateLoading


#: A candidate that transformers does not run.
BY_FP8Q = CandidateLoading(
    loaded_by="fp8q",
    note=f"transformers does not run this form here, and fp8q dequantizes its weights: {WEIGHTS_ALONE}",
)


def coded_source(path: Path) -> Source | None:
    """Open a checkpoint whose codes fp8q dequantizes: as the original of a comparison it counts by the values of its
    weights, and inputs stay in BF16. None for one without codes, or in another form, which transformers may know.

    Raises InputError or BackendError for what is wrong with one of ModelOpt's: transformers reads none of them.
    """
    if quantization_of(path, read_json(path / "config.json")) is None:
        return None
    try:
        source = open_source(str(path), fingerprinted=False, recognize=recognize)
    except (InputError, BackendError):
        if _is_modelopts(path):
            raise
        return None
    return source if source.coding is not None else None


def load_original(path: Path, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """Load the checkpoint that another is compared with, in `dtype`, with transformers but for one in codes.

    Raises InputError or BackendError where it does not load.
    """
    coded = coded_source(path)
    return load_model(coded, dtype, device) if coded else TransformersLoader(path, "", device, dtype).load()


def load_candidate(path: Path, option: str, device: str) -> LoadedCandidate:
    """Load a checkpoint with transformers; where it cannot, with fp8q, weights dequantized and inputs in BF16.

    Raises InputError or BackendError of transformers where fp8q does not read the form either.
    """
    try:
        model = _prepared(path, TransformersLoader(path, option, device).load(), device)
    except (InputError, BackendError) as refused:
        return LoadedCandidate(_dequantized(path, device, refused), BY_FP8Q)
    return LoadedCandidate(model, by_transformers(path, device))


def by_transformers(path: Path, device: str) -> CandidateLoading:
    """Say what transformers does not compute on `device` of the form of the checkpoint in `path`, which it loads, or as
    which other form it gets it.
    """
    config = read_json(path / "config.json")
    if _is_modelopts(path):
        return CandidateLoading(loaded_by="transformers", note=IN_OTHER_FORM)
    quantization = config.get("quantization_config")
    in_blocks = isinstance(quantization, dict) and quantization.get("quant_method") == BLOCKS
    if in_blocks and not device.startswith("cuda"):
        reason = "transformers multiplies FP8 blocks on a GPU alone, and dequantizes them here"
        return CandidateLoading(loaded_by="transformers", note=f"{reason}: {WEIGHTS_ALONE}")
    return CandidateLoading(loaded_by="transformers")


def _is_modelopts(path: Path) -> bool:
    """Tell whether the checkpoint in `path` says that ModelOpt wrote it."""
    return (quantization_of(path, read_json(path / "config.json")) or "").startswith(MODELOPT.form)


def _dequantized(path: Path, device: str, refused: Fp8qError) -> torch.nn.Module:
    """Load the weights of a form that fp8q reads, in BF16; raise `refused` for any other."""
    source = dequantizable(path, refused)
    try:
        return load_model(source, torch.bfloat16, device)
    except (InputError, BackendError):
        raise refused from None


def dequantizable(path: Path, refused: Fp8qError) -> Source:
    """Open a checkpoint whose codes fp8q dequantizes; raise `refused` for any other, as `coded_source` tells them."""
    source = coded_source(path)
    if source is None:
        raise refused from None
    return source


def _prepared(path: Path, model: torch.nn.Module, device: str) -> torch.nn.Module:
    """Run one token, at which compressed-tensors decompresses the weights, with bars of its own on standard error.

    Raises BackendError where the form does not run: inputs in groups of 128 are no groups of another width.
    """
    with running_by_transformers(path):
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=device), use_cache=False)
    return model


@contextmanager
def running_by_transformers(path: Path) -> Iterator[None]:
    """Run a part of the model in this block, silently; raises BackendError where it does not run."""
    with (
        foreign(lambda error: BackendError(path, f"transformers cannot run it ({error_text(error)})")),
        muted(),
        torch.inference_mode(),
    ):
        yield
