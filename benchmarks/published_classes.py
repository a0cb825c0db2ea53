"""Which of today's models go through fp8q by the classes that they are published under?

    python benchmarks/published_classes.py [--names GptOssForCausalLM] [--minutes 20] [--vllm PYTHON]
        [--save published_classes]

A small random model of each class of `PUBLISHED`, by transformers' configuration of it in two layers or so of width 64
(`convert_classes`), with the demo's tokenizer: calibrated on a few windows, validated (the exact reference beside
BF16), converted (`--form dynamic`), both checkpoints loaded by transformers in the class itself, and linted. A step
counts when it ends well: a load when no key is missing or left over and the logits are near the original's, a lint
without errors. A checkpoint that does not load in FP32 is loaded in BF16 too. What is refused says why, in fp8q's
words. `kl_by_part`: KL(BF16 || FP8) in nats of the part alone in FP8, all else in FP32, from the run's codes; of gates,
indexers and routers, which stay in BF16, from codes made here, a scale for each channel and each token. Random weights
say nothing of accuracy: of two parts of one model the figures tell which costs more. `families`: the
models that vLLM's recipes added with FP8 in 2026. `kept`: rows not made anew (`--names`), and the commit that each is
of.

`--vllm`: the Python of an environment with vLLM's CPU build; where none is named that of .venv/vllm, if `make
test-elsewhere` made one. It runs the original and both checkpoints by its own class; experts are multiplied in BF16
there, by the codes and scales that it has loaded. `vllm`: the KL of each from the original in FP32, or what vLLM says;
of what its CPU build loads and does not run, `loaded`. Where it does not take the original, the checkpoints are not
asked for.

Each class has a process of its own; what takes more than `convert_classes.SECONDS` is ended. Prints a line for each,
and last one line of JSON. Exit status 1 where a step ends in anything else than success or a refusal.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from convert_classes import UnmadeError, classes, first_line, guarded, random_model
from published_sizes import ALSO_PUBLISHED, class_of, text_sizes
from result import RESULTS, ROOT, STARTED, arguments, described, publish
from torch import nn
from transformers import PreTrainedModel
from two_implementations import kl
from vllm_jobs import Vllm, job

from fp8q.api import (  # fmt: skip
    CalibrateOptions,
    ConvertOptions,
    InputError,
    ValidateOptions,
    calibrate,
    convert,
    lint,
    validate,
)
from fp8q.calibrate.input.silence import quiet_transformers
from fp8q.calibrate.model.gemms import attention_modules
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.core.run import Run
from fp8q.quantize.codes.encoding import RUN_TIME_SCALES
from fp8q.quantize.codes.formats import E4M3
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.reference.linear import FP8Linear, replace_linears
from fp8q.quantize.scales.decisions import load_scales

DEMO = Path(__file__).parent.parent / "examples" / "demo"
#: The models that people quantize in 2026, and the class of transformers that their config.json names.
PUBLISHED: Mapping[str, str] = {
    "gpt_oss": "GptOssForCausalLM",
    "Llama 4": "Llama4ForConditionalGeneration",
    "Llama 4, its text class": "Llama4ForCausalLM",
    "Nemotron 3": "NemotronHForCausalLM",
    "Granite 4": "GraniteMoeHybridForCausalLM",
    "Kimi Linear": "KimiLinearForCausalLM",
    "Mistral 4": "Mistral4ForCausalLM",
    "Step 3.7": "Step3p7ForConditionalGeneration",
    "Gemma 4": "Gemma4ForConditionalGeneration",
    "Gemma 4, mixtures": "Gemma4ForConditionalGeneration/mixtures",
    "Qwen3.5, 3.6": "Qwen3_5ForConditionalGeneration",
    "Qwen3.5, 3.6, mixtures": "Qwen3_5MoeForConditionalGeneration",
    "MiniMax-M3": "MiniMaxM3SparseForConditionalGeneration",
    "MiniMax-M3, its text class": "MiniMaxM3VLForCausalLM",
    "Kimi K2.5": "Kimi_K25ForConditionalGeneration",
    "GLM 5": "GlmMoeDsaForCausalLM",
    "DeepSeek V4": "DeepseekV4ForCausalLM",
    "Hunyuan V3": "HYV3ForCausalLM",
    "ERNIE 4.5 VL": "Ernie4_5_VLMoeForConditionalGeneration",
    "LFM2": "Lfm2ForCausalLM",
    "SmolLM3": "SmolLM3ForCausalLM",
    "OLMo 3": "Olmo3ForCausalLM",
    "Ling 2.6": "BailingHybridForCausalLM",
    "dots 3 note": "Dots3NoteForConditionalGeneration",
    "DiffusionGemma": "DiffusionGemmaForBlockDiffusion",
    "MiniMax-M2.5": "MiniMaxM2ForCausalLM",
    "Laguna": "LagunaForCausalLM",
    "Hunyuan A13B": "HunYuanMoEV1ForCausalLM",
    "Mistral Medium 3.5": "Mistral3ForConditionalGeneration",
    "Muse Glimmer": "MuseGlimmerForConditionalGeneration",
    "Trinity": "AfmoeForCausalLM",
    "MiMo-V2 Flash": "MiMoV2FlashForCausalLM",
}
#: Models of these that are of no family that vLLM's recipes added with FP8 in 2026, as they were in August; of one
#: family more, Step 3.5's, transformers 5.23 has no class.
OTHER_FAMILIES = frozenset(
    {
        "gpt_oss", "Llama 4", "Llama 4, its text class", "Granite 4", "Gemma 4, mixtures", "MiniMax-M3, its text class",
        "ERNIE 4.5 VL", "SmolLM3", "OLMo 3",
    }
)  # fmt: skip
#: The largest KL of a load from the original, nats: one without scales is far beyond it.
SAME = 0.5
#: vLLM's arguments for classes that see: no image is answered, and none is tried.
TEXT_ALONE = {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}}
ORIGINAL = "original"
#: What stands before the reason where vLLM checks its own configuration.
VALIDATED = re.compile(r"ValidationError: .*\n *Value error, ")
VLLM = ROOT / ".venv" / "vllm" / "bin" / "python"
#: Classes of modules that keep a state, or convolve.
STATES = re.compile(r"Mamba|Delta|Recurrent|LinearAttention|ShortConv|KDA|Lightning")
IDS = torch.arange(3, 51)[None]
Row = dict[str, Any]


def checkpoint(path: Path, name: str) -> Path:
    """A random checkpoint of the class `name`, with the demo's tokenizer."""
    kind = class_of(name)
    model = random_model(kind, classes()[kind], text_sizes(name))
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8")) | ALSO_PUBLISHED.get(name, {})
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    shutil.copyfile(DEMO / "checkpoint" / "tokenizer.json", path / "tokenizer.json")
    # of no class of the architecture's own, which would want other files
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return path


