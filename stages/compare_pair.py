"""Compare two checkpoints of one model on a text: `fp8q compare ORIGINAL --model CANDIDATE --data TEXT --out DIR`.

No run is needed, and none is made: the results are of any two checkpoints that transformers loads, whoever made them.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig

from .. import __version__
from ..calibrate.input.untrusted import local_path
from ..calibrate.measure.chain import Chain, LayerChain
from ..calibrate.model.architecture import load_config, max_positions, text_fields
from ..calibrate.model.bf16_gemms import gemms_in_fp32
from ..calibrate.model.decoder import NoChainError
from ..calibrate.model.tokenizer import stored_tokenizer
from ..calibrate.text import corpus
from ..calibrate.text.chat import renderer
from ..calibrate.text.evaluation import Evaluation
from ..calibrate.text.packing import Packing
from ..core.arrays import read_arrays
from ..core.errors import BackendError, InputError
from ..core.files import read_document, replacing, sha256_file, write_document
from ..core.output_folder import OutputFolder, WorkFolder
from ..core.reporter import Reporter
from ..core.run_files import LOCK
from ..options import LEAST_WINDOWS, PAIR_CONTEXT, CorpusOptions, PairOptions, ValidateOptions
from ..validate.accuracy.bootstrap import Bootstrap, increase_halves
from ..validate.accuracy.compare import (
    BASELINE,
    FLOAT32,
    AnyForward,
    Opener,
    Outcome,
    Turns,
    compare_in_turn,
    windows_at_once,
)
from ..validate.accuracy.decision import decide
from ..validate.accuracy.divergence import TOP1, kl_from
from ..validate.accuracy.document import KL, Accuracy, Estimate
from ..validate.pair.causes import Facts, causes_of, check_files
from ..validate.pair.checkpoint_chain import CheckpointChain, LayerMatrices, check_streamed_form
from ..validate.pair.document import (
    CANDIDATE,
    Cause,
    CheckpointIdentity,
    HiddenError,
    ModuleError,
    PairComparison,
    by_causes,
)
from ..validate.pair.models import (
    BY_FP8Q,
    ORIGINAL_IN_CODES,
    CandidateLoading,
    by_transformers,
    check_codes,
    check_directory,
    check_same_shape,
    check_same_tokens,
    coded_source,
    dequantizable,
    identify,
    load_candidate,
    load_original,
    missing_weights,
    tokenizer_of,
    weight_headers,
)
from ..validate.pair.module_errors import compare_modules, embedding_errors, expert_errors, matrices
from ..validate.pair.served_fields import ConfigFile, config_differences, generation_differences
from ..validate.pair.streamed import PairStream, StreamedWindows, check_disk
from ..validate.pair.tokenizer_differences import tokenizer_differences
from ..validate.report.loss_buckets import by_position
from ..validate.report.pair_page import pair_page
from .corpus import prefix_for
from .measure import LayersNeed, streams_layers
from .other_text import cut_for
from .pipeline.stage import device
from .shared.texts import read_tokens

#: What stands before the candidate's directory in messages.
OPTION = "--model "
#: The files of a comparison in its directory.
NUMBERS = "comparison.json"
TOKENS = "tokens.npz"
PAGE = "report.html"
#: The name of the folder with which a killed comparison goes on.
COMPARE = "compare"
#: In that folder: who loads the candidate, once each of its layers has run a token.
CHECKED = "candidate.json"
#: There too: the hidden states and the results of layers.
LAYERS = "layers"
#: Windows whose texts both tokenizers read.
TEXTS = 8
#: The arithmetics that the original is run in, by the names of runtimes.
ORIGINAL_DTYPES = {BASELINE: torch.bfloat16, FLOAT32: torch.float32}
#: The errors of modules and hidden states, and the causes.
Explanation = tuple[list[ModuleError], list[HiddenError], list[Cause]]


@dataclass(frozen=True)
class CheckpointPair:
    """Two checkpoints, the original first: directories, config.json, identities; how they are compared; and the
    differences of their files beside the weights.
    """

    paths: tuple[Path, Path]
    configs: tuple[Mapping[str, Any], Mapping[str, Any]]
    models: tuple[CheckpointIdentity, CheckpointIdentity]
    evaluation: Evaluation
    options: PairOptions
    progress: Reporter
    file_causes: Sequence[Cause] = ()

    @property
    def key(self) -> str:
        """SHA-256 of all that the results depend on: both checkpoints' files, tokens, protocol, options, version.

        The tokens, since another tokenizer may cut the same text into as many.
        """
        files = [model.sha256 for model in self.models]
        protocol = self.evaluation.protocol.model_dump_json()
        tokens = hashlib.sha256(self.evaluation.ids.tobytes()).hexdigest()
        parts = (__version__, *files, tokens, protocol, self.options.module_windows)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def compare_pair(original: Path, candidate: Path, options: PairOptions, progress: Reporter) -> PairComparison:
    """Compare the checkpoint in `candidate` with `original` on `options.data`, write `options.out` and return it.

    Results of the same files, text, options and version are returned as they are. A verdict raises no error
    (`check_pair` does). Raises InputError for what cannot be compared, BackendError where a model does not run.
    """
    _, out = check_destination(original, options)
    configs = check_directory(original, ""), check_directory(candidate, OPTION)
    check_codes(candidate, configs[1], OPTION)
    ours, theirs = (
        ConfigFile("config.json", raw, load_config(path, f"{option}{path}", raw)[0])
        for path, option, raw in zip((original, candidate), ("", OPTION), configs, strict=True)
    )
    check_same_shape(ours.text, theirs.text, f"{OPTION}{candidate}")
    check_same_tokens(original, candidate, f"{OPTION}{candidate}")
    check_files(original, candidate, configs)
    check_results_directory(out, (original, candidate))
    evaluation = evaluation_of(original, ours.text, options, progress)
    file_causes = differences_beside((original, candidate), (ours, theirs), evaluation)
    models = identify(original, configs[0], progress), identify(candidate, configs[1], progress)
    pair = CheckpointPair((original, candidate), configs, models, evaluation, options, progress, file_causes)
    with results_folder(out) as work:
        return _compared(pair, work, ours.text.vocab_size)


def differences_beside(
    paths: tuple[Path, Path], files: tuple[ConfigFile, ConfigFile], evaluation: Evaluation
) -> list[Cause]:
    """List the differences of the files beside the weights in the directories `paths`, with both config.json `files`,
    that change what is served; raises InputError for one that is damaged.
    """
    tokenizer = tokenizer_of(paths[0])
    texts = [str(tokenizer.decode(ids.tolist())) for ids in evaluation.ids[:TEXTS]]
    positions = max_positions(files[1].text.to_dict())
    return [
        *config_differences(*files),
        *generation_differences(*files, paths),
        *tokenizer_differences(*paths, texts, positions),
    ]


def check_destination(original: Path, options: PairOptions) -> tuple[str, Path]:
    """Return the text and the directory of a comparison without a run; raise InputError where one is not given."""
    if options.data is None or options.out is None:
        raise InputError(
            original,
            "is no run, and two checkpoints are compared on a text",
            "give --data TEXT and --out DIR, or the directory of a run",
        )
    return options.data, options.out


def _compared(pair: CheckpointPair, work: WorkFolder, vocabulary: int) -> PairComparison:
    """Return the stored results where they are of this comparison; else run what is missing, and write them."""
    out = work.root
    stored = out / NUMBERS
    if stored.is_file() and (known := read_document(stored, PairComparison)).key == pair.key:
        return _judged(known, out, pair.options)
    checkpoints = [*zip(pair.paths, pair.configs, ("", OPTION), strict=True)]
    models = "two models in BF16, or the original in FP32, take"
    if goes_by_layer(pair.options, checkpoints, models, pair.progress):
        return _compared_by_layer(pair, work, vocabulary)
    loading = _check_candidate(pair)
    with work.until_done({"key": pair.key}) as folder:
        outcome = _run(pair, vocabulary, folder)
        return write_results(_explained(pair, loading, outcome, _explain(pair)), outcome, out)


def goes_by_layer(
    options: PairOptions, checkpoints: Sequence[tuple[Path, Mapping[str, Any], str]], models: str, progress: Reporter
) -> bool:
    """Tell whether to go layer by layer: as the option says, or where the first of the `checkpoints` (directory,
    config.json, the option that names it) in FP32 exceeds the available memory, with a note that begins with `models`,
    its subject and verb.

    Raises InputError for a form that is not computed so.
    """
    (original, config, _), *_ = checkpoints
    size = 4 * sum(prod(header.shape) for header in weight_headers(original, config).values())
    stream = streams_layers(options.stream, LayersNeed(size, f"{models} {{}}", "comparing"), progress)
    if stream:
        for path, config, option in checkpoints:
            check_streamed_form(path, config, option)
    return stream


@contextmanager
def streamed_openers(
    original: Path, ids: npt.NDArray[np.int64], vocabulary: int, states: Path, progress: Reporter
) -> Iterator[dict[str, Opener]]:
    """Run the windows `ids` [windows, context] through the original in BF16 and FP32, one decoder layer at a time, with
    hidden states in the folder `states`, and give what opens it behind its layers.

    Raises InputError for a model that is no chain of layers, and for a disk without the room.
    """
    chains = {name: _original_chain(original, dtype) for name, dtype in ORIGINAL_DTYPES.items()}
    windows = StreamedWindows.cut(ids, windows_at_once(ids.shape[1], None, vocabulary), np.empty(0, np.int64))
    outputs = {name: chain.layer_output for name, chain in chains.items()}
    check_disk(states, outputs, windows, states.parent)
    with _no_chain():
        states.mkdir(exist_ok=True)
        stream = PairStream(chains, windows, states)
        stream.run(progress)
        with stream.openers() as openers:
            yield openers


def _compared_by_layer(pair: CheckpointPair, work: WorkFolder, vocabulary: int) -> PairComparison:
    """Compare the models with one decoder layer of each in memory, and write the results."""
    original, wide = (_original_chain(pair.paths[0], dtype) for dtype in ORIGINAL_DTYPES.values())
    ids = pair.evaluation.ids
    windows = StreamedWindows.cut(ids, windows_at_once(ids.shape[1], None, vocabulary), _module_windows(pair))
    outputs = {BASELINE: original.layer_output, FLOAT32: wide.layer_output, CANDIDATE: original.layer_output}
    check_disk(work.path / LAYERS, outputs, windows, work.root)
    key = {"key": pair.key}
    left = work.left(key)
    candidate, loading = _candidate_chain(pair, left / CHECKED if left else None)
    with work.until_done(key) as folder, _no_chain():
        if not (folder / CHECKED).is_file():
            write_document(folder / CHECKED, loading)
        (states := folder / LAYERS).mkdir(exist_ok=True)
        stream = PairStream({BASELINE: original, FLOAT32: wide, CANDIDATE: candidate}, windows, states)
        stream.run(pair.progress)
        with stream.openers() as openers:
            outcome = _outcome(pair, openers, vocabulary, folder)
        results = stream.results(name for name, _ in original.model.named_modules())
        weights = (LayerMatrices(original), LayerMatrices(candidate)) if windows.modules else ({}, {})
        facts = Facts(
            *pair.paths, pair.configs, pair.file_causes, results.modules, weights, results.experts, results.tables
        )
        explanation = results.modules, results.hidden, causes_of(facts)
        return write_results(_explained(pair, loading, outcome, explanation), outcome, work.root)


def _original_chain(path: Path, dtype: torch.dtype) -> CheckpointChain | Chain:
    with _no_chain():
        coded = coded_source(path)
        return Chain(coded, device(), dtype) if coded else CheckpointChain(path, "", device(), dtype)


def _candidate_chain(pair: CheckpointPair, checked: Path | None) -> tuple[LayerChain, CandidateLoading]:
    """Open the candidate after each of its parts has run a token, unless the file `checked` says that they have; where
    transformers does not run one, with fp8q.
    """
    path = pair.paths[1]
    known = read_document(checked, CandidateLoading) if checked and checked.is_file() else None
    with _no_chain():
        try:
            if known == BY_FP8Q:
                raise InputError(f"{OPTION}{path}", "does not load any more", "remove the directory and compare again")
            chain = CheckpointChain(path, OPTION, device())
            if known is None:
                chain.check()
            return chain, by_transformers(path, device())
        except NoChainError:
            raise
        except (InputError, BackendError) as refused:
            with _missing_named(pair):
                return Chain(dequantizable(path, refused), device()), BY_FP8Q


@contextmanager
def _no_chain() -> Iterator[None]:
    """Describe the remedy for a model that is no chain of layers."""
    try:
        yield
    except NoChainError as error:
        raise InputError(
            error.subject,
            f"{error.reason}, so it cannot be compared layer by layer",
            "give --no-stream, and memory for whole models",
        ) from error


@contextmanager
def results_folder(out: Path) -> Iterator[WorkFolder]:
    """Hold the lock on the results in `out`, which is made, and removed again where nothing is written; yield the
    folder with which a killed comparison goes on.

    Raises InputError where another process compares there.
    """
    folder = OutputFolder(out, "comparing", f"--out {out}")
    with folder.opened() as created:
        try:
            yield WorkFolder(out, COMPARE)
        finally:
            if created and [path.name for path in out.iterdir()] == [LOCK]:  # refused before anything was measured
                folder.leave(created)


def check_results_directory(out: Path, checkpoints: tuple[Path, ...]) -> None:
    """Raise InputError where `out` is no directory for a comparison of `checkpoints`: it holds something else."""
    names = {NUMBERS, TOKENS, PAGE, WorkFolder(out, COMPARE).path.name, LOCK}
    if local_path(out).exists() and not out.is_dir():
        raise InputError(f"--out {out}", "is a file", "name a new directory")
    if out.resolve() in {path.resolve() for path in checkpoints}:
        raise InputError(f"--out {out}", "is one of the checkpoints", "name a new directory")
    if out.is_dir() and (strange := sorted(path.name for path in out.iterdir() if path.name not in names)):
        raise InputError(
            f"--out {out}", f"holds {strange[0]}, which no comparison wrote", "name a new or empty directory"
        )


def evaluation_of(original: Path, config: PreTrainedConfig, options: PairOptions, progress: Reporter) -> Evaluation:
    """Cut the text into windows by the original's tokenizer, each begun as that begins a text."""
    assert options.data is not None, "the caller looked"
    tokenizer = stored_tokenizer(original)

    def render(where: str, value: object) -> str:  # only chats need a template
        return renderer(tokenizer, str(original))(where, value)

    text = read_tokens(options.data, tokenizer, config.vocab_size, corpus.Reading(render=render), progress)
    prefix = prefix_for(tokenizer, [text], CorpusOptions(), progress)
    limit = max_positions(config.to_dict())
    asked = ValidateOptions(context=options.context, max_tokens=options.max_tokens)
    packing = Packing(min(PAIR_CONTEXT, limit or PAIR_CONTEXT), prefix)
    evaluation = cut_for(text.ids, options.data, asked, packing, limit, progress)
    check_windows(evaluation, options)
    return evaluation


