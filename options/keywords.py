"""The options that the functions of `fp8q.api` take by name, for type checkers and editors.

Written by `docs/public_api.py` from the option classes; not to be changed by hand.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

from . import CalibrateOptions, Clipping, EngineOptions, ExportOptions, PlanOptions, TritonOptions, ValidateOptions


class BenchSettings(TypedDict, total=False):
    """Options of `fp8q.api.bench`."""

    runtime: Literal["auto", "onnxruntime", "tensorrt", "tensorrt-rtx", "reference", "bf16"]
    batch_sizes: Sequence[int] | str | None
    prompt_lengths: Sequence[int] | str | None
    tokens: int
    rounds: int
    memory: float | None
    gpu_hour_price: float | None


class BuildEngineSettings(TypedDict, total=False):
    """Options of `fp8q.api.build_engine`."""

    runtime: Literal["auto", "tensorrt", "tensorrt-rtx"]
    targets: Sequence[str]
    max_batch: int
    max_seq_len: int | None
    min_fp8_share: float | str | None
    max_prompt: int | None
    opt_batch: int | None
    opt_seq_len: int | None
    workspace: int | None
    precision: Literal["fp8", "bf16", "int8"]
    adapter: str | None


class CalibrateSettings(TypedDict, total=False):
    """Options of `fp8q.api.calibrate`."""

    server: Literal["tensorrt", "vllm-plugin", "vllm", "sglang", "transformers", "any"] | None
    clip: Clipping
    method: Literal["amax", "percentile", "mse", "entropy", "delayed"]
    percentile: float
    margin: int
    scale_grid: Literal["bf16", "power-of-two"]
    amax_history_len: int
    amax_compute_algo: Literal["max", "most_recent"]
    interval: int
    weight_method: Literal["amax", "mse"]
    weight_scale: Literal["channel", "tensor"]
    layout: Literal["compressed-tensors", "modelopt"]
    kv_cache: Literal["off", "v", "fp8"]
    kv_scale: Literal["tensor", "head"]
    kv_skip: Sequence[str]
    skip: Sequence[str]
    only: Sequence[str]
    vision: Sequence[str]
    bf16_weights: float | str
    q_scale: bool
    weight_rounding: Literal["nearest", "gptq", "sequential"]
    weigh_first_token: bool
    weigh_outputs: int
    form: Sequence[str]
    block_scale_grid: Literal["bf16", "power-of-two"]
    activation_terms: Literal[1, 2, "tail", "bf16"]
    exact_tail: int
    two_terms: Sequence[str]
    tail: Sequence[str]
    bf16_input: Sequence[str]
    inherit: bool
    min_expert_tokens: int
    samples: int | None
    seq_len: int | None
    chat_template: bool
    bos: Literal["auto", "never"]
    allow_overlap: bool
    seed: int | None
    revision: str | None
    trust_remote_code: bool
    tokenizer: Literal["file", "auto"] | None
    adapter: Sequence[str | Path]
    adapter_mode: Literal["merge", "beside"]
    batch_size: int
    stream: bool | None
    keep_moments: bool | None
    all_experts: bool
    batches: tuple[int, int] | str | None
    preset: Literal["fast", "exact"]
    dtype: Literal["bf16", "fp16"]
    precision: Literal["fp8", "bf16", "int8"]
    attention: Literal["wide", "fp8"]
    logits: Literal["asked", "all"]
    graph: bool


class ChatSettings(TypedDict, total=False):
    """Options of `fp8q.api.chat`."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: Sequence[str]
    runtime: Literal["auto", "onnxruntime", "tensorrt", "tensorrt-rtx", "reference", "bf16"]
    adapter: str | None
    template: str | Path | None


class CompareSettings(TypedDict, total=False):
    """Options of `fp8q.api.compare`."""

    url: str | None
    model: str | Path | None
    served: str | None
    windows: int | None
    timeout: int


