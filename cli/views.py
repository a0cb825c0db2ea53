"""Show the results of commands: the run's tables, or the run as one JSON object.

A command ends with the tables and files that it made, what of the run is outdated now, and the next command.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ..core.columns import Table, size
from ..core.commands import in_run, stage_command
from ..core.errors import Fp8qError, visible
from ..core.run import Run
from ..options import PairOptions
from ..validate.accuracy.decision import noise_floor
from ..validate.accuracy.document import Accuracy, Verdict, load_accuracy
from ..validate.advice.certificate import record_table, text_table
from ..validate.advice.expert_coverage import expert_table
from ..validate.advice.remedy import LossSums, remedy_of
from ..validate.bench.document import Bench, bench_table, capacity_table
from ..validate.endpoint.document import ModelComparison, comparison_table
from ..validate.needles.document import load_needles, needle_table
from ..validate.pair.document import PairComparison
from ..validate.report.accuracy_rows import accuracy_rows, adapter_rows, image_rows
from ..validate.report.loss_buckets import distance_rows, distance_table, not_covered
from ..validate.report.pair_page import SHOWN_IN_TERMINAL, module_error_table, side_table
from ..validate.report.rows import engine_rows, module_rows, size_rows, stage_rows, wrote
from ..validate.report.tables import (
    accuracy_table,
    against_table,
    bf16_cache_table,
    bf16_module_table,
    delayed_table,
    divergence_rows,
    divergence_table,
    engine_table,
    loss_table,
    module_table,
    outlier_table,
    size_table,
    stage_table,
)
from ..validate.report.verdict import next_steps, report_verdict, standing
from ..validate.tasks.document import TaskScores, evaluation_table
from ..validate.tuning.document import Tuning, change_table, conclusion, outcome_table, point_table
from ..validate.tuning.form_choice import form_table, load_form_choice

if TYPE_CHECKING:
    from ..api import Inspection
    from ..quantize.learning.document import AdapterLearning, Distillation
    from ..quantize.sensitivity.document import Sensitivity
    from ..stages.convert import Converted
    from ..stages.engine import EngineView
    from ..stages.lint import Linted, LintedRun, RuleText
    from ..stages.push import Pushed
    from .console import Terminal


#: The tables and files of the run.
TABLES = ("accuracy", "verdict", "engines", "sizes", "stages", "modules", "forms")
MODEL = ("model", "model/model.onnx", "model/model.fp32.onnx", "scales.json")
FILES = (
    *MODEL,
    "baselines",
    "engines",
    "accuracy.json",
    "evaluation.json",
    "bench.json",
    "triton",
    "report.html",
    "report.ipynb",
)


@dataclass(frozen=True)
class Made:
    """The tables and files that a command makes."""

    tables: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


#: Command -> what it makes; `run` makes everything.
MADE: Mapping[str, Made] = {
    "run": Made(TABLES, FILES),
    "calibrate": Made(("sizes", "stages", "modules"), MODEL),
    "scales": Made(("modules",), MODEL),
    "merge": Made(("sizes", "modules"), MODEL),
    "export": Made(("sizes",), (*MODEL[:3], "baselines")),
    "build-engine": Made(("engines",), ("engines",)),
    "validate": Made(("accuracy", "verdict"), ("accuracy.json",)),
    "triton": Made((), ("triton",)),
    "report": Made(("verdict",), ("report.html", "report.ipynb")),
}


def ending(run: Run) -> list[str]:
    """Say which results of `run` are outdated, with the command of each, and what comes next."""
    from ..validate.report.verdict import next_steps, report_verdict, standing

    stages = run.record().stages
    lines = [
        f"outdated, since the run has changed: {name}; `{stage_command(name, run.root)}` does it again"
        for name in stages
        if run.is_stale(name)
    ]
    if "quantize" in stages and not run.is_stale("quantize"):
        first, *_ = next_steps(report_verdict(run), standing(run))
        lines.append(f"next: `{first.command}`   {first.why}")
    return lines


#: Findings of one rule that are shown; the rest are counted.
LISTED = 8
#: Columns of a terminal in which the whole table of accuracy can be read.
WIDE = 100


def show_summary(speak: "Terminal", path: Path, as_json: bool, command: str) -> None:
    """Show what `command` made of the run at `path`, and what comes next; or the whole run as one JSON object.

    The work is done, and it stands: what of the run cannot be read now is named in a note, and left out.
    """
    run = Run(path)
    made = MADE[command]
    contents = rows_of(run, speak, TABLES if as_json else made.tables)
    if as_json:
        emit(run_document(run, contents))
        return
    tables: dict[str, Callable[[Any], Table[Any]]] = {
        "accuracy": partial(accuracy_table, wide=speak.out.width >= WIDE),
        "engines": engine_table,
        "sizes": size_table,
        "stages": stage_table,
        "modules": bf16_module_table,
        "forms": lambda choices: form_table(choices[0]) if choices else Table("", (), (), ""),
    }
    for part, make in tables.items():
        table = make(contents.get(part, []))
        if table.rows:
            draw_table(speak, table, remark=load_accuracy(run).protocol.description if part == "accuracy" else "")
        if table.rows and part == "accuracy" and wrote(run, run.needles, "needles"):
            draw_table(speak, needle_table(load_needles(run)))
        if table.rows and part == "accuracy" and (decoded := distance_rows(run)):
            draw_table(speak, distance_table(decoded))
        if table.rows and part == "accuracy":
            show_distances(speak, run, load_accuracy(run))
    if there := [file for file in files(run) if str(file.relative_to(run.root)) in made.files]:
        speak.table("Files", ("path",), [(str(file),) for file in there])
    for verdict in contents.get("verdict", []):
        show_decision(speak, verdict)
    for line in rows_of(run, speak, ("next",)).get("next", []):
        speak.say(line)


def show_distances(speak: "Terminal", run: Run, accuracy: Accuracy) -> None:
    """Show what is beside a comparison: the divergences in both directions, and what arithmetic and text alone do."""
    if rows := divergence_rows(accuracy):
        draw_table(speak, divergence_table(rows))
    if line := noise_floor(accuracy):
        speak.say(line)
    if line := not_covered(accuracy):
        speak.say(in_run(line, run.root))


def show_decision(speak: "Terminal", verdict: Verdict) -> None:
    """Show the verdict, where something was compared."""
    if verdict.runtime is not None:
        speak.say(f"{verdict.sentence}. {verdict.detail}")


#: The parts of the summary, and what reads each from a run.
PARTS: dict[str, Callable[[Run], Sequence[Any]]] = {
    "accuracy": lambda run: [*accuracy_rows(run), *adapter_rows(run), *image_rows(run)],
    "engines": engine_rows,
    "sizes": size_rows,
    "stages": stage_rows,
    "modules": lambda run: module_rows(run) if run.scales.is_file() else [],  # none of some batches alone
    "verdict": lambda run: [report_verdict(run)] if run.scales.is_file() else [],
    "forms": lambda run: [load_form_choice(run)] if wrote(run, run.form_choice, "forms") else [],
    "next": ending,
}


def rows_of(run: Run, speak: "Terminal", parts: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The rows of each of the `parts` of the summary that can be read; a note for each that cannot."""
    contents: dict[str, Sequence[Any]] = {}
    for part in parts:
        try:
            contents[part] = PARTS[part](run)
        except Exception as error:  # noqa: BLE001  # another stage's file: nothing it holds makes this command a failure
            said = str(error) if isinstance(error, Fp8qError) else f"{type(error).__name__}: {error}"
            speak.note(f"left out here, since it cannot be read: {part}: {said}")
    return contents


