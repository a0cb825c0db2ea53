"""Divide what lies in the directory of a checkpoint, besides config.json and its weights, into what is copied to a
checkpoint that is made of it and what is left behind, with the reason.

Everything is copied that is not refused here: servers read files that no list foresees (tekken.json, `1_Pooling/`).
Left behind are weights in other forms, whatever would be larger than a tokenizer, code, hidden files, and links that
lead out of the directory, which could publish any file of this machine. A hub's cache consists of links to its blobs.
"""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import InputError, visible
from ...core.files import regular_file
from ...core.run_files import CARD
from ..input.untrusted import read_json
from .companions import COMPANION_BYTES, companions
from .recognizer import MODELOPT_FILE
from .weights import INDEX_END, PICKLED, WEIGHTS_END

#: How the names of weights end, in the forms that are published beside safetensors.
OTHER_WEIGHTS = (
    *PICKLED, WEIGHTS_END, ".index.json", ".engine", ".ggml", ".gguf", ".h5", ".keras", ".mlmodel", ".msgpack", ".nemo",
    ".npy", ".npz", ".onnx", ".onnx.data", ".onnx_data", ".ot", ".pdparams", ".plan", ".tflite",
)  # fmt: skip
#: Files that describe codes of the source, which are no longer there.
OF_CODES = (MODELOPT_FILE, "quant_config.json", "quantize_config.json")
#: The folder of the weights as they were before Hugging Face's form.
ORIGINAL = "original"
#: The modules of sentence-transformers: a list of objects, each with the `path` of a folder.
MODULES = "modules.json"
#: The most files that are copied, and the most folders one within the other.
MOST_FILES = 1000
DEEPEST = 4
#: Names that are listed for one reason in a line; the rest are counted.
LISTED = 20
#: The reasons for leaving a file.
CODES_REASON = "a description of the source's codes"
WEIGHTS = "weights in another form"
CODE = "code that no configuration names"
HIDDEN = "hidden"
CARD_REASON = "the model card, whose place another takes"
OUTSIDE = "a link that leads out of the checkpoint"
LARGE = f"more than {COMPANION_BYTES >> 20} MB"
MANY = f"more than {MOST_FILES:,} files, or {DEEPEST} folders deep"
UNREADABLE_NAME = "a name that is no text"


@dataclass(frozen=True)
class BesideWeights:
    """The files beside weights: `copied`, name -> file; `left`, name -> reason, where a folder's name ends with `/`.

    Names are relative to the checkpoint's directory.
    """

    copied: Mapping[str, Path]
    left: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """The bytes of the files that are copied."""
        return sum(file.stat().st_size for file in self.copied.values())

    def remarks(self, *unsaid: str) -> list[str]:
        """A line for each reason but those `unsaid`, with the names of what is left behind for it."""
        names_by_reason: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            if reason not in unsaid:
                names_by_reason.setdefault(reason, []).append(visible(name))
        lines = []
        for reason, names in names_by_reason.items():
            more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
            lines.append(f"{', '.join(names[:LISTED])}{more}: {reason}")
        return lines


def beside_weights(path: Path, weights: Collection[Path], config: Mapping[str, Any] | None = None) -> BesideWeights:
    """Divide what lies in the directory `path` besides config.json, the files `weights` and their index.

    `config`: config.json, where Python files are copied, unread, if it or the tokenizer's configuration names code;
    None where they never are. Files that loaders of tokenizers read are copied wherever their links lead. Raises
    InputError for one of these that is no file, or cannot be read.
    """
    made_anew = {"config.json", *(file.name for file in weights)}
    code = config is not None and (bool(config.get("auto_map")) or _names_code(path))
    divider = _Divider(path.resolve(), _module_folders(path), code)
    for file in companions(path):
        regular_file(file, "copy or download it again")
        divider.copied[str(file.relative_to(path))] = file
    for entry in _entries(path):
        if entry.name not in made_anew and not entry.name.endswith(INDEX_END):
            divider.divide(entry, entry.name, depth=0)
    return BesideWeights(divider.copied, divider.left)


