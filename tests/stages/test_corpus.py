"""From the texts that --data names to the windows of a run, and what is read of other text for it."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from fp8q.calibrate.measure.statistics import StatisticsRecord
from fp8q.calibrate.model.source import Source, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text.corpus import encode_texts
from fp8q.core.errors import InputError
from fp8q.core.files import read_document
from fp8q.core.reporter import SILENT, Standing
from fp8q.core.run import Run
from fp8q.core.run_writer import RunWriter
from fp8q.options import CalibrateOptions, ValidateOptions
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import other_text
from fp8q.stages.pipeline.stage import Notes

if TYPE_CHECKING:
    from tests.conftest import Texts

OPTIONS = CalibrateOptions(samples=8, seq_len=64)


@dataclass
class Corpora:
    """A model with a chat template, and texts: `code` 20,000 characters, `prose` other 10,000, `chats` of questions and
    answers.
    """

    root: Path
    source: Source
    notes: list[str] = field(default_factory=list)

    def path(self, name: str) -> str:
        return str(self.root / name)

    def collect(
        self, data: str | Sequence[str], eval_data: str | None = None, **options: Any
    ) -> corpus_stage.Collected:
        self.notes = []
        return corpus_stage.collect(
            self.source, load_tokenizer(self.source), data, eval_data, replace(OPTIONS, **options), self
        )

    def refusal(self, data: str | Sequence[str], eval_data: str | None = None, **options: Any) -> str:
        with pytest.raises(InputError) as refused:
            self.collect(data, eval_data, **options)
        return str(refused.value)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def track(
        self, description: str, total: int, unit: str = "steps", standing: Standing | None = None
    ) -> AbstractContextManager[Callable[[int], None]]:
        return SILENT.track(description, total, unit, standing)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: "Texts") -> Corpora:
    root = tmp_path_factory.mktemp("corpora")
    model = Path(shutil.copytree(demo_checkpoint, root / "model"))
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}", encoding="utf-8"
    )
    text, other = (path.read_text(encoding="utf-8") for path in (demo_texts.calibration, demo_texts.evaluation))
    (root / "code.txt").write_text(text[:20_000], encoding="utf-8")
    (root / "prose.txt").write_text(text[100_000:110_000], encoding="utf-8")
    (root / "other.txt").write_text(other[:20_000], encoding="utf-8")
    chats = [
        [{"role": "user", "content": f"Number {n}?"}, {"role": "assistant", "content": text[n : n + 400]}]
        for n in range(30_000, 60_000, 400)
    ]
    (root / "chats.jsonl").write_text(
        "".join(json.dumps({"id": "x", "messages": chat}) + "\n" for chat in chats), encoding="utf-8"
    )
    return Corpora(root, open_source(str(model)))


@pytest.fixture(scope="module")
def run(made: Corpora, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of code and chats, as far as its measurement; tokenizer and config where its checkpoint would be."""
    run, notes = Run(tmp_path_factory.mktemp("runs") / "run"), Notes(made)
    collected = made.collect([made.path("code.txt"), made.path("chats.jsonl=3")], chat_template=True, seed=7)
    corpus_stage.write_corpus(run, made.source, collected, notes)
    measure_stage.measure(run, made.source, replace(OPTIONS, stream=False), notes)
    shutil.copytree(made.source.path, run.model)
    return run


