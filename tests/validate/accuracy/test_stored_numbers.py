"""Files of numbers whose SHA-256 is in the record, and whose contents no fp8q wrote: each is refused in one line."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8q.calibrate.text.evaluation import Protocol
from fp8q.core.errors import InputError
from fp8q.core.files import sha256_file, write_document
from fp8q.core.record import RunRecord, StageRecord
from fp8q.core.run import Run
from fp8q.stages.corpus import load_tokens, save_tokens
from fp8q.validate.accuracy.document import (
    Accuracy,
    NotFinite,
    RuntimeAccuracy,
    load_divergences,
    load_token_losses,
    save_accuracy,
)
from fp8q.validate.accuracy.log_probabilities import check_logprobs
from fp8q.validate.accuracy.top_logits import load_top_logits

VOCABULARY, WINDOWS, CONTEXT, TOP = 6, 3, 4, 2
Arrays = dict[str, np.ndarray]


def protocol() -> Protocol:
    return Protocol(dataset="text", sha256="", tokens=WINDOWS * (CONTEXT - 1), context=CONTEXT, stride=CONTEXT)


def recorded(run: Run, stage: str, *paths: Path) -> None:
    """Record files as a stage's outputs."""
    outputs = {path.name: sha256_file(path) for path in paths}
    record = StageRecord(
        inputs={}, options={}, outputs=outputs, version="0", libraries={}, notes=[], seconds=0, peak_memory_bytes=0
    )
    write_document(run.record_file, RunRecord(stages={stage: record}))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of two runtimes: at each position of its windows the tokens 4 and 2 have 1/2 and 1/4."""
    run = Run(tmp_path)
    run.model.mkdir()
    (run.model / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    nll = np.full((WINDOWS, CONTEXT), np.log(2), np.float32)
    nll[:, 0] = np.nan
    row = RuntimeAccuracy(perplexity=2.0, nll_nats=float(np.log(2)))
    save_accuracy(run, Accuracy(protocol=protocol(), runtimes={"bf16": row, "reference": row}),
                  {"bf16": nll, "reference": nll}, {"reference": np.where(np.isnan(nll), nll, 0)})  # fmt: skip
    kept = np.broadcast_to(np.arange(CONTEXT) >= 2, (2, CONTEXT))
    count = int(kept.sum())
    top = {
        "tokens": np.tile(np.array([4, 2], np.int32), (count, 1)),
        "logprobs": np.tile(np.log([0.5, 0.25]).astype(np.float32), (count, 1)),
        "rest": np.full(count, np.log(0.25), np.float32),
    }
    text = {"windows": np.array([0, 2]), "ids": np.full((2, CONTEXT), 4, np.int32), "kept": kept}
    tops = {f"{name}.{field}": values for name in ("bf16", "reference") for field, values in top.items()}
    np.savez(run.top_logits, allow_pickle=False, **text, **tops)
    recorded(run, "validate", run.accuracy, run.tokens, run.top_logits)
    return run


def changed(run: Run, path: Path, change: Callable[[Arrays], Any]) -> None:
    """Change the arrays of a file, and its SHA-256 in the record."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    change(arrays)
    np.savez(path, **arrays)
    recorded(run, "validate", run.accuracy, run.tokens, run.top_logits)


def test_what_was_written_is_read(run: Run) -> None:
    found = load_top_logits(run)
    assert found.vocabulary == VOCABULARY
    assert found.nll["reference"].tolist() == pytest.approx([np.log(2)] * 4)


def put(name: str, index: Any, value: Any) -> Callable[[Arrays], None]:
    """Set a part of an array."""

    def change(arrays: Arrays) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name][index] = value

    return change


def as_type(name: str, dtype: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: arrays[name].astype(dtype)})


