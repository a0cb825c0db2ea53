"""`engines/<target>.sh`: the command of NVIDIA's own tool that builds and times the same engine.

`trtexec` comes with TensorRT and `tensorrt_rtx` with TensorRT-RTX's SDK (not with its Python package); apart from the
target they take the same options. Options follow their documentation and the tool's source
(samples/common/sampleOptions.cpp); the script has not run with either yet.
"""

import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from onnx import TensorProto

from ...core.files import replacing
from ..onnx_file.loading import load_graph
from .info import EngineInfo
from .profiles import Profile
from .targets import TITLES

#: Runtime -> its tool.
TOOLS = {"tensorrt": "trtexec", "tensorrt-rtx": "tensorrt_rtx"}
#: From this version of TensorRT on, every network is strongly typed.
ALWAYS_TYPED = 11
#: Inputs that trtexec must not fill itself, by the bytes of a value: noise would be no token, and FP8 it cannot fill at
#: all (sampleInference.cpp asserts).
LOADED: dict[int, int] = {TensorProto.INT64: 8, TensorProto.FLOAT8E4M3FN: 1}
#: The input whose every slot is 1; all others that are loaded are 0.
FILLED = "attention_mask"

_HEAD = """\
#!/usr/bin/env bash
# Builds with NVIDIA's {tool} what `fp8q build-engine` built for {target} with {title} {version}:
# the same graph, profiles and types; then times both profiles at their likely sizes: `bash {target}.sh [ENGINE]`,
# the engine beside this script unless given. {tool} is looked for on PATH, or given as TOOL=/path/to/{tool}.
# What the engine runs: `fp8q engine RUN --target {target} --plan ENGINE`.
set -euo pipefail
CALLER=$PWD
cd "$(dirname "${{BASH_SOURCE[0]}}")"
TOOL=${{TOOL:-{tool}}}
ENGINE=${{1:-{target}.{tool}.plan}}
[[ -z ${{1-}} || $ENGINE == /* ]] || ENGINE=$CALLER/$ENGINE
INPUTS=$(mktemp -d)
trap 'rm -rf "$INPUTS"' EXIT
"""


def write_script(path: Path, onnx_file: Path, info: EngineInfo, workspace: int | None) -> None:
    """Write the script that builds and times the engine `info` of a graph; `workspace` in MiB, None: the tool's own
    limit.
    """
    with replacing(path) as partial:
        partial.write_text(script(onnx_file, info, workspace, path.parent), encoding="utf-8")


def script(onnx_file: Path, info: EngineInfo, workspace: int | None, directory: Path) -> str:
    """Make the script's text; the graph is named relative to `directory`, as `../model/model.onnx`."""
    inputs = load_graph(onnx_file).inputs
    dimensions = {
        name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for name, value in inputs.items()
    }
    kinds = {name: value.type.tensor_type.elem_type for name, value in inputs.items()}
    loaded = {name: LOADED[kind] for name, kind in kinds.items() if kind in LOADED}
    tool = TOOLS[info.runtime]
    graph = os.path.relpath(onnx_file, directory)
    build = [
        f"--onnx={graph}",
        '--saveEngine="$ENGINE"',
        "--skipInference",
        *_flags(info, workspace),
        *_build(info.profiles, dimensions),
    ]
    parts = [
        _HEAD.format(tool=tool, target=info.target, title=TITLES[info.runtime], version=info.version),
        _command(build),
    ]
    for index, profile in enumerate(info.profiles):
        shapes = {name: profile.shapes(name, sizes)[1] for name, sizes in dimensions.items()}
        files = ",".join(f'{name}:"$INPUTS/{name}"' for name in loaded)
        run = [
            f"--useProfile={index}",
            f"--shapes={_shapes(shapes)}",
            f"--loadInputs={files}",
            "--noDataTransfers",
            "--useSpinWait",
        ]
        parts += [
            f"\n# {profile.name}\n",
            *(_fill(name, math.prod(shapes[name]), size) for name, size in loaded.items()),
            _command(['--loadEngine="$ENGINE"', *run]),
        ]
    return "".join(parts)


def _flags(info: EngineInfo, workspace: int | None) -> list[str]:
    if info.runtime == "tensorrt-rtx":
        flags = [f"--computeCapabilities={info.target.removeprefix('sm')}"]
    else:
        typed = ["--stronglyTyped"] if int(info.version.partition(".")[0]) < ALWAYS_TYPED else []
        flags = [*typed, "--profilingVerbosity=detailed", f"--timingCacheFile={info.target}.trtexec.timings"]
    return flags + ([f"--memPoolSize=workspace:{workspace}M"] if workspace else [])


def _build(profiles: Sequence[Profile], dimensions: Mapping[str, Sequence[int | str]]) -> list[str]:
    options = []
    for index, profile in enumerate(profiles):
        shapes = [
            {name: profile.shapes(name, sizes)[which] for name, sizes in dimensions.items()} for which in range(3)
        ]
        options += [
            f"--profile={index}",
            *(f"--{kind}Shapes={_shapes(sizes)}" for kind, sizes in zip(("min", "opt", "max"), shapes, strict=True)),
        ]
    return options


def _shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    return ",".join(f"{shlex.quote(name)}:{'x'.join(map(str, sizes))}" for name, sizes in shapes.items())


def _fill(name: str, count: int, size: int) -> str:
    """Make a file of `count` values of `size` bytes: ones for the mask, zeros otherwise. trtexec expects one byte for
    an empty tensor.
    """
    if name == FILLED:
        return f"printf '\\001\\0\\0\\0\\0\\0\\0\\0%.0s' $(seq {count}) > \"$INPUTS/{name}\"\n"
    return f'head -c {max(1, size * count)} /dev/zero > "$INPUTS/{name}"\n'


def _command(arguments: Sequence[str]) -> str:
    return '"$TOOL" ' + " \\\n  ".join(arguments) + "\n"
