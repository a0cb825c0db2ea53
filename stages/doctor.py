"""`fp8q doctor RUN`: the stability checklist, of the run's files and of its model on a few windows.

It writes nothing. Checks that need the source checkpoint, or torch, are `unknown` where these are missing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..calibrate.measure.statistics import load_record, load_statistics
from ..calibrate.model.caches import new_cache
from ..calibrate.text.evaluation import prompt_of
from ..core.columns import duration
from ..core.errors import BackendError, InputError
from ..core.run import Run
from ..options import DoctorOptions
from ..quantize.scales.decisions import Scales, load_scales
from ..validate.advice import model_checks as running
from ..validate.advice.checkup import Check, Checkup, Remedies, worst_first
from ..validate.advice.criteria import ANSWER, PROMPT, PROMPTS
from ..validate.advice.model_checks import not_measured
from ..validate.advice.scale_checks import ScaledTensor, served_cache, stored_checks, tensors_of
from .corpus import load_tokens, spread_windows
from .cpu_time import STEP_TOKENS, token_seconds
from .pipeline.stage import CALIBRATE_MODULES, Notes, device, needs
from .pipeline.stages import QUANTIZE
from .shared.adapters import note_base_alone
from .shared.model_files import checked_model, export_options
from .shared.texts import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..calibrate.model.decoder import Layers
    from ..calibrate.model.source import Source
    from ..validate.advice.hidden_states import ModelPair
    from ..validate.advice.loops import Loops

#: The models that are run.
MODELS = ("BF16", "FP8")
#: The time of running both on a window, in forward passes of BF16: each of them, and each GEMM by itself.
PASSES = 4
#: The most tokens that run through both models at a time, in whole windows.
TOKENS = 1024


@dataclass(frozen=True)
class Examined:
    """The subjects of the checks: the run, its scales, and the form in which each tensor's scale is stored."""

    run: Run
    scales: Scales
    tensors: list[ScaledTensor]
    remedies: Remedies


def doctor(run: Run, notes: Notes, options: DoctorOptions) -> Checkup:
    """Every check of `run`, the worst first. Raises InputError for files that are not what their stages wrote."""
    run.refuse_stale("measure", "quantize", "export")
    note_base_alone(run, "what runs is of", notes)
    checked_model(run)
    scales = load_scales(run)
    statistics = load_statistics(run)
    what = Examined(run, scales, tensors_of(statistics, scales, run.model), _remedies(run, scales))
    checks = stored_checks(what.tensors, scales, what.remedies) + served_cache(run.model)
    if not options.windows:
        checks += not_measured("--windows 0 runs no model")
        return Checkup(windows=0, tokens=0, checks=worst_first(checks))
    windows = spread_windows(load_tokens(run, run.calibration), options.windows)
    running, ran = _running(what, windows, notes)
    return Checkup(
        windows=len(windows) if ran else 0, tokens=windows.size if ran else 0, checks=worst_first(checks + running)
    )


def _remedies(run: Run, scales: Scales) -> Remedies:
    record = run.record()
    corpus = load_record(run).corpus
    return Remedies(
        str(run.root),
        record.model["path"],
        corpus.name,
        corpus.windows,
        chosen=run.options(QUANTIZE),
        cached=tuple(dict.fromkeys(name.rpartition(".")[0] for name in scales.kv_cache)),
    )


def _running(what: Examined, windows: Tokens, notes: Notes) -> tuple[list[Check], bool]:
    """The checks that run the model, and whether it was run."""
    try:
        needs("calibrate", CALIBRATE_MODULES)
        from .shared.sources import source_of

        source = source_of(what.run)
    except BackendError as error:
        return not_measured(str(error), "`pip install 'fp8q[calibrate]'`"), False
    except InputError as error:
        return not_measured(str(error), what.remedies.restored()), False
    return _run(what, source, windows, notes), True


def _run(what: Examined, source: "Source", windows: Tokens, notes: Notes) -> list[Check]:
    """Run both models on `windows`, whose second halves stand for decoded tokens, then let both generate text."""
    import torch

    from ..calibrate.model.source import load_model
    from ..validate.accuracy.runtimes import open_reference
    from ..validate.advice.activation_watch import Watcher
    from ..validate.advice.hidden_states import ModelPair

    where = device()
    remedies = what.remedies
    scales = what.scales
    notes.note(_announced(what.run, windows))
    model = load_model(source, torch.bfloat16, where).requires_grad_(False)
    pair = ModelPair(model, open_reference(what.run, "fast", where), _layers(model, source))
    watcher = Watcher(model)
    batches = torch.from_numpy(windows).to(where).split(max(1, TOKENS // windows.shape[1]))
    with notes.track("Running BF16 and FP8", windows.size, "tokens") as advance:
        for ids in batches:
            with pair.reference.answering(ids.shape[1] - prompt_of(ids.shape[1])):
                pair.run(ids, watcher.watching(ids))
            advance(ids.numel())
    seen = watcher.seen
    divergences = pair.divergences
    fp16 = export_options(what.run).dtype == "fp16"
    return [
        *running.norm_inputs(seen, fp16, remedies),
        *running.attention_logits(seen, scales.kv_cache, remedies),
        *running.cache_tokens(seen, list(scales.kv_cache), _namer(what.run), remedies),
        *running.gemm_errors(divergences, scales.activations, remedies),
        *running.hidden_states(divergences, pair.layers, what.tensors, remedies),
        running.loops(_loops(what.run, pair, source, notes), remedies),
    ]


def _announced(run: Run, windows: Tokens) -> str:
    """Say what is run, and its time on this CPU, before anything is loaded."""
    seconds = token_seconds(run)
    steps = len(MODELS) * ANSWER
    time = ""
    if seconds is not None:
        tokens = PASSES * windows.size + STEP_TOKENS * steps
        time = f"; some {duration(seconds * tokens)} here, by the time of calibrating"
    return (
        f"doctor: runs {' and '.join(MODELS)} on {len(windows):,} windows ({windows.size:,} tokens), then lets each "
        f"write {ANSWER} tokens after {PROMPTS} prompts{time}; --windows 0 runs no model, and checks the files alone"
    )


def _layers(model: "PreTrainedModel", source: "Source") -> "Layers | None":
    """The decoder layers; None where the model is no chain of layers."""
    from ..calibrate.model.decoder import NoChainError, find_layers

    try:
        return find_layers(model, source)
    except NoChainError:
        return None


def _namer(run: Run) -> Callable[[int], str]:
    """Return a function from a token id to its text."""
    from tokenizers import Tokenizer

    file = run.model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
    return lambda token: f"token {token}" if tokenizer is None else repr(tokenizer.id_to_token(token))


def _loops(run: Run, pair: "ModelPair", source: "Source", notes: Notes) -> "Loops | None":
    """Count how often greedy text loops; None where the model has no room for prompts and answers."""
    import torch

    from ..validate.advice.loops import Loops, greedy

    windows = load_tokens(run, run.calibration)
    room = source.max_positions
    if windows.shape[1] < PROMPT or (room is not None and room < PROMPT + ANSWER):
        return None
    prompts = torch.from_numpy(spread_windows(windows, PROMPTS)[:, :PROMPT]).to(pair.model.device)
    with notes.track("Writing greedy text", len(MODELS), "models") as advance:
        bf16 = greedy(pair.model, partial(new_cache, pair.model), prompts)
        advance(1)
        fp8 = greedy(pair.reference.model, pair.reference.new_cache, prompts)
        advance(1)
    return Loops.from_answers(fp8, bf16)
