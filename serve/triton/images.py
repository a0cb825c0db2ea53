"""The image that serves a repository: the release of Triton, and the packages to install in it.

A TensorRT plan runs on the TensorRT that built it and no other, so the release is the one with that version. NVIDIA's
support matrix (`MATRIX`) lists them. It could not be opened when this was written, so each row is from another place:
10.16.0 from the release notes of the CUDA Deep Learning image 26.03, on which the month's images are built; the others
from what people who run the images found in them, of `tritonserver` for 10.15.1, 10.16.1 and 11.1.0, of `tensorrt` of
the same month for 11.0.0 and 11.2.1. A version that is not here is not guessed: NVIDIA's release notes of 26.09 and
26.10 name their CUDA (13.4.1, 13.4.3) and not their TensorRT, of which 11.4.0 is the newest; nothing else that could be
searched in November 2026 does. For such a version the Dockerfile says how an image is asked for its own (`ASK`), and
where to begin: with the first release that is not known to have another.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from string import Template

from ..loop.engine_session import KERNELS_FOLDER

MATRIX = "https://docs.nvidia.com/deeplearning/frameworks/support-matrix/index.html"
#: TensorRT -> the release of Triton that has it; the newest release last.
RELEASES = {
    "10.15.1": "26.02",
    "10.16.0": "26.03",
    "10.16.1": "26.05",
    "11.0.0": "26.06",
    "11.1.0": "26.07",
    "11.2.1": "26.08",
}
#: The command that prints the TensorRT of a release's image.
ASK = "docker run --rm nvcr.io/nvidia/tritonserver:YY.MM-py3 dpkg-query -W 'libnvinfer[0-9]*'"
#: The packages that the Python model needs and the image lacks, as constraints.txt pins them. NumPy is there: the
#: server is built against it.
PINS = {"onnxruntime": "1.32.0", "tokenizers": "0.23.3"}
TEMPLATES = Path(__file__).parent / "templates"
_ARG = re.compile(r"^ARG TRITON(?:=(\S+))?\s*$", re.MULTILINE)
_FROM = re.compile(r"^FROM\s+nvcr\.io/nvidia/tritonserver:(\S+)-py3\s*$", re.MULTILINE)

#: The folder of an image for TensorRT-RTX's compiled kernels, on which a volume is mounted that outlives containers.
KERNELS_VOLUME = "/var/cache/fp8q"
KERNELS = """\
# TensorRT-RTX's compiled kernels: the repository may be mounted read-only.
RUN install -d -m 1777 {folder}
ENV {variable}={folder}
"""


def release_of(tensorrt: str, releases: Mapping[str, str] = RELEASES) -> str | None:
    """The release of Triton with a version of TensorRT, such as 10.16.1.11; None if not known."""
    return releases.get(".".join(tensorrt.split(".")[:3]))


def dockerfile(name: str, tensorrt: str | None, awaits_plan: bool, packages: Mapping[str, str] = PINS) -> str:
    """The Dockerfile of a repository whose plan was built by this version of `tensorrt` (None: there is no plan);
    `awaits_plan`: a plan is to be added; `packages`: to install in the image.

    Where the release is unknown it has no default: the build then stops and says so.
    """
    release = newest() if tensorrt is None and not awaits_plan else release_of(tensorrt or "")
    known = ", ".join(f"{version} in {where}" for version, where in RELEASES.items())
    if tensorrt is not None and release:
        why = f"TensorRT {tensorrt} built the plan, and runs it: this release has it."
    elif release:
        why = "Any release will do: the model brings its own runtime, and uses nothing of the image's TensorRT."
    else:
        built = f"{tensorrt} built the plan" if tensorrt else "which built the plan"
        why = (
            f"The release must have the TensorRT {built}: give it, as --build-arg TRITON=YY.MM.\n"
            f"# Known here: {known}; all are in\n# {MATRIX}\n"
            f"# An image tells its own; {where_to_begin(tensorrt)}:\n#   {ASK}"
        )
    return Template((TEMPLATES / "Dockerfile").read_text(encoding="utf-8")).substitute(
        image=image_name(name),
        why=why,
        release=f"={release}" if release else "",
        packages=pinned(packages),
        kernels=KERNELS.format(folder=KERNELS_VOLUME, variable=KERNELS_FOLDER) if "tensorrt-rtx" in packages else "",
    )


def where_to_begin(tensorrt: str | None, releases: Mapping[str, str] = RELEASES) -> str:
    """The release to look at first for a TensorRT whose release is not known (None: nor is its version)."""
    if tensorrt is None:
        return f"begin with {newest()} and go on to later ones"
    wanted = numbers_of(tensorrt)
    before = [where for version, where in releases.items() if numbers_of(version) < wanted]
    later = [where for version, where in releases.items() if numbers_of(version) > wanted]
    if not later:
        return f"begin with {month_from(before[-1], 1)} and go on to later ones"
    if not before:
        return f"begin with {month_from(later[0], -1)} and go back to earlier ones"
    between = month_from(before[-1], 1)
    if between == later[0]:
        return (
            f"no month lies between {before[-1]} and {later[0]}, so build the engine with the TensorRT of one of them"
        )
    return f"begin with {between}, which is not known, and go on up to {later[0]}"


def month_from(release: str, months: int) -> str:
    """The release so many `months` after another, as 26.08 follows 26.07."""
    year, month = divmod(12 * int(release[:2]) + int(release[3:]) - 1 + months, 12)
    return f"{year:02}.{month + 1:02}"


def numbers_of(version: str) -> list[int]:
    """The numbers of a version, up to three."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def pinned(packages: Mapping[str, str]) -> str:
    """Packages as pip takes them."""
    return " ".join(f"{package}=={version}" for package, version in packages.items())


def image_name(name: str) -> str:
    """Name the image of a model's repository: Docker takes no capitals."""
    return f"{name.lower()}-triton"


def newest() -> str:
    """The newest release that is known here."""
    return list(RELEASES.values())[-1]


def release_in(text: str) -> str | None:
    """The default release of Triton that a Dockerfile builds on; None where it names none."""
    base = _FROM.search(text)
    if base is None:
        return None
    if base[1] != "${TRITON}":
        return base[1]
    release = _ARG.search(text)
    return release[1] if release else None
