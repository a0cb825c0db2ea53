"""`report.html` and `report.ipynb`: the run, to show to somebody.

Both say the same from the same rows and plots. The page is one file that asks the network for nothing (its own content
security policy forbids it to), opens from disk, and reads on paper, on a phone and in the dark. The notebook is
`notebooks/accuracy_report.ipynb`, executed inside the run by the interpreter that runs fp8q. A part whose stage has not
run yet says which command to run.
"""

import math
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any

from ..calibrate.measure.statistics import load_statistics
from ..errors import BackendError
from ..files import replacing
from ..options import WITHOUT_FP8
from ..quantize.formats import E4M3
from ..reporter import Reporter
from ..run import Run
from ..undo import scratch, undoing
from . import columns, curves, frequency, tables
from .accuracy import Protocol, load_accuracy, load_tokens
from .columns import Table
from .tables import AccuracyRow, EngineRow, ModuleRow

if TYPE_CHECKING:
    from .plots import Plot

#: What the extra `report` brings, by the names they are imported under.
REPORT_MODULES = ("matplotlib", "papermill", "ipykernel")
NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "accuracy_report.ipynb"
#: The axis of the sparklines, in octaves of the code: where it starts, how long it is, and what E4M3 holds of it.
SPARK = {
    "left": curves.SPARK_LEFT,
    "width": curves.SPARK_RIGHT - curves.SPARK_LEFT,
    "floor": math.log2(E4M3.midpoints[0]),
    "ceiling": math.log2(E4M3.max),
}
TEMPLATE = Path(__file__).with_name("report.html.j2")


def write_report(run: Run, report: Reporter) -> list[Path]:
    """Write `report.html` and `report.ipynb` of `run`; returns both paths.

    Raises BackendError when the extra `report` is not installed or no kernel starts, InputError when the run has no
    scales yet or a file of it was changed.
    """
    for module in REPORT_MODULES:
        if find_spec(module) is None:
            raise BackendError(
                f"{module} is not installed and the report needs it; install it with `pip install 'fp8q[report]'`"
            )
    with report.track("Writing the report", 2, "files") as advance:
        page = render(run)
        with replacing(run.report_html) as partial:
            partial.write_text(page, encoding="utf-8")
        advance(1)
        notebook = execute(NOTEBOOK, run.root, {"RUN": "."})
        with replacing(run.report_ipynb) as partial:
            partial.write_text(notebook, encoding="utf-8")
        advance(1)
    return [run.report_html, run.report_ipynb]


def report_tables(run: Run) -> dict[str, Table[Any]]:
    """The tables of the report: `accuracy`, `frequency`, `sizes`, `engines`, `modules`, `kept`, `facts`, `stages`,
    `notes`.

    Raises InputError when the run has no scales yet, or when one of its files is not what its stage wrote.
    """
    modules, stages = tables.module_rows(run), tables.stage_rows(run)
    return {
        "accuracy": columns.accuracy_table(tables.accuracy_rows(run)),
        "frequency": frequency.frequency_table(frequency.frequency_rows(run)),
        "sizes": columns.size_table(tables.size_rows(run)),
        "engines": columns.engine_table(tables.engine_rows(run)),
        "modules": columns.module_table(modules),
        "kept": columns.kept_table(modules),
        "facts": columns.fact_table(tables.fact_rows(run)),
        "stages": columns.stage_table(stages),
        "notes": columns.note_table(stages),
    }


def report_plots(run: Run) -> "dict[str, Plot]":
    """The plots of the report: `histogram` (of the noisiest tensor) and `layers` where something is in FP8, `positions`
    where the run was evaluated.
    """
    from . import plots

    rows = [row for row in tables.module_rows(run) if row.scale is not None]
    drawn: dict[str, Plot] = {}
    if rows:
        worst = plots.noisiest(rows)
        drawn["histogram"] = plots.histogram_plot(worst, load_statistics(run).tensors[str(worst.tensor)].histogram)
        drawn["layers"] = plots.layer_plot(rows)
    if tables.wrote(run, run.tokens, "validate"):
        sampled = {row.runtime for row in tables.accuracy_rows(run) if row.tokens is not None}
        nll = {name: values for name, values in load_tokens(run).items() if name not in sampled}
        drawn["positions"] = plots.position_plot(nll)
    return drawn


