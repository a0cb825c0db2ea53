"""The registry of rules for what a server does with a checkpoint, with numbers S1xx: `fp8q lint --for SERVER`.

Servers read the same files in different ways, and change it from version to version. So a rule has a check, and for
each server that it is true of the versions and the place in the server's source where that was read. Nothing of a
server is installed or run. The sources that were read: the wheels of vLLM 0.27.1, 0.32.0 and 0.33.0, of SGLang 0.5.16
to 0.5.23 and of transformers 5.23.0 and 5.24.0, and TensorRT-LLM's repository between its versions 1.2 and 1.3
(September 2026).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...calibrate.checkpoint.class_defaults import language_model
from ...calibrate.checkpoint.mtp_layers import mtp_prefixes
from ...core.errors import InputError
from ...core.findings import Broken, Ruleset, Severity
from ...core.headers import StoredTensor
from ...options import CheckpointServer
from ..reading.fp8_tensors import Checkpoint
from ..reading.quantization_config import DeclaredQuantization
from .rules import module_of_tensor

#: CheckpointServer -> its own spelling.
TITLES: Mapping[CheckpointServer, str] = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "transformers": "transformers",
}
#: CheckpointServer -> the oldest and the newest version whose source was read.
READ: Mapping[CheckpointServer, tuple[str, str]] = {
    "vllm": ("0.27.1", "0.33.0"),
    "sglang": ("0.5.16", "0.5.23"),
    "tensorrt-llm": ("1.3", "1.3"),
    "transformers": ("5.19.0", "5.24.0"),
}
Version = tuple[int, ...]
_VERSION = re.compile(r"v?(\d{1,6}(?:\.\d{1,6}){0,3})(?:[.+-]?[a-z].*)?", re.IGNORECASE)


def parse_version(text: str) -> Version:
    """Read a version such as 0.32, v0.5.23 or 1.3.0rc2 as numbers, trailing zeros left out; InputError for others."""
    match = _VERSION.fullmatch(text)
    if match is None:
        raise InputError(f"--version {text}", "is no version", "give one such as 0.32.0, or leave it out")
    numbers = [int(number) for number in match[1].split(".")]
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@dataclass(frozen=True)
class Served:
    """A checkpoint as a version of a server gets it.

    `config`: config.json. `said`: its quantization configuration, or that of hf_quant_config.json; empty where there
    is none. `fp8`: the same checkpoint where its form is one that fp8q reads. `asked`: the version of the command line.
    """

    root: Path
    config: Mapping[str, Any]
    said: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    problems: tuple[tuple[str, str], ...]
    fp8: Checkpoint | None
    server: CheckpointServer
    asked: str | None = None

    @property
    def title(self) -> str:
        """The server's own spelling."""
        return TITLES[self.server]

    @property
    def version(self) -> Version:
        """The version that rules are chosen by: the newest that was read, unless another was asked for."""
        return parse_version(self.asked or READ[self.server][1])

    @property
    def declared(self) -> DeclaredQuantization | None:
        """The quantization that the configuration declares, in a form that is read."""
        return self.fp8.declared if self.fp8 else None

    @property
    def method(self) -> str:
        """The name of the form that the configuration declares."""
        return str(self.said.get("quant_method"))

    @property
    def drafts(self) -> tuple[str, ...]:
        """The beginnings of the names of layers for multi-token prediction."""
        return mtp_prefixes(self.config, self.tensors)

    def is_since(self, version: str) -> bool:
        """Tell whether the server is of `version` or a later one."""
        return parse_version(version) <= self.version

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The fields of the language model."""
        return language_model(self.config)

    @property
    def architecture(self) -> str:
        """The class that config.json names first; empty where it names none."""
        named = self.config.get("architectures")
        if isinstance(named, list) and named:
            return str(named[0])
        return ""


@dataclass(frozen=True)
class Applies:
    """A server that a rule is true of: from the version `since` on and before `until` (None: no limit is known), by
    what was read in `source`.
    """

    server: CheckpointServer
    source: str
    since: str | None = None
    until: str | None = None

    def covers(self, served: Served) -> bool:
        """Tell whether the rule is true of this server's version."""
        if served.server != self.server:
            return False
        after = self.since is None or served.is_since(self.since)
        return after and (self.until is None or not served.is_since(self.until))

    def __str__(self) -> str:
        """Name server and versions."""
        since = f" from {self.since} on" if self.since else ""
        until = f"{' and' if since else ''} before {self.until}" if self.until else ""
        return f"{TITLES[self.server]}{since}{until}"


SERVER_RULES: Ruleset[[Served]] = Ruleset(module_of_tensor)
Check = Callable[[Served], Broken]


def server_rule(number: str, name: str, severity: Severity, *servers: Applies) -> Callable[[Check], Check]:
    """Register a rule, true of `servers`: places where one takes a checkpoint otherwise than it was meant."""

    def adapt(check: Check) -> Check:
        return lambda served: check(served) if any(applies.covers(served) for applies in servers) else iter(())

    sources = "; ".join(f"{TITLES[applies.server]}: {applies.source}" for applies in servers)
    return SERVER_RULES.enter((number, name, severity), ", ".join(map(str, servers)), adapt, f" Read in {sources}.")
