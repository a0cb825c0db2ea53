"""Rules R106 to R111, and R121: Python models, of which Triton starts a process (the stub) that imports `model.py`.

If it cannot, a server waits for minutes, so everything that can be known beforehand is checked. No code is run.
"""

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...core.errors import InputError
from ...core.files import DAMAGE, regular_file
from ...core.findings import Broken
from ...core.run_files import GRAPH_FP32
from ...export.lint.check import FORM, PLACES
from ...export.lint.check import RULES as GRAPH_RULES
from ...export.lint.rules import Expectation
from ...export.onnx_file.loading import load_graph
from ..loop.engine_session import RUNTIMES
from ..loop.here import AUTO, ENGINES, ONNX_RUNTIME
from ..loop.text import ModelFileError, Vocabulary
from ..triton.engine_model import import_schema
from ..triton.repository import COMPANIONS, OPTIONAL_COMPANIONS
from .folder import ModelFolder, is_regular, why
from .rules import model_rule
from .rules_config import AGAIN

CLASS = "TritonPythonModel"
STUB = "triton_python_backend_stub"
ENVIRONMENT = "EXECUTION_ENV_PATH"
#: The model's own folder, with which the value of `EXECUTION_ENV_PATH` may begin.
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
#: Source that is parsed, in bytes; no model's is longer.
LARGEST_SOURCE = 4 << 20
#: Rules about a graph's weights, and about its interface, with which it is served.
OF_WEIGHTS = (*PLACES, "F404", "F405", "F406", "F407")
INTERFACE = "F306"


@model_rule("R106", "python-code")
def python_code(model: ModelFolder) -> Broken:
    """A model.py compiles, has the class TritonPythonModel, and the modules beside it that it imports are there and
    compile too: a process that ends while it imports keeps the server waiting.
    """
    if model.backend != "python":
        return
    for file in model.model_files:
        for place, fault in _imports(file, {file}):
            yield model.place(place), f"{fault}; {AGAIN}"
        tree = _parsed(file)
        if isinstance(tree, ast.Module) and CLASS not in _names(tree):
            yield model.place(file), f"has no class {CLASS}; {AGAIN}"


def _parsed(file: Path) -> ast.Module | str:
    """Parse a module; return its syntax tree, or the reason why it does not compile."""
    try:
        if regular_file(file) > LARGEST_SOURCE:
            return f"has more than {LARGEST_SOURCE:,} bytes"
        return ast.parse(file.read_bytes())
    except InputError as error:
        return why(error, file)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"does not compile ({getattr(error, 'msg', None) or error}{line})"


