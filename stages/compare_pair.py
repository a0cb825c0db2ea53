"""Compare two checkpoints of one model on a text: `fp8q compare ORIGINAL --model CANDIDATE --data TEXT --out DIR`.

No run is needed, and none is made: the results are of any two checkpoints that transformers loads, whoever made them.
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from .. import __version__
from ..calibrate.model.architecture import load_config, max_positions
from ..calibrate.model.bf16_products import widened_products
from ..calibrate.model.tokenizer import stored_tokenizer
from ..calibrate.text import corpus
from ..calibrate.text.chat import renderer
from ..calibrate.text.packing import Packing
from ..core.arrays import read_arrays
from ..core.errors import BackendError, InputError
from ..core.files import read_document, replacing, write_document
from ..core.reporter import Reporter
from ..options import DEFAULT_SEQ_LEN, CorpusOptions, PairOptions, ValidateOptions
from ..validate.accuracy.bootstrap import Bootstrap, increase_halves
from ..validate.accuracy.compare import AnyForward, Opener, Outcome, compare_in_turn
from ..validate.accuracy.decision import decide
from ..validate.accuracy.document import KL, Accuracy, Estimate
from ..validate.accuracy.perplexity import Evaluation
from ..validate.endpoint.checkpoint import loaded_checkpoint
from ..validate.pair.causes import Facts, causes_of
from ..validate.pair.document import CANDIDATE, Cause, CheckpointIdentity, HiddenError, ModuleError, PairComparison
from ..validate.pair.models import (
    LoadedCandidate,
    check_codes,
    check_directory,
    check_same_shape,
    check_same_tokens,
    identify,
    load_candidate,
    missing_weights,
)
from ..validate.pair.module_errors import compare_modules, expert_errors
from ..validate.report.loss_buckets import by_position
from ..validate.report.pair_page import pair_page
from .corpus import prefix_for
from .other_text import cut_for
from .pipeline.steps import device
from .shared.texts import read_tokens

#: What stands before the candidate's directory in messages.
OPTION = "--model "
#: The files of a comparison in its directory, and the folder with which a killed one goes on.
NUMBERS, TOKENS, PAGE, WORK = "comparison.json", "tokens.npz", "report.html", ".compare.work"


def compare_pair(original: Path, candidate: Path, options: PairOptions, progress: Reporter) -> PairComparison:
    """Compare the checkpoint in `candidate` with `original` on `options.data`, write `options.out` and return it.

    Results of the same files, text, options and version are returned as they are. A verdict raises no error
    (`check_pair` does). Raises InputError for what cannot be compared, BackendError where a model does not run.
    """
    if options.data is None or options.out is None:
        raise InputError(
            original,
            "is no run, and two checkpoints are compared on a text",
            "give --data TEXT and --out DIR, or the directory of a run",
        )
    configs = check_directory(original, ""), check_directory(candidate, OPTION)
    check_codes(candidate, configs[1], OPTION)
    text_config, other = (
        load_config(path, f"{option}{path}", raw)[0].get_text_config()
        for path, option, raw in zip((original, candidate), ("", OPTION), configs, strict=True)
    )
    check_same_shape(text_config, other, f"{OPTION}{candidate}")
    check_same_tokens(original, candidate, f"{OPTION}{candidate}")
    check_results_directory(options.out, (original, candidate))
    evaluation = _evaluation(original, text_config, options, progress)
    models = identify(original, configs[0], progress), identify(candidate, configs[1], progress)
    pair = CheckpointPair((original, candidate), configs, models, evaluation, options, progress)
    stored = options.out / NUMBERS
    if stored.is_file() and (known := read_document(stored, PairComparison)).key == pair.key:
        return _judged(known, options.out, options)
    loaded = _check_candidate(pair)
    work = options.out / WORK
    if work.is_dir() and not (work / pair.key).is_dir():
        shutil.rmtree(work)
    (folder := work / pair.key).mkdir(parents=True, exist_ok=True)
    outcome = _run(pair, text_config.vocab_size, folder)
    comparison = _explained(pair, loaded, outcome)
    _write(comparison, outcome, options.out)
    shutil.rmtree(work)
    return comparison


def check_results_directory(out: Path, checkpoints: tuple[Path, Path]) -> None:
    """Raise InputError where `out` is no directory for a comparison of `checkpoints`: it holds something else."""
    names = {NUMBERS, TOKENS, PAGE, WORK}
    if out.exists() and not out.is_dir():
        raise InputError(f"--out {out}", "is a file", "name a new directory")
    if out.resolve() in {path.resolve() for path in checkpoints}:
        raise InputError(f"--out {out}", "is one of the checkpoints", "name a new directory")
    if out.is_dir() and (strange := sorted(path.name for path in out.iterdir() if path.name not in names)):
        raise InputError(
            f"--out {out}", f"holds {strange[0]}, which no comparison wrote", "name a new or empty directory"
        )


def _evaluation(original: Path, config: PreTrainedConfig, options: PairOptions, progress: Reporter) -> Evaluation:
    """Cut the text into windows by the original's tokenizer, each begun as that begins a text."""
    assert options.data is not None, "the caller looked"
    tokenizer = stored_tokenizer(original)

    def render(where: str, value: object) -> str:  # only chats need a template
        return renderer(tokenizer, str(original))(where, value)

    text = read_tokens(options.data, tokenizer, config.vocab_size, corpus.Reading(render=render), progress)
    prefix = prefix_for(tokenizer, [text], CorpusOptions(), progress)
    limit = max_positions(config.to_dict())
    asked = ValidateOptions(context=options.context, max_tokens=options.max_tokens)
    packing = Packing(min(DEFAULT_SEQ_LEN, limit or DEFAULT_SEQ_LEN), prefix)
    return cut_for(text.ids, options.data, asked, packing, limit, progress)