def test_one_text_gives_its_windows_in_order_as_it_always_did(made: Corpora) -> None:
    collected = made.collect(made.path("code.txt"))
    ids = encode_texts([(made.root / "code.txt").read_text(encoding="utf-8")], load_tokenizer(made.source))
    kept = len(ids) - len(ids) // 10
    available = kept // 64
    assert collected.windows.tolist() == [
        ids[64 * place : 64 * place + 64].tolist() for place in [number * available // 8 for number in range(8)]
    ]
    assert collected.evaluation.tolist() == ids[kept:].tolist()
    assert made.notes == [
        f"{made.path('code.txt')}: the last {len(ids) - kept:,} of {len(ids):,} tokens are held out for evaluation"
    ]
    (source,) = collected.sources
    assert (source.name, source.weight, source.windows, source.tokens, source.chat) == (
        made.path("code.txt"),
        1.0,
        8,
        kept,
        False,
    )


def test_windows_are_shared_out_by_weight_and_interleaved(made: Corpora) -> None:
    code, prose = made.path("code.txt"), made.path("prose.txt")
    collected = made.collect([f"{code}=3", prose])
    assert [(source.name, source.weight, source.windows) for source in collected.sources] == [
        (code, 3.0, 6),
        (prose, 1.0, 2),
    ]
    six = made.collect(code, samples=6).windows.tolist()
    two = made.collect(prose, samples=2).windows.tolist()
    # Places 1/12 3/12 5/12 … and 1/4 3/4; of equal ones (3/12) the first text's comes first.
    assert collected.windows.tolist() == [six[0], six[1], two[0], six[2], six[3], six[4], two[1], six[5]]


def test_what_is_held_out_of_several_texts_is_the_same_mixture(made: Corpora) -> None:
    code, prose = made.path("code.txt"), made.path("prose.txt")
    collected = made.collect([f"{code}=3", prose])
    tails = [made.collect(path).evaluation for path in (code, prose)]
    available = [len(tail) // 64 for tail in tails]
    code_windows = min(available[0], 3 * available[1])
    assert collected.evaluation[:64].tolist() == tails[0][:64].tolist()
    assert collected.evaluation[-64:].tolist() in [
        tails[1][64 * place : 64 * place + 64].tolist() for place in range(available[1])
    ]
    assert abs(len(collected.evaluation) / 64 - code_windows * 4 / 3) <= 2
    collected = made.collect([f"{code}=3", prose])
    assert made.notes[2].startswith(
        f"of what is held out, {len(collected.evaluation) // 64} windows are evaluated on: "
    )
    assert made.notes[3] == f"--data: 8 windows, 6 of {code}, 2 of {prose}"


def test_a_text_too_small_for_its_share_lowers_the_default_and_refuses_what_was_asked(made: Corpora) -> None:
    code, prose = made.path("code.txt"), made.path("prose.txt")
    windows = len(made.collect(prose, samples=None).windows)
    collected = made.collect([code, f"{prose}=9"], samples=None)
    assert collected.sources[1].windows == windows
    lowered = len(collected.windows)
    assert (
        f"--samples: the default 512 is lowered to {lowered}, of which {prose} is to give 90.0% and has {windows} "
        "windows of 64 tokens"
    ) in made.notes
    assert made.refusal([code, f"{prose}=9"], samples=lowered + 1) == (
        f"--samples {lowered + 1}: is more than {lowered}, of which {prose} is to give 90.0% and has {windows} "
        "windows of 64 tokens; ask for at most that, or leave it out"
    )


def test_a_text_whose_share_is_no_window_is_refused(made: Corpora) -> None:
    code, prose = made.path("code.txt"), made.path("prose.txt")
    assert (
        made.refusal([f"{code}=99", prose])
        == f"--data {prose}: its weight 1 of 100 is no window of 8; give it more, or more --samples"
    )


def test_texts_that_hold_each_other_cannot_be_held_out(made: Corpora, tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text((made.root / "code.txt").read_text(encoding="utf-8")[5_000:], encoding="utf-8")
    code = made.path("code.txt")
    assert made.refusal([code, str(copy)]).startswith(
        f"--data {copy}: 100% of the text is in both this and {code}, so that none of it can be held out; "
    )
    assert len(made.collect([code, str(copy)], made.path("other.txt")).windows) == 8


def test_the_same_seed_draws_the_same_windows(made: Corpora) -> None:
    code, prose = made.path("code.txt"), made.path("prose.txt")
    drawn = [made.collect([code, prose], seed=seed).windows.tolist() for seed in (1, 1, 2, None)]
    assert drawn[0] == drawn[1]
    assert len({json.dumps(windows) for windows in drawn}) == 3


def test_chats_need_the_option_and_the_option_needs_chats(made: Corpora) -> None:
    chats, code = made.path("chats.jsonl"), made.path("code.txt")
    assert made.refusal(chats).startswith(
        f"{chats}: holds chats, under `messages`; render them by the tokenizer's own template with --chat-template, "
    )
    assert made.refusal(code, chat_template=True) == (
        f"--chat-template: {code} holds no chats, which are rows with `messages` (or `conversations`) of role and "
        "content; leave it out"
    )
    collected = made.collect([chats, code], chat_template=True)
    assert [source.chat for source in collected.sources] == [True, False]
    text = str(load_tokenizer(made.source).decode(made.collect(chats, chat_template=True).windows[0].tolist()))
    assert text.startswith("<|user|>Number 30000?\n<|assistant|>")


def test_the_record_of_a_run_says_what_it_was_measured_on(run: Run, made: Corpora) -> None:
    corpus = read_document(run.statistics_json, StatisticsRecord).corpus
    code, chats = corpus.sources or []
    assert (code.name, code.weight, code.windows, code.chat) == (made.path("code.txt"), 1.0, 2, False)
    assert (chats.name, chats.weight, chats.windows, chats.chat) == (made.path("chats.jsonl"), 3.0, 6, True)
    options = run.record().stages["corpus"].options
    assert (options["chat_template"], options["seed"]) == (True, 7)


@pytest.mark.parametrize("changed", [{"seed": 8}, {"chat_template": False}, {"weight": 2}])
def test_another_seed_template_or_weight_is_another_corpus(
    run: Run, made: Corpora, changed: dict[str, Any], tmp_path: Path
) -> None:
    copy = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    before = copy.record().stages["corpus"]
    collected = made.collect(
        [made.path("code.txt"), made.path(f"chats.jsonl={changed.get('weight', 3)}")],
        chat_template=True,
        seed=changed.get("seed", 7),
    )
    if changed == {"chat_template": False}:
        collected = replace(collected, options=replace(collected.options, chat_template=False))
    corpus_stage.write_corpus(copy, made.source, collected, Notes(made))
    assert copy.record().stages["corpus"].options != before.options


def test_other_text_is_read_as_the_run_read_its_own(run: Run, made: Corpora) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    chats = other_text.read_other(run, made.path("chats.jsonl"), tokenizer, 2048, made)
    assert chats.documents.chat
    assert chats.documents.texts[0].startswith("<|user|>Number 30000?")


def test_chats_are_held_against_the_scales_in_as_many_windows_as_they_fill(
    run: Run, made: Corpora, tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text(
        "".join(line + "\n" for line in (made.root / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:2]),
        encoding="utf-8",
    )
    for path, most in ((few, 7), (made.root / "chats.jsonl", 8)):
        measured = measure_stage.measure_text(run, str(path), Notes(made)).record
        assert (measured.corpus.name, measured.corpus.seq_len, measured.tokens) == (
            str(path),
            64,
            64 * measured.corpus.windows,
        )
        assert 1 < measured.corpus.windows <= most
    assert measured.corpus.windows == 8  # as many as the run was calibrated on


def test_what_was_calibrated_on_is_no_evaluation_text(run: Run, made: Corpora, tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(InputError) as refused:
            other_text.evaluation(run, str(path), ValidateOptions(), made)
        return str(refused.value)

    whole = made.root / "code.txt"
    assert refusal(whole) == (
        f"--data {whole}: is a text that {run.root} was calibrated on; evaluate on another, leave --data out to "
        "evaluate on what was held out, or give --allow-overlap"
    )
    rows = (made.root / "chats.jsonl").read_text(encoding="utf-8").splitlines()
    reflowed = tmp_path / "reflowed.jsonl"
    reflowed.write_text("\n".join(rows[1:]), encoding="utf-8")
    assert refusal(reflowed).endswith(
        f"% of what {run.root} was calibrated on is in it; evaluate on other text, leave --data out to evaluate on "
        "what was held out, or give --allow-overlap"
    )
    evaluation = other_text.evaluation(run, made.path("other.txt"), ValidateOptions(), made)
    assert evaluation.protocol.dataset == made.path("other.txt")


def test_a_token_the_embedding_lacks_is_refused_in_other_text_too(run: Run, made: Corpora, tmp_path: Path) -> None:
    copy = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    tokenizer, config = load_tokenizer(made.source), copy.model / "config.json"
    largest = max(int(corpus_stage.load_tokens(run, path).max()) for path in (run.calibration, run.evaluation))
    lacking = next(
        text
        for token in range(largest + 1, 2048)
        if (encode_texts([text := str(tokenizer.decode([token]))], tokenizer) == token).any()
    )
    (tmp_path / "other.txt").write_text(lacking * 2_000, encoding="utf-8")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": largest + 1}))
    ends = rf"and the model's embedding ends at {largest:,}: it is not this model's tokenizer; "
    with pytest.raises(InputError, match=ends):
        other_text.evaluation(copy, str(tmp_path / "other.txt"), ValidateOptions(), made)


def test_the_positions_are_read_from_the_checkpoint_by_any_name(tmp_path: Path) -> None:
    copy = Run(tmp_path)
    copy.model.mkdir()
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
        (copy.model / "config.json").write_text(json.dumps({key: 77}))
        assert other_text.positions(copy) == 77
    (copy.model / "config.json").write_text("{}")
    assert other_text.positions(copy) is None


def test_a_configuration_that_does_not_parse_is_named(tmp_path: Path) -> None:
    copy = Run(tmp_path)
    copy.model.mkdir()
    (copy.model / "config.json").write_text("{")
    with pytest.raises(InputError) as refused:
        other_text.positions(copy)
    assert str(refused.value) == (
        f"{copy.model / 'config.json'}: does not read as a configuration (Expecting property name enclosed in double "
        "quotes: line 1 column 2 (char 1)); restore it, or calibrate again into a new directory"
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "File is not a zip file"),
        (b"PK\x03\x04", "File is not a zip file"),
        (np.zeros(4, np.float32), "input_ids is float32 [4] and not int64 [any, any]"),
        (np.zeros((1, 1, 1), np.int64), "input_ids is int64 [1, 1, 1] and not int64 [any, any]"),
        (np.zeros(12, np.int64), "input_ids is int64 [12] and not int64 [any, any]"),
        (np.array([[7, -1]]), "input_ids lies between -1 and 7, and not between 0 and 4,294,967,295"),
        (np.array([[0, 2**40]]), "input_ids lies between 0 and 1,099,511,627,776, and not between 0 and 4,294,967,295"),
    ],
)
def test_tokens_that_are_none_are_refused_though_the_record_knows_them(
    tmp_path: Path, content: bytes | np.ndarray, told: str
) -> None:
    run = Run(tmp_path / "run")
    with RunWriter(run).stage("corpus", {}, {}) as log:
        if isinstance(content, bytes):
            run.calibration.write_bytes(content)
        else:
            np.savez(run.calibration, input_ids=content)
        log.outputs.append(run.calibration)
    with pytest.raises(InputError) as refused:
        corpus_stage.load_tokens(run, run.calibration)
    assert str(refused.value) == (
        f"{run.calibration}: does not read as token ids ({told}); restore it, or calibrate again into a new directory"
    )
