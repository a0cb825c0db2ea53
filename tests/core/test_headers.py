"""The reader of safetensors' headers, against safetensors' own writer and reader."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from fp8q.core.errors import InputError
from fp8q.core.headers import StoredTensor, header_bytes, make_header, read_header, value_bits


def written(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def test_tensors_lie_where_the_header_says(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    tensors = {
        "wide": np.arange(6, dtype=np.float32).reshape(2, 3),
        "codes": np.arange(5).astype(ml_dtypes.float8_e4m3fn),
        "one": np.array(7, np.int64),
        "none": np.zeros((0, 4), np.float16),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    content, header = path.read_bytes(), read_header(path)
    with safe_open(path, "np") as opened:
        assert header.keys() == set(opened.keys()) == tensors.keys()
    for name, tensor in tensors.items():
        assert header[name].shape == tensor.shape
        assert content[header[name].start : header[name].end] == tensor.tobytes(), name
    assert {name: at.dtype for name, at in header.items()} == {
        "wide": "F32", "codes": "F8_E4M3", "one": "I64", "none": "F16",
    }  # fmt: skip


def test_a_header_is_read_of_a_file_whose_data_are_cut_short(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = written(tmp_path / "short.safetensors", {"x": entry, "__metadata__": {"format": "pt"}}, b"1234")
    start = 8 + len(header_bytes(path))
    assert read_header(path) == {"x": StoredTensor(path, "F32", (2,), start, start + 8)}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it has 0 bytes, and a header of 0"),
        (b"\x08\x00\x00", "it has 3 bytes, and a header of 8"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "it has 10 bytes, and a header of 1152921504606846976"),
        ((3).to_bytes(8, "little") + b"{}", "it has 10 bytes, and a header of 3"),
        ((2).to_bytes(8, "little") + b"[]", "its header does not read: AttributeError"),
        ((2).to_bytes(8, "little") + b"{\xff", "its header does not read: UnicodeDecodeError"),
        ((8).to_bytes(8, "little") + b'{"x": 1}', "its header does not read: TypeError"),
        ((9).to_bytes(8, "little") + b'{"x": {}}', "its header does not read: KeyError"),
        ((20_000).to_bytes(8, "little") + b"[" * 20_000, "its header does not read: RecursionError"),
    ],
)
def test_what_is_no_header_is_refused_in_a_line_that_names_the_file(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError) as refused:
        read_header(path)
    assert str(refused.value) == f"{path}: is damaged or cut short ({why}); copy or download it again"


def test_offsets_that_are_no_pair_are_refused(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}
    with pytest.raises(InputError, match="its header does not read: TypeError"):
        read_header(written(tmp_path / "weights.safetensors", {"x": entry}))


def test_a_header_that_is_made_is_read_as_such_and_wide_types_come_first(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    head, stored = make_header(path, {"codes": ("F8_E4M3", (3, 1)), "scales": ("F32", (3,)), "half": ("BF16", (2,))})
    path.write_bytes(head + bytes(sum(tensor.nbytes for tensor in stored.values())))
    assert read_header(path) == stored
    start = len(head)
    assert {name: (tensor.start - start, tensor.end - start) for name, tensor in stored.items()} == {
        "scales": (0, 12), "half": (12, 16), "codes": (16, 19),
    }  # fmt: skip
    with safe_open(path, "np") as opened:
        assert opened.get_tensor("scales").tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("F64", 64), ("I64", 64), ("C64", 64), ("U32", 32), ("F32", 32), ("BF16", 16), ("F16", 16), ("U8", 8),
        ("F8_E4M3", 8), ("F8_E8M0", 8), ("BOOL", 8), ("F6_E2M3", 6), ("F4", 4), ("Q4_K", 0), ("", 0), ("F10000", 0),
    ],
)  # fmt: skip
def test_the_bits_of_a_value_are_in_the_name_of_its_type(dtype: str, bits: int) -> None:
    assert value_bits(dtype) == bits
