"""`report.html` and `report.ipynb`: the run, to show to somebody.

Both are made of the same rows and plots. The page is one file that asks the network for nothing (its own content
security policy forbids it to), opens from disk, and reads on paper, on a phone and in the dark. The notebook is
`notebooks/accuracy_report.ipynb`, executed inside the run by the interpreter that runs fp8q. A part whose stage has not
run yet says which command to run.
"""

import math
import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any

from ...calibrate.measure.statistics import load_statistics
from ...core.columns import Table
from ...core.commands import in_run
from ...core.errors import BackendError
from ...core.files import replacing
from ...core.reporter import Reporter
from ...core.run import Run
from ...core.undo import scratch, undoing
from ...options import NOT_SERVED
from ...quantize.codes.formats import E4M3
from ...quantize.scales.decisions import load_scales
from ..accuracy.continuations import Continuations, load_continuations
from ..accuracy.decision import noise_floor
from ..accuracy.document import Accuracy, load_accuracy
from ..advice import certificate as certificates
from ..advice.certificate import Certificate
from ..advice.expert_coverage import expert_rows, expert_table
from ..needles.document import load_needles, needle_table
from ..tasks.document import evaluation_table, load_evaluation
from . import curves, loss_buckets, run_comparison, tables
from . import rows as run_rows
from .accuracy_rows import AccuracyRow, accuracy_rows, adapter_rows
from .drawings import drawings, losses_by_tensor
from .gains import gain_table, gains
from .loss_buckets import not_covered, position_rows, position_table
from .rows import EngineRow, ModuleRow, size_rows
from .verdict import next_steps, report_verdict, standing, step_table

if TYPE_CHECKING:
    from jinja2 import Template

    from ...calibrate.measure.statistics import Corpus


def execute(notebook: Path, directory: Path, parameters: Mapping[str, str | list[str]]) -> str:
    """Execute `notebook` in `directory` with `parameters`, and return it with its outputs, as JSON text.

    The kernel is the running interpreter, whatever kernels the user has installed under the name `python3`; it reads no
    IPython start-up files of the user, and communicates over sockets in a temporary directory, not over TCP. Paths and
    times that papermill records are removed, so that the result does not depend on the run's place. Raises BackendError
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
                kernel_manager_class=same_interpreter_kernel(private, groups),
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
                "",
                f"no Jupyter kernel starts to execute the report ({error})",
                "install one with `pip install 'fp8q[report]'`",
            ) from error
    for part in (done, *done.cells):
        part.metadata.pop("papermill", None)
        part.metadata.pop("execution", None)
    return f"{nbformat.writes(done)}\n"  # type: ignore[no-untyped-call]  # typed, but this one


def same_interpreter_kernel(private: Path, groups: list[int]) -> type:
    """The manager of a kernel that is the running interpreter's own, keeps its files in `private`, and says nothing;
    `groups` takes the process group that it leads.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class SameInterpreterKernel(AsyncKernelManager):
        def __init__(self, **traits: Any) -> None:
            kernels = KernelSpecManager(kernel_dirs=[])
            super().__init__(
                kernel_spec_manager=kernels, transport="ipc", connection_file=f"{private}/kernel.json", **traits
            )

        async def _async_launch_kernel(self, kernel_cmd: list[str], **kw: Any) -> None:
            await super()._async_launch_kernel(kernel_cmd, **kw, stdout=DEVNULL, stderr=DEVNULL)
            groups.append(self.provisioner.pid)  # type: ignore[union-attr]  # it is a local one

    return SameInterpreterKernel


def end_groups(groups: list[int]) -> None:
    """Kill these process groups."""
    for group in groups:
        with suppress(OSError):
            os.killpg(group, signal.SIGKILL)


#: The modules that the extra `report` installs.
REPORT_MODULES = ("matplotlib", "papermill", "ipykernel")
NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "accuracy_report.ipynb"
#: The axis of the sparklines, in octaves of the code: where it starts, how long it is, and what E4M3 holds of it.
SPARK = {
    "left": curves.SPARK_LEFT,
    "width": curves.SPARK_RIGHT - curves.SPARK_LEFT,
    "floor": math.log2(E4M3.midpoints[0]),
    "ceiling": math.log2(E4M3.max),
}
#: Tensors whose loss is listed.
WORST = 12
NOT_LOCATED = "Which tensor costs how much was not measured: `fp8q sensitivity RUN` does."


