"""Mutations of bytes, and of two formats whose damage is more than bytes: safetensors by their header, npz by their
arrays.
"""

import io
import random
import struct
import zipfile

import numpy as np
from mutate_json import mutate_json


def mutate_bytes(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """A description, and `content` with some bytes flipped, zeroed, taken away, added, or cut off."""
    if not content:
        return "one byte", b"\x00"
    at = draw.randrange(len(content))
    size = min(len(content) - at, draw.choice([1, 1, 4, 64, 1000]))
    forms = {
        f"bit flipped at {at}": content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
        f"{size} bytes zero at {at}": content[:at] + bytes(size) + content[at + size :],
        f"{size} bytes 0xff at {at}": content[:at] + b"\xff" * size + content[at + size :],
        f"cut off at {at}": content[:at],
        f"{size} bytes more at its end": content + draw.randbytes(size),
        f"{size} bytes more at {at}": content[:at] + draw.randbytes(size) + content[at:],
        f"{size} bytes fewer at {at}": content[:at] + content[at + size :],
        "empty": b"",
        "random": draw.randbytes(min(len(content), 4096)),
        "all zero": bytes(len(content)),
    }
    what = draw.choice(list(forms))
    return what, forms[what]


def mutate_safetensors(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """The header mutated as JSON and its length told right, or another length, or values, or bytes."""
    (size,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + size], content[8 + size :]
    kind = draw.choice(["header", "header", "header", "length", "values", "values", "bytes"])
    if kind == "header":
        what, changed = mutate_json(draw, header)
        return f"header {what}", struct.pack("<Q", len(changed)) + changed + data
    if kind == "length":
        length = draw.choice([0, 1, 7, size - 1, size + 1, len(content), 100_000_001, 2**31, 2**63, 2**64 - 1])
        return f"header length {length}", struct.pack("<Q", length) + content[8:]
    if kind == "values" and len(data) > 8:
        at = draw.randrange(0, len(data) - 4, 4)
        name, pattern = draw.choice(
            [("NaN", b"\xc0\x7f"), ("Inf", b"\x80\x7f"), ("3e38", b"\x7f\x7f"), ("0", b"\0\0"), ("1", b"\x80\x3f")]
        )
        return f"{name} at byte {at} of the data", content[: 8 + size + at] + pattern + content[8 + size + at + 2 :]
    return mutate_bytes(draw, content)


def mutate_npz(draw: random.Random, content: bytes) -> tuple[str, bytes]:
    """One array of another type or shape, missing, or too many; a header that lies; or bytes."""
    if draw.random() < 0.3:
        return mutate_bytes(draw, content)
    with np.load(io.BytesIO(content), allow_pickle=False) as opened:
        arrays = {name: opened[name] for name in opened.files}
    name = draw.choice(sorted(arrays))
    array = arrays[name]
    what, changed = draw.choice(list(arrays_like(array).items()) + [(kind, None) for kind in OTHER])
    if what == "missing":
        del arrays[name]
    elif what == "called otherwise":
        arrays[name + "x"] = arrays.pop(name)
    elif what == "header of 2^62 values":
        return f"{name} {what}", lying(name)
    elif changed is not None:
        arrays[name] = changed
    written = io.BytesIO()
    np.savez(written, **arrays)
    return f"{name} {what}", written.getvalue()


OTHER = ("missing", "called otherwise", "header of 2^62 values")


def arrays_like(array: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays that are not quite `array`, by what they are."""
    number = array.dtype.kind in "if"
    with np.errstate(all="ignore"):
        narrow = array.astype(np.int8)
    return {
        "as int8": narrow,
        "as float64": array.astype(np.float64),
        "as complex": array.astype(np.complex128),
        "as text": array.astype(str),
        "as objects": np.array([None, {}], dtype=object),
        "flat": array.reshape(-1),
        "without a row": array[:-1] if array.ndim else array.reshape(1),
        "with a dimension more": array[None],
        "empty": array[:0] if array.ndim else np.zeros(0),
        "negative": -array - 1 if number else array,
        "huge": array + 10**9 if number else array,
    }


def lying(name: str) -> bytes:
    """An npz whose one array says that it has 2^62 values and holds none."""
    header = "{'descr': '<i8', 'fortran_order': False, 'shape': (2305843009213693952, 2), }".ljust(117) + "\n"
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    return written.getvalue()