@torch.no_grad()
def log_probabilities(model: PreTrainedModel) -> torch.Tensor:
    """The log probabilities of `model` on the same tokens, float64 [1, positions, vocabulary]."""
    return torch.log_softmax(model(input_ids=IDS, use_cache=False).logits.double(), -1)


def loaded(name: str, path: Path, expected: torch.Tensor) -> str:
    """What becomes of the checkpoint at `path` in transformers' class `name`: `yes`, or what is wrong with it.

    `expected`: what the original says. What ends with an error in FP32 is loaded in BF16 too.
    """
    try:
        return _loaded_in(torch.float32, name, path, expected)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is the answer
        reason = first_line(error)
    try:
        in_bf16 = _loaded_in(torch.bfloat16, name, path, expected)
    except Exception:  # noqa: BLE001 - the first reason is the answer
        return reason
    return f"in BF16 alone; in FP32 {reason}" if in_bf16 == "yes" else reason


def _loaded_in(dtype: torch.dtype, name: str, path: Path, expected: torch.Tensor) -> str:
    """What becomes of it in `dtype`; raises what transformers raises."""
    loading: Any = getattr(transformers, name).from_pretrained(path, dtype=dtype, output_loading_info=True)
    model, info = loading
    if keys := sum(len(names) for names in info.values()):
        return f"{keys} keys do not fit"
    distance = kl(expected, log_probabilities(model))
    return "yes" if distance < SAME else f"other logits, KL {distance:.2g}"


