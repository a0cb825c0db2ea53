"""A Triton repository for the rules: its models, the contents of each `config.pbtxt`, and the served versions.

It may come from anywhere. Nothing in it is run; only regular files are opened, and a configuration only up to
`LARGEST_CONFIG`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ...core.files import read_document, regular_file
from ..loop.text import ModelFileError
from ..triton.engine_model import DESCRIPTION, EngineModel, import_schema
from ..triton.repository import LOOP

CONFIG = "config.pbtxt"
LARGEST_CONFIG = 16 << 20
#: Platform -> the backend that serves it.
PLATFORMS = {
    "tensorrt_plan": "tensorrt",
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "ensemble": "ensemble",
}
#: Backend -> what it opens in a version's folder.
MODEL_FILES = {"python": "model.py", "tensorrt": "model.plan", "onnxruntime": "model.onnx", "pytorch": "model.pt"}


@dataclass(frozen=True)
class ModelFolder:
    """A model: its folder in the repository `root`, and its parsed configuration; None if that does not parse, with the
    reason in `problem`.
    """

    root: Path
    folder: Path
    config: Any | None
    problem: str = ""

    def place(self, path: Path | None = None) -> str:
        """Name a path in the model; its configuration, where none is given."""
        return str((path or self.folder / CONFIG).relative_to(self.root))

    @property
    def backend(self) -> str:
        """The backend that serves it, by its configuration."""
        if self.config is None:
            return ""
        return str(self.config.backend) or PLATFORMS.get(self.config.platform, "")

    @cached_property
    def numbered(self) -> list[Path]:
        """The folders of its versions, the newest last; Triton looks at no others."""
        versions = [path for path in self.folder.iterdir() if path.is_dir() and _is_version(path.name)]
        return sorted(versions, key=lambda path: int(path.name))

    @cached_property
    def served(self) -> list[Path]:
        """The folders of the versions that its version policy serves, whether they exist or not."""
        policy = self.config.version_policy if self.config is not None else None
        if policy is not None and policy.WhichOneof("policy_choice") == "all":
            return self.numbered
        if policy is not None and policy.WhichOneof("policy_choice") == "specific":
            return [self.folder / str(number) for number in policy.specific.versions]
        return self.numbered[-max(1, policy.latest.num_versions if policy is not None else 1) :]

    @property
    def model_file(self) -> str | None:
        """The name of the file that its backend opens in a version's folder; None if not known."""
        file_name = str(self.config.default_model_filename) if self.config is not None else ""
        return file_name or MODEL_FILES.get(self.backend)

    @cached_property
    def model_files(self) -> list[Path]:
        """The files of served versions that are there and can be read."""
        files = [version / self.model_file for version in self.served] if self.model_file else []
        return [file for file in files if is_regular(file)]

    @property
    def is_text(self) -> bool:
        """Tell whether it is fp8q's Python model: its version holds the loop."""
        return any((version / file).exists() for version in self.served for file in LOOP)

    @property
    def is_engine(self) -> bool:
        """Tell whether it is fp8q's plain engine."""
        return (self.folder / DESCRIPTION).exists()

    @cached_property
    def engine(self) -> EngineModel | InputError:
        """The description that fp8q wrote of its plain engine, or why that does not read."""
        try:
            return read_document(self.folder / DESCRIPTION, EngineModel)
        except InputError as error:
            return error

    @property
    def parameters(self) -> dict[str, str]:
        """Its parameters."""
        parameters = self.config.parameters if self.config is not None else {}
        return {name: str(parameters[name].string_value) for name in parameters}


@dataclass(frozen=True)
class Repository:
    """A repository and its models, in the order of their names."""

    root: Path
    models: tuple[ModelFolder, ...]


def is_repository(path: Path) -> bool:
    """Tell whether a folder is a Triton repository: one of its folders holds a configuration."""
    return any((child / CONFIG).is_file() or (child / CONFIG).is_symlink() for child in folders(path))


def folders(path: Path) -> Iterator[Path]:
    """The folders that Triton takes for models; a hidden folder is left over from a killed writer."""
    return (child for child in sorted(path.iterdir()) if child.is_dir() and not child.name.startswith("."))


def open_repository(path: Path) -> Repository:
    """Read the configurations of a repository; raises BackendError where Triton's schema is not installed."""
    return Repository(path, tuple(_open_model(path, folder) for folder in folders(path)))


def _open_model(root: Path, folder: Path) -> ModelFolder:
    config_pb2, text_format = import_schema()
    try:
        if regular_file(folder / CONFIG) > LARGEST_CONFIG:
            return ModelFolder(root, folder, None, f"has more than {LARGEST_CONFIG:,} bytes")
        text = (folder / CONFIG).read_bytes().decode()
        return ModelFolder(root, folder, text_format.Parse(text, config_pb2.ModelConfig()))
    except InputError as error:
        return ModelFolder(root, folder, None, why(error, folder / CONFIG))
    except UnicodeDecodeError as error:
        return ModelFolder(root, folder, None, f"is no text in UTF-8 ({error})")
    except (text_format.ParseError, ValueError, RecursionError) as error:
        fault = " ".join(str(error).split()) or type(error).__name__
        return ModelFolder(root, folder, None, f"does not read by Triton's schema ({fault})")


def _is_version(name: str) -> bool:
    return name.isascii() and name.isdecimal() and not name.startswith("0") and len(name) < 19


def is_regular(path: Path) -> bool:
    """Tell whether there is a regular file that may be read."""
    try:
        regular_file(path)
    except InputError:
        return False
    return True


def why(error: InputError | ModelFileError, path: Path) -> str:
    """Describe the fault of a file, without its name and the remedy."""
    if error.subject == str(path):
        return error.fault
    return f"{error.subject}: {error.fault}"
