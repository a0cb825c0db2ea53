"""vLLM's environment, and the architectures that it takes.

On a CPU vLLM needs one line mended. Its product of FP8 codes narrows the scales of activations to the number of tokens,
since it expects one scale for each token, and a static scale is one for all. On a GPU other code runs.
"""

from dataclasses import replace
from pathlib import Path

from ..architectures import ARCHITECTURES
from .packages import site_packages

MENDED = "model_executor/kernels/linear/scaled_mm/pytorch.py"
BEFORE = "        x_scale = torch.narrow(As, 0, 0, num_tokens)\n"
AFTER = "        x_scale = As if As.numel() == 1 else torch.narrow(As, 0, 0, num_tokens)\n"
#: vLLM's attention on a CPU knows heads of 32, 64, 80 and more, not of 48.
WIDE_HEADS = {"qwen3": {"head_dim": 64}}
CASES = {case.name: replace(case, fields=case.fields | WIDE_HEADS.get(case.name, {})) for case in ARCHITECTURES}


def mended_python(home: Path) -> Path:
    """The Python of vLLM's environment at `home`, after its line is mended."""
    kernel = site_packages(home) / "vllm" / MENDED
    source = kernel.read_text(encoding="utf-8")
    if AFTER not in source:
        assert source.count(BEFORE) == 1, "vLLM's line is another: is it mended there?"
        kernel.write_text(source.replace(BEFORE, AFTER), encoding="utf-8")
    return home / "bin" / "python"
