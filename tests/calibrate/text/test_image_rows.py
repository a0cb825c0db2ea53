"""Images of rows lie within the folder of their text, in few formats, within bounds; what is not so is one line."""

import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from seeing_models import asking, picture, write_rows

from fp8q.calibrate.text import image_rows
from fp8q.calibrate.text.chat import content_parts, messages
from fp8q.calibrate.text.documents import load_documents
from fp8q.calibrate.text.image_rows import ImageRow, digest, image_files
from fp8q.calibrate.text.rows import Reading
from fp8q.core.errors import InputError

WHERE = "chats.jsonl: line 3"


def chat_with(name: object, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "path": name, **more}, {"type": "text", "text": "What?"}]}]


def refusal(folder: Path, name: object, **more: Any) -> str:
    with pytest.raises(InputError) as refused:
        image_files(WHERE, chat_with(name, **more), folder)
    return str(refused.value)


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp"])
def test_the_three_formats_are_read_as_pillow_reads_them(name: str, tmp_path: Path) -> None:
    path = picture(tmp_path / name)
    (file,) = image_files(WHERE, chat_with(name), tmp_path)
    assert file.path == str(path.resolve())
    assert np.array_equal(np.asarray(file.opened(WHERE)), np.asarray(Image.open(path).convert("RGB")))


def test_an_image_is_upright_and_in_rgb(tmp_path: Path) -> None:
    """A photograph on its side, by its EXIF; and one with a palette and an alpha channel."""
    sideways = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    exif = Image.Exif()
    exif[0x0112] = 6
    sideways.save(tmp_path / "a.png", exif=exif)
    Image.new("RGBA", (5, 7), (255, 0, 0, 128)).convert("P").save(tmp_path / "b.png")
    first, second = (image_files(WHERE, chat_with(name), tmp_path)[0].opened(WHERE) for name in ("a.png", "b.png"))
    assert (first.mode, first.size) == ("RGB", (4, 6))
    assert (second.mode, second.size) == ("RGB", (5, 7))


def test_qwens_name_of_the_path_and_several_images_in_order(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    picture(tmp_path / "in" / "a.png", 1)
    picture(tmp_path / "b.png", 2)
    content = [{"type": "image", "image": "in/a.png"}, "and", {"type": "image", "path": "b.png"}]
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": "No."}]
    assert [Path(file.path).name for file in image_files(WHERE, chat, tmp_path)] == ["a.png", "b.png"]
    assert messages(WHERE, chat, content_parts) == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
    ]


def test_parts_of_other_kinds_are_refused(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "video", "path": "a.mp4"}]}]
    with pytest.raises(InputError) as refused:
        messages(WHERE, chat, content_parts)
    assert str(refused.value) == (
        f'{WHERE}, message 1 (user): its content is [{{"type": "video", "path": "a.mp4"}}]; it must be a string, or '
        "parts that are text"
    )