class CompareAnswersSettings(TypedDict, total=False):
    """Options of `fp8q.api.compare_answers`."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: Sequence[str]
    runtime: Literal["auto", "onnxruntime", "tensorrt", "tensorrt-rtx", "reference", "bf16"]
    adapter: str | None
    template: str | Path | None


class CompareCheckpointsSettings(TypedDict, total=False):
    """Options of `fp8q.api.compare_checkpoints`."""

    max_ppl_increase: float | str | None
    max_kl: float | str | None
    max_flips: float | str | None
    data: str | None
    out: str | Path | None
    context: int | None
    max_tokens: int | None
    module_windows: int
    stream: bool | None


class CompareEndpointSettings(TypedDict, total=False):
    """Options of `fp8q.api.compare_endpoint`."""

    url: str | None
    model: str | Path | None
    windows: int | None
    timeout: int
    max_ppl_increase: float | str | None
    max_kl: float | str | None
    max_flips: float | str | None
    data: str | None
    out: str | Path | None
    context: int | None
    max_tokens: int | None
    module_windows: int
    stream: bool | None


class ConvertSettings(TypedDict, total=False):
    """Options of `fp8q.api.convert`."""

    form: Literal["dynamic", "block"]
    layout: Literal["compressed-tensors", "fp8", "modelopt"] | None
    block_scale_grid: Literal["bf16", "power-of-two"]
    skip: Sequence[str]
    rules: str | Path | None
    mtp: bool
    threads: int | None
    revision: str | None


class DistillSettings(TypedDict, total=False):
    """Options of `fp8q.api.distill`."""

    samples: int | None
    allow_overlap: bool
    epochs: float
    batch_size: int
    seed: int
    rank: int
    alpha: int
    adapter_rate: float
    learning_rate: float
    stream: bool
    end_to_end: bool
    shard: bool
    scales: Literal["fixed", "learned"]
    gradients: Literal["fp32", "bf16", "e5m2", "e4m3"]
    watch: int | None
    train: Literal["weights", "adapter"]


class DoctorSettings(TypedDict, total=False):
    """Options of `fp8q.api.doctor`."""

    windows: int


class EvaluateSettings(TypedDict, total=False):
    """Options of `fp8q.api.evaluate`."""

    tasks: Sequence[str] | str
    include_path: Sequence[str | Path]
    limit: int | None
    num_fewshot: int | None
    chat: bool
    seeds: int
    noise_floor: bool
    batch_size: int
    url: str | None
    served: str | None
    bf16_url: str | None
    bf16_served: str | None
    timeout: int


class ExportSettings(TypedDict, total=False):
    """Options of `fp8q.api.export`."""

    dtype: Literal["bf16", "fp16"]
    precision: Literal["fp8", "bf16", "int8"]
    attention: Literal["wide", "fp8"]
    weight_scale: Literal["dq", "mul"]
    logits: Literal["asked", "all"]
    graph: bool


class GenerateSettings(TypedDict, total=False):
    """Options of `fp8q.api.generate`."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: Sequence[str]
    runtime: Literal["auto", "onnxruntime", "tensorrt", "tensorrt-rtx", "reference", "bf16"]
    adapter: str | None
    template: str | Path | None


class LintSettings(TypedDict, total=False):
    """Options of `fp8q.api.lint`."""

    server: Literal["vllm", "sglang", "tensorrt-llm", "transformers"] | None
    version: str | None


class MergeSettings(TypedDict, total=False):
    """Options of `fp8q.api.merge`."""

    clip: Clipping
    method: Literal["amax", "percentile", "mse", "entropy", "delayed"]
    percentile: float
    margin: int
    scale_grid: Literal["bf16", "power-of-two"]
    amax_history_len: int
    amax_compute_algo: Literal["max", "most_recent"]
    interval: int
    weight_method: Literal["amax", "mse"]
    weight_scale: Literal["channel", "tensor"]
    layout: Literal["compressed-tensors", "modelopt"]
    kv_cache: Literal["off", "v", "fp8"]
    kv_scale: Literal["tensor", "head"]
    kv_skip: Sequence[str]
    skip: Sequence[str]
    only: Sequence[str]
    vision: Sequence[str]
    bf16_weights: float | str
    q_scale: bool
    weight_rounding: Literal["nearest", "gptq", "sequential"]
    weigh_first_token: bool
    weigh_outputs: int
    form: Sequence[str]
    block_scale_grid: Literal["bf16", "power-of-two"]
    activation_terms: Literal[1, 2, "tail", "bf16"]
    exact_tail: int
    two_terms: Sequence[str]
    tail: Sequence[str]
    bf16_input: Sequence[str]
    inherit: bool
    min_expert_tokens: int
    preset: Literal["fast", "exact"]
    dtype: Literal["bf16", "fp16"]
    precision: Literal["fp8", "bf16", "int8"]
    attention: Literal["wide", "fp8"]
    logits: Literal["asked", "all"]
    graph: bool


