"""`fp8q.api.load`: Hugging Face's own calls of the model compute what servers compute, tails and FP8 cache included."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import peft
import pytest
import torch
from loaded_runtimes import stacked
from transformers import DynamicCache, StaticCache

from fp8q import api
from fp8q.core.errors import InputError
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import FP8Layer, Reference, load_reference
from fp8q.stages.corpus import load_tokens
from fp8q.validate.accuracy.as_served import served, torch_start

from ...conftest import Texts, WithoutGraphs

TAIL, PROMPT, CONTEXT = 16, 64, 96
#: Mean |difference| of log-probabilities in nats: sums of other rows are added in another order, and codes flip (0.0023
#: at most). One term for two, or a wide cache for an FP8 one, is further than `OTHER` (0.045 at least).
SAME, OTHER = 0.005, 0.025


@pytest.fixture(scope="module")
def quantized(
    tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Texts, without_graphs: WithoutGraphs
) -> Callable[..., Run]:
    """`quantized(activation_terms=2)`: the demo with these options, without graphs."""

    def calibrate(**options: Any) -> Run:
        out = tmp_path_factory.mktemp("run") / "run"
        asked = api.CalibrateOptions(samples=8, seq_len=CONTEXT, **options)
        with without_graphs():
            return api.calibrate(
                str(demo_checkpoint), str(demo_texts.calibration), out, str(demo_texts.evaluation), asked
            )

    return calibrate


@pytest.fixture(scope="module")
def run(quantized: Callable[..., Run]) -> Run:
    """A tail of 16 everywhere and an FP8 cache."""
    return quantized(activation_terms="tail", exact_tail=TAIL, kv_cache="fp8")


@pytest.fixture(scope="module")
def reference(run: Run) -> Reference:
    return load_reference(run.model, "exact", torch.float32)


@pytest.fixture(scope="module")
def model(run: Run) -> Any:
    return api.load(run.root, "float32", "exact", "cpu")


@pytest.fixture(scope="module")
def windows(run: Run) -> torch.Tensor:
    """Four windows of the evaluation text, int64 [4, 96]."""
    return torch.from_numpy(load_tokens(run, run.evaluation)[: 4 * CONTEXT].reshape(4, CONTEXT))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The mean |difference| of log-probabilities in nats."""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).abs().mean())


def at_once(reference: Reference, windows: torch.Tensor, decoded: int, cache: Any = None) -> torch.Tensor:
    """The reference's logits of whole windows, whose last `decoded` positions stand for decoded tokens."""
    with torch.inference_mode(), reference.answering(decoded):
        cache = reference.new_cache() if cache is None else cache
        logits: torch.Tensor = reference.model(input_ids=windows, past_key_values=cache, use_cache=True).logits
    return logits


def test_generate_reads_a_prompt_and_decodes_as_a_server_does(
    model: Any, reference: Reference, windows: torch.Tensor
) -> None:
    """The logits of each step are those that `fp8q validate --as-served` scores the same tokens by."""
    prompts, count = windows[:, :PROMPT], CONTEXT - PROMPT
    answer = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert all(isinstance(layer, FP8Layer) for layer in answer.past_key_values.layers)
    logits = torch.stack(answer.logits, dim=1)
    with torch.inference_mode():
        steps = torch.from_numpy(
            stacked(served(torch_start(reference.model, reference.new_cache), PROMPT)(answer.sequences.numpy()))
        )
    assert distance(logits, steps) < SAME  # the head multiplies other numbers of rows
    one_term = at_once(reference, answer.sequences, 0)[:, PROMPT - 1 : -1]
    wide = at_once(reference, answer.sequences, count, DynamicCache())[:, PROMPT - 1 : -1]
    assert distance(logits, at_once(reference, answer.sequences, count)[:, PROMPT - 1 : -1]) < SAME
    assert min(distance(logits, one_term), distance(logits, wide)) > OTHER


def test_a_padded_batch_is_answered_as_its_prompts_alone(model: Any, windows: torch.Tensor) -> None:
    """Padding lies on the left, so that the tail is the prompt's last positions in every row."""
    short = windows[1, : PROMPT - 24]
    together = torch.stack([windows[0, :PROMPT], torch.cat([torch.zeros(24, dtype=torch.int64), short])])
    mask = torch.ones_like(together)
    mask[1, :24] = 0
    asked: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    asked |= {"output_logits": True, "return_dict_in_generate": True}
    both = torch.stack(model.generate(together, attention_mask=mask, **asked).logits)
    alone = [torch.stack(model.generate(row[None], **asked).logits)[:, 0] for row in (together[0], short)]
    assert max(distance(both[:, row], alone[row]) for row in range(2)) < SAME


def test_a_call_of_a_whole_window_is_one_prompt(model: Any, reference: Reference, windows: torch.Tensor) -> None:
    expected = at_once(reference, windows, 0)
    with torch.inference_mode():
        calls = [
            model(windows),
            model(input_ids=windows, use_cache=False),
            model(windows, past_key_values=DynamicCache()),
            model(windows, torch.ones_like(windows), None, DynamicCache(config=model.config)),
        ]
    assert max(distance(call.logits, expected) for call in calls) < SAME
    assert distance(expected, at_once(reference, windows, CONTEXT)) > OTHER


