"""The reader of FP8 checkpoints, against what the writers of each form make."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q.calibrate.input.patterns import PatternFile
from fp8q.core.errors import InputError
from fp8q.options import BLOCK, DYNAMIC
from fp8q.quantize.reading.codecs import CODECS
from fp8q.quantize.reading.fp8_tensors import Checkpoint, open_checkpoint
from fp8q.quantize.scales.scheme import UNQUANTIZED, Scheme

from . import fp8_checkpoints

MODULE = "model.layers.1.mlp.down_proj"


def opened(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    assert checkpoint.problems == ()
    return checkpoint


def dequantized(checkpoint: Checkpoint, module: str) -> np.ndarray:
    """Code × scale, [out, in], by torch's reading of codes."""
    codes = checkpoint.codes[module]
    assert codes.block is not None
    rows, columns = codes.block
    scales = checkpoint.scales(codes).repeat(rows, 0).repeat(columns, 1)[: codes.shape[0], : codes.shape[1]]
    values = torch.from_numpy(checkpoint.read_codes(codes).copy()).view(torch.float8_e4m3fn).float().numpy()
    return np.asarray(values * scales)


FORMS: dict[str, tuple[Callable[[Path, Path], Path], Scheme]] = {
    "compressed tensor": (fp8_checkpoints.compressed, Scheme("tensor")),
    "compressed channel": (
        lambda s, f: fp8_checkpoints.compressed(s, f, "channel"),
        Scheme("channel", DYNAMIC),
    ),
    "compressed block": (
        lambda s, f: fp8_checkpoints.compressed(s, f, "block"),
        Scheme("block", BLOCK),
    ),
    "fp8 blocks": (fp8_checkpoints.fine_grained, Scheme("block", BLOCK)),
    "fp8 odd blocks": (
        lambda s, f: fp8_checkpoints.fine_grained(s, f, (100, 96)),
        Scheme("block", BLOCK, block=(100, 96)),
    ),
    "fp8 tensor": (lambda s, f: fp8_checkpoints.fine_grained(s, f, None), Scheme("tensor")),
}


@pytest.mark.parametrize("form", FORMS)
def test_codes_times_scales_are_the_weights_that_were_quantized(
    form: str, demo_checkpoint: Path, tmp_path: Path
) -> None:
    make, scheme = FORMS[form]
    checkpoint = opened(make(demo_checkpoint, tmp_path / "made"))
    assert len(checkpoint.codes) == 28
    codes = checkpoint.codes[MODULE]
    assert (codes.scheme, codes.granularity, codes.shape) == (scheme, scheme.weights, (256, 704))
    assert (codes.input_scale is not None) == scheme.input.static
    if codes.input_scale is not None:
        assert float(checkpoint.values(codes.input_scale).item()) == pytest.approx(0.02, rel=2**-8)
    original = load_file(demo_checkpoint / fp8_checkpoints.SINGLE)[f"{MODULE}.weight"].float().numpy()
    error = np.abs(dequantized(checkpoint, MODULE) - original)
    spread = np.abs(original).max()
    assert np.all(error <= np.maximum(np.abs(original) * 2**-4 * 1.01, spread * 2**-15))  # half of the last of 3 bits
    assert checkpoint.declared.scheme("lm_head") == UNQUANTIZED


def changed(folder: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """A checkpoint with another tensor of this name, or without it."""
    tensors = load_file(folder / fp8_checkpoints.SINGLE)
    tensors.pop(name)
    save_file(tensors | ({name: tensor} if tensor is not None else {}), folder / fp8_checkpoints.SINGLE)
    return folder


def test_codes_without_a_scale_are_refused_and_never_taken_for_1(demo_checkpoint: Path, tmp_path: Path) -> None:
    folder = changed(
        fp8_checkpoints.fine_grained(demo_checkpoint, tmp_path / "made"), f"{MODULE}.weight_scale_inv", None
    )
    checkpoint = opened(folder)
    with pytest.raises(InputError) as raised:
        checkpoint.scales(checkpoint.codes[MODULE])
    assert str(raised.value) == (
        f"{MODULE}.weight: has no scale (weight_scale_inv or weight_scale or scale), and codes without one say "
        "nothing; export the checkpoint again"
    )


def test_scales_that_do_not_tile_are_refused(demo_checkpoint: Path, tmp_path: Path) -> None:
    name = f"{MODULE}.weight_scale_inv"
    checkpoint = opened(
        changed(fp8_checkpoints.fine_grained(demo_checkpoint, tmp_path / "made"), name, torch.ones(2, 5))
    )
    with pytest.raises(InputError) as raised:
        checkpoint.scales(checkpoint.codes[MODULE])
    assert str(raised.value) == (
        f"{name}: has the shape [2, 5], which does not tile {MODULE}.weight [256, 704]; export the checkpoint again"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e8m0fnu])
def test_a_scale_is_read_in_any_type_that_scales_have(
    dtype: torch.dtype, demo_checkpoint: Path, tmp_path: Path
) -> None:
    name, value = f"{MODULE}.weight_scale_inv", torch.full((2, 6), 2.0**-12).to(dtype)
    checkpoint = opened(changed(fp8_checkpoints.fine_grained(demo_checkpoint, tmp_path / "made"), name, value))
    assert checkpoint.values(name).tolist() == [[2.0**-12] * 6] * 2


@pytest.mark.parametrize(
    ("form", "pattern", "module", "matched"),
    [
        ("compressed-tensors", "lm_head", "lm_head", True),
        ("compressed-tensors", "lm_head", "model.lm_head", False),
        ("compressed-tensors", "re:.*gate$", "model.layers.0.mlp.gate", True),
        ("compressed-tensors", "Linear", "model.layers.0.mlp.up_proj", True),
        ("modelopt", "model.layers.0*", "model.layers.0.mlp.up_proj", True),
        ("modelopt", "lm_head", "model.lm_head", False),
        ("modelopt", "Linear", "model.layers.0.mlp.up_proj", False),  # a name, and not a class
        ("fp8", "lm_head", "model.lm_head", True),
        ("fp8", "model.layers.1", "model.layers.10.mlp.up_proj", True),  # as transformers' re.match has it
        ("fp8", "mlp.gate", "model.layers.1.mlp.gate_proj", False),
    ],
)
def test_names_are_matched_as_the_forms_loader_does(form: str, pattern: str, module: str, matched: bool) -> None:
    assert CODECS[form].matcher(pattern, PatternFile(Path("config.json"))).matches(module) is matched