def reshaped(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.update({name: change(arrays[name])})


def without(name: str) -> Callable[[Arrays], Any]:
    return lambda arrays: arrays.pop(name)


TOPS: dict[str, tuple[Callable[[Arrays], Any], str]] = {
    "nan": (put("bf16.logprobs", (1, 0), np.nan), "bf16: nan at position 1 is no log-probability"),
    "inf": (put("bf16.logprobs", (1, 0), np.inf), "bf16: inf at position 1 is no log-probability"),
    "above 0": (put("bf16.logprobs", (1, 0), 3.0), "bf16: 3 at position 1 is above 0"),
    "rest nan": (put("bf16.rest", 2, np.nan), "bf16: nan at position 2 is no log-probability"),
    "rest 0": (
        put("bf16.rest", 2, 0.0), "bf16: 1.75 at position 2 is the sum of probabilities, which is 1 at most",
    ),
    "too little": (
        put("bf16.rest", 2, -np.inf), "bf16: 0.75 at position 2 is the sum of all probabilities, which is 1",
    ),
    "all impossible": (
        put("bf16.logprobs", 0, -np.inf), "bf16: 0.25 at position 0 is the sum of all probabilities, which is 1",
    ),
    "not in order": (
        reshaped("bf16.logprobs", lambda values: values[:, ::-1]),
        "bf16.logprobs are not in order, the likeliest first",
    ),
    "an id too large": (put("bf16.tokens", (0, 1), 6), "bf16.tokens lies between 2 and 6, and not between 0 and 5"),
    "an id below 0": (put("bf16.tokens", (0, 1), -1), "bf16.tokens lies between -1 and 4, and not between 0 and 5"),
    "an id twice": (put("bf16.tokens", (0, 1), 4), "bf16.tokens has none at a position, or one twice"),
    "tokens wider": (as_type("bf16.tokens", np.int64), "bf16.tokens is int64 [4, 2] and not int32 [4, any]"),
    "logprobs wider": (as_type("bf16.logprobs", np.float64), "bf16.logprobs is float64 [4, 2] and not float32 [4, 2]"),
    "logprobs texts": (as_type("bf16.logprobs", "U9"), "bf16.logprobs is <U9 [4, 2] and not float32 [4, 2]"),
    "logprobs complex": (as_type("bf16.rest", np.complex64), "bf16.rest is complex64 [4] and not float32 [4]"),
    "fewer rows": (
        reshaped("bf16.tokens", lambda values: values[1:]), "bf16.tokens is int32 [3, 2] and not int32 [4, any]",
    ),
    "no tokens": (
        lambda arrays: arrays.update({name: arrays[name][:, :0] for name in ("bf16.tokens", "bf16.logprobs")}),
        "bf16.tokens has none at a position, or one twice",
    ),
    "a scalar": (
        reshaped("bf16.tokens", lambda values: values[0, 0]), "bf16.tokens is int32 [] and not int32 [4, any]",
    ),
    "a window too many": (put("windows", 1, 3), "windows lies between 0 and 3, and not between 0 and 2"),
    "a window below 0": (put("windows", 0, -1), "windows lies between -1 and 2, and not between 0 and 2"),
    "a window twice": (put("windows", 0, 2), "windows are not in order"),
    "windows floats": (as_type("windows", np.float64), "windows is float64 [2] and not int64 [any]"),
    "ids of the text": (put("ids", (0, 0), 6), "ids lies between 4 and 6, and not between 0 and 5"),
    "ids longer": (
        reshaped("ids", lambda values: np.pad(values, ((0, 0), (0, 1)))), "ids is int32 [2, 5] and not int32 [2, 4]",
    ),
    "kept numbers": (as_type("kept", np.int8), "kept is int8 [2, 4] and not bool [2, 4]"),
    "nothing kept": (put("kept", slice(None), False), "kept has no position, or one with nothing before it"),
    "the first kept": (put("kept", (0, 0), True), "kept has no position, or one with nothing before it"),
    "another kept": (put("kept", (0, 1), True), "bf16.tokens is int32 [4, 2] and not int32 [5, any]"),
    "no windows": (without("windows"), "it has no windows"),
    "no rest": (without("bf16.rest"), "it has no bf16.rest"),
    "no runtime": (
        lambda arrays: [arrays.pop(name) for name in [*arrays] if "." in name],
        "it has no runtime whose losses are finite",
    ),
}  # fmt: skip
AGAIN = "restore it, or run `fp8q validate` again"


@pytest.mark.parametrize("case", TOPS)
def test_likeliest_tokens_that_cannot_be_are_refused(case: str, run: Run) -> None:
    change, why = TOPS[case]
    changed(run, run.top_logits, change)
    with pytest.raises(InputError) as refused:
        load_top_logits(run)
    assert str(refused.value) == f"{run.top_logits}: does not read as likeliest tokens ({why}); {AGAIN}"


LOSSES: dict[str, tuple[Callable[[Arrays], Any], str]] = {
    "nan": (put("bf16", (1, 2), np.nan), "bf16 has 8 losses for 9 tokens"),
    "inf": (put("bf16", (1, 2), np.inf), "bf16 lies between 0.693147 and inf, and not between -0.01 and 3.40282e+38"),
    "below 0": (put("bf16", (1, 2), -1), "bf16 lies between -1 and 0.693147, and not between -0.01 and 3.40282e+38"),
    "one too many": (put("bf16", (1, 0), 1), "bf16 has 10 losses for 9 tokens"),
    "a divergence nan": (put("reference.kl", (1, 2), np.nan), "reference.kl has 8 losses for 9 tokens"),
    "wider": (as_type("bf16", np.float64), "bf16 is float64 [3, 4] and not float32 [3, 4]"),
    "texts": (as_type("bf16", "U9"), "bf16 is <U9 [3, 4] and not float32 [3, 4]"),
    "flat": (reshaped("bf16", lambda values: values.ravel()), "bf16 is float32 [12] and not float32 [any, any]"),
    "another shape": (
        reshaped("reference", lambda values: values.T), "reference is float32 [4, 3] and not float32 [3, 4]",
    ),
    "nothing": (lambda arrays: arrays.clear(), "it has no runtime"),
    "none of a runtime": (
        lambda arrays: arrays.pop("reference"), "it has no losses of reference, which accuracy.json has"
    ),
    "of another runtime": (
        lambda arrays: arrays.update({"refer.kl": arrays.pop("reference.kl")}),
        "it has refer.kl, which is no runtime of accuracy.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_losses_that_cannot_be_are_refused(case: str, run: Run) -> None:
    change, why = LOSSES[case]
    changed(run, run.tokens, change)
    with pytest.raises(InputError) as refused:
        load_token_losses(run)
    assert str(refused.value) == f"{run.tokens}: does not read as losses of tokens ({why}); {AGAIN}"


def test_losses_and_divergences_under_a_former_name_are_read(run: Run) -> None:
    accuracy = Accuracy.model_validate_json(run.accuracy.read_bytes())
    runtimes = {"source" if name == "reference" else name: runtime for name, runtime in accuracy.runtimes.items()}
    write_document(run.accuracy, accuracy.model_copy(update={"runtimes": runtimes}))

    def rename(arrays: Arrays) -> None:
        arrays.update({"source": arrays.pop("reference"), "source.kl": arrays.pop("reference.kl")})

    changed(run, run.tokens, rename)
    assert [*load_token_losses(run)] == ["bf16", "original"]
    assert [*load_divergences(run)] == ["original"]


def test_a_runtime_that_is_said_to_be_broken_is_left_out(run: Run) -> None:
    """`validate` writes what it measured, NaN too; nothing has a distance from that."""
    accuracy = Accuracy.model_validate_json(run.accuracy.read_bytes())
    place = NotFinite(window=0, position=2)
    broken = accuracy.runtimes["reference"].model_copy(update={"not_finite": place})
    write_document(run.accuracy, accuracy.model_copy(update={"runtimes": {**accuracy.runtimes, "reference": broken}}))
    changed(run, run.tokens, put("reference", (0, 2), np.nan))
    changed(run, run.top_logits, put("reference.logprobs", 0, np.nan))
    assert [*load_top_logits(run).runtimes] == ["bf16"]
    assert np.isnan(load_token_losses(run)["reference"][0, 2])


@pytest.mark.parametrize(("content", "why"), [
    (b"", "File is not a zip file"),
    (b"PK", "File is not a zip file"),
])  # fmt: skip
def test_a_file_that_is_no_archive_is_refused(content: bytes, why: str, run: Run) -> None:
    run.top_logits.write_bytes(content)
    recorded(run, "validate", run.accuracy, run.tokens, run.top_logits)
    with pytest.raises(InputError) as refused:
        load_top_logits(run)
    assert str(refused.value) == f"{run.top_logits}: does not read as likeliest tokens ({why}); {AGAIN}"


def test_arrays_that_are_larger_than_their_file_are_not_read(run: Run) -> None:
    np.savez_compressed(run.top_logits, windows=np.zeros(10_000_000))
    assert run.top_logits.stat().st_size < 1 << 20
    recorded(run, "validate", run.accuracy, run.tokens, run.top_logits)
    with pytest.raises(InputError) as refused:
        load_top_logits(run)
    why = "its arrays are compressed"
    assert str(refused.value) == f"{run.top_logits}: does not read as likeliest tokens ({why}); {AGAIN}"


def test_python_objects_are_not_read(run: Run) -> None:
    np.savez(run.top_logits, windows=np.array([{}], object))
    recorded(run, "validate", run.accuracy, run.tokens, run.top_logits)
    with pytest.raises(InputError) as refused:
        load_top_logits(run)
    why = "Object arrays cannot be loaded when allow_pickle=False"
    assert str(refused.value) == f"{run.top_logits}: does not read as likeliest tokens ({why}); {AGAIN}"
    with zipfile.ZipFile(run.top_logits) as archive:
        assert archive.namelist() == ["windows.npy"]


@pytest.mark.parametrize(("ids", "why"), [
    ([[1, 6]], "input_ids lies between 1 and 6, and not between 0 and 5"),
    ([[-1, 5]], "input_ids lies between -1 and 5, and not between 0 and 5"),
    ([1, 5], "input_ids is int64 [2] and not int64 [any, any]"),
    ([[1.0]], "input_ids is float64 [1, 1] and not int64 [any, any]"),
])  # fmt: skip
def test_token_ids_outside_the_vocabulary_are_refused(ids: list[Any], why: str, run: Run) -> None:
    save_tokens(run.calibration, np.array(ids))
    recorded(run, "corpus", run.calibration)
    with pytest.raises(InputError) as refused:
        load_tokens(run, run.calibration)
    assert str(refused.value) == (
        f"{run.calibration}: does not read as token ids ({why}); restore it, or calibrate again into a new directory"
    )


def test_the_bounds_of_probabilities() -> None:
    """1.01 is the most that they add up to, and exp(-log V) the least of the likeliest."""
    check_logprobs(np.log([[0.6, 0.409]]), 2)
    for values, why in (
        ([[0.6, 0.42]], "1.02 is the sum of probabilities, which is 1 at most"),
        ([[0.4, 0.3]], "-0.91629 is the likeliest of 2 tokens, of which one has -0.7031 or more"),
    ):
        with pytest.raises(ValueError, match=f"^{why}$"):
            check_logprobs(np.log(values), 2)
    check_logprobs(np.zeros((3, 0)), 2)