def files(run: Run) -> list[Path]:
    """List the files in `run` that a user may open."""
    return [run.root / name for name in FILES if (run.root / name).exists()]


def run_document(run: Run, contents: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The run as one JSON object: paths, numbers of modules, and the rows of every table that was `found`."""
    shown: dict[str, Any] = {"run": str(run.root)}
    if "modules" in contents:
        rows = contents["modules"]
        shown["quantized"] = sum(row.kind == "product" and row.reason is None for row in rows)
        shown["skipped"] = {row.module: row.reason for row in rows if row.reason is not None}
    for choice in contents.get("forms", []):
        shown["forms"] = choice.model_dump(by_alias=True, mode="json", exclude_none=True)
    for part in ("accuracy", "engines", "sizes", "stages"):
        if part in contents:
            shown[part] = [plain(row) for row in contents[part]]
    for verdict in contents.get("verdict", []):
        shown["verdict"] = verdict.model_dump(exclude_none=True)
        shown["next"] = [step.command for step in next_steps(verdict, standing(run))]
    return {**shown, "files": [str(file) for file in files(run)]}


def plain(row: Any) -> dict[str, Any]:
    """A row without what does not apply to it; JSON has no infinity and no NaN, so these are written as text."""
    return {
        key: str(value) if isinstance(value, float) and value - value != 0 else value
        for key, value in asdict(row).items()
        if value is not None
    }


def inspection(speak: "Terminal", inspected: "Inspection", as_json: bool) -> None:
    """Show what `fp8q inspect` found: what stands out last, where a terminal leaves the eye."""
    parts: dict[str, Sequence[Any] | None] = {
        "modules": inspected.modules,
        "bf16_cache": inspected.bf16_cache,
        "findings": inspected.findings,
        "experts": inspected.experts or None,
        "delayed": inspected.delayed,
        "against": inspected.against,
    }
    if as_json:
        rows_of_parts = {name: [plain(row) for row in rows] for name, rows in parts.items() if rows is not None}
        emit({**rows_of_parts, "certificate": plain(inspected.certificate)})
        return
    tables: list[Table[Any]] = [
        module_table(inspected.modules),
        bf16_module_table(inspected.modules),
        bf16_cache_table(inspected.bf16_cache),
        expert_table(inspected.experts, inspected.all_experts),
    ]
    tables += [delayed_table(inspected.delayed)] if inspected.delayed is not None else []
    tables += [against_table(inspected.against)] if inspected.against is not None else []
    tables += [text_table(inspected.certificate), record_table(inspected.certificate)]
    for table in (*tables, outlier_table(inspected.findings)):
        if table.rows:
            draw_table(speak, table)
    speak.say(f"Calibration text: {inspected.certificate.verdict}. {inspected.certificate.sentence}")


def show_distillation(speak: "Terminal", run: Run, learning: "Distillation | AdapterLearning", as_json: bool) -> None:
    """Show what `fp8q distill` learned: the outcome in a sentence, what is outdated now, and what comes next."""
    if as_json:
        emit(learning.model_dump(mode="json"))
        return
    for line in (f"{learning.conclusion[0].upper()}{learning.conclusion[1:]}.", *ending(run)):
        speak.say(line)


def show_losses(speak: "Terminal", run: Run, sensitivity: "Sensitivity", as_json: bool) -> None:
    """Show what `fp8q sensitivity` found: the sums and what lessens them first; the worst tensor last, where a terminal
    leaves the eye.
    """
    if as_json:
        emit(sensitivity.model_dump(by_alias=True, mode="json"))
        return
    speak.say(str(LossSums.of(sensitivity)))
    remedy = remedy_of(run, sensitivity)
    speak.say(f"{remedy}." if remedy else "Neither two codes for inputs nor GPTQ takes a tenth of it away.")
    draw_table(speak, loss_table(sensitivity.modules[::-1]))


def show_model_comparison(speak: "Terminal", comparison: ModelComparison, as_json: bool) -> None:
    """Show what `fp8q compare` found: the distances, and the verdict."""
    if as_json:
        emit(comparison.model_dump(by_alias=True, mode="json"))
        return
    draw_table(speak, comparison_table(comparison))
    perplexity = f", perplexity {comparison.perplexity.mean:.3f}" if comparison.perplexity else ""
    which = f"Compared: {comparison.which}. " if comparison.which else ""
    speak.say(
        f"{comparison.model}: {comparison.positions:,} positions of {comparison.prompts:,} prompts "
        f"({comparison.sent:,} tokens) by {comparison.form}, {comparison.requests:,} requests{perplexity}. {which}"
        f"Verdict: {comparison.verdict}: {comparison.sentence}."
    )


def show_pair(speak: "Terminal", comparison: PairComparison, options: PairOptions, as_json: bool) -> None:
    """Show the comparison of two checkpoints: numbers, the worst modules, causes, and the decision last."""
    if as_json:
        emit(
            comparison.model_dump(by_alias=True, mode="json")
            | {"passes": comparison.passes, "sentence": comparison.sentence}
        )
        return
    draw_table(speak, side_table(comparison))
    if comparison.modules:
        draw_table(speak, module_error_table(comparison.modules[:SHOWN_IN_TERMINAL]), "the worst")
    for line in (*comparison.notes, *comparison.unseen, *map(str, comparison.causes)):
        speak.say(f"{line[0].upper()}{line[1:]}.")
    speak.say(f"{comparison.sentence}. {comparison.verdict.detail}")
    if options.out is not None:
        speak.say(f"report: {options.out / 'report.html'}")


def show_evaluation(speak: "Terminal", scores: TaskScores, as_json: bool) -> None:
    """Show what `fp8q evaluate` found: a row for each metric of the tasks and groups that were asked for."""
    if as_json:
        emit(scores.model_dump(by_alias=True, mode="json", exclude_none=True))
        return
    draw_table(speak, evaluation_table(scores))


def benched(speak: "Terminal", measurements: Bench, as_json: bool) -> None:
    """Show what `fp8q bench` measured and computed, each by itself, and by which protocol."""
    if as_json:
        emit(measurements.model_dump(by_alias=True))
        return
    its = measurements.protocol
    speak.say(
        f"{its.runtime} {its.version} on {its.device}; answers of {its.tokens:,} tokens, rounds: {its.rounds:,}. "
        f"{its.method}"
    )
    draw_table(speak, bench_table(measurements.rows))
    draw_table(speak, capacity_table(measurements))


def linted(lint: "Linted | LintedRun", as_json: bool) -> None:
    """Show what `fp8q lint` found: a line each, of one rule the first few, or all of it as one JSON object."""
    if as_json:
        emit(
            {
                "findings": [
                    {"file": str(part.path)}
                    | {key: value for key, value in asdict(finding).items() if key not in ("name", "places")}
                    for part in lint.parts
                    for finding in part.findings
                ]
            }
        )
        return
    lines = [line for part in lint.parts for line in part_lines(part)]
    sys.stdout.write("\n".join(map(visible, lines)) + "\n")


def show_pushed(pushed: "Pushed", as_json: bool) -> None:
    """Show the files that `fp8q push` uploaded, or would upload, or all of it as one JSON object."""
    if as_json:
        emit(asdict(pushed) | {"files": [{"name": name, "bytes": size} for name, size in pushed.files]})
        return
    lines = [f"{pushed.repo}: {len(pushed.files):,} files, {pushed.bytes:,} bytes"]
    lines += [f"  {name} ({size:,})" for name, size in pushed.files]
    lines += [f"note: {remark}" for remark in pushed.remarks]
    lines.append(f"uploaded: {pushed.url}" if pushed.url else "nothing was sent: --yes uploads them")
    sys.stdout.write("\n".join(map(visible, lines)) + "\n")


def show_rules(rules: "Sequence[RuleText]", as_json: bool) -> None:
    """Show rules of the lint: code and name in a line, and the reason below it, or all as one JSON object."""
    if as_json:
        emit({"rules": [asdict(rule) for rule in rules]})
        return
    sys.stdout.write("\n\n".join(f"{rule.rule} {rule.name}\n{fill(str(rule), WIDE)}" for rule in rules) + "\n")


def part_lines(part: "Linted") -> list[str]:
    """Format the findings of one part that was linted."""
    lines = [f"{part.path}: {part.what}"]
    for rule, group in groupby(part.findings, lambda finding: finding.rule):
        shown = list(group)
        lines += [f"{finding.severity:<8}{finding}" for finding in shown[:LISTED]]
        more = sum(finding.places for finding in shown[LISTED:])
        listed = "all" if shown[-1].places == 1 else f"the first {len(shown) - 1}"
        lines += [f"{'':<8}{rule}: {more} more (--json has {listed})"] if more else []
    return [*lines, *(["no findings"] if not part.findings else [])]


def show_engines(speak: "Terminal", engine_views: "Sequence[EngineView]", as_json: bool) -> None:
    """Show what `fp8q engine` found: an engine's GEMMs (layers that run alike in one row), attention kernels and
    GEMMs that are not FP8.
    """
    if as_json:
        emit({"engines": [asdict(view) for view in engine_views]})
        return
    from ..export.onnx_file.names import gemm_name

    for view in engine_views:
        columns = ("GEMM", "profile", "operands -> result", "merged with", "kernels before it", "kernels after it")
        gemm_cells = [
            (
                gemm_name(row.node),
                row.profile,
                f"{' × '.join(row.operands)} -> {row.result}",
                *map(kernels, (row.merged, row.before, row.after)),
            )
            for row in view.products
        ]
        speak.say(engine_sentence(view))
        if gemm_cells:
            speak.table(f"{view.target}: GEMMs", columns, alike(gemm_cells))
        attention = [
            (row.module or row.node, row.profile, row.kernel, f"{', '.join(row.operands)} -> {row.result}")
            for row in view.attention
        ]
        if attention:
            speak.table(
                f"{view.target}: attention", ("module", "profile", "kernel", "reads first -> result"), alike(attention)
            )
        if view.cache:
            step = f"a decode step of {view.cache.rows} rows over {view.cache.slots:,} slots"
            speak.say(f"{view.target}: {step} {view.cache}")
        not_fp8 = [(row.product, "yes" if row.promised else "no", row.reason) for row in view.wide]
        if view.narrow:
            reason = (
                "the kernel scales by itself, and rounds its sum once"
                if view.evidence == "inspector"
                else "the weights' scales are per tensor, or narrower than FP32"
            )
            narrow = [(module, reason) for module in view.narrow]
            speak.table(f"{view.target}: FP8 GEMMs that answer in less than FP32", ("GEMM", "why"), alike(narrow))
        differs = [
            (row.module, row.profile, row.what, row.found, row.expected if row.told else "cannot be told")
            for row in view.differences
        ]
        if differs:
            title = f"{view.target}: what is not this run's, or cannot be told"
            speak.table(title, ("module", "profile", "of it", "the engine", "the run"), alike(differs))
        if not_fp8:
            speak.table(
                f"{view.target}: GEMMs that are not FP8 on both sides",
                ("GEMM", "expected", "why"),
                alike(not_fp8),
            )


def engine_sentence(view: "EngineView") -> str:
    """The sentence above an engine's tables: how many expected GEMMs are on codes, and how that is known."""
    codes = (
        f"; {view.codes_found} multiply the run's codes, {view.factors_found} have its factors s_x · s_w behind "
        f"them, {view.inputs_found} its input scale before them"
        if view.codes_found is not None
        else ""
    )
    origin = f"read from the engine's {view.evidence}" if view.unknown is None else f"UNKNOWN: {view.unknown}"
    fp8 = "an unknown number" if view.evidence == "unknown" else view.fp8_products
    untold = f", and of {len(view.untold)} it cannot be told" if view.untold else ""
    return (
        f"{view.target}, {view.runtime} {view.version}: {fp8} of {view.promised_products} expected "
        f"GEMMs on FP8 codes on both sides{untold} ({origin}){codes}"
    )


def kernels(names: Sequence[str]) -> str:
    """Names of kernels or modules in a cell: modules by their last part, the compiler's own prefix left out."""
    return " ".join(name.removeprefix("__myl_") if name.startswith("_") else name.rpartition(".")[2] for name in names)


def alike(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows whose first column differs in a layer's number alone, as one, with their count."""
    counts: dict[tuple[str, ...], list[str]] = {}
    for first, *rest in rows:
        counts.setdefault(
            (re.sub(r"\.\d+\.|_\d+$", lambda number: number[0].replace(number[0].strip("._"), "*"), first), *rest), []
        ).append(first)
    return [(f"{key[0]} ({len(names)})" if len(names) > 1 else names[0], *key[1:]) for key, names in counts.items()]


def draw_table(speak: "Terminal", table: Table[Any], remark: str = "") -> None:
    """Draw one table; `told`: what its title says besides."""
    titles = [column.title for column in table.columns]
    numeric = [column.title for column in table.columns if column.numeric]
    speak.table(
        f"{table.title}: {remark}" if remark else table.title,
        titles,
        [[cell.text for cell in row] for row in table.cells()],
        numeric,
    )
    if table.note:
        speak.say(table.note)
        speak.say("")


def emit(result: dict[str, Any]) -> None:
    """Print `result` as one line of JSON."""
    sys.stdout.write(json.dumps(result) + "\n")


def show_converted(speak: "Terminal", model: str, written: "Converted", as_json: bool) -> None:
    """Show what `fp8q convert` wrote of `model`: what is kept and why, the sizes, the proof, and what comes next."""
    if as_json:
        emit(asdict(written) | {"path": str(written.path)})
        return
    rows = [(reason, f"{len(modules):,}", modules[0]) for reason, modules in written.kept.items()]
    speak.table("Matrices kept in the source's type", ("reason", "count", "first"), rows)
    for line in written.warnings:
        speak.note(line)
    speak.say(f"What is a linear layer was decided by {written.decided_by}.")
    speak.say(
        f"{written.quantized:,} tensors of codes in the form {written.form} ({written.layout}): "
        f"{size(written.source_bytes)} -> {size(written.written_bytes)}. Proof: every code decoded; the "
        f"largest error is {written.largest_error_steps:.3g} of a step, "
        f"{written.largest_relative_error:.2%} of a value."
    )
    original = model if Path(model).is_dir() else "ORIGINAL"  # compare takes no name on the hub
    speak.say(f"next: `fp8q compare {original} --model {written.path} --data TEXT --out DIR`   Measure what it costs.")


def show_tuning(speak: "Terminal", run: Path, tuning: Tuning, as_json: bool) -> None:
    """Show the tuning of `run`, and what to do next."""
    if as_json:
        emit(tuning.model_dump(by_alias=True, mode="json"))
        return
    draw_table(speak, point_table(tuning))
    if tuning.chosen is not None:
        changes = change_table(tuning)
        if changes.rows:
            draw_table(speak, changes)
        else:
            speak.say(changes.missing)
        draw_table(speak, outcome_table(tuning))
    speak.say(conclusion(tuning, str(run)))
