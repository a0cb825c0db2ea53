"""vLLM with `integrations/vllm`: two terms and tails are multiplied as such, and lose what the reference loses.

The plugin is installed by pip into a folder of its own, which is put before vLLM's environment, so that the same vLLM
runs with it and without it. KL is that of FP32 from what vLLM answers, beside that of FP32 from the reference in BF16
arithmetic, as vLLM's is. One term loses 4 to 13 times as much.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8q_vllm.rows import FREE_ROWS, PROMPTS
from safetensors.torch import load_file, save_file
from vllm_jobs import Vllm, installed_plugin, job, log_probabilities, mean_kl

from fp8q import api
from fp8q.calibrate.checkpoint.adapter import open_adapter
from fp8q.calibrate.model.adapter_addition import attach_adapter
from fp8q.calibrate.model.source import load_model
from fp8q.core.run import Run
from fp8q.quantize.reference import fp8_model
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of

from ..architectures import Architecture
from ..conftest import Texts, WithoutGraphs
from ..mixtures import random_mixture
from .conftest import MOST
from .vllm_arithmetic import truncated
from .vllm_environment import CASES

TRAINED = ("llama", "qwen2", "gemma", "opt")
#: Of no architecture that vLLM refuses on a CPU in any form (test_vllm.py).
RANDOM = tuple(name for name, case in CASES.items() if not case.trained)
CONTEXT, WINDOWS, TAIL = 64, 6, 16
#: Four windows of so many tokens are more rows than have second terms throughout, and have whole tails.
LONG = FREE_ROWS // PROMPTS + 32
#: Of the reference's KL, for the same checkpoint in one term.
ONE_TERM_LEAST = 3
REFUSED = {
    "unknown field": "config.json has fp8q.third_terms, which this fp8q-vllm does not know; install the version that "
    "came with the fp8q that wrote it",
    "damaged scale": "an input in two terms has the scale ",
    "experts": "experts in two terms are not computed by vLLM; give them one term with `fp8q scales RUN "
    "--activation-terms 1 --tail '*self_attn*'`",
}
#: vLLM's own ways to serve, with what a batch may be: parts of prompts, shared prefixes, drafts.
BATCHING: dict[str, dict[str, Any]] = {
    "compiled": {"enforce_eager": False},
    "prompts in chunks": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64, "max_num_seqs": 4},
    "shared prefixes": {"enable_prefix_caching": True},
    "two processes": {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}
#: Of long windows, all prompts in one batch.
TOGETHER: dict[str, Any] = {"max_num_seqs": PROMPTS, "max_num_batched_tokens": PROMPTS * LONG}


@dataclass(frozen=True)
class Served:
    """A run, and `folder`, in which the FP32 model's log-probabilities of its evaluation text are kept."""

    run: Run
    folder: Path
    context: int = CONTEXT
    adapter: str | None = None

    @cached_property
    def ids(self) -> np.ndarray:
        """The first windows of the evaluation text, int64 [windows, context]."""
        windows = WINDOWS if self.context == CONTEXT else 2 * PROMPTS
        ids: np.ndarray = load_tokens(self.run, self.run.evaluation).ravel()
        return ids[: windows * self.context].reshape(windows, -1)

    @cached_property
    def exact(self) -> np.ndarray:
        """The FP32 model's log-probabilities, float32 [windows, context - 1, vocabulary]."""
        model = load_model(source_of(self.run), torch.float32, "cpu")
        if self.adapter:
            attach_adapter(model, open_adapter(self.run.model / "adapters" / self.adapter), torch.float32, "cpu")
        with torch.inference_mode():
            logits = model(input_ids=torch.from_numpy(self.ids), use_cache=False).logits
        return log_probabilities(logits)

    def job(self, model: Path | None = None, again: bool = False, **engine: Any) -> dict[str, Any]:
        """What `vllm_losses.py` reads; `model` in the place of the run's; `again`: windows are answered twice."""
        path = self.folder / "exact.npy"
        if not path.exists():
            np.save(path, self.exact)
        adapter = self.run.model / "adapters" / self.adapter if self.adapter else None
        return job(model or self.run.model, self.ids, path, adapter, engine=engine, again=again)

    def reference_kl(self, tails: bool = False) -> float:
        """The reference's mean KL in nats: all positions in two terms, or those of `tails` alone."""
        loaded = load_reference(self.run.model, "fast", torch.bfloat16, adapter=self.adapter)
        with torch.inference_mode(), loaded.answering(0 if tails else self.context):
            logits = loaded.model(
                input_ids=torch.from_numpy(self.ids), past_key_values=loaded.new_cache(), use_cache=True
            ).logits
        return mean_kl(self.exact, logits)