def check_windows(evaluation: Evaluation, options: PairOptions) -> None:
    """Raise InputError, before any model is loaded, where there are too few windows for the intervals of a verdict."""
    windows, context = evaluation.ids.shape
    if windows >= LEAST_WINDOWS:
        return
    few = f"{windows:,} window{'' if windows == 1 else 's'} of {context:,} tokens"
    if evaluation.protocol.of_tokens is not None:
        raise InputError(
            f"--max-tokens {options.max_tokens}",
            f"leaves {few}, and a verdict needs {LEAST_WINDOWS}",
            f"give --max-tokens {LEAST_WINDOWS * context}, or a smaller --context",
        )
    raise InputError(
        f"--data {options.data}",
        f"has {few}, and a verdict needs {LEAST_WINDOWS}",
        "give more text, or a smaller --context",
    )


def _check_candidate(pair: CheckpointPair) -> CandidateLoading:
    """Load the candidate before any model runs, and forget it, so that memory is free until its turn has come."""
    with _missing_named(pair):
        return load_candidate(pair.paths[1], OPTION, device()).loading


@contextmanager
def _missing_named(pair: CheckpointPair) -> Iterator[None]:
    """Name the weights that the candidate's files lack, if any, where it does not load in this block."""
    try:
        yield
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
        **original_openers(original),
        CANDIDATE: lambda: _logits(load_candidate(candidate, OPTION, device()).model),
    }
    return _outcome(pair, openers, vocabulary, folder)


