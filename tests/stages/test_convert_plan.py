"""`fp8q convert` refuses before it writes what headers, config.json and a glance at the source show."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q.calibrate.input import untrusted
from fp8q.core import headers
from fp8q.core.reporter import SILENT
from fp8q.options import ConvertOptions
from fp8q.quantize.conversion.shards import CheckpointWriter
from fp8q.stages.convert import convert

Fp8q = Callable[..., Any]
SINGLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
Q = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.1.input_layernorm.weight"
OPTIONS = ConvertOptions(threads=1)


@pytest.fixture
def source(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the demo."""
    return Path(shutil.copytree(demo_checkpoint, tmp_path / "source"))


def with_tensors(source: Path, **changed: torch.Tensor) -> None:
    tensors = load_file(source / SINGLE) | {name.replace("__", "."): tensor for name, tensor in changed.items()}
    save_file(tensors, source / SINGLE, {"format": "pt"})


def in_files(source: Path, *names: str) -> None:
    """Spread the weights of `source` over files of these names, with an index."""
    tensors = load_file(source / SINGLE)
    (source / SINGLE).unlink()
    index = dict[str, str]()
    for number, file in enumerate(names):
        some = dict(list(tensors.items())[number :: len(names)])
        save_file(some, source / file, {"format": "pt"})
        index |= dict.fromkeys(some, file)
    (source / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def configured(source: Path, **fields: object) -> None:
    config = json.loads((source / CONFIG).read_text())
    (source / CONFIG).write_text(json.dumps(config | fields))


def refused(fp8q: Fp8q, source: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """The line that refuses the source, before anything is written."""

    def write(self: CheckpointWriter) -> None:
        raise AssertionError("weights are written")

    out = source.parent / "fp8"
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "write", write)
        told: str = fp8q("convert", source, "--out", out, *options).complaint()
    assert not out.exists()
    return told


def test_one_file_under_an_index_is_written_under_one(source: Path, tmp_path: Path) -> None:
    name = "model-00001-of-00001.safetensors"
    in_files(source, name)
    out = convert(str(source), tmp_path / "fp8", OPTIONS, SILENT).path
    written = load_file(out / name)
    assert json.loads((out / INDEX).read_text())["weight_map"] == dict.fromkeys(sorted(written), name)


@pytest.mark.parametrize("named", ["weights.safetensors", "weights.safetensors.index.json"])
def test_weights_that_the_configuration_names_are_found_without_that(source: Path, tmp_path: Path, named: str) -> None:
    if named.endswith(".json"):
        in_files(source, "part-a.safetensors", "part-b.safetensors")
        (source / INDEX).rename(source / named)
    else:
        (source / SINGLE).rename(source / named)
    configured(source, transformers_weights=named)
    out = convert(str(source), tmp_path / "fp8", OPTIONS, SILENT).path
    assert "transformers_weights" not in json.loads((out / CONFIG).read_text())
    files = {"part-a.safetensors", "part-b.safetensors"} if named.endswith(".json") else {named}
    assert set(json.loads((out / INDEX).read_text())["weight_map"].values()) == files
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).config.vocab_size > 0


def test_a_lone_surrogate_is_written_as_it_was(source: Path, tmp_path: Path) -> None:
    text = (source / CONFIG).read_text().replace("{", '{"note": "\\ud800 é", ', 1)
    (source / CONFIG).write_text(text)
    out = convert(str(source), tmp_path / "fp8", OPTIONS, SILENT).path
    assert json.loads((out / CONFIG).read_text())["note"] == "\ud800 é"
    assert '"note": "\\ud800 é"' in (out / CONFIG).read_text()


def test_a_directory_that_is_no_text_gets_a_card(source: Path, tmp_path: Path) -> None:
    odd = source.rename(tmp_path / "\udcff")
    out = convert(str(odd), tmp_path / "fp8", OPTIONS, SILENT).path
    assert "# \\udcff, FP8" in (out / "README.md").read_text()


