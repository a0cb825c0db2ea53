"""The reader of FP8 checkpoints, against what the writers of each form make."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fp8q.quantize.forms.declared import Scheme
from fp8q.quantize.forms.read import Checkpoint, open_checkpoint

from . import made

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
    "compressed tensor": (made.compressed, Scheme("tensor", "static")),
    "compressed channel": (lambda s, f: made.compressed(s, f, "channel"), Scheme("channel", "dynamic")),
    "compressed block": (lambda s, f: made.compressed(s, f, "block"), Scheme("block", "dynamic", (128, 128))),
    "fp8 blocks": (made.fine_grained, Scheme("block", "dynamic", (128, 128))),
    "fp8 odd blocks": (lambda s, f: made.fine_grained(s, f, (100, 96)), Scheme("block", "dynamic", (100, 96))),
    "fp8 tensor": (lambda s, f: made.fine_grained(s, f, None), Scheme("tensor", "static")),
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
    assert (codes.input_scale is not None) == (scheme.inputs == "static")
    if codes.input_scale is not None:
        assert float(checkpoint.values(codes.input_scale).item()) == pytest.approx(0.02, rel=2**-8)
    original = load_file(demo_checkpoint / made.SINGLE)[f"{MODULE}.weight"].float().numpy()
    error = np.abs(dequantized(checkpoint, MODULE) - original)
    spread = np.abs(original).max()
    assert np.all(error <= np.maximum(np.abs(original) * 2**-4 * 1.01, spread * 2**-15))  # half of the last of 3 bits
    assert checkpoint.declared.scheme("lm_head") is None