def in_vllm(python: Path, name: str, checkpoints: Mapping[str, Path], expected: torch.Tensor) -> dict[str, float | str]:
    """What vLLM's CPU build makes of each of the `checkpoints` of the class `name`, the original first: the KL in nats,
    or what it says; `loaded` and what it says where it has loaded the checkpoint and does not run the class.
    """
    answers: dict[str, float | str] = {}
    engine = TEXT_ALONE if name.endswith("ForConditionalGeneration") else {}
    with tempfile.TemporaryDirectory() as folder, Vllm(python) as vllm:
        exact = Path(folder) / "exact.npy"
        np.save(exact, expected[:, :-1].float().numpy())
        for which, path in checkpoints.items():
            try:
                answer = vllm.ask(job(path, IDS.numpy(), exact, wide_experts=which != ORIGINAL, engine=engine))
            except RuntimeError as error:
                answers[which] = first_line(error)
                break
            if "error" not in answer:
                distance = float(np.mean(answer["kl_nats"]))
                answers[which] = distance if distance < SAME else f"other logits, KL {distance:.2g}"
                continue
            said = re.sub(r"'/[^' ]*/model'", "MODEL", VALIDATED.sub("", answer["error"]).strip().splitlines()[0])[:160]
            answers[which] = f"loaded: {said}" if answer["loaded"] else said
            if which == ORIGINAL and not answer["loaded"]:
                break
    return answers


def linted(path: Path) -> str:
    """What lint says of a checkpoint: `yes` without an error, or its first error."""
    errors = [finding for part in lint(path).parts for finding in part.findings if finding.severity == "error"]
    return "yes" if not errors else f"{len(errors)} errors, first {errors[0]}"


def dynamic_layer(module: nn.Module) -> FP8Linear:
    """`module` in FP8, by a scale for each output channel and each token."""
    weight = module.get_parameter("weight").detach().float()
    scale = weight.abs().amax(1) / E4M3.max
    codes = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    bias = getattr(module, "bias", None)
    layer = FP8Linear(codes, scale, None, None if bias is None else bias.detach(), "exact")
    layer.run_time_scales = RUN_TIME_SCALES["dynamic"]
    return layer


def part_of(model: PreTrainedModel, name: str, attention: Iterable[str]) -> str:
    """The part of a model that the GEMM `name` is counted in."""
    if ".experts." in name:
        return "experts"
    if name.startswith(tuple(f"{module}." for module in attention)):
        return "attention"
    owners = [type(model.get_submodule(name.rsplit(".", up)[0])).__name__ for up in range(1, 1 + name.count("."))]
    return "states" if any(map(STATES.search, owners)) else "other"


def parts_in_fp8(run: Run, path: Path) -> tuple[PreTrainedModel, dict[str, dict[str, nn.Module]]]:
    """The model at `path`, in FP32, and for each of its parts the layers in FP8, by their names."""
    scales = load_scales(run)
    original = load_model(open_source(str(path)), torch.float32)
    reference = load_reference(run.model, "exact", torch.float32).model
    attention = [*attention_modules(original).values()]
    layers: dict[str, dict[str, nn.Module]] = {}
    for name in scales.weights:
        layers.setdefault(part_of(original, name, attention), {})[name] = reference.get_submodule(name)
    for name, skipped in scales.skipped.items():
        kind = {"recurrent": "gates", "router": "routers", "indexer": "indexers"}.get(
            skipped.reason.split(":")[0].split(" ")[0]
        )
        module = original.get_submodule(name)
        if kind and type(module) is nn.Linear:
            layers.setdefault(kind, {})[name] = dynamic_layer(module)
    return original, dict(sorted(layers.items()))


