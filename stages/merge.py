"""Merge runs that were measured separately: the stages `corpus` and `measure` of a run for which no model runs.

Two kinds of runs are merged in the same way. Runs of different texts make a corpus of all texts. Runs of parts of one
text (`--batches`) make the whole text, and then the statistics equal those of one measurement byte for byte. The result
does not depend on the order or grouping of runs: texts are ordered by fingerprint, so for the method `delayed` their
batches are not in the order of measurement.

Second moments, for GPTQ, are sums in FP32, and those of parts are added in the order of the texts: the same runs give
the same bytes in any order, and one measurement of all gives others in the last bits.
"""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..calibrate.input.untrusted import local_path
from ..calibrate.measure.moments import add_moments
from ..calibrate.measure.statistics import Statistics, load_statistics, save_statistics
from ..calibrate.model.source import Source
from ..calibrate.model.tokenizer import load_tokenizer
from ..calibrate.text.evaluation import sha256_of
from ..calibrate.text.overlap import measure_overlap
from ..core.errors import InputError
from ..core.files import replacing, sha256_file
from ..core.reporter import Reporter
from ..core.run import Run
from ..options import CorpusOptions, ExportOptions, MeasureOptions, ScaleOptions
from .corpus import load_tokens, opening_of, save_corpus
from .export import export_or_note
from .pipeline.stage import Key, Notes
from .pipeline.stages import CORPUS, MEASURE, CorpusFacts, MeasureFacts
from .preflight import check_out, nothing_left
from .quantize import quantize
from .shared.adapters import adapters_of
from .shared.run_images import has_image_rows
from .shared.sources import check_model, gemms_of, opened_as
from .shared.texts import Tokens


@dataclass(frozen=True)
class Merged:
    """The joined contents of `runs`: statistics, windows int64 [windows, seq_len] in batch order, and held-out tokens
    int64 [tokens].
    """

    runs: tuple[Run, ...]
    statistics: Statistics
    windows: Tokens
    evaluation: Tokens

    @property
    def lineage(self) -> list[str]:
        """The paths of the runs."""
        return [str(run.root.resolve()) for run in self.runs]

    def measured(self, moments: bool) -> dict[str, str]:
        """SHA-256 of each run's measurement, under names without a dot, since these are no files of the merged run;
        with that of its second `moments`.
        """
        return {f"statistics {number}": _digest(run, moments) for number, run in enumerate(self.runs)}


def _digest(run: Run, moments: bool) -> str:
    outputs = run.record().stages["measure"].outputs
    if not moments:
        return outputs[run.statistics.name]
    names = [run.statistics.name, *moment_files(run)]
    return hashlib.sha256("".join(outputs[name] for name in names).encode()).hexdigest()


def moment_files(run: Run) -> list[str]:
    """The names of the files of second moments that `run` measured."""
    return sorted(name for name in run.record().stages["measure"].outputs if name.startswith(f"{run.moments.name}/"))


def merge(
    run: Run, notes: Notes, paths: Sequence[Path], model: str | None, options: tuple[ScaleOptions, ExportOptions]
) -> Run:
    """Add the runs at `paths`, choose scales, and write checkpoint and graphs into `run`.

    The model is not run. `model`: the source checkpoint, if it has moved.
    """
    scale_options, export_options = options
    check_out(run)
    before = run.record().model
    with notes.held():
        check_rounding(scale_options)
        merged = add(paths, run.root)
        if scale_options.needs_moments:
            check_moments(merged.runs)
        source = source_of_all(merged, model, notes)
        check_model(run, before, source)
        gemms = gemms_of(source, scale_options)
        overlap = check_held_out(merged, source, notes)
        note_missing(merged, notes)
    with nothing_left(run):
        write_merged(run, source, merged, notes, overlap, scale_options.needs_moments)
        quantize(run, source, gemms, scale_options, notes)
        export_or_note(run, export_options, notes)
    return run


