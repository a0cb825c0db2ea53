"""vLLM takes `model/` as it is, and loses what the reference loses: a second implementation of the whole model, its own
kernels, its own cache, which knows nothing of fp8q.

In BF16 arithmetic the loss of a single token differs between two implementations of one FP8 model as much as between
either and BF16: sums are rounded otherwise, and codes flip. So what is compared is the mean KL of FP32 from each, which
is near for both, and another one for BF16, for two terms and for another cache. The reference computes as vLLM does on
a CPU (`vllm_arithmetic`): one term, a cache that rounds toward zero, and experts, of which it has no GEMM for CPUs,
by their codes and scales but in BF16.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from vllm_jobs import Vllm, job, log_probabilities, mean_kl

from fp8q.calibrate.checkpoint.adapter import open_adapter
from fp8q.calibrate.model.adapter_addition import attach_adapter
from fp8q.calibrate.model.source import load_model
from fp8q.calibrate.text.evaluation import cut
from fp8q.core.run import Run
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import source_of

from ..architectures import Architecture
from ..mixtures import MIXTURES
from .conftest import MOST
from .vllm_arithmetic import cache_toward_zero, widen_experts
from .vllm_environment import CASES

#: Of trained models few windows, since PyTorch's GEMM of codes does 57 million operations a second without AMX for
#: FP8; of tiny random ones more: the losses of their tokens differ by more.
CONTEXT, WINDOWS, MANY = 64, 6, 24
#: Their cache has no place for scales in vLLM, and stays wide.
WIDE_CACHES = ("gpt_neox",)
WITH_ADAPTERS = ("adapter", "base of an adapter", "learned adapter", "base of a learned adapter")
#: The first is trained.
OF_EXPERTS = {"mixtral": Architecture("mixtral", "experts", "off")} | {
    name: Architecture(
        name,
        "experts",
        "off",
        config=config,
        fields=fields | {"num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 32},
    )
    for name, (config, fields) in MIXTURES.items()
    if name != "mixtral"
}
#: What it does not take, and says of it.
REFUSED = {
    "gpt2": "AttributeError: ",
    "stories260k": "RuntimeError: Unsupported CPU attention configuration: head_dim=8 ",
    "experts in FP8": "ValueError: Unsupported FP8 MoE backend: NONE",
    "part of a group": "ValueError: Found different quantization schemes for the shards of "
    "model.layers.0.self_attn.qkv_proj. vLLM requires all to use the same scheme.",
}
#: What vLLM says of a cache of codes on a CPU of AVX2 alone.
NO_INSTRUCTIONS = "requires x86 with AVX-512 or AMX"
LLAMA = Architecture(
    "llama", "queries in BF16, keys and values in FP8", "off", config="LlamaConfig", fields={"num_key_value_heads": 2}
)


@dataclass(frozen=True)
class Asked:
    """One job: a run, the type of the cache that vLLM is asked for, a checkpoint in the place of the run's, the
    directory of one of the run's adapters, and whether experts are multiplied in BF16.
    """

    run: Run
    folder: Path
    cache: str = "auto"
    other: Path | None = None
    adapter: Path | None = None
    wide_experts: bool = False
    windows: int = WINDOWS

    @property
    def ids(self) -> np.ndarray:
        """The first windows of the evaluation text, int64 [windows, context]."""
        return cut(load_tokens(self.run, self.run.evaluation), self.run.root.name, CONTEXT, CONTEXT).ids[: self.windows]

    def asked(self) -> dict[str, Any]:
        """What `vllm_losses.py` reads."""
        path = self.folder / "exact.npy"
        np.save(path, self.exact)
        model = self.other or self.run.model
        return job(model, self.ids, path, self.adapter, cache=self.cache, wide_experts=self.wide_experts)

    @cached_property
    def exact(self) -> np.ndarray:
        """The FP32 model's log-probabilities, float32 [windows, context - 1, vocabulary]."""
        return log_probabilities(self._source(torch.float32))

    def bf16_kl(self) -> float:
        """The mean KL in nats of FP32 from the source model in BF16."""
        return mean_kl(self.exact, self._source(torch.bfloat16))

    def kl(self, first_terms: bool = True, wide_cache: bool = False) -> float:
        """The mean KL in nats of FP32 from the reference as vLLM computes it; or with all terms, or without codes in
        its cache.
        """
        loaded = load_reference(self.run.model, "fast", torch.bfloat16, adapter=self.adapter)
        if first_terms:
            loaded.take_first_terms()
        if self.wide_experts:
            widen_experts(loaded)
        with torch.inference_mode(), cache_toward_zero():
            cache = DynamicCache() if wide_cache else loaded.new_cache()
            logits = loaded.model(torch.from_numpy(self.ids), past_key_values=cache, use_cache=True).logits
        return mean_kl(self.exact, logits)

    def _source(self, dtype: torch.dtype) -> torch.Tensor:
        """The logits of the source model in `dtype`."""
        model = load_model(source_of(self.run), dtype, "cpu")
        if self.adapter:
            attach_adapter(model, open_adapter(self.adapter), dtype, "cpu")
        with torch.inference_mode():
            found: torch.Tensor = model(input_ids=torch.from_numpy(self.ids), use_cache=False).logits
        return found