@dataclass(frozen=True)
class CheckpointPair:
    """Two checkpoints, the original first: directories, config.json, identities; and how they are compared."""

    paths: tuple[Path, Path]
    configs: tuple[Mapping[str, Any], Mapping[str, Any]]
    models: tuple[CheckpointIdentity, CheckpointIdentity]
    evaluation: Evaluation
    options: PairOptions
    progress: Reporter

    @property
    def key(self) -> str:
        """SHA-256 of all that the results depend on: both checkpoints' files, tokens, protocol, options, version."""
        files, protocol = [model.sha256 for model in self.models], self.evaluation.protocol.model_dump_json()
        parts = (__version__, *files, protocol, self.options.module_windows)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _check_candidate(pair: CheckpointPair) -> LoadedCandidate:
    """Load the candidate before any model runs; where that fails, name the weights that its files lack, if any.

    Returns it without its model, which `compare_in_turn` loads again when its turn has come, and memory is free.
    """
    try:
        return replace(load_candidate(pair.paths[1], OPTION, device()), model=torch.nn.Identity())
    except InputError:
        if missing := missing_weights(*pair.paths, pair.configs):
            more = f", nor {len(missing) - 1:,} more of the original's weights" if len(missing) > 1 else ""
            raise InputError(
                f"{OPTION}{pair.paths[1]}",
                f"has no {missing[0]}{more}: a module is left out, or under another name",
                "export it again",
            ) from None
        raise


def _run(pair: CheckpointPair, vocabulary: int, folder: Path) -> Outcome:
    """Run the windows through the original in BF16 and FP32 and through the candidate, one loaded at a time."""
    original, candidate = pair.paths
    openers: dict[str, Opener] = {
        "bf16": lambda: _logits(loaded_checkpoint(original, "", torch.bfloat16).to(device())),
        "fp32": lambda: _logits(loaded_checkpoint(original, "", torch.float32).to(device())),
        CANDIDATE: lambda: _logits(load_candidate(candidate, OPTION, device()).model),
    }
    outcome = compare_in_turn(pair.evaluation, openers, vocabulary, folder / "windows", pair.progress)
    if outcome.failed:
        raise BackendError("", "; ".join(outcome.failed.values()))
    base, runtimes = outcome.nll["bf16"], {}
    for name, runtime in outcome.accuracy.runtimes.items():
        nll, kl = outcome.nll[name], outcome.kl.get(name)
        update: dict[str, object] = {"by_position": by_position(nll, None if name == "bf16" else base, kl)}
        if name == CANDIDATE:
            update["increase_halves"] = increase_halves(base, nll)
        runtimes[name] = runtime.model_copy(update=update)
    return replace(outcome, accuracy=outcome.accuracy.model_copy(update={"runtimes": runtimes}))


