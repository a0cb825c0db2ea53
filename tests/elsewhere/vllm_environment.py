"""The architectures that vLLM takes."""

from dataclasses import replace

from ..architectures import ARCHITECTURES

#: vLLM's attention on a CPU knows heads of 32, 64, 80 and more, not of 48.
WIDE_HEADS = {"qwen3": {"head_dim": 64}}
CASES = {case.name: replace(case, fields=case.fields | WIDE_HEADS.get(case.name, {})) for case in ARCHITECTURES}
