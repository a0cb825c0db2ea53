"""`fp8q convert --form block` of a checkpoint in blocks: its scales become powers of two, as servers make them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.options import ConvertOptions
from fp8q.quantize.codes.blocks import block_values
from fp8q.quantize.lint.check import SERVER_RULES, open_served
from fp8q.stages.convert import convert

from ..reading import fp8_checkpoints

Q = "model.layers.0.self_attn.q_proj"
BLOCK = ConvertOptions(form="block", threads=1)
SINGLE, INDEX = fp8_checkpoints.SINGLE, "model.safetensors.index.json"


@pytest.fixture
def source(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """The demo in blocks under FP32 scales, as Qwen publishes its models."""
    return fp8_checkpoints.fine_grained(demo_checkpoint, tmp_path / "source")


def assert_rescaled(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> None:
    assert before.keys() == after.keys()
    coded = 0
    for name, tensor in before.items():
        if name.endswith("_scale_inv"):
            assert (after[name].frexp().mantissa == 0.5).all()
        elif f"{name}_scale_inv" in before:
            expected = fp8_checkpoints.rounded_again(block_values(tensor, before[f"{name}_scale_inv"]))
            assert torch.equal(block_values(after[name], after[f"{name}_scale_inv"]), expected), name
            coded += 1
        else:
            assert torch.equal(after[name], tensor)
    assert coded == 28


def test_codes_are_what_vllm_would_make_of_them_and_all_else_stays(source: Path, tmp_path: Path) -> None:
    written = convert(str(source), tmp_path / "out", BLOCK, SILENT)
    assert (written.form, written.layout, written.quantized, written.warnings) == ("block", "fp8", 28, ())
    assert_rescaled(load_file(source / SINGLE), load_file(tmp_path / "out" / SINGLE))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert "It was in blocks already" in (tmp_path / "out" / "README.md").read_text()

    def rules(folder: Path) -> list[str]:
        return [finding.rule for finding in SERVER_RULES.findings(open_served(folder, "vllm", None))]

    assert (rules(source), rules(tmp_path / "out")) == (["S117"], [])


def test_scales_may_lie_in_another_file_than_their_codes(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / SINGLE)
    (source / SINGLE).unlink()
    parts = {"a.safetensors": False, "b.safetensors": True}
    index: dict[str, str] = {}
    for file, scales in parts.items():
        some = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale_inv") == scales}
        save_file(some, source / file, {"format": "pt"})
        index |= dict.fromkeys(some, file)
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    out = tmp_path / "out"
    convert(str(source), out, BLOCK, SILENT)
    assert_rescaled(
        tensors, {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    )


def test_a_block_of_zeros_may_have_a_scale_of_zero(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / SINGLE)
    tensors[f"{Q}.weight"].view(torch.uint8)[:128, :128] = 0
    tensors[f"{Q}.weight_scale_inv"][0, 0] = 0
    save_file(tensors, source / SINGLE, {"format": "pt"})
    convert(str(source), tmp_path / "out", BLOCK, SILENT)
    after = load_file(tmp_path / "out" / SINGLE)
    assert after[f"{Q}.weight_scale_inv"][0, 0] == torch.finfo(torch.float32).tiny
    assert not after[f"{Q}.weight"].view(torch.uint8)[:128, :128].any()


def powers(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            tensors[name] = torch.exp2(torch.ceil(torch.log2(tensor)))
    save_file(tensors, folder / SINGLE, {"format": "pt"})


def set_value(ending: str, value: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        name = next(name for name in sorted(tensors) if name.endswith(ending))
        tensors[name].view(torch.float8_e4m3fn if ending == "q_proj.weight" else torch.float32)[0, 0] = value
        save_file(tensors, folder / SINGLE, {"format": "pt"})

    return change


@pytest.mark.parametrize(
    ("change", "options", "fault"),
    [
        (powers, BLOCK, "has powers of two for the scales of its blocks already; serve it as it is"),
        (set_value("q_proj.weight_scale_inv", -1.0), BLOCK, "has a scale that is negative or not finite"),
        (set_value("q_proj.weight", float("nan")), BLOCK, f"{Q}.weight: holds 1 NaN and 0 Inf"),
        (None, ConvertOptions(form="block", layout="compressed-tensors"), "is in the layout fp8"),
        (None, ConvertOptions(form="block", skip=("*",)), "--skip: chooses what is quantized and how"),
        (None, ConvertOptions(), r"is quantized already \(fp8\)"),
    ],
    ids=["powers", "negative", "nan", "layout", "skip", "dynamic"],
)
def test_what_cannot_be_scaled_again_is_refused(
    change: Callable[[Path], None] | None, options: ConvertOptions, fault: str, source: Path, tmp_path: Path
) -> None:
    if change is not None:
        change(source)
    with pytest.raises(InputError, match=fault):
        convert(str(source), tmp_path / "out", options, SILENT)
    assert not (tmp_path / "out").exists()