def render_report(run: Run, report: Reporter, others: Sequence[Run] = ()) -> list[Path]:
    """Write `report.html` and `report.ipynb` of `run`, compared with `others`; return both paths.

    Raises BackendError when the extra `report` is not installed or no kernel starts, InputError when the run has no
    scales yet or a file of it was changed.
    """
    for module in REPORT_MODULES:
        if find_spec(module) is None:
            raise BackendError(
                "", f"{module} is not installed and the report needs it", "install it with `pip install 'fp8q[report]'`"
            )
    with report.track("Writing the report", 2, "files") as advance:
        page = render(run, others)
        with replacing(run.report_html) as partial:
            partial.write_text(page, encoding="utf-8")
        advance(1)
        notebook = execute(
            NOTEBOOK, run.root, {"RUN": ".", "COMPARE": [os.path.relpath(other.root, run.root) for other in others]}
        )
        with replacing(run.report_ipynb) as partial:
            partial.write_text(notebook, encoding="utf-8")
        advance(1)
    return [run.report_html, run.report_ipynb]


def report_tables(run: Run, others: Sequence[Run] = ()) -> dict[str, Table[Any]]:
    """Return the tables of the report, by name.

    Raises InputError when the run has no scales yet, or when one of its files is not what its stage wrote.
    """
    modules = run_rows.module_rows(run)
    stages = run_rows.stage_rows(run)
    statistics = load_statistics(run)
    accuracy = evaluated(run)
    contents: dict[str, Table[Any]] = {
        "next": step_table(next_steps(report_verdict(run), standing(run))),
        "gains": gain_table(gains(run)),
        "accuracy": tables.accuracy_table([*accuracy_rows(run), *adapter_rows(run)]),
        "divergences": tables.divergence_table(tables.divergence_rows(accuracy) if accuracy else []),
        "positions": position_table(position_rows(run), not_covered(accuracy) if accuracy else ""),
        "tasks": evaluation_table(load_evaluation(run) if run_rows.wrote(run, run.evaluated, "evaluate") else None),
        "needles": needle_table(load_needles(run) if run_rows.wrote(run, run.needles, "needles") else None),
        "distance": loss_buckets.distance_table(loss_buckets.distance_rows(run)),
        "frequency": loss_buckets.frequency_table(loss_buckets.frequency_rows(run)),
        "beside": run_comparison.run_table(run_comparison.run_rows([run, *others]) if others else []),
        "loss": replace(tables.loss_table(losses_by_tensor(run)[:WORST]), missing=NOT_LOCATED),
        "sizes": tables.size_table(size_rows(run)),
        "engines": tables.engine_table(run_rows.engine_rows(run), run.without_graph()),
        "modules": tables.module_table(modules),
        "kept": tables.bf16_module_table(modules),
        "experts": expert_table(expert_rows(statistics, load_scales(run)), bool(statistics.record.all_experts)),
        "certificate": certificates.record_table(text_certificate(run)),
        "facts": tables.fact_table(run_rows.fact_rows(run)),
        "stages": tables.stage_table(stages),
        "notes": tables.note_table(stages),
    }
    return {name: of_run(table, run) for name, table in contents.items()}


def evaluated(run: Run) -> Accuracy | None:
    """The accuracy of the files that are in the run now; None where they were not evaluated."""
    if run_rows.wrote(run, run.accuracy, "validate"):
        return load_accuracy(run)
    return None


def of_run(table: Table[Any], run: Run) -> Table[Any]:
    """The table with the run's own path in the commands that it names."""
    return replace(table, missing=in_run(table.missing, run.root), note=in_run(table.note, run.root))


def report_continuations(run: Run) -> Continuations:
    """Load the continuations of the same prompts by both models; empty where the present files have none."""
    if run_rows.wrote(run, run.continuations, "continue"):
        return load_continuations(run)
    return Continuations(tokens=0, continuations=[])


