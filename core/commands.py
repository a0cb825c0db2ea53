"""Commands on a run, as messages name them: with the run's own path as a shell's word, so that they can be pasted.

What is told below the stages knows no path of a run, and says RUN; whoever opened the run puts its path there
(`in_run`).
"""

import re
from pathlib import Path
from shlex import quote

#: The command that runs a stage, if its name differs from the stage's: `calibrate` measures, quantizes and exports.
COMMANDS = {
    "corpus": "calibrate",
    "costliest": "calibrate",
    "forms": "run",
    "measure": "calibrate",
    "quantize": "calibrate",
    "first-tokens": "calibrate",
    "outputs": "calibrate",
    "queries": "export --attention fp8",
    "adapter": "distill --train adapter",
    "needles": "validate --needles LENGTHS",
    "continue": "report",
} | {
    f"{stage}-{precision}": f"{stage} --precision {precision}"
    for stage in ("export", "build-engine")
    for precision in ("bf16", "int8")
}


def name_in_commands(root: Path) -> str:
    """The path of a run as a shell's word."""
    return quote(str(root))


def in_run(text: str, root: Path) -> str:
    """The text with the path of the run at `root` in its commands, in the place of RUN."""
    return re.sub(r"(`fp8q [a-z-]+) RUN\b", lambda match: f"{match[1]} {name_in_commands(root)}", text)


def engine_stage(precision: str, adapter: str | None = None) -> str:
    """The name of the stage that builds the engines of a precision, or those with an adapter."""
    if adapter:
        return f"build-engine --adapter {adapter}"
    if precision == "fp8":
        return "build-engine"
    return f"build-engine-{precision}"


def stage_command(stage: str, root: Path) -> str:
    """The command that does `stage` of the run at `root`; `calibrate` and `run` need a model and a text, so alone."""
    name, *options = COMMANDS.get(stage, stage).split()
    return " ".join(["fp8q", name, *([] if name in ("calibrate", "run") else [name_in_commands(root)]), *options])


def tune_command(name: str, budget: str, graph: bool, plugin: bool = False) -> str:
    """`fp8q tune` with the option `budget`, for the run of that `name` in commands.

    A run without a `graph` has no engine and no Triton repository: vLLM serves it, by one code an activation
    unless it has the `plugin`.
    """
    server = "" if graph else " --for vllm-plugin" if plugin else " --for vllm"
    return f"fp8q tune {name}{server} {budget}"