def _imports(file: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield the modules that do not compile, with the reason: this one, and those in its folder that it imports.

    Modules in `seen` are not checked again.
    """
    tree = _parsed(file)
    if isinstance(tree, str):
        yield file, tree
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.level != 1:
            continue
        for name in [node.module.partition(".")[0]] if node.module else [alias.name for alias in node.names]:
            imported = file.parent / f"{name}.py"
            if imported in seen or (file.parent / name).is_dir():
                continue
            seen.add(imported)
            yield from _imports(imported, seen)


def _names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at its top."""
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@model_rule("R107", "python-environment")
def python_environment(model: ModelFolder) -> Broken:
    """A stub that a model brings along may be executed, and the Python environment that it names is there: a stub that
    cannot start keeps the server waiting as a missing model.py does.
    """
    if model.backend != "python":
        return
    stub = model.folder / STUB
    if (stub.exists() or stub.is_symlink()) and not (stub.is_file() and os.access(stub, os.X_OK)):
        yield model.place(stub), "cannot be executed; set its mode (`chmod +x`), or take it out"
    if environment := model.parameters.get(ENVIRONMENT):
        path = Path(environment.replace(MODEL_FOLDER, str(model.folder)))
        if MODEL_FOLDER in environment and not path.exists():
            yield model.place(), f"{ENVIRONMENT} names {environment}, which is not there; put it there, or leave it out"


@model_rule("R108", "parameters", scope="text")
def parameters(model: ModelFolder) -> Broken:
    """fp8q's Python model has the parameters that its model.py reads: runtime, weights (a folder in the version's) and
    max_batch; an engine that it may run is a file that reads.
    """
    for name in ("runtime", "weights", "max_batch"):
        if name not in model.parameters:
            yield model.place(), f"has no parameter {name}; {AGAIN}"
    runtime = model.parameters.get("runtime", AUTO)
    most = model.parameters.get("max_batch", "1")
    if runtime not in (AUTO, ONNX_RUNTIME, *RUNTIMES):
        yield model.place(), f"there is no runtime {runtime}; set {AUTO}, {ONNX_RUNTIME}, {' or '.join(RUNTIMES)}"
    if runtime in RUNTIMES and not _plans(model, runtime):
        yield (
            model.place(),
            f"holds no engine of {runtime} in the version's {ENGINES}; set {AUTO}, or {AGAIN}",
        )
    for plan in (plan for engine_runtime in RUNTIMES for plan in _plans(model, engine_runtime)):
        if not is_regular(plan) or not plan.stat().st_size:
            yield model.place(plan), f"is no file that reads, or empty; {AGAIN}"
    if not (most.isascii() and most.isdecimal() and int(most[:20]) > 0):
        yield model.place(), f"max_batch is {most!r}, and is a number of requests; set 8, for example"
    if "weights" in model.parameters and not _weights(model):
        yield model.place(), f"there is no folder {model.parameters['weights']} in the version's; {AGAIN}"


def _plans(model: ModelFolder, runtime: str) -> list[Path]:
    """The engines of a runtime, in the versions that are served."""
    return [plan for version in model.served for plan in sorted((version / ENGINES / runtime).glob("*.plan"))]


def _weights(model: ModelFolder) -> list[Path]:
    """The folders of the weights, in the versions that are served; none outside of them."""
    name = model.parameters.get("weights", "")
    if not name or Path(name).name != name:
        return []
    return [version / name for version in model.served if (version / name).is_dir()]


@model_rule("R109", "model-files", scope="text")
def model_files(model: ModelFolder) -> Broken:
    """The tokenizer and the configurations beside the weights are there, and say what generation needs."""
    for weights in _weights(model):
        files = [weights / name for name in COMPANIONS]
        files += [weights / name for name in OPTIONAL_COMPANIONS if (weights / name).exists()]
        try:
            for file in files:
                regular_file(file)
            Vocabulary.read(weights)
        except (InputError, ModelFileError) as error:
            file = next((file for file in files if error.subject == str(file)), weights)
            yield model.place(file), f"{why(error, file)}; {AGAIN}"
        except DAMAGE as error:
            fault = " ".join(str(error).split()) or type(error).__name__
            yield model.place(weights), f"the configurations do not say what generation needs ({fault}); {AGAIN}"


@model_rule("R110", "weights", scope="text")
def weights_of_graph(model: ModelFolder) -> Broken:
    """The graph of fp8q's Python model reads, takes what the loop gives it, and its weights are the files beside it,
    whole and the right ones: rules F314, F306 and F401 to F407.
    """
    for weights in _weights(model):
        file = weights / GRAPH_FP32
        try:
            graph = load_graph(file)
        except InputError as error:
            yield model.place(file), f"{why(error, file)}; {AGAIN}"
            continue
        if not (broken := list(GRAPH_RULES[FORM].findings(graph, None))):
            broken = [
                *GRAPH_RULES[INTERFACE].findings(graph, Expectation({})),
                *(finding for number in OF_WEIGHTS for finding in GRAPH_RULES[number].findings(graph, None)),
            ]
        for finding in broken:
            yield model.place(file), str(finding)


@model_rule("R111", "batching", scope="text")
def batching(model: ModelFolder) -> Broken:
    """fp8q's Python model answers each request in pieces, when it will (decoupled), and batches requests itself: with a
    max_batch_size of 1, as Triton's OpenAI front end sends them. Without the first no request is ever answered.
    """
    assert model.config is not None, "`model_rule` leaves out what does not parse"
    if not model.config.model_transaction_policy.decoupled:
        yield model.place(), f"the model is not decoupled; set model_transaction_policy, or {AGAIN}"
    if model.config.max_batch_size != 1:
        yield model.place(), f"max_batch_size is {model.config.max_batch_size}, and requests are [1, n]; set 1"


@model_rule("R121", "instances", "warning", scope="text")
def instances(model: ModelFolder) -> Broken:
    """fp8q's Python model has one instance, or one on each GPU that is named: each loads the weights and has a cache of
    its own, and requests are batched within one. Without a kind Triton makes one for each GPU that the host has.
    """
    assert model.config is not None, "`model_rule` leaves out what does not parse"
    groups = list(model.config.instance_group)
    kinds = import_schema()[0].ModelInstanceGroup
    if not groups or any(group.kind == kinds.KIND_AUTO or _on_all(group, kinds) for group in groups):
        yield (
            model.place(),
            (
                "instance_group names no kind or no GPUs, so each GPU of a host gets an instance; set kind: KIND_CPU "
                "for one on the first GPU, or KIND_GPU and gpus"
            ),
        )
    if most := max((group.count for group in groups if group.count > 1), default=0):
        yield model.place(), f"instance_group has count {most}, and each instance loads the weights again; set 1"


def _on_all(group: Any, kinds: Any) -> bool:
    return bool(group.kind == kinds.KIND_GPU and not group.gpus)