@pytest.fixture(scope="module")
def plugin(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has installed the plugin into."""
    return installed_plugin(vllm_python, tmp_path_factory.mktemp("installed"))


Serve = Callable[..., Served]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, shared_checkpoint: Callable[[str], Path], demo_checkpoint: Path,
    random_checkpoint: Callable[..., Path], made_adapter: Callable[..., Path], demo_texts: Texts,
    without_graphs: WithoutGraphs,
) -> Serve:  # fmt: skip
    """`served("llama", activation_terms=2)`: a run of that checkpoint with these options, rounded by GPTQ."""

    def calibrate(name: str, context: int = CONTEXT, adapter: str | None = None, **options: Any) -> Served:
        folder, case = tmp_path_factory.mktemp(name), CASES.get(name, Architecture(name, "", "off"))
        if name == "demo":
            model = demo_checkpoint
        elif case.trained:
            model = shared_checkpoint(name)
        else:
            model = random_checkpoint(folder / "model", case.config, case.fields)
        if adapter:
            made = made_adapter(model, folder / adapter, 0.2, r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"])
            options |= {"adapter": (made,), "adapter_mode": "beside"}
        chosen: dict[str, Any] = {
            "samples": 16,
            "seq_len": CONTEXT,
            "activation_terms": 2,
            "weight_rounding": "gptq",
        } | options
        texts = str(demo_texts.calibration), str(demo_texts.evaluation)
        with without_graphs():
            run = api.calibrate(str(model), texts[0], folder / "run", texts[1], api.CalibrateOptions(**chosen))
        return Served(run, folder, context, adapter)

    return calibrate


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, demo_texts: Texts, without_graphs: WithoutGraphs) -> Run:
    """A random mixture of experts whose experts are in two terms."""
    folder = tmp_path_factory.mktemp("experts")
    model = random_mixture(folder / "model", "mixtral")
    texts = str(demo_texts.calibration), str(demo_texts.evaluation)
    with without_graphs():
        options = api.CalibrateOptions(samples=4, seq_len=CONTEXT, activation_terms=2)
        return api.calibrate(str(model), texts[0], folder / "run", texts[1], options)


class Answers:
    """What vLLM answers to jobs by name, with the plugin in one process and without it in another; each is asked when a
    test first wants it.
    """

    def __init__(self, asked: Callable[[str], tuple[Served, dict[str, Any]]], two: Vllm, one: Vllm) -> None:
        self._asked = cache(asked)
        self._answer = cache(lambda name, plugin: (two if plugin else one).ask(self._asked(name)[1]))

    def served(self, name: str) -> Served:
        """The run behind the job `name`."""
        return self._asked(name)[0]

    def two(self, name: str) -> dict[str, Any]:
        """The answer to the job `name`, with the plugin."""
        found: dict[str, Any] = self._answer(name, True)
        return found

    def kl(self, name: str, plugin: bool = True) -> float:
        """The mean KL in nats of the job `name`."""
        answer, ids = self._answer(name, plugin), self.served(name).ids
        assert "error" not in answer, answer["error"]
        assert len(answer["kl_nats"]) == ids.size - len(ids)
        return float(np.mean(answer["kl_nats"]))


Calibrated = tuple[str, dict[str, Any], dict[str, Any]]
BY_PATTERN: dict[str, Any] = {
    "activation_terms": 1,
    "skip": ("model.layers.0.*",),
    "two_terms": ("*.o_proj",),
    "tail": ("*.mlp.*",),
    "exact_tail": TAIL,
}
#: The jobs of a run of their own: its checkpoint, how it is calibrated, and vLLM's engine.
OWN: dict[str, Calibrated] = {name: (name, {}, {}) for name in ("demo", *TRAINED, *RANDOM)}
OWN |= {
    "tails": ("demo", {"context": LONG, "activation_terms": "tail", "exact_tail": TAIL}, TOGETHER),
    "forms by pattern": ("demo", {"context": LONG, **BY_PATTERN}, TOGETHER),
    "FP8 cache": ("demo", {"kv_cache": "fp8"}, {}),
    "adapter": ("demo", {"adapter": "style"}, {}),
    "layer left wide": ("demo", {"kv_cache": "fp8", "kv_skip": ("*.layers.1.*",)}, {}),
}


@pytest.fixture(scope="module")
def answers(
    vllm_python: Path, plugin: Path, served: Serve, request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Answers]:  # fmt: skip
    """All jobs, those with the plugin in one process and those without it in another."""
    run_of = cache(lambda name: served(OWN[name][0], **OWN[name][1]))

    def asked(name: str) -> tuple[Served, dict[str, Any]]:
        if name == "left wide, not told":
            return run_of("layer left wide"), run_of("layer left wide").job()
        if name in OWN:
            run, engine = run_of(name), OWN[name][2]
            if name == "layer left wide":
                engine = {"kv_cache_dtype_skip_layers": skipped_by_the_card(run.run)}
            return run, run.job(again=name == "demo", **engine)
        demo = run_of("demo")
        if name in BATCHING:
            return demo, demo.job(again=name == "shared prefixes", **BATCHING[name])
        copy = tmp_path_factory.mktemp("copies") / "model"
        match name:
            case "drafts":
                draft = {"model": str(demo.run.model), "num_speculative_tokens": 2, "method": "draft_model"}
                return demo, demo.job(speculative_config=draft)
            case "unknown field":
                return demo, demo.job(with_field(demo.run.model, copy, "third_terms", []))
            case "damaged scale":
                return demo, demo.job(with_another_scale(demo.run.model, copy))
            case "experts":
                return demo, demo.job(request.getfixturevalue("experts").model)
        raise AssertionError(f"no job is called {name}")

    with Vllm(vllm_python, plugin) as two, Vllm(vllm_python) as one:
        yield Answers(asked, two, one)


def skipped_by_the_card(run: Run) -> list[str]:
    """The layers that the model card tells vLLM to leave wide."""
    card = (run.model / "README.md").read_text(encoding="utf-8")
    (line,) = (line for line in card.splitlines() if "vllm serve" in line)
    command, _, layers = line.partition(" --kv-cache-dtype-skip-layers ")
    assert command.strip() == "vllm serve path/to/this/directory --kv-cache-dtype fp8"
    return layers.split()


def with_field(model: Path, copy: Path, name: str, value: object) -> Path:
    """A copy of a checkpoint whose config.json has one field more under `fp8q`."""
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config["fp8q"][name] = value
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def with_another_scale(model: Path, copy: Path) -> Path:
    """A copy of a checkpoint of which one input's scale is 1.5 times what it was, so no power of two."""
    shutil.copytree(model, copy)
    for shard in copy.glob("*.safetensors"):
        tensors = load_file(shard)
        name = "model.layers.1.mlp.down_proj.input_scale"
        if name in tensors:
            save_file(tensors | {name: tensors[name] * 1.5}, shard, {"format": "pt"})
    return copy


def test_installing_the_plugin_changes_no_other_package(plugin: Path) -> None:
    report = json.loads((plugin.parent / "report.json").read_text(encoding="utf-8"))
    assert [each["metadata"]["name"] for each in report["install"]] == ["fp8q-vllm"]


@pytest.mark.parametrize("name", ["demo", *TRAINED, *RANDOM, "adapter"])
def test_two_terms_lose_what_the_reference_loses(name: str, answers: Answers) -> None:
    assert answers.kl(name) <= MOST * answers.served(name).reference_kl()


@pytest.mark.parametrize("name", ["demo", *TRAINED])
def test_without_the_plugin_one_term_loses_far_more(name: str, answers: Answers) -> None:
    least = ONE_TERM_LEAST * answers.served(name).reference_kl()
    assert answers.kl(name) < least < answers.kl(name, plugin=False)


@pytest.mark.parametrize("name", [*BATCHING, "drafts"])
def test_every_way_to_batch_loses_the_same(name: str, answers: Answers) -> None:
    assert answers.kl(name) <= MOST * answers.served("demo").reference_kl()


def test_drafts_and_prefixes_leave_the_text_as_it_is(answers: Answers) -> None:
    demo, drafts, prefixes = (answers.two(name) for name in ("demo", "drafts", "shared prefixes"))
    assert drafts["answers"] == demo["answers"]
    assert prefixes["again"] == demo["again"]


@pytest.mark.parametrize("name", ["tails", "forms by pattern"])
def test_in_large_batches_only_the_tails_of_prompts_have_second_terms(name: str, answers: Answers) -> None:
    assert answers.kl(name) == pytest.approx(answers.served(name).reference_kl(tails=True), rel=MOST - 1)
    assert answers.kl(name) > MOST * answers.served(name).reference_kl()


def test_an_fp8_cache_holds_the_codes_that_vllm_writes(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's cache on a CPU rounds toward zero, not to the nearest code."""
    if "requires x86 with AVX-512 or AMX" in answers.two("FP8 cache").get("error", ""):
        pytest.skip(answers.two("FP8 cache")["error"])
    monkeypatch.setattr(fp8_model, "round_to_codes", truncated)
    assert answers.kl("FP8 cache") == pytest.approx(answers.served("FP8 cache").reference_kl(), rel=MOST - 1)


def test_a_layer_is_left_wide_where_vllm_is_told_so_by_the_card(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not told, the layer's cache has the scales of a cache that is codes throughout."""
    whole, told, untold = (answers.two(name) for name in ("FP8 cache", "layer left wide", "left wide, not told"))
    if "requires x86 with AVX-512 or AMX" in whole.get("error", ""):
        pytest.skip(whole["error"])
    monkeypatch.setattr(fp8_model, "round_to_codes", truncated)
    expected = answers.served("layer left wide").reference_kl()
    assert answers.kl("layer left wide") == pytest.approx(expected, rel=MOST - 1)
    assert answers.kl("layer left wide") < answers.kl("FP8 cache") / MOST
    assert told["nll_nats"] != untold["nll_nats"] == whole["nll_nats"]


@pytest.mark.parametrize(("name", "error"), REFUSED.items())
def test_what_it_does_not_know_it_refuses(name: str, error: str, answers: Answers) -> None:
    assert error in answers.two(name)["error"]
