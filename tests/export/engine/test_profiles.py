"""The ranges of sizes that an engine is built for, and those that do not fit together."""

import pytest

from fp8q.core.errors import InputError
from fp8q.export.engine.profiles import CHUNK, Profile, profiles
from fp8q.options import EngineOptions
from fp8q.serve.loop import engine_session


def test_every_inputs_shapes_follow_from_the_names_of_its_dimensions() -> None:
    prefill, decode = profiles(max_batch=8, max_seq_len=2048)
    assert prefill == Profile(
        name="prefill", batch=(1, 1, 8), seq=(2, 1024, 2048), capacity=(0, 0, 2048), scored=(1, 1, 2048)
    )
    assert decode == Profile(name="decode", batch=(1, 8, 8), seq=(1, 1, 1), capacity=(0, 2048, 2048))
    assert prefill.shapes("attention_mask", ("batch", "capacity + seq")) == ((1, 2), (1, 1024), (8, 4096))
    assert prefill.shapes("logits_indices", ("batch", "scored")) == ((1, 1), (1, 1), (8, 2048))
    assert decode.shapes("logits_indices", ("batch", "scored")) == ((1, 1), (8, 1), (8, 1))
    assert decode.shapes("attention_mask", ("batch", "seq + capacity")) == ((1, 1), (8, 2049), (8, 2049))
    assert decode.shapes("past", ("batch", 2, "capacity", 64)) == ((1, 2, 0, 64), (8, 2, 2048, 64), (8, 2, 2048, 64))
    in_blocks = decode.shapes("past", ("2*batch*blocks", 64, 64))
    assert in_blocks == ((0, 64, 64), (2 * 8 * 32, 64, 64), (2 * 8 * 32, 64, 64))
    assert decode.shapes("mask", ("batch", "capacity + 1")) == ((1, 1), (8, 2049), (8, 2049))


def test_profiles_of_the_smallest_engine() -> None:
    prefill, decode = profiles(max_batch=1, max_seq_len=1)
    assert (prefill.batch, prefill.seq, prefill.capacity) == ((1, 1, 1), (2, 2, 2), (0, 0, 64))
    assert (decode.batch, decode.seq, decode.capacity) == ((1, 1, 1), (1, 1, 1), (0, 64, 64))


def test_capacities_are_rounded_up_to_whole_blocks() -> None:
    prefill, decode = profiles(8, 200, opt_seq_len=65)
    assert (prefill.seq, prefill.capacity, decode.capacity) == ((2, 65, 200), (0, 0, 256), (0, 128, 256))


def test_profiles_follow_the_prompt_and_the_likely_sizes() -> None:
    prefill, decode = profiles(8, 2048, max_prompt=1024, opt_batch=4, opt_seq_len=512)
    assert (prefill.batch, prefill.seq, prefill.capacity) == ((1, 4, 8), (2, 512, 1024), (0, 0, 2048))
    assert (decode.batch, decode.seq, decode.capacity) == ((1, 4, 8), (1, 1, 1), (0, 512, 2048))
    prefill, decode = profiles(8, 2048, max_prompt=256)  # a chunk is more than a step takes
    assert (prefill.batch, prefill.seq) == (
        (1, 1, 8),
        (2, 256, 256),
    )
    assert (decode.batch, decode.capacity) == ((1, 8, 8), (0, 2048, 2048))


def test_kernels_of_prompts_are_chosen_for_a_chunk_of_the_serving_loop_however_long_sequences_are() -> None:
    assert engine_session.CHUNK == CHUNK == 1024
    assert profiles(8, 131_072)[0].seq == (2, CHUNK, 131_072)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"max_prompt": 300, "max_seq_len": 256},
            "--max-prompt 300: is more than --max-seq-len 256; ask for at most that, or raise --max-seq-len",
        ),
        (
            {"opt_seq_len": 4096, "max_seq_len": 2048},
            "--opt-seq-len 4,096: is more than --max-seq-len 2,048; ask for at most that, or raise --max-seq-len",
        ),
        ({"opt_batch": 9}, "--opt-batch 9: is more than --max-batch 8; ask for at most that, or raise --max-batch"),
        ({"max_prompt": 0}, "--max-prompt 0: must be at least 1"),
        ({"workspace": 0}, "--workspace 0: must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as refused:
        EngineOptions(**sizes)  # type: ignore[arg-type]
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("dimension", "what"),
    [
        ("time", "time is none of batch, seq, scored, capacity, blocks"),
        ("", "it has no name"),
        ("batch*time", "time is none of batch, seq, scored, capacity, blocks"),
    ],
)
def test_a_dimension_of_another_name_is_refused(dimension: str, what: str) -> None:
    with pytest.raises(InputError) as refused:
        profiles(1, 16)[0].shapes("features", ("batch", dimension))
    assert (
        str(refused.value)
        == f"features: its dimension {dimension!r} has no range ({what}); export the graph with `fp8q export`"
    )


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"max_batch": 99_999_999_999},
            "--max-batch 99,999,999,999: is more than 2,147,483,647, the most that a runtime takes",
        ),
        (
            {"workspace": 99_999_999_999_999},
            "--workspace 99,999,999,999,999: is more than 8,796,093,022,207, the most that a runtime takes",
        ),
    ],
)
def test_sizes_that_no_runtime_takes_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(InputError) as refused:
        EngineOptions(**sizes)  # type: ignore[arg-type]
    assert str(refused.value) == message