def _outcome(pair: CheckpointPair, openers: Mapping[str, Opener], vocabulary: int, folder: Path) -> Outcome:
    """Measure the three models that `openers` load; raises BackendError where one failed."""
    outcome = compare_in_turn(Turns(pair.evaluation, openers, vocabulary, folder / "windows"), pair.progress)
    if outcome.failed:
        raise BackendError("", "; ".join(outcome.failed.values()))
    return with_buckets(outcome)


def original_openers(original: Path) -> dict[str, Opener]:
    """The original in BF16 and in FP32, each loaded when its turn comes."""
    return {
        name: lambda dtype=dtype: _logits(load_original(original, dtype, device()))  # type: ignore[misc]
        for name, dtype in ORIGINAL_DTYPES.items()
    }


def with_buckets(outcome: Outcome) -> Outcome:
    """Add losses by position, and the candidate's increase on either half of the windows."""
    base = outcome.nll["bf16"]
    runtimes = {}
    for name, runtime in outcome.accuracy.runtimes.items():
        nll = outcome.nll[name]
        kl = outcome.kl.get(name)
        update: dict[str, object] = {"by_position": by_position(nll, None if name == "bf16" else base, kl)}
        if name == CANDIDATE:
            update["increase_halves"] = increase_halves(base, nll)
        runtimes[name] = runtime.model_copy(update=update)
    return replace(outcome, accuracy=outcome.accuracy.model_copy(update={"runtimes": runtimes}))