def page_template(name: str) -> "Template":
    """The template `name` of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).get_template(name)


def render(run: Run, others: Sequence[Run] = ()) -> str:
    """The page, HTML."""
    template = page_template("report.html.j2")
    contents = report_tables(run, others)
    statistics = load_statistics(run)
    modules = contents["modules"].rows
    accuracy = evaluated(run)
    verdict = report_verdict(run)
    seen = {name for name, tensor in statistics.tensors.items() if tensor.histogram.samples}
    drawn = {row.tensor: row.scale for row in modules if row.tensor in seen and row.scale is not None}
    sparklines = {name: curves.sparkline(statistics.tensors[name].histogram, scale) for name, scale in drawn.items()}
    return template.render(
        model=statistics.record.model,
        tables=contents,
        drawn=drawings(run),
        sparklines=sparklines,
        spark=SPARK,
        verdict=verdict,
        summary=summary_sentences(contents["accuracy"].rows, modules, contents["kept"].rows, verdict.runtime),
        continuations=report_continuations(run).continuations,
        accuracy=accuracy,
        noise=noise_floor(accuracy) if accuracy else "",
        calibration=calibrated_on(statistics.record.corpus, text_certificate(run)),
        timed=any(gain.known.startswith("fp8q bench") for gain in contents["gains"].rows),
        untimed=in_run("No times were measured: `fp8q bench RUN` does.", run.root),
        engines=in_run(engines_sentence(contents["engines"].rows), run.root),
        certificate=text_certificate(run),
    )


def text_certificate(run: Run) -> Certificate:
    """Tell whether the run's calibration text was enough."""
    return certificates.certificate(load_statistics(run), load_scales(run))


def calibrated_on(corpus: "Corpus", certificate: Certificate) -> str:
    """State the calibration text, and whether it was enough."""
    enough = {"good": "enough", "watch": "more text would help", "bad": "too little"}
    sufficiency = enough.get(certificate.verdict, "whether that is enough cannot be told")
    images = f" and {corpus.images:,} rows with images" if corpus.images else ""
    return f"{corpus.windows * corpus.seq_len:,} tokens{images} of {corpus.name}: {sufficiency}"


def summary_sentences(
    accuracy: Sequence[AccuracyRow],
    modules: Sequence[ModuleRow],
    bf16_modules: Sequence[ModuleRow],
    decides: str | None = None,
) -> str:
    """Summarize in two sentences what runs in FP8 and how the perplexity changes in the runtime that `decides` the
    verdict; where that is none of `accuracy`, in the one of the largest perplexity.
    """
    gemms = sum(row.kind == "product" for row in modules)
    done = f"{gemms} of {gemms + len(bf16_modules)} GEMMs run in FP8" + (
        ", keys and values are cached in FP8." if len(modules) > gemms else "."
    )
    served = [row for row in accuracy if row.runtime not in NOT_SERVED and row.tokens is None]
    compared = [row for row in served if row.perplexity_increase is not None]
    base = next((row for row in accuracy if row.runtime == "bf16"), None)
    if not compared or base is None:
        return f"{done} What that costs has not been evaluated yet."
    row = next((row for row in compared if row.runtime == decides), None)
    row = row or max(compared, key=lambda row: row.perplexity_increase or 0.0)
    return f"{done} Perplexity is {base.perplexity:.4f} in BF16 and {row.perplexity:.4f} in FP8."


def engines_sentence(built: Sequence[EngineRow]) -> str:
    """Summarize the proof of the FP8 engines in a sentence; empty where there are none."""
    rows = [row for row in built if row.precision == "fp8"]
    if not rows:
        return ""
    outdated = [row.target for row in rows if row.evidence == "outdated"]
    unproven = [row.target for row in rows if row.fp8_products is None]
    short = [row.target for row in rows if row.wide]
    untold = [row.target for row in rows if (row.fp8_products or 0) + len(row.wide) < (row.promised_products or 0)]
    if outdated:
        return (
            f"What runs in FP8 is not said of {', '.join(outdated)}: the engine was built from other files than the "
            "run has now; run `fp8q build-engine RUN` again."
        )
    if unproven:
        return f"What runs in FP8 cannot be told for {', '.join(unproven)}: the engine could not be read."
    if short:
        return f"Some expected GEMMs are not FP8 on both sides on {', '.join(short)}; the table names them."
    if untold:
        return f"Of some expected GEMMs on {', '.join(untold)} TensorRT's inspector does not tell what they run in."
    return (
        f"Every expected GEMM takes FP8 codes on both sides, on {' and '.join(row.target for row in rows)}; read "
        "from the engines themselves."
    )
