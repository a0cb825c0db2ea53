"""Metrics for Prometheus at /metrics. A token's time is the time at which it was produced, not sent."""

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from ... import __version__

Outcome = Literal["stop", "length", "refused", "busy", "cancelled", "failed"]
#: Seconds: from a token of a small model on a CPU to a long prompt on a slow one.
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """The counts of one server; a registry of its own, so that a process may have several."""

    def __init__(self) -> None:
        """All are zero."""
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._info = Gauge("fp8q_info", "Always 1.", ("version", "model", "runtime"), registry=registry)
        self._requests = Counter(
            "fp8q_requests", "Answers by how they ended; one for each prompt.", ("model", "outcome"), registry=registry
        )
        self._prompt = Counter(
            "fp8q_prompt_tokens", "Tokens of prompts that were answered.", ("model",), registry=registry
        )
        self._produced = Counter("fp8q_generated_tokens", "Tokens produced.", ("model",), registry=registry)
        self._first = Histogram(
            "fp8q_time_to_first_token_seconds", "From the request to its first token.", ("model",),
            buckets=FIRST, registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "fp8q_inter_token_seconds", "From token to token.", ("model",), buckets=BETWEEN, registry=registry
        )
        self._load = [
            Gauge(f"fp8q_requests_{name}", f"Answers {words}.", ("model",), registry=registry)
            for name, words in (("running", "under way"), ("waiting", "that wait for a row of the batch"))
        ]

    def model_metrics(self, model: str, runtime: str, load: Callable[[], tuple[int, int]]) -> "ModelMetrics":
        """The counts of one model; `load`: how many of its requests run, and how many wait."""
        self._info.labels(__version__, model, runtime).set(1)
        running, waiting = self._load
        running.labels(model).set_function(lambda: load()[0])
        waiting.labels(model).set_function(lambda: load()[1])
        return ModelMetrics(self, model)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)


class ModelMetrics:
    """The counts of one model; its labels are looked up once."""

    def __init__(self, metrics: Metrics, model: str):
        """Count under this name."""
        self._requests = {outcome: metrics._requests.labels(model, outcome) for outcome in get_args(Outcome)}
        self.first = metrics._first.labels(model)
        self.between = metrics._between.labels(model)
        self.prompt = metrics._prompt.labels(model)
        self.produced = metrics._produced.labels(model)

    def ended(self, outcome: Outcome, count: int = 1) -> None:
        """So many answers ended like this."""
        self._requests[outcome].inc(count)