def _explained(
    pair: CheckpointPair, loading: CandidateLoading, outcome: Outcome, explanation: Explanation
) -> PairComparison:
    """Judge the outcome, and put the errors of modules and the causes beside it."""
    modules, hidden, causes = explanation
    flips, kl = flips_and_kl(outcome, np.nonzero(pair.evaluation.scored)[0])
    return PairComparison(
        key=pair.key,
        original=pair.models[0],
        candidate=pair.models[1].model_copy(update={"loaded_by": loading.loaded_by}),
        protocol=pair.evaluation.protocol,
        runtimes=outcome.accuracy.runtimes,
        flips=flips,
        kl_nats=kl,
        verdict=decide(outcome.accuracy, outcome.nll, pair.options, outcome.kl),
        modules=modules,
        hidden=hidden,
        causes=causes,
        notes=[note for note in (ORIGINAL_IN_CODES if coded_source(pair.paths[0]) else None, loading.note) if note],
        unseen=unseen(pair.evaluation.ids.shape[1], max_positions({**pair.configs[0], **text_fields(pair.configs[0])})),
    )


def unseen(context: int, positions: int | None) -> list[str]:
    """Say what windows of `context` tokens do not show of a model of so many `positions`."""
    if positions is None or positions <= context:
        return []
    line = (
        f"positions from {context:,} on were not run, of the model's {positions:,}: there only configurations and "
        f"embeddings are compared (--context {positions} runs all)"
    )
    return [line]


