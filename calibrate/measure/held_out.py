"""Hold some batches out of the second moments of experts, and keep tokens of each expert from them.

GPTQ fits an expert's codes to the tokens that calibration routes to it. Where these are few, the codes are good for
them and worse than nearest rounding for others (`docs/decisions/0080`). So every eighth batch is left out of the
second moments of the inputs of experts, and from these batches up to `TOKENS` tokens of each expert's own are stored,
by which codes are judged. They are of other windows: the tokens of one batch that an expert sees are in the order of
its rank among the chosen experts, so the last ones of each batch would be those that it matters least to.

Tokens and not their second moments are stored, since a matrix [width, width] for each expert would be far larger: for
gate and up, whose moments all experts of a layer share, 100 GB for a mixture of 30 B parameters instead of 3.
"""

from pathlib import Path

import numpy as np
import torch

from ...core.files import reading
from ..model.expert_modules import INPUT_GEMMS

#: One batch in so many is held out, the last of each; of fewer batches the last one. A single batch is not held out.
EVERY = 8
#: Tokens of an expert that are stored.
TOKENS = 128
#: What the names of files with held-out tokens end in.
HELD_OUT = ".held_out.npy"


def is_held_out(batch: int, batches: int) -> bool:
    """Tell whether batch number `batch`, of so many `batches`, is held out of the second moments of experts."""
    return batches > 1 and batch % EVERY == min(EVERY, batches) - 1


class HeldOutTokens:
    """Choose tokens of named tensors from the held-out batches of a text, evenly spread over them."""

    def __init__(self, batches: int):
        """Choose from a text of so many `batches`."""
        self.batches = batches
        self._chosen: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, x: torch.Tensor, batch: int) -> None:
        """Choose from the tokens `x` [tokens, width], any float type (rounded to BF16), of the held-out `batch`.

        Batches come in their order; one with few tokens leaves more for those after it.
        """
        chosen = self._chosen.setdefault(name, [])
        remaining = sum(is_held_out(later, self.batches) for later in range(batch, self.batches))
        number = min(len(x), -(-(TOKENS - sum(map(len, chosen))) // remaining))
        if number:
            rows = torch.arange(number, device=x.device) * len(x) // number
            chosen.append(x.detach()[rows].to(torch.bfloat16).cpu())

    def names(self) -> list[str]:
        """The names of all tensors that have tokens."""
        return [name for name, chosen in self._chosen.items() if chosen]

    def tokens(self, name: str) -> torch.Tensor | None:
        """The chosen tokens of `name`, BF16 [tokens, width]; None where there are none."""
        chosen = self._chosen.get(name)
        return torch.cat(chosen) if chosen else None

    def save(self, folder: Path) -> None:
        """Write the tokens of each name to its file in `folder`."""
        for name in self.names():
            tokens = self.tokens(name)
            assert tokens is not None, "it has tokens"
            save_inputs(tokens_file(folder, name), tokens)

    def load(self, folder: Path) -> None:
        """Go on with the tokens that `save` wrote to `folder`."""
        for file in sorted(folder.glob(f"*{HELD_OUT}")):
            name = file.name.removesuffix(HELD_OUT)
            tokens = load_held_out(folder, name)
            assert tokens is not None, "its file is there"
            self._chosen[name] = [tokens]


def input_name(gemm: str) -> str:
    """The GEMM of the same expert by which the input of `gemm` is called: gate's for gate and up, also where an expert
    has no gate.
    """
    if has_own_input(gemm):
        return gemm
    return f"{gemm.rpartition('.')[0]}.{INPUT_GEMMS[0]}"


def has_own_input(gemm: str) -> bool:
    """Tell whether no other GEMM of any expert reads the input of the expert's `gemm`."""
    return gemm.rpartition(".")[2] not in INPUT_GEMMS


def expert_number(gemm: str) -> int:
    """The number of the expert that `gemm` is of, among those of its layer."""
    return int(gemm.rpartition(".")[0].rpartition(".")[2])


def tokens_file(folder: Path, name: str) -> Path:
    """The file of the held-out tokens of the input `name`: their BF16 bits, int16 [tokens, width]."""
    return folder / f"{name}{HELD_OUT}"


def load_held_out(folder: Path, name: str) -> torch.Tensor | None:
    """Load the held-out tokens of the input `name`, BF16 [tokens, width]; None where none were stored."""
    return load_inputs(tokens_file(folder, name), "held-out tokens")


def save_inputs(path: Path, tokens: torch.Tensor) -> None:
    """Write inputs `tokens`, BF16 [tokens, width], as their bits, which NumPy has no type for."""
    np.save(path, tokens.cpu().view(torch.int16).numpy())


def load_inputs(path: Path, what: str) -> torch.Tensor | None:
    """Read the BF16 [tokens, width] that `save_inputs` wrote; None without such a file. `what` names them in errors."""
    if not path.is_file():
        return None
    with reading(path, what):
        return torch.from_numpy(np.load(path, allow_pickle=False)).view(torch.bfloat16)
