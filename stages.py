"""The stages of calibration, joined: corpus, measure, quantize, export. Each reads files and writes files of the run.

All that can be wrong with the input is found before the first file is written. A stage that is current (same inputs, options and version)
is passed over, so the same command goes on where it was killed, and another method chooses again without measuring again.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from . import __version__
from .errors import Fp8qError, InputError
from .options import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN, CalibrateOptions, Clipping, ExportOptions, KvCache, ScaleOptions, WeightMethod
from .progress import Reporter
from .run import Run, StageLog, library_versions, replacing, sha256_file, write_document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .calibrate.source import Source
    from .calibrate.statistics import Statistics
    from .quantize.policy import Products
    from .quantize.scales import Scales
    from .validate.perplexity import Evaluation

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Collected:
    """The tokens of one run: `windows` int64 [windows, seq_len] to calibrate on, `evaluation` int64 [tokens] held out; `text`: SHA-256 of the calibration text."""

    windows: Tokens
    evaluation: Tokens
    names: tuple[str, str]
    text: str


class Notes:
    """A reporter that passes everything on and remembers the notes."""

    def __init__(self, report: Reporter):
        """Speak through `report`."""
        self.report, self.track, self.lines, self.waiting = report, report.track, list[str](), False

    def note(self, line: str) -> None:
        """Say the line, unless notes wait, and keep it."""
        self.lines.append(line)
        if not self.waiting:
            self.report.note(line)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Say the notes made in the block when it ends well: where it fails, the error is all there is to say."""
        said, self.waiting = len(self.lines), True
        yield
        self.waiting = False
        for line in self.lines[said:]:
            self.report.note(line)