def _explained(pair: CheckpointPair, loaded: LoadedCandidate, outcome: Outcome) -> PairComparison:
    """Judge the outcome, compare modules, and name causes."""
    modules, hidden, causes = _explain(pair)
    bootstrap, measured = Bootstrap(np.nonzero(pair.evaluation.scored)[0]), outcome.measured[CANDIDATE]
    return PairComparison(
        key=pair.key,
        original=pair.models[0],
        candidate=pair.models[1].model_copy(update={"loaded_by": loaded.loaded_by}),
        protocol=pair.evaluation.protocol,
        runtimes=outcome.accuracy.runtimes,
        flips=Estimate(**bootstrap.interval(1.0 - measured["top1"].astype(np.float64))._asdict()),
        kl_nats=Estimate(**bootstrap.interval(measured["kl"].astype(np.float64))._asdict()),
        verdict=decide(outcome.accuracy, outcome.nll, pair.options.max_ppl_increase),
        modules=modules,
        hidden=hidden,
        causes=causes,
        notes=[loaded.note] if loaded.note else [],
    )


def _logits(model: torch.nn.Module) -> AnyForward:
    def forward(ids: "np.ndarray[Any, np.dtype[np.int64]]") -> torch.Tensor:
        with widened_products():
            logits: torch.Tensor = model(input_ids=torch.from_numpy(ids).to(device()), use_cache=False).logits
        return logits

    return forward


def _explain(pair: CheckpointPair) -> tuple[list[ModuleError], list[HiddenError], list[Cause]]:
    """Compare modules on evenly spaced windows, both models in memory, and name the causes."""
    ids, most = pair.evaluation.ids, pair.options.module_windows
    if not most:
        return [], [], causes_of(Facts(*pair.paths, pair.configs, [], ({}, {}), {}))
    original = loaded_checkpoint(pair.paths[0], "", torch.bfloat16).to(device())
    candidate = load_candidate(pair.paths[1], OPTION, device()).model
    chosen = np.linspace(0, len(ids) - 1, min(most, len(ids))).astype(np.int64)
    windows = [torch.from_numpy(ids[number : number + 1]).to(device()) for number in chosen]
    with pair.progress.track("Comparing modules", len(windows), "windows") as advance, widened_products():
        modules, hidden = compare_modules(original, candidate, windows, advance)
    weights, experts = (_matrices(original), _matrices(candidate)), expert_errors(original, candidate)
    return modules, hidden, causes_of(Facts(*pair.paths, pair.configs, modules, weights, experts))


def _matrices(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Module -> its weight [out, in], of those that hold it as numbers."""
    return {
        name.removesuffix(".weight"): weight.detach()
        for name, weight in model.named_parameters()
        if name.endswith(".weight") and weight.dim() == 2 and weight.element_size() > 1
    }


def _write(comparison: PairComparison, outcome: Outcome, out: Path) -> None:
    arrays = {**outcome.nll, **{f"{name}{KL}": values for name, values in outcome.kl.items()}}
    with replacing(out / TOKENS) as partial_file, open(partial_file, "wb") as handle:
        np.savez(handle, allow_pickle=False, **{name: arrays[name] for name in sorted(arrays)})
    _write_page(comparison, out)
    write_document(out / NUMBERS, comparison)


def _write_page(comparison: PairComparison, out: Path) -> None:
    page = pair_page(comparison)
    with replacing(out / PAGE) as partial_file:
        partial_file.write_text(page, encoding="utf-8")


def _judged(comparison: PairComparison, out: Path, options: PairOptions) -> PairComparison:
    """Return the stored results with the verdict by the limit of `options`, written where it was by another."""
    arrays = read_arrays(out / TOKENS, "losses of tokens", "remove the directory and compare again")
    losses = {name: values for name, values in arrays.items() if not name.endswith(KL)}
    accuracy = Accuracy(protocol=comparison.protocol, runtimes=comparison.runtimes)
    judged = comparison.model_copy(update={"verdict": decide(accuracy, losses, options.max_ppl_increase)})
    if judged != comparison:
        _write_page(judged, out)
        write_document(out / NUMBERS, judged)
    return judged