class TestRefusedBeforeWriting:
    """One line, exit code 2, and not a byte of weights."""

    @pytest.mark.parametrize("name", ["README.md", "weights.bin", ".hidden.safetensors"])
    def test_a_file_of_weights_that_loaders_pass_over(
        self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        in_files(source, name, "model-2.safetensors")
        assert refused(fp8q, source, monkeypatch) == (
            f"{source / name}: holds weights, and loaders take files called *.safetensors for them; rename it, there "
            "and in the index"
        )

    def test_one_of_several_files_that_loaders_take_for_all(
        self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        in_files(source, "a.safetensors", "b.safetensors")
        (source / "b.safetensors").rename(source / SINGLE)
        index = (source / INDEX).read_text().replace("b.safetensors", SINGLE)
        (source / "own.safetensors.index.json").write_text(index)
        configured(source, transformers_weights="own.safetensors.index.json")
        assert refused(fp8q, source, monkeypatch) == (
            f"{source / SINGLE}: is one of 2 files of weights, and loaders take a file of this name for all of them; "
            "rename it, there and in the index"
        )

    @pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
    def test_a_weight_of_integers(
        self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
    ) -> None:
        with_tensors(source, **{f"{Q}.weight": torch.zeros(64, 64, dtype=dtype)})
        kind = "I8" if dtype == torch.int8 else "U8"
        assert refused(fp8q, source, monkeypatch) == (
            f"{source / SINGLE}: {Q}.weight is {kind}, so the checkpoint is quantized already; give the one it was "
            "made from, in BF16, FP16 or FP32"
        )

    def test_a_tensor_with_the_name_of_a_scale(self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
        with_tensors(source, **{f"{Q}.weight_scale": torch.ones(1)})
        assert refused(fp8q, source, monkeypatch) == (
            f"{source / SINGLE}: holds {Q}.weight_scale, which is the name of what {Q}.weight becomes; take it out, or "
            "keep that module as it is with --skip"
        )

    def test_a_scale_without_its_weight(self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
        with_tensors(source, **{"model.layers.9.gone.weight_scale": torch.ones(1)})
        assert refused(fp8q, source, monkeypatch) == (
            f"{source}: model.layers.9.gone.weight_scale: is there, and model.layers.9.gone.weight is not (rule C124); "
            "copy or download the checkpoint again"
        )

    def test_a_head_of_its_own_beside_a_tie(self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
        embedding = load_file(source / SINGLE)["model.embed_tokens.weight"]
        with_tensors(source, **{"lm_head.weight": embedding + 1})
        configured(source, tie_word_embeddings=True)
        assert refused(fp8q, source, monkeypatch) == (
            f"{source}: lm_head.weight: is not model.embed_tokens.weight, and config.json ties both (rule C129); say "
            "tie_word_embeddings false, or leave one out"
        )

    @pytest.mark.parametrize("name", [NORM, "model.rotary.mask"])
    def test_nan_in_what_is_copied(self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        values = torch.ones(64)
        values[3] = float("nan")
        with_tensors(source, **{name: values})
        assert refused(fp8q, source, monkeypatch) == (
            f"{name}: holds 1 NaN and 0 Inf in BF16 among 64 values; take an earlier checkpoint of the training, or "
            "copy or download the file again"
        )

    def test_infinity_in_a_weight(self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
        with_tensors(source, **{NORM: torch.full((64,), float("inf"))})
        assert refused(fp8q, source, monkeypatch).startswith(f"{NORM}: holds 0 NaN and 64 Inf in BF16 among 64 values;")

    def test_a_header_or_a_configuration_beyond_what_is_read(
        self, source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("fp8q.stages.convert_plan.LONGEST", 1000)
            assert "bytes in FP8, and 1,000 are the most; split it" in refused(fp8q, source, monkeypatch)
        monkeypatch.setattr("fp8q.stages.convert_plan.JSON_BYTES", 900)
        told = refused(fp8q, source, monkeypatch)
        assert told.startswith(f"{source / CONFIG}: would have ")
        assert told.endswith("900 are the most that are read of such a file; it is damaged, or not to be trusted")
        assert (headers.LONGEST, untrusted.JSON_BYTES) == (100_000_000, 64 << 20)


def test_a_tensor_without_values_is_copied(source: Path, tmp_path: Path) -> None:
    with_tensors(source, **{"model.empty": torch.zeros(0, 4)})
    out = convert(str(source), tmp_path / "fp8", OPTIONS, SILENT).path
    assert load_file(out / SINGLE)["model.empty"].shape == (0, 4)


def test_a_mask_may_be_infinite(source: Path, tmp_path: Path) -> None:
    with_tensors(source, **{"model.mask": torch.full((4, 4), float("-inf")).triu(1)})
    out = convert(str(source), tmp_path / "fp8", OPTIONS, SILENT).path
    assert torch.equal(load_file(out / SINGLE)["model.mask"], torch.full((4, 4), float("-inf")).triu(1))


def test_nan_in_a_large_tensor_is_met_as_it_is_read(source: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.quantize.conversion.shards.SMALL_BYTES", 0)
    with_tensors(source, **{NORM: torch.full((64,), float("nan"))})
    out = source.parent / "fp8"
    assert fp8q("convert", source, "--out", out).complaint().startswith(f"{NORM}: holds 64 NaN and 0 Inf")
    assert not out.exists()


@pytest.mark.parametrize(("value", "rule"), [(448.0, "C112"), (900.0, "C113")])
def test_large_weights_are_what_they_are(source: Path, tmp_path: Path, value: float, rule: str) -> None:
    """The lint takes such scales of others for a mistake; here each was proven."""
    matrix = torch.full((64, 64), value, dtype=torch.bfloat16)
    shape = load_file(source / SINGLE)[f"{Q}.weight"].shape
    with_tensors(source, **{f"{Q}.weight": matrix[:1, :1].expand(shape).contiguous()})
    found = convert(str(source), tmp_path / "fp8", OPTIONS, SILENT)
    assert [line[:4] for line in found.warnings] == [rule]
    written = load_file(found.path / SINGLE)
    assert torch.all(written[f"{Q}.weight"].float() * written[f"{Q}.weight_scale"] > 0.97 * value)