def device() -> str:
    """Where models run: the first GPU, or the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def products_of(source: "Source", skip: tuple[str, ...]) -> "Products":
    """The matrix products of the source model, told without its weights.

    Raises InputError for a pattern of `skip` that matches nothing, and for products that have no FP8 checkpoint form yet.
    """
    from transformers.pytorch_utils import Conv1D

    from .calibrate.observe import matrix_products, output_head, takes_quantizers
    from .calibrate.source import meta_model
    from .export.support import unsupported
    from .quantize.policy import Products, select

    model = meta_model(source)
    if reason := unsupported(model, source):
        raise InputError(f"{source.name}: {source.architecture} {reason}, which fp8q does not do for now; give another model")
    modules = matrix_products(model)
    if any(isinstance(module, Conv1D) for module in modules.values()):
        raise InputError(
            f"{source.name}: {source.architecture} keeps its weights in Conv1D modules, which have no FP8 form on the Hugging Face side; this version does not do it"
        )
    unknown = {name: type(module).__name__ for name, module in modules.items() if not takes_quantizers(module)}
    products = Products(tuple(modules), output_head(model), unknown)
    select(products, skip)
    return products


def source_of(run: Run) -> "Source":
    """The source checkpoint the run was made of, opened again.

    Raises InputError when it is no longer where it was, or is no longer the same.
    """
    from .calibrate.source import open_source

    model = run.record().model
    if not Path(model["path"]).is_dir():
        raise InputError(f"{model['path']}: the model that {run.root} was made of is no longer there; put it back, or calibrate again")
    source = open_source(model["path"])
    if source.fingerprint != model["fingerprint"]:
        raise InputError(
            f"{model['path']}: is no longer the model that {run.root} was made of (its fingerprint differs); restore it, or calibrate again into another directory"
        )
    return source


def collect(source: "Source", tokenizer: "PreTrainedTokenizerBase", data: str, eval_data: str | None, options: CalibrateOptions, report: Reporter) -> Collected:
    """Read and cut the texts. Raises InputError for all that can be wrong with them."""
    from .calibrate import corpus

    seq_len = corpus.lower_default("--seq-len", options.seq_len, DEFAULT_SEQ_LEN, source.max_positions, "the model's positions", report)
    vocabulary = source.text_config.vocab_size
    texts = corpus.load_texts(data, report=report)
    ids = corpus.encode(texts, tokenizer, vocabulary)
    if eval_data is None:
        ids, evaluation = corpus.hold_out(ids)
        report.note(f"{data}: the last {len(evaluation):,} of {len(ids) + len(evaluation):,} tokens are held out for evaluation")
    else:
        eval_texts = corpus.load_texts(eval_data, report=report)
        corpus.check_disjoint(texts, eval_texts, data, eval_data, report)
        evaluation = corpus.encode(eval_texts, tokenizer, vocabulary)
    if len(ids) < seq_len:
        raise InputError(f"{data}: has {len(ids):,} tokens, less than one window of {seq_len:,}; give more text or a smaller --seq-len")
    if len(evaluation) < seq_len:
        raise InputError(
            f"{eval_data or data}: leaves {len(evaluation):,} tokens for evaluation, less than one window of {seq_len:,}; give more text, --eval-data, or a smaller --seq-len"
        )
    samples = corpus.lower_default("--samples", options.samples, DEFAULT_SAMPLES, len(ids) // seq_len, f"the windows of {seq_len:,} tokens in {data}", report)
    return Collected(corpus.windows(ids, seq_len, samples), evaluation, (data, eval_data or data), corpus.fingerprint(texts))


def check_weights(run: Run, source: "Source", report: Reporter) -> None:
    """Raise InputError for NaN or Inf in a weight, unless the run has measured just this model before."""
    from .calibrate.source import check_finite

    measured = run.record().stages.get("measure")
    if measured is None or measured.inputs["model"] != source.fingerprint:
        check_finite(source, report)


def write_corpus(run: Run, source: "Source", collected: Collected, notes: Notes) -> None:
    """The stage `corpus`: `calibration.npz` and `evaluation.npz`."""
    inputs = {"text": collected.text, "tokens": digest(collected.windows), "evaluation": digest(collected.evaluation)}
    options = {"data": collected.names[0], "eval_data": collected.names[1], "model": str(source.path.resolve())}
    if run.is_current("corpus", inputs, options):
        return
    model = {"name": source.title, "path": options["model"], "revision": source.revision or "", "fingerprint": source.fingerprint}
    with stage(run, "corpus", inputs, options, notes, model) as log:
        save_tokens(run.calibration, collected.windows)
        save_tokens(run.evaluation, collected.evaluation)
        log.outputs += [run.calibration, run.evaluation]


def measure(run: Run, source: "Source", options: CalibrateOptions, notes: Notes) -> None:
    """The stage `measure`: the model on the calibration windows, and `statistics.*`. Streamed or not, these are the same."""
    import torch

    from .calibrate.measure import measure as run_model
    from .calibrate.moments import gathering
    from .calibrate.source import load_model
    from .calibrate.statistics import Corpus, ModelIdentity, save_statistics
    from .calibrate.stream import measure_streamed

    inputs = {"model": source.fingerprint, "calibration.npz": sha256_file(run.require(run.calibration, "corpus"))}
    wanted = options.weight_rounding == "gptq"
    chosen = {"batch_size": options.batch_size, "moments": wanted}
    if any(run.is_current("measure", inputs, chosen | {"moments": there}) for there in {wanted, True}):
        return
    windows = load_tokens(run, run.calibration)
    identity = ModelIdentity(name=source.title, revision=source.revision, architecture=source.architecture, fingerprint=source.fingerprint)
    name = str(run.record().stages["corpus"].options["data"])
    corpus = Corpus(name=name, fingerprint=digest(windows), windows=len(windows), seq_len=windows.shape[1], batch_size=options.batch_size)

    stream = streamed(source, options.stream, notes)
    with stage(run, "measure", inputs, chosen, notes) as log:
        if stream:
            key = inputs | chosen | {"fp8q": __version__, "libraries": library_versions(), "threads": torch.get_num_threads(), "device": device()}
            with run.work("measure", key) as folder, gathering(run, wanted, folder / "moments") as moments:
                statistics = measure_streamed(source, windows, identity, corpus, notes, folder, device(), moments=moments)
        else:
            with gathering(run, wanted) as moments:
                statistics = run_model(load_model(source, torch.bfloat16, device()), windows, identity, corpus, notes, moments=moments)
        log.outputs += [*save_statistics(run, statistics), *sorted(run.moments.glob("*.npy"))]


def streamed(source: "Source", asked: bool | None, notes: Notes) -> bool:
    """Whether to stream: what was asked for, or whether the weights are too large for the memory available, with a note."""
    from .calibrate.memory import SHARE, available_bytes, weight_bytes

    if asked is not None:
        return asked
    size, available = weight_bytes(source), available_bytes(device())
    if available is None or size <= SHARE * available:
        return False
    notes.note(
        f"--stream: the weights take {size / 1e9:,.3g} GB in BF16, and {SHARE:.0%} of the memory available is {SHARE * available / 1e9:,.3g} GB: calibrating layer by layer"
    )
    return True


def measure_text(run: Run, text: str, notes: Notes) -> "Statistics":
    """The run's float model on other text: windows of the calibration's length, as many at most. Raises InputError where the text fills none."""
    import torch

    from .calibrate import corpus
    from .calibrate.measure import measure as run_model
    from .calibrate.source import load_model, load_tokenizer
    from .calibrate.statistics import Corpus, StatisticsRecord
    from .run import read_document

    record, source = read_document(run.require(run.statistics_json, "measure"), StatisticsRecord), source_of(run)
    size = record.corpus.seq_len
    ids = corpus.encode(corpus.load_texts(text, report=notes), load_tokenizer(source), source.text_config.vocab_size)
    if len(ids) < size:
        raise InputError(f"--against {text}: has {len(ids):,} tokens, less than one window of {size:,}, in which the run was calibrated; give more text")
    windows = corpus.windows(ids, size, min(len(ids) // size, record.corpus.windows))
    measured = Corpus(name=text, fingerprint=digest(windows), windows=len(windows), seq_len=size, batch_size=record.corpus.batch_size)
    return run_model(load_model(source, torch.bfloat16, device()), windows, record.model, measured, notes)


def quantize(run: Run, source: "Source", products: "Products", options: ScaleOptions, notes: Notes) -> None:
    """The stage `quantize`: choose scales, write `model/` and `scales.json`."""
    from .calibrate.statistics import load_statistics
    from .export.carry import carry_graphs
    from .quantize.checkpoint import quantize_checkpoint
    from .quantize.scales import group_of
    from .quantize.weight_rounding import Compensations
    from .quantize.weights import Rounding

    compensated = options.weight_rounding == "gptq"
    measured = run.record().stages["measure"].outputs
    inputs = {name: digest for name, digest in measured.items() if compensated or not name.startswith("moments/")}
    chosen = asdict(options.clip) | {
        "weight_method": options.weight_method,
        "kv_cache": options.kv_cache,
        "skip": list(options.skip),
        "weight_rounding": options.weight_rounding,
    }
    if run.is_current("quantize", inputs, chosen):
        return
    for name in inputs:
        run.require(run.root / name, "measure")
    statistics = load_statistics(run)
    scales, exported = choose_scales(statistics, products, options), has_graphs(run)
    compensations = Compensations(run.moments, group_of(statistics.record.groups)) if compensated else None
    with stage(run, "quantize", inputs, chosen, notes) as log:
        with replacing(run.model) as partial:
            scales = quantize_checkpoint(source, partial, scales, Rounding(options.weight_method, compensations), notes)
            if exported:
                carry_graphs(run, partial)
        write_document(run.scales, scales)
        for module, decision in scales.skipped.items():
            if decision.samples is not None:
                notes.note(f"{module}: stays in BF16: {decision.reason}")
        graphs = {run.onnx, run.onnx_fp32}
        log.outputs += [run.scales, *sorted(path for path in run.model.rglob("*") if path.is_file() and path not in graphs)]


def rescaled(run: Run, clip: Clipping, weight_method: WeightMethod | None, kv_cache: KvCache | None, skip: tuple[str, ...] | None) -> ScaleOptions:
    """What to choose the run's scales by: what is None stays as it was, or takes the default where a killed run does not tell.

    Raises InputError when the run was not measured.
    """
    run.require(run.statistics, "measure")
    before = run.record().stages.get("quantize")
    kept = asdict(ScaleOptions()) | (before.options if before else {})
    asked: dict[str, Any] = {"weight_method": weight_method, "kv_cache": kv_cache, "skip": skip}
    chosen = {name: kept[name] if value is None else value for name, value in asked.items()}
    return ScaleOptions(clip, chosen["weight_method"], chosen["kv_cache"], tuple(chosen["skip"]), kept["weight_rounding"])


def has_graphs(run: Run) -> bool:
    """Whether the graphs in the run are what this version exported. A checkpoint that they no longer fit took them away (`export.carry`)."""
    exported = run.record().stages.get("export")
    if exported is None or exported.version != __version__:
        return False
    return all((run.root / name).is_file() and sha256_file(run.root / name) == digest for name, digest in exported.outputs.items())


def exported_dtype(run: Run) -> Literal["bf16", "fp16"]:
    """The type the run's graph computes in; the default where there is none."""
    before = run.record().stages.get("export")
    return "fp16" if before and before.options["dtype"] == "fp16" else ExportOptions.dtype