def check_rounding(options: ScaleOptions) -> None:
    """Raise InputError for rounding that needs more than statistics and second moments."""
    if options.weight_rounding == "sequential":
        raise InputError(
            "--weight-rounding sequential",
            "runs the model",
            "use `fp8q calibrate` on all of the text in one run, or leave it out",
        )
    asked = {
        "--q-scale": options.q_scale,
        "--bf16-weights": options.bf16_weights,
        "--weigh-first-token": options.weighs_first_token,
        "--weigh-outputs": options.weighs_outputs,
    }
    for option, value in asked.items():
        if value:
            raise InputError(option, "runs the model", "use it with `fp8q calibrate` or `fp8q scales`, or leave it out")


def check_moments(runs: Sequence[Run]) -> None:
    """Raise InputError for a run without second moments, and for one whose files of them are not what was measured."""
    for run in runs:
        names = moment_files(run)
        if not names:
            raise InputError(
                run.root,
                "was measured without second moments, which --weight-rounding gptq needs",
                "measure it again with --weight-rounding gptq, or merge without it",
            )
        for name in names:
            run.require(run.root / name, "measure")


def add(paths: Sequence[Path], out: Path) -> Merged:
    """Read and add the runs at `paths`, which are to be merged into `out`.

    Raises InputError, naming the run, for fewer than two, for a run that is given twice, is `out` itself, was not
    measured or is damaged, and for runs that cannot be added.
    """
    runs = _distinct([Run(Path(path)) for path in paths], Path(out))
    for run in runs:
        if names := adapters_of(run):
            raise InputError(
                run.root,
                f"was measured with the adapter {names[0]} beside the model, and such runs are not added",
                "calibrate with all of the text, and each --adapter, in one run",
            )
        if has_image_rows(run):
            raise InputError(
                run.root,
                "was calibrated on rows with images, and such runs are not added",
                "calibrate with all of the text in one run",
            )
    measured = {run: load_statistics(run) for run in runs}
    runs.sort(key=lambda run: (measured[run].record.corpus.fingerprint, min(measured[run].batches_measured, default=0)))
    total = measured[runs[0]]
    for run in runs[1:]:
        try:
            total = total.merge(measured[run])
        except InputError as error:
            raise InputError(
                " and ".join(str(other.root) for other in runs[: runs.index(run) + 1]), str(error)
            ) from None
    texts: dict[str, Tokens] = {}
    for run in runs:
        corpus = measured[run].record.corpus
        windows = load_tokens(run, run.calibration)
        run.refuse_stale("measure")
        starts = np.cumsum([text.windows for text in corpus.parts])[:-1]
        texts.update((text.fingerprint, part) for text, part in zip(corpus.parts, np.split(windows, starts)))
    held_out = {sha256_of(tokens): tokens for tokens in (load_tokens(run, run.evaluation) for run in runs)}
    windows = np.concatenate([texts[text.fingerprint] for text in total.record.corpus.parts])
    return Merged(tuple(runs), total, windows, np.concatenate([held_out[name] for name in sorted(held_out)]))


def _distinct(runs: list[Run], out: Path) -> list[Run]:
    if len(runs) < 2:
        raise InputError(
            f"{' '.join(str(run.root) for run in runs) or 'no run'}", "is nothing to add", "give two runs or more"
        )
    seen: set[Path] = set()
    for run in runs:
        place = local_path(run.root).resolve()
        if place == local_path(out).resolve():
            raise InputError(run.root, "is --out itself", "give the merged run a directory of its own")
        if place in seen:
            raise InputError(run.root, "is given twice", "give each run once")
        seen.add(place)
    return runs