def _entries(folder: Path) -> list["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _module_folders(path: Path) -> frozenset[str]:
    """The folders that sentence-transformers reads modules of, which may have weights of their own."""
    try:
        modules = read_json(path / MODULES)
    except InputError:  # absent, or not sentence-transformers'
        return frozenset()
    named = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return frozenset(name for name in named if isinstance(name, str))


def _names_code(path: Path) -> bool:
    """Tell whether the configuration of a tokenizer or processor names code."""
    return any(_has_auto_map(path / name) for name in os.listdir(path) if name.endswith("_config.json"))


def _has_auto_map(file: Path) -> bool:
    try:
        content = read_json(file)
    except InputError:
        return False
    return isinstance(content, dict) and bool(content.get("auto_map"))


@dataclass
class _Divider:
    """Divides the directory whose real path is `inside`, file by file."""

    inside: Path
    modules: frozenset[str]
    code: bool
    copied: dict[str, Path] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def divide(self, entry: "os.DirEntry[str]", name: str, depth: int) -> None:
        """Enter a file, or what is in a folder, called `name` from the checkpoint's directory."""
        if name in self.copied:
            return
        is_folder = entry.is_dir(follow_symlinks=False)
        reason = self._reason(Path(entry.path), name, is_folder, depth)
        if reason is not None:
            self.left[f"{name}/" if is_folder else name] = reason
        elif is_folder:
            for inner in _entries(Path(entry.path)):
                self.divide(inner, f"{name}/{inner.name}", depth + 1)
        else:
            self.copied[name] = Path(entry.path)

    def _reason(self, file: Path, name: str, is_folder: bool, depth: int) -> str | None:
        """The reason for leaving a file or folder; None for one that is copied."""
        if not name.isprintable():
            return UNREADABLE_NAME
        if file.name.startswith("."):
            return HIDDEN
        if depth > DEEPEST or len(self.copied) >= MOST_FILES:
            return MANY
        if is_folder:
            return self._folder_reason(file, name)
        if name == CARD:
            return CARD_REASON
        if name in OF_CODES:
            return CODES_REASON
        if _is_weights(name) and not (name.endswith(WEIGHTS_END) and self._is_module(name)):
            return WEIGHTS
        if name.endswith(".py") and not (self.code and depth == 0):
            return CODE
        if not self._leads_inside(file):
            return OUTSIDE
        return _file_reason(file)

    def _folder_reason(self, folder: Path, name: str) -> str | None:
        if not os.access(folder, os.R_OK | os.X_OK):
            return "a folder that cannot be read"
        if self._is_module(name):
            return None
        if name == ORIGINAL or any(map(_is_weights, _names_in(folder))):
            return WEIGHTS
        return None

    def _is_module(self, name: str) -> bool:
        return any(name == module or name.startswith(f"{module}/") for module in self.modules if module)

    def _leads_inside(self, file: Path) -> bool:
        """Tell whether a file lies in the checkpoint's directory, or, of a hub's cache, among its blobs."""
        target = Path(os.path.realpath(file))
        if target.is_relative_to(self.inside):
            return True
        in_cache = self.inside.parent.name == "snapshots"
        return in_cache and target.is_relative_to(self.inside.parent.parent / "blobs")


def _names_in(folder: Path) -> Iterator[str]:
    """The names of all files below `folder`."""
    return (name for _, _, names in os.walk(folder) for name in names)


def _is_weights(name: str) -> bool:
    return name.lower().endswith(OTHER_WEIGHTS)


def _file_reason(file: Path) -> str | None:
    """The reason for leaving what is no file, cannot be read, or is too large."""
    try:
        size = regular_file(file)
    except InputError as error:
        return error.fault
    return LARGE if size > COMPANION_BYTES else None