def choose_scales(statistics: "Statistics", products: "Products", options: ScaleOptions) -> "Scales":
    """Decide every tensor of `products`; the weights' part is filled in when they are written."""
    from .quantize.policy import select
    from .quantize.scales import Scales, activation_scales, kv_cache_scales

    chosen, skipped = select(products, options.skip)
    activations, unfit = activation_scales(statistics, chosen, options.clip)
    cache = kv_cache_scales(statistics, options.clip) if options.kv_cache == "fp8" else {}
    return Scales(weights={}, activations=activations, kv_cache=cache, skipped=skipped | unfit)


def export(run: Run, dtype: Literal["bf16", "fp16"], notes: Notes) -> None:
    """The stage `export`: both ONNX graphs beside the checkpoint, linted."""
    from .calibrate.statistics import StatisticsRecord
    from .export.lint import lint
    from .export.model import export_model
    from .quantize.reference import stored_scales
    from .quantize.scales import load_scales
    from .run import read_document

    scales = load_scales(run)
    written = run.record().stages["quantize"].outputs
    inputs = {name: digest for name, digest in written.items() if name != str(run.scales.relative_to(run.root))} | {"scales.json": written["scales.json"]}
    options = {"dtype": dtype}
    if run.is_current("export", inputs, options):
        return
    for name in inputs:
        run.require(run.root / name, "quantize")
    record = read_document(run.require(run.statistics_json, "measure"), StatisticsRecord)
    carried = has_graphs(run) and run.record().stages["export"].options == options
    with stage(run, "export", inputs, options, notes) as log:
        log.outputs += [run.onnx, run.onnx_fp32] if carried else export_model(run, record, scales, dtype, notes)
        promised = {module: activation.scale for module, activation in scales.activations.items()}
        weight_scales = stored_scales(run.model, promised)
        for path in log.outputs:
            findings = lint(path, promised, weight_scales)
            for finding in findings:
                notes.note(f"{path.name}: {finding}")
            errors = [finding for finding in findings if finding.severity == "error"]
            if errors:
                raise Fp8qError(f"{path}: the exported graph breaks {len(errors)} rules of the lint, first {errors[0]}")