@contextmanager
def standing_in(model: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace modules of `model` by `layers` in this block."""
    before = {name: model.get_submodule(name) for name in layers}
    replace_linears(model, layers)
    yield
    replace_linears(model, before)


def by_part(run: Run, path: Path) -> dict[str, float]:
    """KL in nats of each part alone in FP8."""
    original, parts = parts_in_fp8(run, path)
    expected = log_probabilities(original)
    losses: dict[str, float] = {}
    for part, layers in parts.items():
        with standing_in(original, layers), suppress(AttributeError):  # a class may read the weight itself
            losses[part] = kl(expected, log_probabilities(original))
    return losses


def step(row: Row, name: str, work: Callable[[], Any]) -> Any:
    """Do a step and note how it ended; None where it failed or was refused."""
    try:
        done = work()
    except InputError as refused:
        reason = str(refused).replace(f"{ROOT}/", "")
        row[name] = f"refused: {re.sub(r'/[^ ]*/(model|run)[^ :]*', 'MODEL', reason)}"
        return None
    except Exception as error:  # noqa: BLE001 - the table goes on, and says what was not caught
        row["failed"] = [*row.get("failed", []), name]
        row[name] = f"FAILED: {first_line(error)}"
        return None
    row[name] = done if isinstance(done, str) else "yes"
    return done


def outcome(vllm: Path | None, name: str, model_type: str) -> Row:
    """The row of one class; `vllm`: the Python that has it."""
    kind = class_of(name)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row: Row = {}
    with tempfile.TemporaryDirectory() as temporary, quiet_transformers():
        folder = Path(temporary)
        text = folder / "text.txt"
        text.write_text((DEMO / "calibration.txt").read_text(encoding="utf-8")[:9_000], encoding="utf-8")
        try:
            model = checkpoint(folder / "model", name)
            expected = log_probabilities(getattr(transformers, kind).from_pretrained(model, dtype=torch.float32))
        except UnmadeError as error:
            return {"unmade": str(error)}
        except Exception as error:  # noqa: BLE001 - transformers' own
            return {"unmade": first_line(error)}
        options = CalibrateOptions(samples=2, seq_len=48, batch_size=2)
        run = step(row, "calibrate", lambda: calibrate(str(model), str(text), folder / "run", options=options))
        if run is not None:
            row["gemms"] = len(load_scales(run).weights)
            row["no_graph"] = run.without_graph()
            limits = ValidateOptions(runtimes=("bf16", "reference"), context=48, max_tokens=144)
            judged = step(row, "validate", lambda: validate(run.root, options=limits))
            if judged is not None:
                row["kl"] = judged.runtimes["reference"].kl_mean_nats
            row["loads the run"] = loaded(kind, run.model, expected)
            step(row, "parts", lambda: row.setdefault("kl_by_part", by_part(run, model)))
        written = step(row, "convert", lambda: convert(str(model), folder / "fp8", ConvertOptions(threads=1)))
        if written is not None:
            row["converted"] = written.quantized
            row["loads what convert wrote"] = loaded(kind, folder / "fp8", expected)
        row["lint"] = {
            which: step(row, f"lint {which}", partial(linted, path))
            for which, path, done in (
                ("calibrate", folder / "run" / "model", run),
                ("convert", folder / "fp8", written),
            )
            if done is not None
        }
        if vllm is not None:
            made = {"calibrate": (run, folder / "run" / "model"), "convert": (written, folder / "fp8")}
            there = {which: path for which, (done, path) in made.items() if done is not None}
            row["vllm"] = in_vllm(vllm, kind, {ORIGINAL: model} | there, expected) if there else {}
    return row


def shown(row: Row) -> str:
    """A row in words."""
    return ", ".join(f"{key}: {value}" for key, value in row.items())


def main() -> int:
    """Try each class, print, and say by the exit status whether every step ended in success or a refusal."""
    parser = arguments(__doc__)
    parser.add_argument("--names", help="only these classes, with commas between")
    there = VLLM if VLLM.exists() else None
    parser.add_argument("--vllm", type=Path, default=there, help="the Python of an environment with vLLM")
    parser.add_argument("--jobs", type=int, default=2, help="classes at a time, a process each")
    parser.add_argument("--minutes", type=float, default=600.0, help="leave out what would begin later")
    options = parser.parse_args()
    if options.vllm is not None and not options.vllm.exists():
        parser.error(f"--vllm {options.vllm}: is not there")
    head = described("published_classes")
    wanted = options.names.split(",") if options.names else [*PUBLISHED.values()]
    types = classes()
    rows: dict[str, Row] = {}
    made_at: dict[str, str] = {}
    if options.names and options.save:
        before = json.loads((RESULTS / f"{options.save}.json").read_text(encoding="utf-8"))
        rows = before["rows"]
        made_at = {name: before["kept"].get(name, before["commit"]) for name in rows}
    begin = partial(guarded, partial(outcome, options.vllm), STARTED + 60 * options.minutes)
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, row in zip(wanted, pool.map(begin, wanted, (types[class_of(name)] for name in wanted)), strict=True):
            if row is not None:
                rows[name] = row
                made_at.pop(name, None)
                print(f"{name}: {shown(row)}", flush=True)
    failed = [name for name, row in rows.items() if "failed" in row]
    families = [model for model in PUBLISHED if model not in OTHER_FAMILIES]
    figures = {"models": PUBLISHED, "families": families, "kept": made_at, "rows": dict(sorted(rows.items()))}
    return publish(head, figures | {"failed": failed, "passed": not failed}, options.save)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