@pytest.fixture(scope="module")
def answered(
    vllm_python: Path, quantized: Callable[..., Run], demo_validated: Run, request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[Asked, dict[str, Any]]]]:  # fmt: skip
    """`answered("qwen2")`: what vLLM was asked of it, and its answer; each is asked when a test first wants it, all of
    one process; a skip where the checkpoint is not here.
    """

    def asked(name: str) -> Asked:
        folder = tmp_path_factory.mktemp("exact")
        if name in CASES | OF_EXPERTS:
            case = (CASES | OF_EXPERTS)[name]
            windows = WINDOWS if case.trained else MANY
            return Asked(quantized(case), folder, wide_experts=name in OF_EXPERTS, windows=windows)
        if name.endswith("adapter"):
            learned = "learned" in name
            run: Run = request.getfixturevalue("demo_with_a_learned_adapter" if learned else "demo_with_an_adapter")
            adapter = run.adapter if learned else run.model / "adapters" / "style"
            return Asked(run, folder, adapter=None if name.startswith("base of ") else adapter)
        match name:
            case "experts in FP8":
                return replace(answered_once("olmoe")[0], wide_experts=False)
            case "part of a group":
                return Asked(quantized(LLAMA, ("*.q_proj",)), folder)
            case "demo, saturating cache":
                return Asked(demo_validated, folder, other=cache_scales_divided(demo_validated.model, folder / "model"))
        return Asked(demo_validated, folder, name.removeprefix("demo, ").removesuffix(" cache"))

    with Vllm(vllm_python) as vllm:

        @cache
        def answered_once(name: str) -> tuple[Asked, dict[str, Any]]:
            job = asked(name)
            return job, vllm.ask(job.asked())

        yield answered_once


def cache_scales_divided(model: Path, copy: Path) -> Path:
    """A copy of a checkpoint whose cache's scales are a 64th of what they should be."""
    shutil.copytree(model, copy)
    for shard in copy.glob("*.safetensors"):
        tensors = load_file(shard)
        scales = {name: tensors[name] / 64 for name in tensors if name.endswith((".k_scale", ".v_scale"))}
        save_file(tensors | scales, shard, {"format": "pt"})
    return copy


def losses(answer: dict[str, Any]) -> np.ndarray:
    """vLLM's losses in nats, float [tokens]; a skip for a cache of codes where the CPU has no instructions for it."""
    if NO_INSTRUCTIONS in answer.get("error", ""):
        pytest.skip(answer["error"])
    assert "error" not in answer, answer["error"]
    return np.array(answer["nll_nats"])


@pytest.mark.parametrize(
    "name",
    [*sorted(CASES.keys() - REFUSED.keys()), *OF_EXPERTS, "demo, auto cache", *WITH_ADAPTERS],
)
def test_it_loses_what_the_reference_loses(name: str, answered: Callable[[str], Any]) -> None:
    """And neither BF16 nor two terms would: their KL is beyond the limit."""
    asked, answer = answered(name)
    assert len(losses(answer)) == asked.windows * (CONTEXT - 1)
    found, expected = float(np.mean(answer["kl_nats"])), asked.kl(wide_cache=name in WIDE_CACHES)
    others = {"bf16": asked.bf16_kl()}
    if in_two_codes(load_scales(asked.run).forms):
        others["two terms"] = asked.kl(first_terms=False, wide_cache=name in WIDE_CACHES)
    assert 1 / MOST < found / expected < MOST
    assert not [other for other, kl in others.items() if kl / expected > 1 / MOST]


@pytest.mark.parametrize("cache", ["auto", "bfloat16"])
def test_the_cache_costs_what_a_cache_of_its_type_costs(cache: str, answered: Callable[[str], Any]) -> None:
    asked, answer = answered(f"demo, {cache} cache")
    losses(answer)
    found, codes, wide = float(np.mean(answer["kl_nats"])), asked.kl(), asked.kl(wide_cache=True)
    expected, other = (codes, wide) if cache == "auto" else (wide, codes)
    assert abs(np.log(found / expected)) < np.log(MOST) < abs(np.log(found / other))


def test_the_cache_is_in_fp8_without_a_word_and_wide_where_that_is_asked(answered: Callable[[str], Any]) -> None:
    """config.json names its scheme."""
    auto, fp8, wide = (losses(answered(f"demo, {cache} cache")[1]) for cache in ("auto", "fp8", "bfloat16"))
    assert auto.tolist() == fp8.tolist()
    assert 0 < np.abs(auto - wide).mean() < 0.2


def test_the_caches_scales_are_the_checkpoints(answered: Callable[[str], Any]) -> None:
    """Scales that let it saturate ruin the model."""
    right, saturating = (losses(answered(f"demo, {cache} cache")[1]) for cache in ("auto", "saturating"))
    assert saturating.mean() > 1.5 * right.mean()


@pytest.mark.parametrize("base", [name for name in WITH_ADAPTERS if name.startswith("base of ")])
def test_an_adapter_beside_the_base_is_felt(base: str, answered: Callable[[str], Any]) -> None:
    """Its loss is far from the base's: else that it is the reference's says nothing."""
    on, off = (losses(answered(name)[1]) for name in (re.sub("base of an? ", "", base), base))
    assert abs(on.mean() - off.mean()) > 0.1


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_cannot_take_it_refuses(name: str, answered: Callable[[str], Any]) -> None:
    """Nothing of it runs wrong in silence; a cache of codes is refused first where the CPU cannot convert them."""
    error = answered(name)[1]["error"]
    assert REFUSED[name] in error or NO_INSTRUCTIONS in error


def test_the_card_says_of_two_terms_that_vllm_runs_one(answered: Callable[[str], Any]) -> None:
    asked, answer = answered("phi3")
    card = (asked.run.model / "README.md").read_text(encoding="utf-8")
    assert {each.terms for each in load_scales(asked.run).activations.values()} == {2}
    assert "Without these one term runs here" in card
    assert len(losses(answer))
