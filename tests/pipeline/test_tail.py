"""A run whose decoded tokens and last positions of a prompt have two codes: its files, reference, graph and servers."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from loaded_runtimes import stacked

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.quantize.checkpoint.card_additions import COST, NOT_MEASURED, markdown_text, state_in_card
from fp8q.quantize.reference.fp8_model import Reference, load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import tails_of
from fp8q.serve.loop.sessions import open_session
from fp8q.stages.corpus import load_tokens
from fp8q.validate.accuracy.as_served import served, torch_start
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.report.loss_buckets import distance_rows, distance_table
from fp8q.validate.report.run_comparison import terms

from .other_models import mean_kl

pytestmark = pytest.mark.slow

TAIL, PROMPT, CONTEXT = 16, 64, 96
#: The length of the prompt whose operations are counted.
LONG = 2048
#: KL in nats between two ways to compute the same: codes flip, in the cache too. Another form is 20 times as far.
LIMIT = 1e-4
Logits = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def run(demo_run: Run, tmp_path_factory: pytest.TempPathFactory, keeping_graphs: Any) -> Run:
    """The demo's run, with a tail of 16 everywhere and an FP8 cache."""
    made = Run(Path(copytree(demo_run.root, tmp_path_factory.mktemp("tail") / "run")))
    with keeping_graphs():
        api.scales(made.root, api.RescaleOptions(activation_terms="tail", exact_tail=TAIL))
        api.export(made.root)
    return made


@pytest.fixture(scope="module")
def loaded(run: Run) -> Reference:
    return load_reference(run.model, "exact", torch.float32)


@pytest.fixture(scope="module")
def windows(run: Run) -> np.ndarray:
    return load_tokens(run, run.evaluation)[: 8 * CONTEXT].reshape(8, CONTEXT)


@pytest.fixture(scope="module")
def decoded(loaded: Reference, windows: np.ndarray) -> np.ndarray:
    """The reference's logits behind the prompt, [windows · decoded, vocabulary], token by token."""
    with torch.inference_mode():
        logits = stacked(served(torch_start(loaded.model, loaded.new_cache), PROMPT)(windows))
    return logits.reshape(-1, logits.shape[-1])


def behind(logits: np.ndarray) -> np.ndarray:
    """The logits of the prompt's last token and of those behind it but the last, a row each."""
    return logits[:, PROMPT - 1 : CONTEXT - 1].reshape(-1, logits.shape[-1])


def at_once(loaded: Reference, windows: np.ndarray, answered: int) -> np.ndarray:
    """Those of whole windows in one call, of which the last `answered` positions stand for decoded ones."""
    with torch.inference_mode(), loaded.answering(answered):
        logits = loaded.model(
            input_ids=torch.from_numpy(windows), past_key_values=loaded.new_cache(), use_cache=True
        ).logits
    return behind(logits.numpy())


def test_the_files_say_which_positions_are_exact_and_that_others_run_one_term(run: Run) -> None:
    scales = load_scales(run)
    assert tails_of(scales.forms) == dict.fromkeys(scales.weights, TAIL)
    assert {np.frexp(each.scale)[0] for each in scales.activations.values()} == {0.5}
    assert terms(scales) == "a tail of 16"
    config = json.loads((run.model / "config.json").read_text(encoding="utf-8"))
    assert config["fp8q"]["tails"] == tails_of(scales.forms)
    assert config["fp8q"]["two_terms"] == [*scales.weights]
    card = (run.model / "README.md").read_text(encoding="utf-8")
    assert "where fp8q's graphs and engines read the input of every FP8 GEMM, each decoded token and the" in card
    assert "last 16 positions of a prompt have two E4M3 codes a value" in card
    assert {row.tail for row in api.inspect(run.root).modules if row.kind == "product" and row.scale} == {TAIL}


def test_one_call_with_the_terms_of_each_position_is_a_prompt_and_its_decoded_tokens(
    loaded: Reference, windows: np.ndarray, decoded: np.ndarray
) -> None:
    """Where FP32's sums differ in their order a code may flip; a call of the prompt's form alone is another model."""
    whole = at_once(loaded, windows, CONTEXT - PROMPT)
    assert mean_kl([decoded], [whole]) < LIMIT / 5
    assert mean_kl([decoded], [at_once(loaded, windows, 0)]) > 10 * LIMIT


def test_onnx_runtime_decodes_what_the_reference_decodes(run: Run, windows: np.ndarray, decoded: np.ndarray) -> None:
    session = open_session(run.model, "onnxruntime", run.onnx_fp32.name)
    batch = session.open_batch(len(windows), CONTEXT)
    batch.reserve(CONTEXT, CONTEXT, len(windows))
    count = np.full(len(windows), PROMPT)
    rows = [batch.prefill(0, windows[:, :PROMPT], np.zeros_like(count), count).copy()]
    rows += [
        np.stack(batch.decode(windows[:, position], np.full(len(windows), position)).rows(range(len(windows))))
        for position in range(PROMPT, CONTEXT - 1)
    ]
    logits = np.stack(rows, axis=1).reshape(-1, rows[0].shape[-1])
    assert mean_kl([decoded], [logits]) < LIMIT