def render(run: Run) -> str:
    """The page, HTML."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    contents = report_tables(run)
    statistics, modules = load_statistics(run), contents["modules"].rows
    drawn = {row.tensor: row.scale for row in modules if row.tensor in statistics.tensors}
    sparklines = {name: curves.sparkline(statistics.tensors[name].histogram, scale) for name, scale in drawn.items()}
    return template.render(
        model=statistics.record.model,
        tables=contents,
        plots=report_plots(run),
        sparklines=sparklines,
        spark=SPARK,
        summary=summary(contents["accuracy"].rows, modules, contents["kept"].rows),
        protocol=protocol(run),
        engines=engines(contents["engines"].rows),
    )


def summary(accuracy: Sequence[AccuracyRow], modules: Sequence[ModuleRow], kept: Sequence[ModuleRow]) -> str:
    """Is it still the same model? In two sentences."""
    products = sum(row.kind == "product" for row in modules)
    done = f"{products} of {products + len(kept)} matrix products run in FP8" + (
        ", keys and values are cached in FP8." if len(modules) > products else "."
    )
    whole = [row for row in accuracy if row.runtime not in WITHOUT_FP8 and row.tokens is None]
    compared = [row for row in whole if row.perplexity_increase is not None]
    base = next((row for row in accuracy if row.runtime == "bf16"), None)
    if not compared or base is None:
        return f"{done} What that costs has not been evaluated yet."
    worst = max(compared, key=lambda row: row.perplexity_increase or 0.0)
    which = f"{worst.runtime}, the worst of {len(compared)} FP8 runtimes" if len(compared) > 1 else worst.runtime
    change = (
        f"Perplexity goes from {base.perplexity:.4f} in BF16 to {worst.perplexity:.4f} in FP8 ({which}): "
        f"{columns.increase(worst.perplexity_increase or 0.0)}"
    )
    if worst.increase_low is None or worst.increase_high is None:
        why = columns.too_short(worst)
        return f"{done} {change}{why and f'; {why}'}."
    doubt = "; zero lies inside it" if worst.increase_low <= 0 <= worst.increase_high else ""
    return f"{done} {change}, 95 % interval {columns.interval((worst.increase_low, worst.increase_high))}{doubt}."


def protocol(run: Run) -> Protocol | None:
    """How the run was evaluated; None where it was not."""
    return load_accuracy(run).protocol if tables.wrote(run, run.accuracy, "validate") else None


def engines(built: Sequence[EngineRow]) -> str:
    """What the FP8 engines prove, in a sentence; empty where there are none."""
    rows = [row for row in built if row.precision == "fp8"]
    if not rows:
        return ""
    outdated = [row.target for row in rows if row.evidence == "outdated"]
    unproven = [row.target for row in rows if row.fp8_products is None]
    short = [row.target for row in rows if row.wide]
    if outdated:
        return (
            f"What runs in FP8 is not said of {', '.join(outdated)}: the engine was built from other files than the "
            "run has now; run `fp8q build-engine RUN` again."
        )
    if unproven:
        return f"What runs in FP8 cannot be told for {', '.join(unproven)}: the engine could not be read."
    if short:
        return f"Some promised products ran wider on {', '.join(short)}; the table names them."
    return (
        f"Every promised product takes FP8 codes on both sides, on {' and '.join(row.target for row in rows)}; read "
        "from the engines themselves."
    )


def execute(notebook: Path, directory: Path, parameters: dict[str, str]) -> str:
    """Execute `notebook` in `directory` with `parameters`, and return it with its outputs, as JSON text.

    The kernel is the running interpreter's own, whatever kernels the user has installed under the name `python3`; it
    reads none of the user's IPython start-up files, and talks over sockets in a temporary directory, not over TCP. What
    papermill notes of paths and times is left out: the result says the same wherever the run lies. Raises BackendError
    when no kernel starts.
    """
    import nbformat
    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from jupyter_core.utils import ensure_event_loop

    def executed(private: Path, groups: list[int]) -> Any:
        try:
            return papermill.execute_notebook(
                notebook,
                None,
                parameters,
                kernel_name="python3",
                progress_bar=False,
                cwd=directory,
                kernel_manager_class=own_kernel(private, groups),
                extra_arguments=[f"--ipython-dir={private}"],
            )
        finally:
            ensure_event_loop().close()  # this thread's, which nbclient made and leaves open

    groups: list[int] = []
    # Signals stay ours: in the main thread nbclient would put handlers of its own in their place, and leave Python's.
    with scratch() as private, ThreadPoolExecutor(1, "notebook") as pool, undoing(lambda: end_groups(groups)):
        try:
            done = pool.submit(executed, private, groups).result()
        except (NoSuchKernel, RuntimeError) as error:
            raise BackendError(
                f"no Jupyter kernel starts to execute the report ({error}); install one with `pip install "
                "'fp8q[report]'`"
            ) from error
    for part in (done, *done.cells):
        part.metadata.pop("papermill", None)
        part.metadata.pop("execution", None)
    return f"{nbformat.writes(done)}\n"  # type: ignore[no-untyped-call]  # typed, but this one


def own_kernel(private: Path, groups: list[int]) -> type:
    """The manager of a kernel that is the running interpreter's own, keeps its files in `private`, and says nothing;
    `groups` takes the process group that it leads.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class OwnKernel(AsyncKernelManager):
        def __init__(self, **traits: Any) -> None:
            own = KernelSpecManager(kernel_dirs=[])
            super().__init__(
                kernel_spec_manager=own, transport="ipc", connection_file=f"{private}/kernel.json", **traits
            )

        async def _async_launch_kernel(self, kernel_cmd: list[str], **kw: Any) -> None:
            await super()._async_launch_kernel(kernel_cmd, **kw, stdout=DEVNULL, stderr=DEVNULL)
            groups.append(self.provisioner.pid)  # type: ignore[union-attr]  # it is a local one

    return OwnKernel


def end_groups(groups: list[int]) -> None:
    """Kill these process groups."""
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)