def test_what_is_no_path_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    outside = picture(tmp_path / "out.png")
    (folder / "link.png").symlink_to(outside)
    (folder / "circle.png").symlink_to(folder / "circle.png")
    form = 'a part is like {"type": "image", "path": "cat.png"}, a file in the folder of the text'
    for name in ("../out.png", str(outside), "link.png"):
        assert refusal(folder, name) == f"{WHERE}: its image {name} is not within {folder}; copy it there"
    assert refusal(folder, None) == f"{WHERE}: has an image without a path; {form}"
    assert refusal(folder, None, url="https://example.org/a.png") == f"{WHERE}: has an image without a path; {form}"
    for name in ("https://example.org/a.png", "data:image/png;base64,iVBORw0KGgo="):
        assert refusal(folder, name) == f"{WHERE}: its image {name} is no file; save it beside the text, and name that"
    for nameless in (7, ""):
        assert refusal(folder, nameless) == f"{WHERE}: has an image without a path; {form}"
    for name in ("a\0.png", "\ud800.png", "x" * 300, "circle.png"):
        assert refusal(folder, name).startswith(f"{WHERE}: its image "), name


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png")
    (tmp_path / "link.png").symlink_to(path)
    (tmp_path / "other").symlink_to(tmp_path)
    assert [image_files(WHERE, chat_with(name), tmp_path)[0].path for name in ("link.png", "other/a.png")] == [
        str(path.resolve())
    ] * 2


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int) -> bytes:
    """The header of an image of this size, and some lines."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(10_000, 10_000), (100_000, 100_000)])
def test_a_huge_image_is_refused_by_its_header(size: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png_of(*size))
    path = (tmp_path / "a.png").resolve()
    assert refusal(tmp_path, "a.png") == f"{WHERE}: its image {path} has more than 89,478,485 pixels; scale it down"


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    with open(tmp_path / "a.png", "wb") as file:
        file.truncate(image_rows.FILE_BYTES + 1)
    assert refusal(tmp_path, "a.png") == (
        f"{WHERE}: its image {(tmp_path / 'a.png').resolve()}: has 67,108,865 bytes, and 67,108,864 are the most that "
        "are read of such a file; it is damaged, or not to be trusted"
    )


def broken(path: Path) -> None:
    content = picture(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])


def other_format(path: Path) -> None:
    content = io.BytesIO()
    Image.new("RGB", (4, 4)).save(content, "BMP")
    path.write_bytes(content.getvalue())


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda path: None, "a.png: there is no such file; copy or download it again"),
        (
            lambda path: path.symlink_to(path.parent / "gone.png"),
            "gone.png: there is no such file; copy or download it again",
        ),
        (lambda path: path.mkdir(), "a.png: is a directory; copy or download it again"),
        (lambda path: path.write_bytes(b""), "is none in PNG, JPEG, WEBP; convert it"),
        (lambda path: path.write_text("<svg/>"), "is none in PNG, JPEG, WEBP; convert it"),
        (other_format, "is none in PNG, JPEG, WEBP; convert it"),
        (broken, "does not decode: "),
    ],
)
def test_what_is_no_image_is_refused(make: Callable[[Path], object], fault: str, tmp_path: Path) -> None:
    make(tmp_path / "a.png")
    said = refusal(tmp_path, "a.png")
    assert said.startswith(f"{WHERE}: its image {tmp_path.resolve()}/")
    assert fault in said
    assert "\n" not in said


def test_an_image_that_has_changed_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 1)
    (file,) = image_files(WHERE, chat_with("a.png"), tmp_path)
    picture(tmp_path / "a.png", 2)
    with pytest.raises(InputError) as refused:
        file.opened(WHERE)
    assert str(refused.value) == f"{WHERE}: its image {file.path} has changed since it was read; restore it"


def test_the_digest_is_of_contents_wherever_files_lie(tmp_path: Path) -> None:
    def row(folder: str, seed: int) -> ImageRow:
        (tmp_path / folder).mkdir(exist_ok=True)
        picture(tmp_path / folder / "a.png", seed)
        chat = chat_with("a.png")
        files = image_files(folder, chat, tmp_path / folder)
        return ImageRow(where=folder, messages=messages(folder, chat, content_parts), images=files)

    assert digest([row("one", 1)]) == digest([row("two", 1)]) != digest([row("three", 2)])


def test_rows_with_images_are_apart_from_texts_where_they_are_asked_for(tmp_path: Path) -> None:
    plain = {"messages": [{"role": "user", "content": "Hi"}]}
    rows = [plain, asking("a.png"), plain]
    path = write_rows(tmp_path / "a.jsonl", rows)
    reading = Reading(render=lambda where, chat: "rendered", images=True)
    loaded = load_documents(str(path), reading)
    assert loaded.texts == ["rendered"] * 2
    assert loaded.with_images == (("line 2", rows[1]["messages"]),)
    alone = load_documents(str(write_rows(tmp_path / "b.jsonl", rows[1:2])), reading)
    assert (alone.texts, alone.chat, len(alone.with_images)) == ([], True, 1)
    assert load_documents(str(path), Reading(render=lambda where, chat: "rendered")).with_images == ()


def test_tables_of_such_rows_are_read_too(tmp_path: Path) -> None:
    """Arrow fills in what a part lacks."""
    content = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}]
    rows = [{"messages": [{"role": "user", "content": content}]}]
    picture(tmp_path / "a.png")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.parquet", "saved"):
        loaded = load_documents(str(tmp_path / name), Reading(render=lambda where, chat: "", images=True))
        ((row, chat),) = loaded.with_images
        assert row == "row 1"
        assert len(image_files(row, chat, tmp_path)) == 1
        assert messages(row, chat, content_parts)[0]["content"] == [
            {"type": "image"},
            {"type": "text", "text": "What?"},
        ]
    assert json.dumps(rows)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_images_in_a_column_want_parts_of_messages(form: str, tmp_path: Path) -> None:
    """As TRL's and LLaVA's rows have them, beside strings; rows without an image are read."""
    content = [{"role": "user", "content": "<image>What?"}]
    rows: list[dict[str, Any]] = [{"messages": content, "images": []}, {"messages": content, "images": ["a.png"]}]
    data = datasets.Dataset.from_list(rows)
    path = tmp_path / f"chats.{form}"
    if form == "jsonl":
        write_rows(path, rows)
    elif form == "parquet":
        data.to_parquet(path)
    else:
        data.save_to_disk(path)
    where = "line 2" if form == "jsonl" else "row 2"
    with pytest.raises(InputError) as refused:
        load_documents(str(path), Reading(render=lambda where, chat: "text", images=True))
    assert str(refused.value) == (
        f"{path}: {where} has images under `images`, and no part of a message for them; write each where it stands (a "
        'part is like {"type": "image", "path": "cat.png"}, a file in the folder of the text), or leave the column out'
    )


def test_a_text_that_marks_its_image_is_none_to_read_alone(tmp_path: Path) -> None:
    described = [{"text": "A cat.", "image": "a.png"}]
    assert load_documents(str(write_rows(tmp_path / "a.jsonl", described))).texts == ["A cat."]
    marked = write_rows(tmp_path / "b.jsonl", [{"text": "<image>What?", "image": "a.png"}])
    with pytest.raises(InputError, match="line 1 has images under `image`, and no part of a message for them; write"):
        load_documents(str(marked))
    alone = write_rows(tmp_path / "c.jsonl", [{"text": "The tag <image> of SVG."}])
    assert load_documents(str(alone)).texts == ["The tag <image> of SVG."]
