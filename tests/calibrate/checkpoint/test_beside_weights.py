"""Whatever lies beside weights is copied, or named with the reason why it is not."""

import json
import os
from pathlib import Path

import pytest

from fp8q.calibrate.checkpoint.beside_weights import beside_weights
from fp8q.calibrate.checkpoint.companions import COMPANION_BYTES
from fp8q.core.errors import InputError

COPIED = {
    "tokenizer.json": "{}",
    "tekken.json": "{}",
    "own.tiktoken": "YQ== 0",
    "modules.json": '[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]',
    "1_Pooling/config.json": "{}",
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "a module's own weights",
    "additional_chat_templates/tool.jinja": "{{ messages }}",
    "additional_chat_templates/notes.md": "notes",
    "some-file-of-tomorrow.yaml": "x: 1",
}
LEFT = {
    ".gitattributes": "hidden",
    "README.md": "the model card, whose place another takes",
    "consolidated.safetensors": "weights in another form",
    "pytorch_model.bin": "weights in another form",
    "pytorch_model.bin.index.json": "weights in another form",
    "model-Q4.GGUF": "weights in another form",
    "original/": "weights in another form",
    "onnx/": "weights in another form",
    "modeling_own.py": "code that no configuration names",
    "hf_quant_config.json": "a description of the source's codes",
    "large.dat": "more than 512 MB",
    "pipe": "is a pipe",
    "dangling": "is a link to a file that is not there",
    "secret": "a link that leads out of the checkpoint",
    "two\nlines": "a name that is no text",
}


def put(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with one of everything."""
    folder = tmp_path / "source"
    put(folder, COPIED)
    put(folder, {"config.json": "{}", "model.safetensors": "", "model.safetensors.index.json": "{}"})
    plain = [name for name in LEFT if name not in ("pipe", "dangling", "secret") and not name.endswith("/")]
    put(folder, dict.fromkeys(plain, "x"))
    put(folder, {"original/params.json": "{}", "onnx/model.onnx": "", "onnx/config.json": "{}"})
    os.truncate(folder / "large.dat", COMPANION_BYTES + 1)
    os.mkfifo(folder / "pipe")
    put(tmp_path, {"elsewhere": "mine"})
    (folder / "dangling").symlink_to("nowhere")
    (folder / "secret").symlink_to("../elsewhere")
    return folder


def test_everything_is_copied_or_left_for_a_reason(checkpoint: Path) -> None:
    divided = beside_weights(checkpoint, [checkpoint / "model.safetensors"])
    assert divided.copied == {name: checkpoint / name for name in COPIED}
    assert divided.left == LEFT
    assert "two\\nlines: a name that is no text" in divided.remarks()
    assert divided.remarks()[0] == ".gitattributes: hidden"


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_code_that_a_configuration_names_is_copied_to_where_it_may_be(checkpoint: Path, file: str) -> None:
    (checkpoint / file).write_text(json.dumps({"auto_map": {"AutoModel": "modeling_own.Model"}}))
    config = json.loads((checkpoint / "config.json").read_text())
    assert "modeling_own.py" in beside_weights(checkpoint, (), config).copied
    assert beside_weights(checkpoint, ()).left["modeling_own.py"] == "code that no configuration names"


def test_a_hubs_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    put(blobs, {"1": "{}", "2": "{}"})
    (snapshot / "1_Pooling").mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/2")
    divided = beside_weights(snapshot, ())
    assert sorted(divided.copied) == ["1_Pooling/config.json", "tokenizer.json"]
    assert divided.left == {}


def test_a_file_that_loaders_need_is_refused_where_it_is_none(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    os.mkfifo(checkpoint / "tokenizer.json")
    with pytest.raises(InputError, match=r"tokenizer\.json: is a pipe; copy or download it again"):
        beside_weights(checkpoint, ())


def test_a_thousand_files_are_copied_and_no_more(tmp_path: Path) -> None:
    put(tmp_path, {f"{number:04}.txt": "" for number in range(1002)})
    divided = beside_weights(tmp_path, ())
    assert len(divided.copied) == 1000
    assert divided.remarks() == ["1000.txt, 1001.txt: more than 1,000 files, or 4 folders deep"]
