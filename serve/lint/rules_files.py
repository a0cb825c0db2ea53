"""Rules R115 to R118: the plan and the image that runs it; links and permissions."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ...core.errors import InputError
from ...core.files import NO_FILES, regular_file
from ...core.findings import Broken
from ...export.engine.targets import read_engine_header
from ..triton.engine_model import EngineModel
from ..triton.images import RELEASES, release_in
from .folder import ModelFolder, Repository
from .rules import model_rule, repository_rule

#: A Dockerfile that is read, in bytes.
LARGEST_DOCKERFILE = 1 << 20


def plans(model: ModelFolder) -> list[Path]:
    """The plans of a model that TensorRT's backend serves."""
    if model.backend == "tensorrt":
        return model.model_files
    return []


@model_rule("R115", "plan")
def plan(model: ModelFolder) -> Broken:
    """A plan is TensorRT's, and the one that engine.json was written for. TensorRT-RTX's engines end in .plan as well,
    and Triton's backend does not read them; another plan may have other tensors and profiles.
    """
    described = model.engine if model.is_engine else None
    for file in plans(model):
        runtime, version = read_engine_header(file)
        if file.stat().st_size and runtime != "tensorrt":  # an empty one breaks R105
            whose = "TensorRT-RTX's, which Triton does not read" if runtime else "not of TensorRT's form"
            yield model.place(file), f"is {whose}; put an engine there that `fp8q build-engine` built with TensorRT"
        elif runtime and isinstance(described, EngineModel):
            comparisons = [
                (f"{file.stat().st_size} bytes", described.bytes and f"{described.bytes} bytes"),
                (f"TensorRT {version}", version and described.tensorrt and f"TensorRT {described.tensorrt}"),
            ]
            for actual, expected in comparisons:
                if expected and actual != expected:
                    yield model.place(file), f"is of {actual}, and engine.json of {expected}; run `fp8q triton` again"


@repository_rule("R116", "image")
def image(repository: Repository) -> Broken:
    """The image of the Dockerfile has the TensorRT that built the plans: no other reads them. Releases that fp8q does
    not know are not judged.
    """
    file = repository.root / "Dockerfile"
    try:
        if regular_file(file) > LARGEST_DOCKERFILE:
            return
        release = release_in(file.read_text(encoding="utf-8", errors="replace"))
    except InputError:
        return
    has = next((version for version, known in RELEASES.items() if known == release), None)
    for model in repository.models:
        for path in plans(model) if has else ():
            _, version = read_engine_header(path)
            if version and version.split(".")[:3] != str(has).split("."):
                yield (
                    "Dockerfile",
                    (
                        f"Triton {release} has TensorRT {has}, and {model.place(path)} is of {version}; "
                        "take the release that has it, or build the engine again"
                    ),
                )


@repository_rule("R117", "links")
def links(repository: Repository) -> Broken:
    """Links lead to something inside the repository, and all else is files and folders. A repository is copied and
    mounted alone; a pipe or a device may never be read to its end.
    """
    root = Path(os.path.realpath(repository.root))
    for path in _walk(repository.root):
        place = str(path.relative_to(repository.root))
        if path.is_symlink():
            target = Path(os.path.realpath(path))
            if not target.is_relative_to(root):
                yield place, "is a link that leads out of the repository; put the file itself there"
            elif not target.exists():
                yield place, "is a link to what is not there; put the file itself there"
            continue
        mode = path.lstat().st_mode
        kind = next((kind for is_one, kind in NO_FILES if is_one(mode) and kind != "directory"), None)
        if kind:
            yield place, f"is a {kind}; take it out"


@repository_rule("R118", "permissions", "warning")
def permissions(repository: Repository) -> Broken:
    """Whoever runs the server may read the files: in a container, or as a service, that is often another user."""
    for path in _walk(repository.root):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & 0o005 != 0o005:
            yield (
                str(path.relative_to(repository.root)),
                "is a folder that others may not open; set its mode (`chmod o+rx`)",
            )
        elif stat.S_ISREG(mode) and not mode & 0o004:
            yield (
                str(path.relative_to(repository.root)),
                "is a file that others may not read; set its mode (`chmod o+r`)",
            )


def _walk(root: Path) -> Iterator[Path]:
    """All that lies in a repository; no link is followed."""
    for folder, directories, files in os.walk(root):
        directories.sort()
        for name in sorted([*directories, *files]):
            yield Path(folder, name)