def test_peft_adds_an_adapter_which_no_codes_take_in(run: Run, reference: Reference, windows: torch.Tensor) -> None:
    """PEFT calls the model's `forward` itself: with B of zeros it has the tail and the FP8 cache of any other call."""
    adapted = peft.get_peft_model(
        api.load(run.root, "float32", "exact", "cpu"), peft.LoraConfig(target_modules=["q_proj", "down_proj"])
    ).eval()
    with torch.no_grad():
        assert distance(adapted(input_ids=windows).logits, at_once(reference, windows, 0)) < SAME
    for safe in (False, True):
        with pytest.raises(InputError, match="^merge: an adapter has no place in FP8 codes; "):
            adapted.merge_adapter(safe_merge=safe)
    with pytest.raises(InputError, match="^an FP8 layer passes no gradient on; `fp8q distill` learns "):
        adapted(input_ids=windows)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
        assert distance(adapted(input_ids=windows).logits, at_once(reference, windows, 0)) > OTHER


def test_a_copy_of_the_model_computes_with_its_own_layers(model: Any, windows: torch.Tensor) -> None:
    copy = deepcopy(model)
    with torch.no_grad():
        expected = model(windows).logits
        assert torch.equal(copy(windows).logits, expected)
        copy.get_output_embeddings().weight.mul_(2)
        assert not torch.equal(copy(windows).logits, expected)
        assert torch.equal(model(windows).logits, expected)


@pytest.mark.parametrize("prompt", [0, PROMPT, CONTEXT + 1])
def test_as_served_says_how_many_tokens_of_a_window_are_the_prompt(
    run: Run, reference: Reference, windows: torch.Tensor, prompt: int
) -> None:
    model = api.load(run.root, "float32", "exact", as_served=prompt)
    with torch.inference_mode():
        found = model(windows).logits
    assert distance(found, at_once(reference, windows, max(CONTEXT - prompt, 0))) < SAME
    if prompt < CONTEXT:
        assert distance(found, at_once(reference, windows, 0)) > OTHER


def test_by_default_it_is_the_reference_that_validate_runs(quantized: Callable[..., Run]) -> None:
    """In BF16 and fast GEMMs: two terms in some modules, weights alone in others, one term in the rest."""
    run = quantized(two_terms=("*.o_proj",), bf16_input=("*.down_proj",))
    windows = load_tokens(run, run.evaluation)[: 2 * CONTEXT].reshape(2, CONTEXT)
    loaded, expected = api.load(run.root), load_reference(run.model, "fast", torch.bfloat16)
    with torch.inference_mode():
        found = loaded(torch.from_numpy(windows)).logits
        assert torch.equal(found, expected.model(torch.from_numpy(windows)).logits)
        expected.take_first_terms()
        assert not torch.equal(found, expected.model(torch.from_numpy(windows)).logits)
    assert (found.dtype, loaded.training, loaded.name_or_path) == (torch.bfloat16, False, str(run.model))
    assert loaded.generation_config.eos_token_id == 1


def test_what_would_hold_other_numbers_than_a_servers_is_refused(
    model: Any, run: Run, windows: torch.Tensor, tmp_path: Path
) -> None:
    static = StaticCache(model.config, max_cache_len=CONTEXT)
    filled = DynamicCache()
    filled.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    for cache, what in ((static, "StaticCache of 0"), (filled, "DynamicCache of 3")):
        with pytest.raises(InputError) as refused:
            model(windows, past_key_values=cache)
        assert str(refused.value) == (
            f"past_key_values: is a {what} positions whose layers hold no FP8 codes, and this model's cache does; "
            "leave it out, or begin with an empty DynamicCache"
        )
    mask = torch.ones_like(windows)
    mask[2, -5:] = 0
    with pytest.raises(InputError) as refused:
        model(windows, attention_mask=mask)
    assert str(refused.value) == (
        "attention_mask: row 2 is padded on the right, where the last 16 positions of a prompt have second terms; pad "
        "on the left (`tokenizer.padding_side`), or load the model with `as_served`"
    )
    with pytest.raises(InputError) as refused:
        model.save_pretrained(tmp_path)
    assert str(refused.value) == (
        f"save_pretrained: this model computes with the codes of {run.model}; copy that directory"
    )


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"dtype": "int8"}, "dtype int8: is none of bfloat16, float16, float32"),
        ({"mode": "slow"}, "mode slow: is none of fast, exact"),
        ({"as_served": -1}, "as_served -1: must be at least 0"),
        ({"device": "toaster"}, "device toaster: "),
        ({"adapter": "style"}, "--adapter style: is not beside the model in "),
    ],
)
def test_arguments_that_name_nothing_are_refused(run: Run, named: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        api.load(run.root, **named)
    assert str(refused.value).startswith(message)
    assert len(str(refused.value).splitlines()) == 1


def test_files_that_their_stage_did_not_write_are_refused(run: Run, tmp_path: Path) -> None:
    copied = Run(Path(copytree(run.root, tmp_path / "run")))
    config = copied.model / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.json: is not the file that `fp8q .*` wrote"):
        api.load(copied.root)
    with pytest.raises(InputError, match="there is no such directory"):
        api.load(tmp_path / "none")
