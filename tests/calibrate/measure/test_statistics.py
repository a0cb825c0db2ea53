"""Adding statistics: in whatever order and groups, the same bytes; never what does not belong together."""

from functools import reduce
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fp8q.calibrate.measure.histogram import PATTERNS, Histogram, magnitudes
from fp8q.calibrate.measure.statistics import (
    Corpus,
    ModelIdentity,
    Statistics,
    StatisticsRecord,
    TensorStatistics,
    load_arrays,
    replace_record,
    save_arrays,
)
from fp8q.core.errors import InputError

MODEL = ModelIdentity(name="m", architecture="A", fingerprint="1", tokenizer="2")
#: Three texts of 3, 2 and 1 batches, the first with a last batch of one window.
TEXTS = [
    Corpus(name=f"text {name}", fingerprint=name, windows=windows, seq_len=2, batch_size=2)
    for name, windows in (("c", 5), ("a", 4), ("b", 1))
]
HISTOGRAM = "p.input: its histogram's patterns do not ascend, or their counts are not positive"
BATCHES = [(text, batch) for text in range(3) for batch in range(TEXTS[text].batches)]


def measured(text: int, batches: list[int], corpus: Corpus | None = None, **record: Any) -> Statistics:
    """What measuring `batches` of a text gives: each batch has two values a channel, which follow from its number; some
    are NaN or infinite.
    """
    amax, width = np.full(TEXTS[text].batches, np.nan, np.float32), 8
    patterns = [np.random.default_rng([text, batch]).integers(0, PATTERNS, (2, width)) for batch in batches]
    for batch, found in zip(batches, patterns):
        amax[batch] = magnitudes(found[found < 0x7F80].max(initial=0))
    stacked = np.concatenate(patterns)
    tensor = TensorStatistics(
        Histogram.from_dense(np.bincount(stacked.flatten(), minlength=PATTERNS)), amax, magnitudes(stacked.max(0))
    )
    tokens = sum(2 * min(2, TEXTS[text].windows - 2 * batch) for batch in batches)
    fields = {"model": MODEL, "corpus": corpus or TEXTS[text], "tokens": tokens, "groups": {"p": ["p"]}} | record
    return Statistics(StatisticsRecord.model_validate(fields), {"p.input": tensor}, {"p": np.ones(2, np.float32)})


def content(statistics: Statistics) -> tuple[str, bytes]:
    with TemporaryDirectory() as folder:
        save_arrays(Path(folder) / "arrays", statistics.tensors, statistics.weights)
        return statistics.record.model_dump_json(), (Path(folder) / "arrays").read_bytes()


@st.composite
def distributions(draw: st.DrawFn) -> list[Statistics]:
    """The six batches of three texts, dealt out to runs of one text each, the runs in any order."""
    parts = []
    for text in range(3):
        order = draw(st.permutations(range(TEXTS[text].batches)))
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(order) - 1)))) - {len(order)})
        parts += [measured(text, list(order[start:end])) for start, end in pairwise([0, *cuts, len(order)])]
    return draw(st.permutations(parts))


@given(distributions(), st.integers(1, 5))
@settings(max_examples=40)
def test_any_distribution_order_and_grouping_of_the_same_batches_gives_the_same_bytes(
    parts: list[Statistics], cut: int
) -> None:
    whole = reduce(Statistics.merge, [measured(text, list(range(TEXTS[text].batches))) for text in range(3)])
    first, second = parts[:cut], parts[cut:]
    grouped = [reduce(Statistics.merge, group) for group in (second, first) if group]
    assert content(reduce(Statistics.merge, parts)) == content(reduce(Statistics.merge, grouped)) == content(whole)


