"""Loss by how often a token occurs: the buckets, and what is in them, by hand."""

import numpy as np

from fp8q.core.run import Run
from fp8q.validate.accuracy.document import FrequencyBucket, load_accuracy, load_token_losses, save_accuracy
from fp8q.validate.accuracy.perplexity import cut
from fp8q.validate.report.token_frequency import buckets, by_frequency, frequency_rows, frequency_table

EVALUATION = cut(np.array([0, 1, 2, 3, 1, 1, 9, 2]), "text", 4, 4)  # scored: 1 2 3 and 1 9 2
CALIBRATION = np.array([[1] * 4, [1, 2, 2, 2], [3, 3, 3, 3]])  # 1: five times, 2: three times, 3: four times, 9: never
NLL = np.array([[np.nan, 1, 2, 3], [np.nan, 5, 7, 4]], np.float32)


def test_buckets_go_up_by_powers_of_four() -> None:
    assert list(buckets(np.array([0, 17]))) == [(0, 0), (1, 3), (4, 15), (16, 63)]
    assert list(buckets(np.array([16]))) == [(0, 0), (1, 3), (4, 15), (16, 63)]
    assert list(buckets(np.array([0]))) == [(0, 0)]


def test_each_scored_token_counts_in_the_bucket_of_its_occurrences_in_the_calibration_text() -> None:
    base = NLL - np.array([[0, 0.75, 0, 0], [0, 0, 0, 0.25]], np.float32)
    assert by_frequency(EVALUATION, CALIBRATION, NLL, base) == [
        FrequencyBucket(least=0, most=0, tokens=1, nll_nats=7, nll_increase_nats=0),
        FrequencyBucket(least=1, most=3, tokens=2, nll_nats=3, nll_increase_nats=0.125),  # both 2
        FrequencyBucket(least=4, most=15, tokens=3, nll_nats=3, nll_increase_nats=0.25),  # 1, 3, 1
    ]
    assert [bucket.nll_increase_nats for bucket in by_frequency(EVALUATION, CALIBRATION, NLL, None)] == [None] * 3
    assert sum(bucket.tokens for bucket in by_frequency(EVALUATION, CALIBRATION, NLL, None)) == 6


def test_the_table_has_a_column_for_each_runtime_beside_bf16(evaluated_run: Run) -> None:
    assert frequency_table(frequency_rows(evaluated_run)).rows == []  # written before there were any
    accuracy, nll = load_accuracy(evaluated_run), load_token_losses(evaluated_run)
    of = {"bf16": None, "reference": -0.5}
    runtimes = {
        name: accuracy.runtimes[name].model_copy(
            update={
                "by_frequency": [
                    FrequencyBucket(least=0, most=0, tokens=12, nll_nats=3, nll_increase_nats=more),
                    FrequencyBucket(least=1024, most=4095, tokens=2000, nll_nats=1.5, nll_increase_nats=more),
                ]
            }
        )
        for name, more in of.items()
    }
    with evaluated_run.stage("validate", {}, {"context": 64}) as log:
        log.outputs += save_accuracy(evaluated_run, accuracy.model_copy(update={"runtimes": runtimes}), nll)
    table = frequency_table(frequency_rows(evaluated_run))
    titles = ["in the calibration text", "tokens", "NLL of BF16, nats", "reference: more"]
    assert [column.title for column in table.columns] == titles
    assert [[cell.text for cell in row] for row in table.cells()] == [
        ["never", "12", "3.0000", "−0.5000"],
        ["1,024 to 4,095 times", "2,000", "1.5000", "−0.5000"],
    ]