def flips_and_kl(outcome: Outcome, windows: npt.NDArray[np.intp]) -> tuple[Estimate, Estimate]:
    """The candidate's flips and KL with their intervals over `windows` [tokens], the window of each token."""
    bootstrap = Bootstrap(windows)
    measured = outcome.measured[CANDIDATE]
    flips = bootstrap.interval(1.0 - measured[TOP1].astype(np.float64))
    kl = bootstrap.interval(measured[kl_from(BASELINE)].astype(np.float64))
    return flips.estimate, kl.estimate


def _logits(model: torch.nn.Module) -> AnyForward:
    def forward(ids: "np.ndarray[Any, np.dtype[np.int64]]") -> torch.Tensor:
        with gemms_in_fp32():
            logits: torch.Tensor = model(input_ids=torch.from_numpy(ids).to(device()), use_cache=False).logits
        return logits

    return forward


def _explain(pair: CheckpointPair) -> Explanation:
    """Compare modules on evenly spaced windows, both models in memory, and name the causes."""
    ids = pair.evaluation.ids
    chosen = _module_windows(pair)
    if not len(chosen):
        return [], [], causes_of(Facts(*pair.paths, pair.configs, pair.file_causes))
    original = load_original(pair.paths[0], torch.bfloat16, device())
    candidate = load_candidate(pair.paths[1], OPTION, device()).model
    windows = [torch.from_numpy(ids[number : number + 1]).to(device()) for number in chosen]
    with pair.progress.track("Comparing modules", len(windows), "windows") as advance, gemms_in_fp32():
        modules, hidden = compare_modules(original, candidate, windows, advance)
    weights = (matrices(original), matrices(candidate))
    experts = expert_errors(original, candidate)
    tables = embedding_errors(original, candidate)
    facts = Facts(*pair.paths, pair.configs, pair.file_causes, modules, weights, experts, tables)
    return modules, hidden, causes_of(facts)