class PushSettings(TypedDict, total=False):
    """Options of `fp8q.api.push`."""

    repo: str | None
    yes: bool
    public: bool
    revision: str | None


class QuantizeSettings(TypedDict, total=False):
    """Options of `fp8q.api.quantize`."""

    calibrate: CalibrateOptions
    server: Literal["tensorrt", "vllm-plugin", "vllm", "sglang", "transformers", "any"] | None
    clip: Clipping
    method: Literal["amax", "percentile", "mse", "entropy", "delayed"]
    percentile: float
    margin: int
    scale_grid: Literal["bf16", "power-of-two"]
    amax_history_len: int
    amax_compute_algo: Literal["max", "most_recent"]
    interval: int
    weight_method: Literal["amax", "mse"]
    weight_scale: Literal["channel", "tensor"]
    layout: Literal["compressed-tensors", "modelopt"]
    kv_cache: Literal["off", "v", "fp8"]
    kv_scale: Literal["tensor", "head"]
    kv_skip: Sequence[str]
    skip: Sequence[str]
    only: Sequence[str]
    vision: Sequence[str]
    bf16_weights: float | str
    q_scale: bool
    weight_rounding: Literal["nearest", "gptq", "sequential"]
    weigh_first_token: bool
    weigh_outputs: int
    form: Sequence[str]
    block_scale_grid: Literal["bf16", "power-of-two"]
    activation_terms: Literal[1, 2, "tail", "bf16"]
    exact_tail: int
    two_terms: Sequence[str]
    tail: Sequence[str]
    bf16_input: Sequence[str]
    inherit: bool
    min_expert_tokens: int
    samples: int | None
    seq_len: int | None
    chat_template: bool
    bos: Literal["auto", "never"]
    allow_overlap: bool
    seed: int | None
    revision: str | None
    trust_remote_code: bool
    adapter: Sequence[str | Path]
    adapter_mode: Literal["merge", "beside"]
    batch_size: int
    stream: bool | None
    keep_moments: bool | None
    all_experts: bool
    batches: tuple[int, int] | str | None
    export: ExportOptions
    dtype: Literal["bf16", "fp16"]
    precision: Literal["fp8", "bf16", "int8"]
    attention: Literal["wide", "fp8"]
    logits: Literal["asked", "all"]
    graph: bool
    preset: Literal["fast", "exact"]


class ReportSettings(TypedDict, total=False):
    """Options of `fp8q.api.report`."""

    compare: Sequence[str | Path]
    continuations: int


class RunSettings(TypedDict, total=False):
    """Options of `fp8q.api.run`."""

    calibrate: CalibrateOptions
    server: Literal["tensorrt", "vllm-plugin", "vllm", "sglang", "transformers", "any"] | None
    clip: Clipping
    method: Literal["amax", "percentile", "mse", "entropy", "delayed"]
    percentile: float
    margin: int
    scale_grid: Literal["bf16", "power-of-two"]
    amax_history_len: int
    amax_compute_algo: Literal["max", "most_recent"]
    interval: int
    weight_method: Literal["amax", "mse"]
    weight_scale: Literal["channel", "tensor"]
    layout: Literal["compressed-tensors", "modelopt"]
    kv_cache: Literal["off", "v", "fp8"]
    kv_scale: Literal["tensor", "head"]
    kv_skip: Sequence[str]
    skip: Sequence[str]
    only: Sequence[str]
    vision: Sequence[str]
    bf16_weights: float | str
    q_scale: bool
    weight_rounding: Literal["nearest", "gptq", "sequential"]
    weigh_first_token: bool
    weigh_outputs: int
    form: Sequence[str]
    block_scale_grid: Literal["bf16", "power-of-two"]
    activation_terms: Literal[1, 2, "tail", "bf16"]
    exact_tail: int
    two_terms: Sequence[str]
    tail: Sequence[str]
    bf16_input: Sequence[str]
    inherit: bool
    min_expert_tokens: int
    samples: int | None
    seq_len: int | None
    chat_template: bool
    bos: Literal["auto", "never"]
    allow_overlap: bool
    seed: int | None
    revision: str | None
    trust_remote_code: bool
    tokenizer: Literal["file", "auto"] | None
    adapter: Sequence[str | Path]
    adapter_mode: Literal["merge", "beside"]
    batch_size: int
    stream: bool | None
    keep_moments: bool | None
    all_experts: bool
    batches: tuple[int, int] | str | None
    export: ExportOptions
    dtype: Literal["bf16", "fp16"]
    precision: Literal["fp8", "bf16", "int8"]
    attention: Literal["wide", "fp8"]
    logits: Literal["asked", "all"]
    graph: bool
    engine: EngineOptions
    runtime: Literal["auto", "tensorrt", "tensorrt-rtx"]
    targets: Sequence[str]
    max_batch: int
    max_seq_len: int | None
    min_fp8_share: float | str | None
    max_prompt: int | None
    opt_batch: int | None
    opt_seq_len: int | None
    workspace: int | None
    validate: ValidateOptions
    max_ppl_increase: float | str | None
    max_kl: float | str | None
    max_flips: float | str | None
    runtimes: Sequence[str] | str | None
    context: int | None
    stride: int | None
    as_served: int | None
    accumulator: Literal["fp32", "fp22", "two-level"] | None
    accumulator_windows: int
    max_tokens: int | None
    needles: Sequence[int] | str | None
    needle_trials: int
    needle_text: str | Path | None
    triton: TritonOptions
    name: str | None
    gpus: Sequence[int] | str | None
    engine_model: bool
    planning: PlanOptions
    plan: bool
    preset: Literal["fast", "exact"]


