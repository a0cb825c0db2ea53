"""Rules C101 to C103: files and types, which a loader reads before any scale."""

from ...core.findings import Broken
from ..reading.fp8_tensors import CODES, Checkpoint
from .rules import AGAIN, checkpoint_rule

#: Types of eight bits that are no E4M3.
OTHER_CODES = ("F8_E5M2", "I8", "U8")


@checkpoint_rule("C101", "checkpoint-files")
def checkpoint_files(checkpoint: Checkpoint) -> Broken:
    """Every file that the index names is there, whole, and holds the tensors that it promises, each once. A loader that
    does not find a scale goes on with the number it began with.
    """
    for file, what in checkpoint.problems:
        yield file, f"{what}; copy or download it again"


@checkpoint_rule("C102", "code-type")
def code_type(checkpoint: Checkpoint) -> Broken:
    """The codes of a weight are E4M3. Loaders make a parameter of that type and copy what the file has into it: E5M2
    and bytes are then converted as numbers, not taken as codes.
    """
    for name, tensor in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if tensor.dtype in OTHER_CODES and name != module and checkpoint.declared.scheme(module) is not None:
            yield name, f"holds {tensor.dtype}; store its codes as {CODES}"


@checkpoint_rule("C103", "nothing-quantized")
def checkpoint_nothing_quantized(checkpoint: Checkpoint) -> Broken:
    """At least one weight is codes: a checkpoint without any is no FP8 model, whatever its configuration says."""
    if not checkpoint.codes and not checkpoint.problems:
        yield checkpoint.declared.source.name, f"says FP8, and no weight is {CODES}; {AGAIN}"