def fp8_files(run: Run) -> dict[str, str]:
    """Name -> SHA-256 of the files that every FP8 runtime reads, found to be what their stages wrote."""
    hashes: dict[str, str] = {}
    for by in ("quantize", "export"):
        outputs = run.record().stages[by].outputs if by in run.record().stages else {}
        for name, digest in outputs.items():
            run.require(run.root / name, by)
            hashes[name] = digest
    run.require(run.onnx, "export")
    return hashes


def evaluation(run: Run, data: str | None, context: int | None, stride: int | None, report: Reporter) -> "Evaluation":
    """The tokens to evaluate on, cut into windows: those held out, or those of `data`.

    Raises InputError when `data` is what the run was calibrated on, or shorter than a window.
    """
    from transformers import AutoTokenizer

    from .calibrate import corpus
    from .validate.perplexity import cut

    collected = run.record().stages.get("corpus")
    held_out = load_tokens(run, run.evaluation)
    calibration = load_tokens(run, run.calibration)
    assert collected is not None, "the tokens were there, so their stage is"
    name = str(collected.options["eval_data"])
    if data is not None:
        name, texts = data, corpus.load_texts(data)
        if corpus.fingerprint(texts) == collected.inputs["text"]:
            raise InputError(f"--data {data}: is the text that {run.root} was calibrated on; evaluate on another")
        held_out = corpus.encode(texts, AutoTokenizer.from_pretrained(run.model))
    limit = positions(run.model) or calibration.shape[1]
    size = corpus.lower_default("--context", context, calibration.shape[1], limit, "the model's positions", report)
    return cut(held_out, name, size, size if stride is None else stride)


def positions(model: Path) -> int | None:
    """How many positions the checkpoint in `model` has, by its config.json."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    found = next((config[key] for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length") if key in config), None)
    return None if found is None else int(found)


@contextmanager
def stage(
    run: Run, name: str, inputs: Mapping[str, str], options: Mapping[str, object], notes: Notes, model: Mapping[str, str] | None = None
) -> Iterator[StageLog]:
    """`Run.stage`, with the notes made since the last one."""
    with run.stage(name, inputs, options, model) as log:
        yield log
        log.notes, notes.lines = notes.lines, []


def digest(tokens: Tokens) -> str:
    """SHA-256 of token ids, int64 little-endian."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i8").tobytes()).hexdigest()


def save_tokens(path: Path, tokens: Tokens) -> None:
    """Write token ids as `input_ids` in an npz file."""
    with replacing(path) as partial, open(partial, "wb") as handle:
        np.savez(handle, allow_pickle=False, input_ids=tokens)


def load_tokens(run: Run, path: Path) -> Tokens:
    """Read the `input_ids` of a file the stage `corpus` wrote."""
    with np.load(run.require(path, "corpus"), allow_pickle=False) as arrays:
        ids: Tokens = arrays["input_ids"]
    return ids
