"""The kernels of the loop on a GPU, written in Triton, and their compilation to `loop/kernels.ptx`.

    python -m fp8q.serve.kernels

`loop/device_kernels.py` says what each of them does, and launches them through the driver, so that a server needs no
Triton. PTX for sm_80 runs on every later GPU: the driver compiles it when it is loaded. PTX ISA 8.0 is of CUDA 12.0,
older than any driver that fp8q runs on. Triton compiles without a GPU, and its interpreter runs these functions on a
CPU, which is how the tests hold them against NumPy.

Triton's own parameters come last: two addresses of scratch memory, which none of these kernels uses.
"""

import os
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .loop.device_kernels import LINE_HALVES, PTX, SUMMARIZE, THREADS, TILE, WORDS
from .loop.sampling import BLOCK

#: Compute capability and PTX ISA of the compiled kernels.
CAPABILITY = 80
ISA = 80
#: Triton's declaration of shared memory, but for its size.
SHARED = ".extern .shared .align 16 .b8 global_smem"


@triton.jit
def scatter(
    new_at,
    past_at,
    slots_at,
    words,
    row_words,
    line_words,
    past_line,
    new_tensor,
    past_tensor,
    block: tl.constexpr,
):
    """Write `words` of a tensor's new keys or values, int32 [rows, heads, line_words], behind each row's past. All
    distances are in words.
    """
    tensor = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < words
    slot = tl.load(slots_at + at // row_words, mask=inside, other=-1)
    inside = inside & (slot >= 0)
    word = tl.load(new_at + tensor * new_tensor + at, mask=inside, other=0)
    line = (at // line_words).to(tl.int64)
    to = tensor * past_tensor + line * past_line + slot * line_words + at % line_words
    tl.store(past_at + to, word, mask=inside)


@triton.jit
def summarize(
    logits_at,
    inverses_at,
    maxima_at,
    sums_at,
    places_at,
    vocabulary,
    blocks,
    bf16: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
):
    """Summarize `tile` blocks of a row's logits; BF16 ones are read as their bits, int16."""
    row = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * tile + tl.arange(0, tile)
    token = number[:, None] * block + tl.arange(0, block)[None, :]
    inside = token < vocabulary
    logits = tl.load(logits_at + row * vocabulary + token, mask=inside, other=0)
    logits = (logits.to(tl.int32) << 16).to(tl.float32, bitcast=True) if bf16 else logits.to(tl.float32)
    logits = tl.where(inside, logits, float("-inf"))
    largest, place = tl.max(logits, 1, return_indices=True, return_indices_tie_break_left=True)
    inverse = tl.load(inverses_at + row)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # of a block that is forbidden as a whole
    weights = tl.exp((logits - base[:, None]) * inverse)
    to = row * blocks + number
    there = number < blocks
    tl.store(maxima_at + to, largest, mask=there)
    tl.store(sums_at + to, tl.sum(weights, 1), mask=there)
    tl.store(places_at + to, place, mask=there)


@triton.jit
def gather_blocks(logits_at, pairs_at, out_at, row_halves, block_halves, line: tl.constexpr):
    """Copy a block of a row's logits, as 16-bit halves, to the place of its pair (row, block)."""
    pair = tl.program_id(0)
    row = tl.load(pairs_at + 2 * pair).to(tl.int64)
    begin = tl.load(pairs_at + 2 * pair + 1) * block_halves
    at = tl.arange(0, line)
    inside = (at < block_halves) & (begin + at < row_halves)
    half = tl.load(logits_at + row * row_halves + begin + at, mask=inside, other=0)
    tl.store(out_at + pair.to(tl.int64) * block_halves + at, half, mask=inside)


#: The types of the kernels' parameters, and their constants.
SCATTER = {
    "new_at": "*i32", "past_at": "*i32", "slots_at": "*i64", "words": "i32", "row_words": "i32", "line_words": "i32",
    "past_line": "i64", "new_tensor": "i64", "past_tensor": "i64",
}  # fmt: skip
SUMMARIZED = {
    "inverses_at": "*fp32", "maxima_at": "*fp32", "sums_at": "*fp32", "places_at": "*i32", "vocabulary": "i32",
    "blocks": "i32",
}  # fmt: skip
GATHER = {"logits_at": "*i16", "pairs_at": "*i32", "out_at": "*i16", "row_halves": "i32", "block_halves": "i32"}
#: NumPy's name of the type of logits -> Triton's name of a pointer to them; uint16 holds BF16.
POINTERS = {"float32": "*fp32", "float16": "*fp16", "uint16": "*i16"}


def compiled() -> str:
    """Compile all kernels to one PTX module. Triton must have been imported without TRITON_INTERPRET."""
    parts = [
        _compiled(scatter, "scatter", SCATTER, {"block": WORDS}),
        _compiled(gather_blocks, "gather_blocks", GATHER, {"line": LINE_HALVES}),
    ]
    for dtype, name in SUMMARIZE.items():
        constants = {"bf16": dtype == "uint16", "tile": TILE, "block": BLOCK}
        parts.append(_compiled(summarize, name, {"logits_at": POINTERS[dtype]} | SUMMARIZED, constants))
    heads = {head for head, _ in parts}
    assert len(heads) == 1, "they are compiled for one GPU"
    return "\n".join([*heads, *(body for _, body in parts)])


def _compiled(kernel: Any, name: str, types: dict[str, str], constants: dict[str, Any]) -> tuple[str, str]:
    """Compile a kernel under another name; return the head of its PTX module, and the rest, without comments.

    Triton leaves the size of shared memory to the launch; here it is declared, so that a launch is one of any kernel.
    """
    source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
    options = {"num_warps": THREADS // 32, "ptx_version": ISA}
    made = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    assert made.metadata.global_scratch_size == made.metadata.profile_scratch_size == 0, "the launch gives none"
    lines = [line.partition("//")[0].rstrip() for line in made.asm["ptx"].splitlines()]
    text = "\n".join(line for line in lines if line.strip())
    head, entry, body = text.partition(".visible .entry")
    entry = f"{entry}{body}".replace(f" {kernel.__name__}", f" {name}").replace(f"[{kernel.__name__}_", f"[{name}_")
    if made.metadata.shared:
        head = head.replace(f"{SHARED}[];", "")
        entry = f"{SHARED.removeprefix('.extern ')}_{name}[{made.metadata.shared}];\n{entry}".replace(
            "global_smem;", f"global_smem_{name};"
        )
    return head.strip(), entry


def main() -> None:
    """Compile the kernels into the file that the loop loads."""
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # no paths
    PTX.write_text(f"// fp8q.serve.kernels, compiled by Triton {triton.__version__}\n{compiled()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
