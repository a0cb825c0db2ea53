"""The safetensors of a checkpoint: which are found, what is damaged, what is finite."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8q.calibrate.checkpoint.weights import Weights, check_finite, find_weights, index_text, read_index
from fp8q.core.errors import InputError


def shards(directory: Path, contents: Mapping[str, Mapping[str, torch.Tensor]], **changes: str) -> Path:
    """Write `contents` (file -> tensors) and their index to `directory`; `changes` are put over the index."""
    for name, tensors in contents.items():
        save_file(dict(tensors), directory / name)
    index = {tensor: name for name, tensors in contents.items() for tensor in tensors} | changes
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
    )
    return directory


def two_shards(directory: Path, **changes: str) -> Path:
    return shards(
        directory, {"b.safetensors": {"w": torch.ones(2, 3)}, "a.safetensors": {"v": torch.ones(4)}}, **changes
    )


def refusal(directory: Path) -> str:
    with pytest.raises(InputError) as refused:
        find_weights(directory, "MODEL")
    return str(refused.value)


def finiteness(file: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """The error of `check_finite` for tensors written to `file`; empty when they are finite."""
    save_file(dict(tensors), file)
    try:
        check_finite(Weights((file,)))
    except InputError as error:
        return str(error)
    return ""


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    assert find_weights(tmp_path, "MODEL") == (tmp_path / "model.safetensors",)


def test_shards_are_those_of_the_index_in_name_order(tmp_path: Path) -> None:
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert find_weights(two_shards(tmp_path), "MODEL") == (tmp_path / "a.safetensors", tmp_path / "b.safetensors")


def test_weights_are_read_as_they_are_stored(tmp_path: Path) -> None:
    tensors = {
        "w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "n": torch.tensor([1, 2]),
        "half": torch.tensor([0.1], dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = Weights((tmp_path / "model.safetensors",))
    assert set(weights.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert weights.tensor(name).dtype == tensor.dtype
        assert torch.equal(weights.tensor(name), tensor)
        assert weights.shape(name) == tuple(tensor.shape)
        assert weights.file(name) == tmp_path / "model.safetensors"
    assert [weights.dtype(name) for name in tensors] == ["BF16", "I64", "F16"]


def test_names_come_in_the_order_of_the_bytes(tmp_path: Path) -> None:
    two_shards(tmp_path)
    assert list(Weights((tmp_path / "a.safetensors", tmp_path / "b.safetensors")).names()) == ["v", "w"]


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of this process is read from /proc")
def test_a_tensor_is_mapped_and_not_copied(tmp_path: Path) -> None:
    save_file({"w": torch.ones(64 << 20, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    weights = Weights((tmp_path / "model.safetensors",))
    before = anonymous_bytes()
    tensor = weights.tensor("w")
    assert int(tensor[:: 1 << 12].sum()) == 1 << 14  # every page has been read
    assert anonymous_bytes() - before < 8 << 20


def test_the_name_of_pickled_weights_and_how_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"[X.from_pretrained('{tmp_path}').save_pretrained('NEW') for X in (M, T)]"
    )
    assert refusal(tmp_path) == (
        "MODEL: has only pickled weights (pytorch_model.bin), which can run code when read and are refused; convert "
        f'them where you trust them with `python -c "{code}"` and give NEW'
    )


@pytest.mark.parametrize(
    ("file", "found"),
    [
        (None, ""),
        ("model-00001-of-00002.safetensors", " (but model-00001-of-00002.safetensors)"),
        ("q4.gguf", " (but q4.gguf)"),
    ],
)
def test_what_there_is_instead_of_weights_is_named(tmp_path: Path, file: str | None, found: str) -> None:
    if file:
        (tmp_path / file).touch()
    assert refusal(tmp_path) == (
        f"MODEL: has no safetensors weights: neither model.safetensors nor model.safetensors.index.json{found}, and "
        "pickled ones are not read; save the model with save_pretrained"
    )


def test_an_adapter_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").touch()
    assert refusal(tmp_path) == (
        "MODEL: is an adapter without its base model; give the base model as MODEL, and this directory with --adapter"
    )


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (0, "header too small"),
        (20, "invalid header length"),
        (-1, "incomplete metadata, file not fully covered"),
    ],
)
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, keep: int, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes()[:keep])
    assert (
        refusal(tmp_path)
        == f"{path}: is damaged or cut short (Error while deserializing header: {reason}); copy or download it again"
    )


def test_a_pointer_that_git_left_is_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert refusal(tmp_path) == (
        f"{path}: is damaged or cut short (Error while deserializing header: header too large); copy or download "
        "it again"
    )


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    (two_shards(tmp_path) / "a.safetensors").unlink()
    assert refusal(tmp_path) == (
        f"{tmp_path}/model.safetensors.index.json: names a.safetensors, which is missing (1 of 2 shards are); "
        "copy or download it again"
    )


def test_tensors_that_no_shard_holds_are_named(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    two_shards(tmp_path, u="a.safetensors")
    assert (
        refusal(tmp_path)
        == f"{index}: promises u in a.safetensors, which does not hold it; copy or download the checkpoint again"
    )
    two_shards(tmp_path, w="a.safetensors", v="b.safetensors")
    assert (
        refusal(tmp_path)
        == f"{index}: promises w in a.safetensors, which does not hold it; copy or download the checkpoint again"
    )


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    shards(
        tmp_path,
        {"a.safetensors": {"w": torch.ones(1)}, "b.safetensors": {"w": torch.ones(1), "v": torch.ones(1)}},
        w="a.safetensors",
    )
    assert (
        refusal(tmp_path)
        == f"{tmp_path / 'b.safetensors'}: holds w, and so does a.safetensors; copy or download the checkpoint again"
    )


@pytest.mark.parametrize(
    "content", ["[]", "{}", "null", '{"weight_map": null}', '{"weight_map": {}}', '{"weight_map": {"w": 1}}']
)
def test_an_index_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(content, encoding="utf-8")
    assert (
        refusal(tmp_path)
        == f"{index}: does not read as a safetensors index (an object with a weight_map); copy or download it again"
    )


def test_an_index_cannot_point_out_of_its_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    two_shards(tmp_path / "model", w="../secret.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    assert refusal(tmp_path / "model") == (
        f"{index}: names ../secret.safetensors, which is not a file beside it; the checkpoint is damaged or not "
        "to be trusted"
    )


@pytest.mark.parametrize(("file", "shown"), [("../w.safetensors", "'../w.safetensors'"), ("w\0", r"'w\x00'")])
def test_an_index_that_is_linted_shows_names_in_quotes(tmp_path: Path, file: str, shown: str) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}), encoding="utf-8")
    with pytest.raises(InputError) as raised:
        read_index(index, linted=True)
    assert str(raised.value) == (
        f"{index}: names {shown}, which is not a file beside it; the checkpoint is damaged or not to be trusted"
    )


def test_an_index_is_sorted_and_read_back(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(index_text({"b": "2.safetensors", "a": "1.safetensors"}, 6))
    assert json.loads(index.read_bytes())["metadata"] == {"total_size": 6}
    assert [*read_index(index).items()] == [("a", "1.safetensors"), ("b", "2.safetensors")]


REMEDY = "take an earlier checkpoint of the training, or copy or download the file again"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_nan_and_inf_are_counted(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "model.safetensors"
    bad = torch.zeros(30, 50)
    bad[0, 1], bad[7, 3], bad[29, 49] = float("nan"), float("-inf"), float("inf")
    found = finiteness(path, {"good": torch.ones(9, dtype=dtype), "bad": bad.to(dtype)})
    assert found == f"bad: holds 1 NaN and 2 Inf among 1,500 values, in {path}; {REMEDY}"


def test_many_are_counted_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8q.calibrate.checkpoint.weights.CHUNK", 7)
    path = tmp_path / "model.safetensors"
    assert (
        finiteness(path, {"w": torch.full((5, 4), float("nan"))})
        == f"w: holds 20 NaN among 20 values, in {path}; {REMEDY}"
    )


def test_whatever_is_finite_in_bf16_passes(tmp_path: Path) -> None:
    below = torch.tensor([0x7F7F7FFF], dtype=torch.int32).view(torch.float32)  # rounds to BF16's largest, 0x7F7F
    finite = {
        "half": torch.tensor([65504.0], dtype=torch.float16),
        "below": below,
        "tiny": torch.tensor([1e-45]),
        "whole": torch.tensor([1]),
        "none": torch.zeros(0, 3),
    }
    assert finiteness(tmp_path / "model.safetensors", finite) == ""


def test_what_rounds_to_infinity_in_bf16_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    # 3.396e38 and its negative tie away to infinity
    midpoint = torch.tensor([0, 0x7F7F8000, -0x00808000], dtype=torch.int32).view(torch.float32)
    assert midpoint[1] == -midpoint[2] == pytest.approx(3.3961775e38)
    assert (
        finiteness(path, {"w": midpoint})
        == f"w: holds 2 beyond BF16's largest (3.39e38) among 3 values, in {path}; {REMEDY}"
    )


def test_the_first_in_the_files_is_named(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan")])
    save_file({"first": nan}, tmp_path / "a.safetensors")
    save_file({"again": nan}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match=r"^first: holds 1 NaN among 1 values, in .*a\.safetensors; "):
        check_finite(Weights((tmp_path / "a.safetensors", tmp_path / "b.safetensors")))