def _module_windows(pair: CheckpointPair) -> npt.NDArray[np.int64]:
    """The numbers of the windows on which modules are compared, evenly spaced."""
    windows = len(pair.evaluation.ids)
    return np.linspace(0, windows - 1, min(pair.options.module_windows, windows)).astype(np.int64)


def write_results(comparison: PairComparison, outcome: Outcome, out: Path) -> PairComparison:
    """Write tokens.npz, the page and comparison.json; return the comparison with the digest of the tokens' file."""
    arrays = {**outcome.nll, **{f"{name}{KL}": values for name, values in outcome.kl.items()}}
    with replacing(out / TOKENS) as partial_file, open(partial_file, "wb") as handle:
        np.savez(handle, allow_pickle=False, **{name: arrays[name] for name in sorted(arrays)})
    comparison = comparison.model_copy(update={
        "tokens_sha256": sha256_file(out / TOKENS), "verdict": by_causes(comparison.verdict, comparison.causes),
    })  # fmt: skip
    _write_page(comparison, out)
    write_document(out / NUMBERS, comparison)
    return comparison


def _write_page(comparison: PairComparison, out: Path) -> None:
    page = pair_page(comparison)
    with replacing(out / PAGE) as partial_file:
        partial_file.write_text(page, encoding="utf-8")


def _judged(comparison: PairComparison, out: Path, options: PairOptions) -> PairComparison:
    """Return the stored results with the verdict by the limits of `options`, written where it was by others."""
    remedy = "remove the directory and compare again"
    arrays = read_arrays(out / TOKENS, "losses of tokens", remedy)
    if sha256_file(out / TOKENS) != comparison.tokens_sha256:
        raise InputError(out / TOKENS, f"is not the file that {NUMBERS} was written with", remedy)
    losses = {name: values for name, values in arrays.items() if not name.endswith(KL)}
    kl = {name.removesuffix(KL): values for name, values in arrays.items() if name.endswith(KL)}
    accuracy = Accuracy(protocol=comparison.protocol, runtimes=comparison.runtimes)
    verdict = by_causes(decide(accuracy, losses, options, kl), comparison.causes)
    judged = comparison.model_copy(update={"verdict": verdict})
    if judged != comparison:
        _write_page(judged, out)
        write_document(out / NUMBERS, judged)
    return judged