def source_of_all(merged: Merged, model: str | None, report: Reporter) -> Source:
    """Open the source checkpoint of the merged runs: `model`, or the path that one of the runs recorded.

    Raises InputError when it is missing or another.
    """
    models = [run.record().model for run in merged.runs]
    there = next((identity["path"] for identity in models if Path(identity["path"]).is_dir()), None)
    if model is None and there is None:
        raise InputError(
            models[0]["path"],
            f"the model that {merged.runs[0].root} was made of is not there",
            "say where it is with --model",
        )
    source = opened_as(model or str(there), models[0], report)
    if source.fingerprint != (wanted := merged.statistics.record.model.fingerprint):
        raise InputError(
            f"--model {source.name}",
            f"is not the model that {merged.runs[0].root} was made of (fingerprint {source.fingerprint[:12]}, not "
            f"{wanted[:12]})",
            "say with --model where that one is",
        )
    return source


def check_held_out(merged: Merged, source: Source, report: Reporter) -> float | None:
    """The share of one run's held-out text that another run calibrated on, where it is too large and a run allowed
    that; None where it is small.

    Raises InputError where it is too large and no run allowed it; notes it from a hundredth on.
    """
    tokenizer = load_tokenizer(source)
    calibrated, held_out = (tokenizer.batch_decode(tokens) for tokens in (merged.windows, merged.evaluation[None]))
    overlap = measure_overlap(calibrated, held_out, merged.windows.shape[1])
    sentence = f"{overlap.shown} of what these runs held out for evaluation was calibrated on by another of them"
    if overlap.too_much and all(opening_of(run).overlap is None for run in merged.runs):
        raise InputError("", sentence, "give them --eval-data apart from all texts")
    if overlap.worth_a_note:
        report.note(sentence)
    return overlap.share if overlap.too_much else None


def note_missing(merged: Merged, notes: Notes) -> None:
    """Note the batches that none of the runs has measured."""
    if left := missing(merged):
        notes.note(
            f"{len(left)} batches were measured by none of the runs: "
            f"{', '.join(left[:3])}{' …' if len(left) > 3 else ''}"
        )


def missing(merged: Merged) -> list[str]:
    """The batches of the corpus that no run has measured, in words: `3 of TEXT`."""
    corpus = merged.statistics.record.corpus
    there = merged.statistics.batches_measured
    return [f"{batch} of {text.name}" for place, (text, batch) in enumerate(corpus.numbered()) if place not in there]


def write_merged(
    run: Run, source: Source, merged: Merged, notes: Notes, overlap: float | None = None, moments: bool = False
) -> None:
    """Write the stages `corpus` and `measure` of the merged `run`; `overlap`: the result of `check_held_out`;
    `moments`: add second moments too.
    """
    corpus = merged.statistics.record.corpus
    collected = [(part.options(CORPUS), part.facts(CORPUS)) for part in merged.runs]
    options = CorpusOptions(
        chat_template=any(options.chat_template for options, _ in collected),
        bos="auto" if any(options.bos == "auto" for options, _ in collected) else "never",
    )
    facts = CorpusFacts(
        data=corpus.name,
        eval_data=" + ".join(sorted({facts.eval_data for _, facts in collected})),
        model=str(source.path.resolve()),
        tokenizer=source.tokenizer,
        prefix=corpus.prefix,
        overlap=overlap,
        other_tokens=sorted({kind for _, facts in collected for kind in facts.other_tokens or ()}) or None,
        runs=merged.lineage,
    )
    inputs = {"tokens": sha256_of(merged.windows), "evaluation": sha256_of(merged.evaluation)}
    save_corpus(run, source, Key(inputs, options, facts), (merged.windows, merged.evaluation), notes)
    measured = Key(
        {"model": source.fingerprint, "calibration.npz": sha256_file(run.calibration)} | merged.measured(moments),
        MeasureOptions(batch_size=corpus.batch_size),
        MeasureFacts(moments=moments, runs=merged.lineage),
    )
    if not MEASURE.is_current(run, measured):
        with MEASURE.writing(run, measured, notes) as log:
            shutil.rmtree(run.moments, ignore_errors=True)
            if moments:
                with replacing(run.moments) as partial:
                    partial.mkdir()
                    add_moments([part.moments for part in merged.runs], partial)
            log.outputs += [*save_statistics(run, merged.statistics), *sorted(run.moments.glob("*.npy"))]
