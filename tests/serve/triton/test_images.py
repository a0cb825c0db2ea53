from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fp8q.options import TritonOptions
from fp8q.serve.loop.engine_session import EngineRuntime
from fp8q.serve.triton.images import PINS, RELEASES, dockerfile, newest, release_in, release_of, where_to_begin
from fp8q.serve.triton.repository import PythonModelEngine, readme

ROOT = Path(__file__).resolve().parents[3]


def test_what_the_image_lacks_is_pinned_as_constraints_are() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {r.name: str(r.specifier) for r in map(Requirement, filter(None, (line.split("#")[0] for line in lines)))}
    assert {name: pins[name] for name in PINS} == {name: f"=={version}" for name, version in PINS.items()}


@pytest.mark.parametrize(
    ("version", "release"),
    [("10.16.1.11", "26.05"), ("11.2.1.2", "26.08"), ("10.15.1", "26.02"), ("10.16", None), ("12.0.0.1", None)],
)
def test_a_release_is_told_by_three_numbers_of_the_version_and_never_guessed(version: str, release: str | None) -> None:
    assert release_of(version) == release


def test_the_newest_release_is_the_last() -> None:
    assert newest() == max(RELEASES.values())
    assert list(RELEASES) == sorted(RELEASES, key=lambda version: [int(number) for number in version.split(".")])


def test_the_image_has_the_plans_tensorrt_and_what_triton_lacks() -> None:
    assert dockerfile("Demo", "10.16.1.11", awaits_plan=False) == (
        "# What Triton's image lacks for this repository, made by `fp8q triton`. The repository is mounted, not "
        "copied:\n"
        "#   docker build -t demo-triton - < Dockerfile\n"
        "# TensorRT 10.16.1.11 built the plan, and runs it: this release has it.\n"
        "ARG TRITON=26.05\n"
        "FROM nvcr.io/nvidia/tritonserver:${TRITON}-py3\n"
        "# Ubuntu's Python takes packages from an index only when told to.\n"
        "ENV PIP_BREAK_SYSTEM_PACKAGES=1\n"
        "RUN pip install --no-cache-dir onnxruntime==1.32.0 tokenizers==0.23.3\n"
        "# The image's own user triton-server, by number, so that Kubernetes' runAsNonRoot can tell; the repository "
        "must be\n"
        "# readable for it.\n"
        "USER 1000:1000\n"
        "EXPOSE 8000 8001 8002\n"
        'CMD ["tritonserver", "--model-repository=/models"]\n'
    )


def test_the_image_has_a_folder_for_kernels_that_tensorrt_rtx_compiles() -> None:
    lines = dockerfile("Demo", None, awaits_plan=False, packages={"tensorrt-rtx": "1.7.1.116"}).splitlines()
    made = lines.index("RUN install -d -m 1777 /var/cache/fp8q")
    assert lines[made + 1] == "ENV FP8Q_KERNELS=/var/cache/fp8q"
    assert made < lines.index("USER 1000:1000")


@pytest.mark.parametrize(("runtime", "volumes"), [("tensorrt-rtx", 1), ("tensorrt", 0)])
def test_the_command_of_the_image_mounts_a_volume_there(runtime: EngineRuntime, volumes: int) -> None:
    engine = PythonModelEngine(runtime, "1.7.1.116", "sm89", Path("sm89.plan"))
    text = readme("demo", TritonOptions(), None, dockerfile("demo", None, awaits_plan=False), [engine])
    assert text.count(" -v fp8q-kernels:/var/cache/fp8q -v ") == volumes


@pytest.mark.parametrize(
    ("tensorrt", "begin"),
    [
        ("11.4.0.1", "begin with 26.09 and go on to later ones"),
        (
            "11.1.1.2",
            "no month lies between 26.07 and 26.08, so build the engine with the TensorRT of one of them",
        ),
        ("10.14.1", "begin with 26.01 and go back to earlier ones"),
    ],
)
def test_for_a_tensorrt_that_is_not_known_the_dockerfile_says_how_to_find_its_release(
    tensorrt: str, begin: str
) -> None:
    lines = dockerfile("demo", tensorrt, awaits_plan=False).splitlines()
    at = lines.index(f"# An image tells its own; {begin}:")
    assert lines[at + 1 : at + 3] == [
        "#   docker run --rm nvcr.io/nvidia/tritonserver:YY.MM-py3 dpkg-query -W 'libnvinfer[0-9]*'",
        "ARG TRITON",
    ]


def test_between_two_releases_that_are_known_the_months_between_them_are_looked_at() -> None:
    known = {"1.0.0": "25.11", "1.2.0": "26.02"}
    assert where_to_begin("1.1.0", known) == "begin with 25.12, which is not known, and go on up to 26.02"
    assert where_to_begin("1.3.0", {"1.0.0": "25.12"}) == "begin with 26.01 and go on to later ones"


@pytest.mark.parametrize(
    ("tensorrt", "awaits_plan", "release", "words"),
    [
        ("10.16.1.11", False, "26.05", "TensorRT 10.16.1.11 built the plan, and runs it: this release has it."),
        ("12.0.0.1", False, None, "The release must have the TensorRT 12.0.0.1 built the plan: give it, as "),
        (None, True, None, "The release must have the TensorRT which built the plan: give it, as "),
        (None, False, "26.08", "Any release will do: the model brings its own runtime"),
    ],
)
def test_the_release_has_a_default_only_where_it_is_known(
    tensorrt: str | None, awaits_plan: bool, release: str | None, words: str
) -> None:
    text = dockerfile("demo", tensorrt, awaits_plan)
    assert words in text
    assert release_in(text) == release


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("FROM nvcr.io/nvidia/tritonserver:26.02-py3\n", "26.02"),
        ("ARG TRITON=26.03\nFROM nvcr.io/nvidia/tritonserver:${TRITON}-py3\n", "26.03"),
        ("FROM ubuntu:24.04\n", None),
        ("", None),
    ],
)
def test_a_dockerfiles_release_is_read(text: str, release: str | None) -> None:
    assert release_in(text) == release
