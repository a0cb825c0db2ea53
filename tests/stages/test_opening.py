"""How windows begin: as served text does, or as the plain recipe cuts them; and which of it a run remembers."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from loaded_runtimes import compare_runtimes
from transformers import AutoModelForCausalLM, AutoTokenizer

from fp8q import api
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.calibrate.model.source import Source, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text.evaluation import Protocol
from fp8q.calibrate.text.packing import Packing
from fp8q.core.errors import InputError
from fp8q.core.files import sha256_file
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions, ValidateOptions
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import other_text
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared.opening import open_run
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.accuracy.runtimes import float_model
from fp8q.validate.report.report import render
from tests.command_result import Result
from tests.conftest import KeepingGraphs
from tests.noise import OTHER_SUMS

if TYPE_CHECKING:
    from tests.conftest import Texts

BOS, SIZE = 0, 64
# with an FP8 cache, as `demo_run` has it: the graph is the same
OPTIONS = CalibrateOptions(samples=6, seq_len=SIZE, batch_size=2, kv_cache="fp8")


@pytest.fixture(scope="module")
def source(opening_demo: Path) -> Source:
    return open_source(str(opening_demo))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, demo_texts: "Texts") -> Path:
    """`calibration.txt` and `evaluation.txt`, short."""
    folder = tmp_path_factory.mktemp("texts")
    for path, length in ((demo_texts.calibration, 20_000), (demo_texts.evaluation, 10_000)):
        (folder / path.name).write_text(path.read_text(encoding="utf-8")[:length], encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, opening_demo: Path, texts: Path, keeping_graphs: KeepingGraphs
) -> Run:
    """A run as it is by default, validated; read and not changed."""
    out = tmp_path_factory.mktemp("run") / "run"
    with keeping_graphs():
        api.calibrate(str(opening_demo), str(texts / "calibration.txt"), out, str(texts / "evaluation.txt"), OPTIONS)
    api.validate(out, options=ValidateOptions(runtimes=("bf16",)))
    return Run(out)


def corpus_of(root: Path, source: Source, data: Path, evaluation: Path, options: CalibrateOptions) -> Run:
    """A run as far as its corpus, and what evaluating needs of its checkpoint."""
    run = Run(root)
    collected = corpus_stage.collect(source, load_tokenizer(source), str(data), str(evaluation), options, SILENT)
    corpus_stage.write_corpus(run, source, collected, Notes(SILENT))
    run.model.symlink_to(source.path)
    return run


def perplexity_of(run: Run, source: Source, options: ValidateOptions) -> tuple[float, Protocol]:
    """In FP32: BF16 by two implementations parts by 0.1 %, more on some processors, and hides faults as large."""
    evaluation = other_text.evaluation(run, None, options, SILENT)
    forward = float_model(source, torch.float32, "cpu")
    accuracy, _ = compare_runtimes(evaluation, {"fp32": forward}, source.text_config.vocab_size, SILENT)
    return accuracy.runtimes["fp32"].perplexity, accuracy.protocol


def test_every_window_begins_with_bos_and_the_text_goes_on_in_the_next(run: Run, texts: Path, source: Source) -> None:
    ids = load_tokenizer(source)((texts / "calibration.txt").read_text(encoding="utf-8"))["input_ids"][1:]
    windows = corpus_stage.load_tokens(run, run.calibration)
    available = len(ids) // (SIZE - 1)
    places = [(SIZE - 1) * (number * available // 6) for number in range(6)]
    assert windows.tolist() == [[BOS, *ids[place : place + SIZE - 1]] for place in places]


def test_the_protocol_the_record_and_the_statistics_say_what_windows_begin_with(run: Run) -> None:
    protocol = json.loads(run.accuracy.read_text())["protocol"]
    assert (protocol["bos"], protocol["prefix"], protocol["context"], protocol["stride"]) == ("auto", [BOS], SIZE, 63)
    assert protocol["tokens"] == 63 * ((len(corpus_stage.load_tokens(run, run.evaluation)) - 1) // 63)
    assert corpus_stage.opening_of(run) == corpus_stage.Opening(bos="auto", prefix=[BOS])
    statistics = load_statistics(run)
    assert (statistics.record.corpus.prefix, statistics.record.tokens) == ([BOS], 6 * SIZE)
    # the prefix is served, and counts: one value of each channel a token
    first = statistics.tensors["model.layers.0.self_attn.q_proj.input"]
    assert first.histogram.samples == 6 * SIZE * len(first.amax_channels)


def test_the_protocol_is_told_on_the_page_and_on_the_terminal(run: Run, fp8q: Callable[..., Result]) -> None:
    told = "in windows of 64 tokens every 63, each begun as the tokenizer begins a text"
    assert told in render(run)
    shown = fp8q("validate", run.root, "--runtimes", "bf16").out
    assert told in " ".join(shown.split())


def test_other_text_is_measured_and_evaluated_in_windows_that_begin_as_the_runs_own(run: Run, texts: Path) -> None:
    path = str(texts / "evaluation.txt")
    assert measure_stage.measure_text(run, path, Notes(SILENT)).record.corpus.prefix == [BOS]
    evaluation = other_text.evaluation(run, path, ValidateOptions(context=32), SILENT)
    assert (evaluation.ids[:, 0] == BOS).all()
    assert (evaluation.protocol.bos, evaluation.protocol.context, evaluation.protocol.stride) == ("auto", 32, 31)


def test_a_tokenizer_that_adds_none_has_the_same_windows_either_way(
    demo_checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    plain = open_source(str(demo_checkpoint))
    paths = texts / "calibration.txt", texts / "evaluation.txt"
    auto = corpus_of(tmp_path / "auto", plain, *paths, OPTIONS)
    never = corpus_of(tmp_path / "never", plain, *paths, replace(OPTIONS, bos="never"))
    assert auto.calibration.read_bytes() == never.calibration.read_bytes()
    assert corpus_stage.opening_of(auto) == corpus_stage.Opening(bos="auto")
    scored = [other_text.evaluation(run, None, ValidateOptions(), SILENT).scored for run in (auto, never)]
    np.testing.assert_array_equal(scored[0], scored[1])


def age(run: Run) -> None:
    """Make `run` what one was before there was `--bos`."""
    record = json.loads(run.record_file.read_text())
    for name in ("bos", "prefix"):
        del record["stages"]["corpus"]["options"][name]
    statistics, accuracy = (json.loads(path.read_text()) for path in (run.statistics_json, run.accuracy))
    del statistics["corpus"]["prefix"], accuracy["protocol"]["prefix"], accuracy["protocol"]["bos"]
    for stage, path, document in (
        ("measure", run.statistics_json, statistics), ("validate", run.accuracy, accuracy),
    ):  # fmt: skip
        path.write_text(json.dumps(document))
        record["stages"][stage]["outputs"][path.name] = sha256_file(path)
    record["stages"]["quantize"]["inputs"][run.statistics_json.name] = sha256_file(run.statistics_json)
    run.record_file.write_text(json.dumps(record))


def test_a_run_older_than_the_option_is_current_and_evaluated_as_it_was(
    opening_demo: Path, texts: Path, tmp_path: Path, keeping_graphs: KeepingGraphs
) -> None:
    given = str(opening_demo), str(texts / "calibration.txt"), tmp_path / "old", str(texts / "evaluation.txt")
    never = replace(OPTIONS, bos="never")
    with keeping_graphs():
        old = api.calibrate(*given, never)
    options = ValidateOptions(runtimes=("bf16",))
    before = api.validate(old.root, options=options)
    assert (before.protocol.bos, before.protocol.prefix, before.protocol.stride) == ("never", [], SIZE)
    age(old)
    written = times(old)
    with keeping_graphs():
        api.calibrate(*given, never)
    api.validate(old.root, options=options)
    assert times(old) == written
    assert load_accuracy(old) == before
    windows = other_text.evaluation(old, None, options, SILENT).ids
    assert (windows[:, 0] == BOS).tolist() == [True, *[False] * (len(windows) - 1)]
    with pytest.raises(InputError, match=r"their corpus prefix \(--bos\) differs \(\[\] and \[0\]\)"):
        load_statistics(old).merge(changed(load_statistics(old)))


def times(run: Run) -> dict[Path, int]:
    """When each file of `run` was written."""
    return {path: path.stat().st_mtime_ns for path in run.root.rglob("*") if path.is_file() and path.name != ".lock"}


def changed(statistics: Any) -> Any:
    """Statistics of another text, with windows that begin with BOS."""
    corpus = statistics.record.corpus.model_copy(update={"prefix": [BOS], "fingerprint": "other"})
    return replace(statistics, record=statistics.record.model_copy(update={"corpus": corpus}))


def hugging_face(model: Path, text: str, max_length: int, stride: int) -> float:
    """The code of transformers' page "Perplexity of fixed-length models", but for its names, its type, and the weight
    of a window: the page takes one off its losses also where the first token is none of them.
    """
    encodings = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    seq_len, nll_sum, n_tokens, prev_end_loc = encodings.input_ids.size(1), 0.0, 0, 0
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + max_length, seq_len)
        trg_len = end_loc - prev_end_loc
        input_ids = encodings.input_ids[:, begin_loc:end_loc]
        target_ids = input_ids.clone()
        target_ids[:, :-trg_len] = -100
        with torch.no_grad():
            neg_log_likelihood = loaded(input_ids, labels=target_ids).loss
        num_loss_tokens = int((target_ids[:, 1:] != -100).sum())
        nll_sum += float(neg_log_likelihood) * num_loss_tokens
        n_tokens += num_loss_tokens
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    return math.exp(nll_sum / n_tokens)


@pytest.mark.parametrize(("context", "stride"), [(128, 128), (128, 64)])
def test_never_is_the_plain_recipe_of_hugging_face(
    source: Source, texts: Path, tmp_path: Path, context: int, stride: int
) -> None:
    tokenizer, whole = load_tokenizer(source), 128 * 12
    ids = tokenizer((texts / "evaluation.txt").read_text(encoding="utf-8"))["input_ids"]
    text = str(tokenizer.decode(ids[1:whole]))
    assert (
        len(tokenizer(text)["input_ids"]) == whole
    )  # fills the windows: the recipe scores what is left, fp8q does not
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    run = corpus_of(
        tmp_path / "run", source, texts / "calibration.txt", tmp_path / "text.txt", replace(OPTIONS, bos="never")
    )
    found, protocol = perplexity_of(run, source, ValidateOptions(context=context, stride=stride))
    assert (protocol.bos, protocol.tokens) == ("never", whole - (12 if stride == context else 1))
    assert found == pytest.approx(hugging_face(source.path, text, context, stride), rel=OTHER_SUMS)


def test_auto_is_each_document_after_bos_where_each_fits_a_window(source: Source, texts: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(source)
    ids = tokenizer((texts / "evaluation.txt").read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    cut = [tokenizer.decode(ids[place : place + 127]) for place in range(0, len(ids) - 127, 127)]
    documents = [text for text in cut if len(tokenizer(text, add_special_tokens=False)["input_ids"]) == 127]
    assert len(documents) > 10
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    run = corpus_of(tmp_path / "run", source, texts / "calibration.txt", tmp_path / "documents.jsonl", OPTIONS)
    found, protocol = perplexity_of(run, source, ValidateOptions(context=128))
    assert protocol.tokens == 127 * len(documents)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    served = [tokenizer(text, return_tensors="pt")["input_ids"] for text in documents]
    with torch.no_grad():
        nll = sum(float(model(input_ids=ids, labels=ids).loss) for ids in served) / len(served)
    assert found == pytest.approx(math.exp(nll), rel=OTHER_SUMS)


def test_chats_that_begin_without_bos_are_served_without(source: Source, texts: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(source)
    text, noted = (texts / "calibration.txt").read_text(encoding="utf-8"), list[str]()
    rows = [{"messages": [{"role": "user", "content": text[place : place + 400]}]} for place in range(0, 16_000, 400)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Notebook(Notes):
        def note(self, line: str) -> None:
            noted.append(line)

    for template, prefix in (("{{ messages[0].content }}", []), ("<s>{{ messages[0].content }}", [BOS])):
        tokenizer.chat_template = template
        collected = corpus_stage.collect(
            source, tokenizer, str(tmp_path / "chats.jsonl"), str(texts / "evaluation.txt"),
            replace(OPTIONS, chat_template=True, allow_overlap=True), Notebook(SILENT),
        )  # fmt: skip
        assert collected.opening.prefix == prefix
    assert [line for line in noted if line.startswith("--bos")] == [
        f"--bos: no window begins with <s>, since the chats of {tmp_path / 'chats.jsonl'} do not, as they are served"
    ]


def test_overlapping_text_passes_where_that_is_allowed_and_the_protocol_says_so(
    run: Run, source: Source, texts: Path, tmp_path: Path, fp8q: Callable[..., Result]
) -> None:
    calibration, evaluation = ((texts / f"{name}.txt").read_text() for name in ("calibration", "evaluation"))
    mixed = tmp_path / "mixed.txt"
    mixed.write_text(evaluation + calibration[2_000:6_000] + evaluation[::-1])
    refused = fp8q("calibrate", source.path, "--data", texts / "calibration.txt", "--eval-data", mixed,
                   "--out", tmp_path / "no", "--samples", 6, "--seq-len", SIZE)  # fmt: skip
    line = refused.complaint()
    assert line.startswith(f"--eval-data {mixed}: is not apart from the calibration text: ")
    assert line.endswith("leave --eval-data out to hold out the last tenth of --data, or give --allow-overlap")
    allowed = corpus_of(
        tmp_path / "yes", source, texts / "calibration.txt", mixed, replace(OPTIONS, allow_overlap=True)
    )
    share = corpus_stage.opening_of(allowed).overlap
    assert share is not None
    assert 0.1 < share < 0.4
    assert other_text.evaluation(allowed, None, ValidateOptions(), SILENT).protocol.overlap == share

    line = fp8q("validate", run.root, "--data", texts / "calibration.txt").complaint()
    assert line == (
        f"--data {texts / 'calibration.txt'}: is a text that {run.root} was calibrated on; evaluate on another, leave "
        "--data out to evaluate on what was held out, or give --allow-overlap"
    )
    found = other_text.evaluation(
        run, str(texts / "calibration.txt"), ValidateOptions(allow_overlap=True), SILENT
    ).protocol
    assert found.overlap is not None
    assert found.overlap > 0.5


def test_a_checkpoint_in_the_place_of_a_run_is_told_apart(demo_checkpoint: Path) -> None:
    with pytest.raises(InputError) as refused:
        open_run(demo_checkpoint)
    assert str(refused.value) == (
        f"{demo_checkpoint}: is a checkpoint, and a run is wanted here; make one with "
        f"`fp8q calibrate {demo_checkpoint} --data TEXT --out RUN`, and give its directory"
    )


def test_a_long_text_is_scored_in_part_and_a_note_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_text, "MAX_TOKENS", 50)
    ids, packing = np.arange(1000), Packing(8, ())
    notes = Notes(SILENT)
    found = other_text.cut_for(ids, "text", ValidateOptions(), packing, None, notes)
    assert found.ids[[0, -1], 0].tolist() == [0, 992]
    (line,) = notes.lines
    assert line == (
        "--max-tokens: 77 of the 875 tokens of text are scored, in 11 of 125 windows, evenly spaced; --max-tokens N "
        "takes more or fewer"
    )
    asked = other_text.cut_for(ids, "text", ValidateOptions(max_tokens=21), packing, None, notes)
    assert len(asked.ids) == 3
    assert len(notes.lines) == 1
    whole = other_text.cut_for(ids, "text", ValidateOptions(max_tokens=875), packing, None, notes)
    assert (len(whole.ids), whole.protocol.of_tokens) == (125, None)
