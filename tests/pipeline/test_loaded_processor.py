"""A model that sees, in memory: with its processor the run and the checkpoint have what those of its files have."""

import json
from pathlib import Path
from typing import Any

import pytest
from seeing_models import PROCESSORS, asking
from transformers import AutoModelForMultimodalLM, AutoProcessor

from fp8q import api
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.stages.shared.run_images import load_image_rows

from ..seeing import PICTURES

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"chat_template": True, "samples": 4, "seq_len": 48, "batch_size": 2, "graph": False}


def texts_with_images(folders: Path) -> list[list[dict[str, Any]]]:
    """The rows of `mixed.jsonl`, with paths of files."""
    rows = [asking(str(folders / f"{number}.png"), f"What is in picture {number}?") for number in range(PICTURES)]
    words = (folders / "text.txt").read_text(encoding="utf-8")
    plain = [[{"role": "user", "content": text}] for text in words.split("\n\n")]
    return [*(row["messages"] for row in rows), *plain]


@pytest.mark.parametrize("config", PROCESSORS)
def test_a_processor_in_memory_gives_the_run_of_its_files(config: str, folders: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForMultimodalLM.from_pretrained(folders / config, dtype="bfloat16")
    processor: Any = AutoProcessor.from_pretrained(folders / config)
    texts = texts_with_images(folders)
    run = api.quantize(model, processor, texts, tmp_path / "run", **SETTINGS)
    of_files = api.calibrate(
        run.loaded_model, run.loaded_texts / "rows.jsonl", tmp_path / "files", tokenizer="auto", **SETTINGS
    )
    again = AutoProcessor.from_pretrained(run.model)
    assert type(again) is type(processor)
    assert again.image_processor.to_dict() == processor.image_processor.to_dict()
    assert all((run.model / name).is_file() for name in ("preprocessor_config.json", "processor_config.json"))
    assert {file.name for file in run.model.iterdir()} == {file.name for file in of_files.model.iterdir()}
    assert load_statistics(run).record.corpus.images == 4
    assert run.statistics.read_bytes() == of_files.statistics.read_bytes()
    stored = json.loads(run.images.read_text())
    assert {Path(image["path"]).parts[0] for row in stored["calibration"] for image in row["images"]} == {"loaded"}
    moved = Run(run.root.rename(tmp_path / "moved"))
    rows = load_image_rows(moved)
    assert rows is not None
    assert len(rows.all) == 4 + 1
    assert all(image.opened("row") for row in rows.all for image in row.images)


def test_a_tokenizer_alone_is_named_where_images_or_files_are_missing(folders: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForMultimodalLM.from_pretrained(folders / "Gemma3Config", dtype="bfloat16")
    processor: Any = AutoProcessor.from_pretrained(folders / "Gemma3Config")
    with pytest.raises(InputError) as refused:
        api.quantize(model, processor.tokenizer, texts_with_images(folders), tmp_path / "run", **SETTINGS)
    name = type(processor.tokenizer).__name__
    assert str(refused.value) == (
        f"{name}: reads no images, and texts hold some; give the model's processor in its place (AutoProcessor)"
    )
    with pytest.raises(InputError, match="is no tokenizer of transformers, and no processor that has one; give"):
        api.quantize(model, processor.image_processor, ["text"], tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run").exists()
    words = (folders / "text.txt").read_text(encoding="utf-8")
    run = api.quantize(model, processor.tokenizer, [words], tmp_path / "run", **(SETTINGS | {"chat_template": False}))
    noted = [note for stage in run.record().stages.values() for note in stage.notes]
    assert any(note.startswith(f"{name}: Gemma3ForConditionalGeneration reads more than text") for note in noted)
