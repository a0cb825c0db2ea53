"""`fp8q convert` as its users meet it: what loaders make of the files, calls that were killed, and bad input."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8q.core.errors import BackendError, InputError
from fp8q.core.reporter import SILENT
from fp8q.options import ConvertOptions
from fp8q.quantize.conversion import shards
from fp8q.quantize.conversion.coding import CodedPart, Errors, encode_part
from fp8q.quantize.lint.check import SERVER_RULES, checkpoint_findings, open_served
from fp8q.quantize.reading.fp8_tensors import open_checkpoint
from fp8q.stages.convert import convert
from fp8q.stages.convert_directory import PROGRESS

from ..mixtures import WITHOUT_GATE, random_ernie, random_mixture, random_of
from ..quantize.reading.fp8_checkpoints import compressed, fine_grained, modelopt

Fp8q = Callable[..., Any]
Made = Callable[[str], Path]
Shared = Callable[[str], Path]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BLOCK = ConvertOptions(form="block", threads=2)
DYNAMIC = ConvertOptions(threads=2)
TOKENS = torch.arange(64).reshape(2, 32) * 7 % 500 + 3
STACKED = {
    "moe_intermediate_size": 48, "num_experts": 4, "shared_expert_intermediate_size": 48, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


@pytest.fixture
def sharded(demo_checkpoint: Path, tmp_path: Path) -> Path:
    """The demo's weights in three files."""
    folder = Path(shutil.copytree(demo_checkpoint, tmp_path / "sharded"))
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    files, index = [dict[str, torch.Tensor]() for _ in range(3)], dict[str, str]()
    for number, (name, tensor) in enumerate(tensors.items()):
        files[number % 3][name] = tensor
        index[name] = f"model-{number % 3 + 1:05}-of-00003.safetensors"
    for number, some in enumerate(files):
        save_file(some, folder / f"model-{number + 1:05}-of-00003.safetensors", {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a converted checkpoint in BF16, by the scales' shapes alone."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for codes in checkpoint.codes.values():
        assert codes.scale is not None
        assert codes.block is not None
        rows, columns = codes.shape[-2:]
        high, wide = codes.block
        scales = tensors.pop(codes.scale).repeat_interleave(high, -2)[..., :rows, :]
        spread = scales.repeat_interleave(min(wide, columns), -1)[..., :columns]
        tensors[codes.weight] = (tensors[codes.weight].float() * spread).bfloat16()
    return tensors


def logits(folder: Path, quantized_inputs: frozenset[str] = frozenset()) -> torch.Tensor:
    """What transformers computes of a checkpoint; the input of each of `quantized_inputs` is rounded token by token."""
    from transformers import AutoModelForCausalLM

    def rounded(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = inputs[0].abs().amax(-1, keepdim=True) / 448
        return ((inputs[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(scale.dtype) * scale,)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, module in model.named_modules():
        if name in quantized_inputs:
            module.register_forward_pre_hook(rounded)
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def plain(source: Path, converted: Path, folder: Path) -> Path:
    """The dequantized weights of a converted checkpoint, as a checkpoint of its source's configuration."""
    folder.mkdir()
    save_file(dequantized(converted), folder / SINGLE, {"format": "pt"})
    shutil.copy(source / "config.json", folder)
    return folder


def test_transformers_multiplies_dynamic_codes_as_they_are_meant(demo_checkpoint: Path, tmp_path: Path) -> None:
    found = convert(str(demo_checkpoint), tmp_path / "fp8", DYNAMIC, SILENT)
    checkpoint = open_checkpoint(found.path)
    assert checkpoint is not None
    expected = logits(plain(demo_checkpoint, found.path, tmp_path / "plain"), frozenset(checkpoint.codes))
    assert torch.equal(logits(found.path), expected)
    assert float((expected - logits(demo_checkpoint)).abs().max()) > 0.1


def test_transformers_dequantizes_blocks_as_they_are_meant(tmp_path: Path, shared_checkpoint: Shared) -> None:
    source = shared_checkpoint("llama")
    found = convert(str(source), tmp_path / "fp8", BLOCK, SILENT)
    assert torch.equal(logits(found.path), logits(plain(source, found.path, tmp_path / "plain")))


@pytest.mark.parametrize("options", [DYNAMIC, BLOCK], ids=["dynamic", "block"])
def test_experts_are_loaded_with_the_values_of_their_codes(tmp_path: Path, options: ConvertOptions) -> None:
    from transformers import AutoModelForCausalLM

    source = random_mixture(tmp_path / "mixture", "qwen3_moe")
    found = convert(str(source), tmp_path / "fp8", options, SILENT)
    kept = {reason.partition(":")[0] for reason in found.kept}
    assert {"embedding", "output head", "router"} <= kept
    loaded = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.bfloat16).state_dict()
    tensors, experts = dequantized(found.path), "model.layers.1.mlp.experts"
    parts = [tensors[f"{experts}.2.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(loaded[f"{experts}.gate_up_proj"][2], torch.cat(parts))


@pytest.mark.parametrize("options", [DYNAMIC, BLOCK], ids=["dynamic", "block"])
def test_a_hybrid_with_stacks_of_experts_is_loaded_as_it_is_meant(tmp_path: Path, options: ConvertOptions) -> None:
    source = random_of(tmp_path / "hybrid", "Qwen3_5MoeTextConfig", STACKED, save_original_format=False)
    found = convert(str(source), tmp_path / "fp8", options, SILENT)
    names = set(dequantized(found.path))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in names
    assert "model.layers.0.mlp.experts.gate_up_proj" not in names
    gates = next(modules for reason, modules in found.kept.items() if reason.startswith("recurrent gate"))
    assert gates == ["model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_b"]
    stacked = plain_of_stacks(source, found.path, tmp_path / "plain")
    weights, original = load_file(stacked / SINGLE), load_file(source / SINGLE)
    for name, tensor in original.items():
        step = (weights[name].float() - tensor.float()).abs() / tensor.float().abs().clamp_min(1e-2)
        assert float(step.max()) < 0.07, name
    if options.form == "block":  # whose inputs transformers does not round without a GPU
        assert torch.equal(logits(found.path), logits(stacked))


def plain_of_stacks(source: Path, converted: Path, folder: Path) -> Path:
    """The converted weights under the source's names: modules of experts are stacked again."""
    folder.mkdir()
    tensors, original = dequantized(converted), load_file(source / SINGLE)
    for name in original:
        if name not in tensors and name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            tensors[name] = torch.stack(
                [torch.cat([tensors[f"{stem}{i}.{part}_proj.weight"] for part in ("gate", "up")]) for i in range(4)]
            )
        elif name not in tensors:
            stem = name.removesuffix("down_proj")
            tensors[name] = torch.stack([tensors[f"{stem}{i}.down_proj.weight"] for i in range(4)])
    save_file({name: tensors[name] for name in original}, folder / SINGLE, {"format": "pt"})
    shutil.copy(source / "config.json", folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [DYNAMIC, BLOCK, ConvertOptions(form="block", layout="compressed-tensors"), ConvertOptions(layout="modelopt")],
)
def test_every_layout_is_clean_by_the_lint(demo_checkpoint: Path, tmp_path: Path, options: ConvertOptions) -> None:
    found = convert(str(demo_checkpoint), tmp_path / "fp8", options, SILENT)
    assert [each for each in checkpoint_findings(found.path)[1] if each.severity == "error"] == []
    assert (found.largest_error_steps, round(found.largest_relative_error, 4)) == (0.5, 0.0588)
    assert (found.layout, found.quantized) == (options.chosen_layout, 28)
    assert found.written_bytes < 0.75 * found.source_bytes


@pytest.mark.parametrize(
    ("options", "preset"),
    [(DYNAMIC, "FP8_DYNAMIC"), (ConvertOptions(form="block", layout="compressed-tensors"), "FP8_BLOCK")],
)
def test_the_configuration_is_that_of_the_presets(
    demo_checkpoint: Path, tmp_path: Path, options: ConvertOptions, preset: str
) -> None:
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    found = convert(str(demo_checkpoint), tmp_path / "fp8", options, SILENT)
    stated = json.loads((found.path / "config.json").read_text())["quantization_config"]
    read, wanted = QuantizationConfig.model_validate(stated), preset_name_to_scheme(preset, ["Linear"])
    scheme = read.config_groups["group_0"]
    for side in ("weights", "input_activations"):
        mine, theirs = getattr(scheme, side), getattr(wanted, side)
        for field in ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "block_structure"):
            assert getattr(mine, field) == getattr(theirs, field), (side, field)
    assert read.ignore == ["lm_head"]


def test_modelopts_layout_has_its_names_and_the_codes_of_the_other(demo_checkpoint: Path, tmp_path: Path) -> None:
    """Shapes, types and files are those of ModelOpt's own export per channel and token."""
    other = convert(str(demo_checkpoint), tmp_path / "other", DYNAMIC, SILENT).path
    found = convert(str(demo_checkpoint), tmp_path / "fp8", ConvertOptions(layout="modelopt", threads=2), SILENT).path
    theirs = modelopt(demo_checkpoint, tmp_path / "theirs", "FP8_PER_CHANNEL_PER_TOKEN_CFG")
    mine, same, exported = (load_file(folder / SINGLE) for folder in (found, other, theirs))
    kinds = [{name: (tensor.dtype, tensor.shape) for name, tensor in each.items()} for each in (mine, exported)]
    assert kinds[0] == kinds[1]
    assert mine.keys() == same.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor.flatten().view(torch.uint8), same[name].flatten().view(torch.uint8)), name
    said = [json.loads((folder / "hf_quant_config.json").read_text())["quantization"] for folder in (found, theirs)]
    assert said[0] | {"exclude_modules": []} == said[1] | {"exclude_modules": []}
    assert set(said[0]["exclude_modules"]) <= set(said[1]["exclude_modules"])  # which has the embedding too
    stated = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (found, theirs)]
    assert stated[0].keys() == stated[1].keys()
    assert SERVER_RULES.findings(open_served(found, "vllm", None)) == []
    assert "tags: [fp8, modelopt]" in (found / "README.md").read_text()


@pytest.mark.parametrize(("options", "field"), [(DYNAMIC, "ignore"), (BLOCK, "modules_to_not_convert")])
def test_a_draft_is_named_as_vllm_names_it_too(tmp_path: Path, options: ConvertOptions, field: str) -> None:
    """ERNIE 4.5's `model.mtp_block.0` is a layer after the last one in vLLM."""
    source = random_ernie(tmp_path / "ernie")
    for mtp in (False, True):
        out = convert(str(source), tmp_path / f"mtp {mtp}", replace(options, mtp=mtp), SILENT).path
        listed = json.loads((out / "config.json").read_text(encoding="utf-8"))["quantization_config"][field]
        block = {module for module in listed if module.endswith(".mlp.up_proj")}
        assert block == (set() if mtp else {"model.mtp_block.0.mlp.up_proj", "model.layers.2.mlp.up_proj"})
        assert "model.mtp_linear_proj.0" in listed
        assert "S161" not in {each.rule for each in SERVER_RULES.findings(open_served(out, "vllm", None))}


def test_a_call_that_was_killed_goes_on_with_what_is_finished(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = convert(str(sharded), tmp_path / "whole", DYNAMIC, SILENT)
    out, finish, named = tmp_path / "fp8", shards._finish, list[str]()

    def killed(partial: Path, file: Path) -> None:
        if named:
            raise KeyboardInterrupt
        finish(partial, file)
        named.append(file.name)

    monkeypatch.setattr(shards, "_finish", killed)
    with pytest.raises(KeyboardInterrupt):
        convert(str(sharded), out, DYNAMIC, SILENT)
    assert named == ["model-00001-of-00003.safetensors"]
    assert sorted(path.name for path in out.iterdir()) == [PROGRESS, ".convert.lock", *named]
    monkeypatch.undo()
    found = convert(str(sharded), out, DYNAMIC, SILENT)
    assert found.resumed == tuple(named)
    assert digests(out) == digests(whole.path)
    assert found.largest_error_steps == whole.largest_error_steps


def test_a_finished_file_with_other_bytes_is_written_again(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = convert(str(sharded), tmp_path / "whole", DYNAMIC, SILENT), tmp_path / "fp8"
    shutil.copytree(whole.path, out)
    first, second = (out / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-1])
    (out / "config.json").unlink()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    key = tmp_path / "key"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shards.CheckpointWriter, "write", stop)
        convert(str(sharded), key, DYNAMIC, SILENT)
    shutil.copy(key / PROGRESS, out)
    found = convert(str(sharded), out, DYNAMIC, SILENT)
    assert found.resumed == ("model-00003-of-00003.safetensors",)
    assert digests(out) == digests(whole.path)


def test_another_call_does_not_go_on_with_it(
    sharded: Path, tmp_path: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "fp8"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shards.CheckpointWriter, "write", stop)
        convert(str(sharded), out, DYNAMIC, SILENT)
    told = f"{out}: holds a convert in progress of another model, or with other options; remove it, or name another"
    assert fp8q("convert", sharded, "--out", out, "--form", "block").complaint() == told
    assert (out / PROGRESS).is_file()


@pytest.mark.parametrize("at", [1, 3, 30])
def test_a_full_disk_leaves_nothing(
    sharded: Path, tmp_path: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    write, count = os.pwrite, 0

    def full(*arguments: Any) -> int:
        nonlocal count
        count += 1
        if count >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    told = fp8q("convert", sharded, "--out", tmp_path / "new" / "fp8", "--threads", "1").complaint()
    assert told.endswith(": no space left on the disk; free some or name another directory")
    assert not (tmp_path / "new" / "fp8").exists()


def test_too_little_room_is_told_before_the_work(
    demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    out = tmp_path / "fp8"
    told = fp8q("convert", demo_checkpoint, "--out", out).complaint()
    assert told.startswith(f"{out}: has 1 bytes free, and the checkpoint takes ")
    assert not out.exists()


def test_a_code_that_is_not_the_nearest_ends_the_call(
    demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any) -> CodedPart:
        coded = encode_part(*arguments)
        return CodedPart(coded.codes, coded.scales, Errors(0.6, 0.1))

    monkeypatch.setattr(shards, "encode_part", wrong)
    with pytest.raises(BackendError, match=r"has a code 0\.6 steps from its number in the rows 0 to "):
        convert(str(demo_checkpoint), tmp_path / "fp8", DYNAMIC, SILENT)
    assert not (tmp_path / "fp8").exists()


def test_bytes_that_read_back_otherwise_end_the_call(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite

    def flipped(handle: int, content: Any, at: int) -> int:
        return write(handle, (np.asarray(content) ^ 1).tobytes(), at)

    monkeypatch.setattr(os, "pwrite", flipped)
    with pytest.raises(BackendError, match=f"^{SINGLE}: reads back as other bytes than were written; check the disk$"):
        convert(str(demo_checkpoint), tmp_path / "fp8", DYNAMIC, SILENT)


@pytest.mark.parametrize("kind", ["F16", "F32"])
def test_a_checkpoint_in_another_type_becomes_bf16(demo_checkpoint: Path, tmp_path: Path, kind: str) -> None:
    source = Path(shutil.copytree(demo_checkpoint, tmp_path / "source"))
    wide = {name: tensor.to(shards.TYPES[kind]) for name, tensor in load_file(source / SINGLE).items()}
    save_file(wide, source / SINGLE, {"format": "pt"})
    found = convert(str(source), tmp_path / "fp8", DYNAMIC, SILENT)
    tensors = load_file(found.path / SINGLE)
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    name = "model.layers.0.mlp.up_proj.weight"
    usual = encode_part(name, wide[name].bfloat16(), blocks=None)
    assert np.array_equal(tensors[name].view(torch.uint8).numpy(), usual.codes)
    assert tensors["model.norm.weight"].dtype == shards.TYPES[kind]
    assert torch.equal(tensors["model.embed_tokens.weight"], wide["model.embed_tokens.weight"].bfloat16())
    assert json.loads((found.path / "config.json").read_text())["dtype"] == "bfloat16"


def test_experts_that_are_stored_in_out_are_turned_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4's: transformers makes modules of them where a checkpoint is quantized."""
    from transformers import AutoModelForCausalLM

    fields = {"intermediate_size_mlp": 96, "num_local_experts": 2, "head_dim": 16, "interleave_moe_layer_step": 1}
    source = random_of(tmp_path / "llama4", "Llama4TextConfig", fields)
    monkeypatch.setattr(shards, "PART_VALUES", 1000)
    found = convert(str(source), tmp_path / "fp8", DYNAMIC, SILENT)
    experts = "model.layers.1.feed_forward.experts"
    stored, made = load_file(source / SINGLE), dequantized(found.path)
    gate, up = stored[f"{experts}.gate_up_proj"][1].T.chunk(2)
    for name, wanted in (("gate", gate), ("up", up), ("down", stored[f"{experts}.down_proj"][1].T)):
        got = made[f"{experts}.1.{name}_proj.weight"].float()
        assert float((got - wanted.float()).abs().max() / wanted.abs().max()) < 0.04
    loaded: Any = AutoModelForCausalLM.from_pretrained(found.path, output_loading_info=True)
    assert not any(loaded[1].values())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dynamic", "block"])
def test_experts_without_a_gate_are_converted_under_their_names(form: str, tmp_path: Path) -> None:
    """Nemotron 3's: two weights an expert, a state's gates in BF16; transformers loads all of it."""
    from transformers import AutoModelForCausalLM

    source = random_of(tmp_path / "nemotron", *WITHOUT_GATE)
    found = convert(str(source), tmp_path / "fp8", BLOCK if form == "block" else DYNAMIC, SILENT)
    stored, made = load_file(source / SINGLE), dequantized(found.path)
    assert stored.keys() == made.keys()
    experts = {name for name in stored if ".experts." in name}
    assert experts == {
        f"backbone.layers.1.mixer.experts.{number}.{gemm}.weight"
        for number in range(4)
        for gemm in ("up_proj", "down_proj")
    }
    written = {name: tensor for file in found.path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert {written[name].dtype for name in experts} == {torch.float8_e4m3fn}
    for name in experts:  # half a step of three bits is a sixteenth of a value
        assert float((made[name] - stored[name]).abs().max() / stored[name].abs().max()) < 0.07
    kept = {name for name, tensor in written.items() if tensor.dtype == torch.bfloat16 and tensor.dim() == 2}
    assert not kept & experts
    assert "backbone.layers.1.mixer.gate.weight" in kept
    loaded: Any = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(loaded[1].values())
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    with torch.no_grad():
        ours, theirs = (model(input_ids=TOKENS).logits.float() for model in (loaded[0], original))
    assert 0 < float((ours - theirs).norm() / theirs.norm()) < 0.3
    assert not [finding for finding in checkpoint_findings(found.path)[1] if finding.severity == "error"]


def test_a_large_matrix_is_cut_into_parts(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, options in (("dynamic", DYNAMIC), ("block", BLOCK)):
        whole = convert(str(demo_checkpoint), tmp_path / f"whole-{name}", options, SILENT)
        with monkeypatch.context() as patched:
            patched.setattr(shards, "PART_VALUES", 1000)
            patched.setattr(shards, "PART_BYTES", 999)
            parts = convert(str(demo_checkpoint), tmp_path / f"parts-{name}", options, SILENT)
        assert digests(parts.path) == digests(whole.path)


def test_what_lies_beside_the_weights_is_copied(sharded: Path, tmp_path: Path) -> None:
    (sharded / "chat_template.jinja").write_text("{{ messages }}")
    (sharded / "modeling_own.py").write_text("raise SystemExit")
    (sharded / "LICENSE").write_text("free")
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_own.Model"}}))
    found = convert(str(sharded), tmp_path / "fp8", DYNAMIC, SILENT)
    for name in ("chat_template.jinja", "modeling_own.py", "LICENSE", "tokenizer.json"):
        assert (found.path / name).read_bytes() == (sharded / name).read_bytes()
    card = (found.path / "README.md").read_text()
    assert "28 tensors are E4M3 codes" in card
    assert "- `model.embed_tokens`: embedding: the output head is tied to it" in card
    index = json.loads((found.path / INDEX).read_text())
    assert index["weight_map"].keys() == {name for file in found.path.glob("*.safetensors") for name in load_file(file)}


def test_the_command_shows_what_is_kept_and_the_proof(demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q) -> None:
    result = fp8q("convert", demo_checkpoint, "--out", tmp_path / "fp8")
    assert result.code == 0
    assert "embedding: the output head is tied to it" in result.out
    assert "28 tensors of codes in the form dynamic (compressed-tensors)" in result.out
    assert "Proof: every code decoded; the largest error is 0.5 of a step, 5.88% of a value." in result.out
    assert f"next: `fp8q compare {demo_checkpoint} --model " in result.out
    shown = json.loads(fp8q("convert", demo_checkpoint, "--out", tmp_path / "again", "--json").out)
    assert (shown["path"], shown["quantized"], shown["warnings"]) == (str(tmp_path / "again"), 28, [])


class TestBadInput:
    """One line, exit code 2, and nothing left behind."""

    def refused(self, fp8q: Fp8q, source: Path, out: Path, *options: str) -> str:
        before = sorted(out.rglob("*")) if out.exists() else None
        told: str = fp8q("convert", source, "--out", out, *options).complaint()
        assert (sorted(out.rglob("*")) if out.exists() else None) == before
        return told

    @pytest.mark.parametrize("kind", ["fp8", "compressed-tensors", "modelopt", "nested", "tensors alone", "packed"])
    def test_a_source_in_codes(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q, kind: str) -> None:
        folder = tmp_path / "source"
        if kind == "compressed-tensors":
            compressed(demo_checkpoint, folder)
        else:
            fine_grained(demo_checkpoint, folder)
        config = json.loads((folder / "config.json").read_text())
        stated = config["quantization_config"]
        if kind == "modelopt":
            del config["quantization_config"]
            (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
        elif kind == "nested":
            config["text_config"] = {"quantization_config": config.pop("quantization_config")}
        elif kind == "tensors alone":
            del config["quantization_config"]
        elif kind == "packed":
            config["quantization_config"] = stated | {"quant_method": "gptq"}
        (folder / "config.json").write_text(json.dumps(config))
        told = self.refused(fp8q, folder, tmp_path / "out")
        assert "is quantized already" in told
        assert told.endswith("give the checkpoint it was made from, in BF16, FP16 or FP32") or kind == "tensors alone"

    def test_pickled_weights(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q) -> None:
        folder = Path(shutil.copytree(demo_checkpoint, tmp_path / "source"))
        (folder / SINGLE).rename(folder / "pytorch_model.bin")
        told = self.refused(fp8q, folder, tmp_path / "out")
        assert told.startswith(f"{folder}: has only pickled weights (pytorch_model.bin)")

    def test_a_missing_shard(self, sharded: Path, tmp_path: Path, fp8q: Fp8q) -> None:
        (sharded / "model-00002-of-00003.safetensors").unlink()
        told = self.refused(fp8q, sharded, tmp_path / "out")
        assert "names model-00002-of-00003.safetensors, which is missing (1 of 3 shards are)" in told

    def test_a_file_that_is_cut(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q) -> None:
        folder = Path(shutil.copytree(demo_checkpoint, tmp_path / "source"))
        (folder / SINGLE).write_bytes((demo_checkpoint / SINGLE).read_bytes()[:-100])
        told = self.refused(fp8q, folder, tmp_path / "out")
        assert told.startswith(f"{folder / SINGLE}: is damaged or cut short")

    def test_values_that_are_not_finite(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q) -> None:
        folder = Path(shutil.copytree(demo_checkpoint, tmp_path / "source"))
        tensors = load_file(folder / SINGLE)
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
        save_file(tensors, folder / SINGLE, {"format": "pt"})
        told = self.refused(fp8q, folder, tmp_path / "out")
        assert told.startswith("model.layers.1.mlp.up_proj.weight: holds 1 NaN and 0 Inf in BF16 among ")

    def test_a_directory_with_other_files(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "mine.txt").write_text("mine")
        told = f"{out}: is not empty, and holds no convert in progress; name a new or empty directory"
        assert self.refused(fp8q, demo_checkpoint, out) == told

    def test_a_file_in_the_place_of_the_directory(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q) -> None:
        (tmp_path / "out").write_text("mine")
        told = f"{tmp_path / 'out'}: is a file, and a checkpoint is a directory; name another with --out"
        assert fp8q("convert", demo_checkpoint, "--out", tmp_path / "out").complaint() == told

    @pytest.mark.parametrize("place", [".", "fp8", "a/b"])
    def test_a_directory_in_the_source(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q, place: str) -> None:
        folder = Path(shutil.copytree(demo_checkpoint, tmp_path / "source"))
        out = folder / place
        told = f"{out}: lies in {folder}, which is converted; name a directory elsewhere with --out"
        assert self.refused(fp8q, folder, out) == told

    def test_a_form_that_is_none(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q) -> None:
        told = self.refused(fp8q, demo_checkpoint, tmp_path / "out", "--form", "static")
        assert "dynamic" in told
        assert "block" in told
        told = self.refused(fp8q, demo_checkpoint, tmp_path / "out", "--layout", "fp8")
        assert told == "--layout fp8: has no scales of channels; leave it out, or ask for --form block"

    def test_blocks_and_experts_in_modelopts_layout(
        self, tmp_path: Path, fp8q: Fp8q, capsys: pytest.CaptureFixture[str]
    ) -> None:
        mixture = random_mixture(tmp_path / "mixture", "qwen3_moe")
        capsys.readouterr()
        told = self.refused(fp8q, mixture, tmp_path / "out", "--layout", "modelopt", "--form", "block")
        assert told == (
            "--layout modelopt: has blocks beside inputs in BF16 alone, and --form block scales inputs in groups; "
            "leave it out, or ask for --form dynamic"
        )
        told = self.refused(fp8q, mixture, tmp_path / "out", "--layout", "modelopt")
        assert told == (
            "--layout modelopt: has no reader that takes scales of channels for experts, as "
            "model.layers.0.mlp.experts.0.down_proj; leave it out"
        )

    def test_a_pattern_that_parts_what_loaders_join(self, demo_checkpoint: Path, tmp_path: Path, fp8q: Fp8q) -> None:
        told = self.refused(fp8q, demo_checkpoint, tmp_path / "out", "--skip", "*.0.self_attn.q_proj")
        assert told.startswith("model.layers.0.self_attn.")
        assert "would break rule C116: " in told

    def test_no_such_model(self, tmp_path: Path, fp8q: Fp8q) -> None:
        assert "there is no such directory" in self.refused(fp8q, tmp_path / "none", tmp_path / "out")


def test_python_has_the_function(demo_checkpoint: Path, tmp_path: Path) -> None:
    from fp8q import api

    assert api.convert(str(demo_checkpoint), tmp_path / "fp8").quantized == 28
    with pytest.raises(InputError):
        api.convert(str(demo_checkpoint), tmp_path / "fp8")