def test_rows_of_other_lengths_have_their_tails_where_their_texts_end(run: Run, windows: np.ndarray) -> None:
    """A row alone, and beside longer and shorter ones: the same positions have second terms."""
    session = open_session(run.model, "onnxruntime", run.onnx_fp32.name)
    lengths = (60, 41, 7)

    def prefill(rows: Sequence[int]) -> np.ndarray:
        counts = np.array([lengths[row] for row in rows])
        tokens = np.zeros((len(rows), counts.max()), np.int64)
        for index, row in enumerate(rows):
            tokens[index, -lengths[row] :] = windows[row, : lengths[row]]
        batch = session.open_batch(len(rows), CONTEXT)
        batch.reserve(CONTEXT, CONTEXT, len(rows))
        return batch.prefill(0, tokens, np.zeros_like(counts), counts).copy()

    together, alone = prefill((0, 1, 2)), np.concatenate([prefill((row,)) for row in range(3)])
    assert mean_kl([alone], [together]) < 1e-6


def test_a_prompt_costs_little_more_than_in_one_term(run: Run) -> None:
    """The rows of each expected GEMM, as the graph has them, for a prompt of 2,048 tokens."""
    model = onnx.load(run.onnx, load_external_data=False)
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.value_info}
    products = {name: f"{name}.matmul" for name in load_scales(run).weights}
    rows = [shapes[node.input[0]][1].dim_param for node in model.graph.node if node.name in products.values()]
    assert len(rows) == len(products)
    assert set(rows) == {f"seq + Min({TAIL}, seq)"}
    assert (LONG + min(64, LONG)) / LONG <= 1.04  # with the default tail


def test_validating_decodes_by_default_and_says_so(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Run(Path(copytree(run.root, tmp_path / "run")))
    stale = stale_stages(copied)
    api.validate(copied.root, None, api.ValidateOptions(runtimes=("bf16", "reference", "one-term"), context=CONTEXT))
    accuracy = load_accuracy(copied)
    assert accuracy.protocol.prompt == CONTEXT // 2
    notes = " ".join(copied.record().stages["validate"].notes)
    assert notes.startswith(
        "--as-served: is 48, half a window, since decoded tokens and a prompt's last 16 have another form than the "
        "rest of the prompt; --as-served N takes another prompt"
    )
    table = distance_table(distance_rows(copied))
    assert [column.title for column in table.columns] == ["behind the prompt", "tokens", "reference", "one-term"]
    assert [row[0].text for row in table.cells()] == ["1 to 12", "13 to 24", "25 to 36", "37 to 48"]
    assert all(re.fullmatch(r"0\.\d+|\d\.\d+e-05", row[2].text) for row in table.cells())
    check_that_the_cost_of_one_term_is_stated(copied)
    assert stale_stages(copied) == stale


def stale_stages(run: Run) -> set[str]:
    """The finished stages but `validate`, of which an input was written again since."""
    return {stage for stage in run.record().stages if stage != "validate" and run.is_stale(stage)}


def check_that_the_cost_of_one_term_is_stated(run: Run) -> None:
    """In the card and by lint, in KL of this very model; no stage is done again for the card."""
    runtimes = load_accuracy(run).runtimes
    one, ours = (runtimes[name].kl_mean_nats for name in ("one-term", "reference"))
    assert one is not None
    assert ours is not None
    assert one > 1.5 * ours
    cost = f"KL from BF16 is {one:.3g} nats a token in one term, and {ours:.3g} as fp8q multiplies it"
    card = run.card.read_text(encoding="utf-8")
    protocol = markdown_text(load_accuracy(run).protocol.description)
    assert f"<!-- cost of one term -->\n{cost} (`fp8q validate`: {protocol}).\n<!-- end -->\n\n" in card
    assert card.count("cost of one term") == 1
    assert NOT_MEASURED not in card
    linted = api.lint(run.root)
    assert linted.parts[-1].what == (
        f"{len(load_scales(run).weights)} inputs in a tail of 16, of which transformers, and vLLM without fp8q-vllm, "
        f"run the first term alone: {cost}"
    )
    before = run.record()
    api.validate(run.root, None, api.ValidateOptions(runtimes=("bf16", "reference", "one-term"), context=CONTEXT))
    api.scales(run.root)
    assert run.record() == before
    assert run.card.read_text(encoding="utf-8") == card
    run.card.write_text("The owner's own.", encoding="utf-8")
    state_in_card(run.card, COST, cost)
    assert run.card.read_text(encoding="utf-8") == "The owner's own."


def test_before_it_is_validated_the_card_and_lint_name_the_command_that_measures_it(run: Run) -> None:
    card = run.card.read_text(encoding="utf-8")
    assert f"<!-- cost of one term -->\n{NOT_MEASURED}\n<!-- end -->\n\n" in card
    assert (
        api.lint(run.root)
        .parts[-1]
        .what.endswith(f"run the first term alone: `fp8q validate {run.root}` measures what that costs")
    )


def test_engines_and_graphs_that_cannot_have_the_tail_are_refused(run: Run) -> None:
    with pytest.raises(InputError) as refused:
        api.build_engine(run.root, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=TAIL))
    assert str(refused.value) == (
        "--max-seq-len 16: no call is longer than the run's tail of 16 positions, so all would be in two terms "
        f"throughout; give more, or choose a shorter one with `fp8q scales {run.root} --exact-tail N`"
    )
    with pytest.raises(InputError, match="^--max-prompt 8: no call is longer than the run's tail of 16 positions"):
        api.build_engine(run.root, api.EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_prompt=8))