class ScalesSettings(TypedDict, total=False):
    """Options of `fp8q.api.scales`."""

    clip: Clipping
    method: Literal["amax", "percentile", "mse", "entropy", "delayed"]
    percentile: float
    margin: int
    scale_grid: Literal["bf16", "power-of-two"]
    amax_history_len: int
    amax_compute_algo: Literal["max", "most_recent"]
    interval: int
    weight_method: Literal["amax", "mse"]
    weight_scale: Literal["channel", "tensor"]
    layout: Literal["compressed-tensors", "modelopt"]
    kv_cache: Literal["off", "v", "fp8"]
    kv_scale: Literal["tensor", "head"]
    kv_skip: Sequence[str]
    skip: Sequence[str]
    only: Sequence[str]
    vision: Sequence[str]
    bf16_weights: float | str
    q_scale: bool
    weight_rounding: Literal["nearest", "gptq", "sequential"]
    weigh_first_token: bool
    weigh_outputs: int
    form: Sequence[str]
    block_scale_grid: Literal["bf16", "power-of-two"]
    activation_terms: Literal[1, 2, "tail", "bf16"]
    exact_tail: int
    two_terms: Sequence[str]
    tail: Sequence[str]
    bf16_input: Sequence[str]
    inherit: bool
    min_expert_tokens: int
    preset: Literal["fast", "exact"]


class SensitivitySettings(TypedDict, total=False):
    """Options of `fp8q.api.sensitivity`."""

    windows: int
    measure: int | None
    stream: bool | None


class ServeSettings(TypedDict, total=False):
    """Options of `fp8q.api.serve`."""

    host: str
    port: int
    name: str | None
    runtime: Literal["auto", "onnxruntime", "tensorrt", "tensorrt-rtx", "reference", "bf16"]
    bf16: bool
    adapter: Sequence[str]
    template: str | Path | None
    max_batch: int
    grace: int
    api_key: str | None


class TritonSettings(TypedDict, total=False):
    """Options of `fp8q.api.triton`."""

    out: str | Path | None
    name: str | None
    max_batch: int
    gpus: Sequence[int] | str | None
    engine_model: bool


class TuneSettings(TypedDict, total=False):
    """Options of `fp8q.api.tune`."""

    max_ppl_increase: float | str | None
    max_kl: float | str | None
    prefer: Literal["memory", "prefill"]
    windows: int
    server: Literal["tensorrt", "vllm-plugin", "vllm", "sglang", "transformers", "any"]


class ValidateSettings(TypedDict, total=False):
    """Options of `fp8q.api.validate`."""

    max_ppl_increase: float | str | None
    max_kl: float | str | None
    max_flips: float | str | None
    runtimes: Sequence[str] | str | None
    context: int | None
    stride: int | None
    allow_overlap: bool
    as_served: int | None
    accumulator: Literal["fp32", "fp22", "two-level"] | None
    accumulator_windows: int
    max_tokens: int | None
    stream: bool | None
    needles: Sequence[int] | str | None
    needle_trials: int
    needle_text: str | Path | None


class WatchSettings(TypedDict, total=False):
    """Options of `fp8q.api.watch`."""

    every: int
    history: int
    scaling: Literal["delayed", "current", "none"]