def test_texts_follow_each_other_by_fingerprint_and_their_batches_are_renumbered() -> None:
    both = measured(0, [0, 1, 2]).merge(measured(1, [1]))
    corpus = both.record.corpus
    assert [text.name for text in corpus.parts] == ["text a", "text c"]
    assert (corpus.name, corpus.windows, corpus.batches, both.record.tokens) == ("text a + text c", 9, 5, 4 + 10)
    alone = [measured(1, [1]).tensors["p.input"].amax_batches, measured(0, [0, 1, 2]).tensors["p.input"].amax_batches]
    np.testing.assert_array_equal(both.tensors["p.input"].amax_batches, np.concatenate(alone))
    assert both.batches_measured == {1, 2, 3, 4}
    assert both.tensors["p.input"].histogram.samples == 4 * 2 * 8


def test_one_text_under_two_names_is_one_text() -> None:
    here, there = measured(0, [0]), measured(0, [1], TEXTS[0].model_copy(update={"name": "/data/c"}))
    assert here.merge(there).record == there.merge(here).record
    assert here.merge(there).record.corpus.name == "/data/c"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (measured(0, [1, 2]), "both measured batch 2 of text c (1 batches in all); give each batch to one of them"),
        (
            measured(0, [1], model=MODEL.model_copy(update={"fingerprint": "9"})),
            "their model fingerprint differs (1 and 9); measure both with the same model and options",
        ),
        (
            measured(0, [1], model=MODEL.model_copy(update={"tokenizer": "9"})),
            "their model tokenizer differs (2 and 9); measure both with the same model and options",
        ),
        (
            measured(0, [1], TEXTS[0].model_copy(update={"seq_len": 4})),
            "their corpus seq_len differs (2 and 4); measure both with the same model and options",
        ),
        (
            measured(0, [1], TEXTS[0].model_copy(update={"batch_size": 1})),
            "their corpus batch_size differs (2 and 1); measure both with the same model and options",
        ),
        (
            measured(0, [1], TEXTS[0].model_copy(update={"prefix": [7]})),
            "their corpus prefix (--bos) differs ([] and [7]); measure both with the same model and options",
        ),
        (
            measured(0, [1], groups={"p": ["p", "q"]}),
            "their groups p differs (['p'] and ['p', 'q']); measure both with the same model and options",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused_with_both_values(other: Statistics, message: str) -> None:
    with pytest.raises(InputError) as refused:
        measured(0, [0, 2]).merge(other)
    assert str(refused.value) == f"statistics cannot be added: {message}"


def test_a_tensor_that_only_one_of_them_has_is_refused_by_name() -> None:
    one = measured(0, [0])
    other = Statistics(replace_record(one.record), {}, one.weights)
    with pytest.raises(
        InputError, match=r"^statistics cannot be added: their tensors p.input differs \(8 and None\); "
    ):
        one.merge(other)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"p.input.bits": np.array([3, 2], np.int16)}, HISTOGRAM),
        ({"p.input.bits": np.array([-1, 2], np.int16)}, HISTOGRAM),
        ({"p.input.bits": np.array([1], np.int16)}, HISTOGRAM),
        ({"p.input.counts": np.array([1, -1])}, HISTOGRAM),
        ({"p.input.counts": np.array([1.0, 2.0])}, "p.input: float64 [2] where int64 [n] belongs"),
        ({"p.input.amax_batches": np.zeros((1, 2), np.float32)}, "p.input: float32 [1, 2] where float32 [n] belongs"),
        ({"p.input.amax_channels": None}, "'p.input.amax_channels'"),
    ],
)
def test_statistics_that_are_none_are_refused_by_name(
    tmp_path: Path, changes: dict[str, np.ndarray | None], told: str
) -> None:
    file = tmp_path / "statistics.safetensors"
    amax = np.ones(2, np.float32)
    tensor = TensorStatistics(Histogram(np.array([1, 2], np.int16), np.array([5, 6])), amax, amax)
    save_arrays(file, {"p.input": tensor}, {})
    assert load_arrays(file)[0]["p.input"].histogram.samples == 11
    arrays = {name: array for name, array in (load_file(file) | changes).items() if array is not None}
    save_file(arrays, file)
    with pytest.raises(InputError) as refused:
        load_arrays(file)
    assert str(refused.value) == (
        f"{file}: does not read as statistics ({told}); delete it and run `fp8q calibrate` again"
    )
