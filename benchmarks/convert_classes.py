"""Does `fp8q convert` quantize the linear layers of every class that generates text, and nothing else?

    python benchmarks/convert_classes.py [--names LlamaConfig,T5Config] [--save convert_classes]

Every class of transformers that its mappings call a causal language model, one from sequences to sequences, or one from
images and text to text (of which text alone is run), with random weights in two layers of width 64. Each is converted
(`--form dynamic`), loaded again by transformers in its own class, and run beside the BF16 weights on the same tokens,
both in FP32 (CTRL's own code mixes types in BF16): KL(BF16 || FP8) in nats, the mean over positions, and no key may be
missing or left over. Beside it stands the KL of the BF16 model with zeros in the place of what was quantized, so that a
KL of nearly nothing is seen to mean something; the limit is a twentieth of it, or 10^-2 where that is more. Of each:
the linear layers of the class (`nn.Linear`, but for those of experts, which are tensors there), the tensors of codes,
and what was kept and why.
Random weights say nothing of accuracy.

Each class has a process of its own, forked from one that has imported everything; what takes more than `SECONDS` is
ended. Prints a line for each, and last one line of JSON. Exit status 1 where one that is not refused is not right.
"""

import json
import os
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers
from result import RESULTS, ROOT, STARTED, arguments, described, publish
from small_configurations import CONFIGURATIONS, FURTHER, LATENT_SIZES, SIZES, every, sizes
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from two_implementations import kl

from fp8q.calibrate.input.silence import quiet_transformers
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.options import ConvertOptions
from fp8q.quantize.reading.fp8_tensors import open_checkpoint
from fp8q.stages.convert import convert

LIMIT = 1e-2
SECONDS = 600
#: Memory that one class may take, bytes: a few make tables whose sizes no field of theirs sets.
MEMORY = 16 << 30
TOKENS = 24
#: Smaller than `small_configurations`: nothing is built of these.
SMALLER = {
    "vocab_size": 256, **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size", "d_ff"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96), "head_dim": 16, "d_kv": 16,
    "vocab_size_per_layer_input": 256, "num_decoder_layers": 2, "global_head_dim": 16,
}  # fmt: skip
#: Fields of towers and of whole models, wherever they stand.
TOWERS: dict[str, int] = {
    "depth": 2, "embed_dim": 64, "out_hidden_size": 64, "image_size": 28, "patch_size": 14, "num_mel_bins": 16,
    "max_source_positions": 32, "encoder_layers": 2, "decoder_layers": 2, "projection_dim": 64,
    "num_global_layers": 2, "mm_tokens_per_image": 4,
}  # fmt: skip
#: Sections of rotary frequencies, of which a head of 16 has 8, and one that turns half of it 4.
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
HALF_SECTIONS = SECTIONS | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
#: What a class needs besides, in the configuration and in those inside it.
NEEDED: dict[str, dict[str, Any]] = {
    "DbrxConfig": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "Glm4vConfig": {"text_config": {"rope_parameters": SECTIONS}},
    "Glm46VConfig": {"text_config": {"rope_parameters": SECTIONS}},
    "GlmOcrConfig": {"text_config": {"rope_parameters": SECTIONS}},
    "PaddleOCRVLConfig": {"text_config": {"rope_parameters": SECTIONS}},
    "Glm4vMoeConfig": {"text_config": {"rope_parameters": HALF_SECTIONS}},
    "Gemma4Config": {
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "patch_size": 14,
            "position_embedding_size": 64,
        },
    },
    "LongcatFlashConfig": {"head_dim": 16},
    "Mistral4Config": {"head_dim": 48},
    "Ernie4_5_VLMoeConfig": {
        "text_config": {
            "rope_parameters": SECTIONS | {"mrope_section": [3, 3, 2]},
            "moe_intermediate_size": [64, 32],
        },
    },
    "Step3p7Config": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
            "sliding_window": 12,
            "share_expert_dim": 64,
            "num_sliding_attention_heads": 4,
            "per_layer_config": {},
        },
    },
    "Dots3NoteConfig": {
        "text_config": {"per_layer_config": {}, "head_dim": 48},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        "vision_config": {
            "per_layer_config": {},
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
            "num_local_experts": 4,
        },
    },
    "DiffusionGemmaConfig": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64, "per_layer_config": {}},
    },
    "MllamaTextConfig": {"cross_attention_layers": [1]},
    "MllamaConfig": {"text_config": {"cross_attention_layers": [1]}},
}
#: Lists with an entry for each layer, which follow from the number of layers where they are left out.
BY_LAYER = (
    "layer_types", "mlp_layer_types", "no_rope_layers", "full_attn_layers", "moe_layers", "per_layer_config",
)  # fmt: skip
#: Classes at a time, a thread each: one, for the memory that it may take.
JOBS = 1
#: What becomes of a class that is not compared. `unloadable`: `convert` says so, and transformers does not load it.
OTHER = ("refused", "unmade", "failed", "unloadable")
NO_OTHERS: Mapping[str, object] = {}
Row = dict[str, Any]


class UnmadeError(Exception):
    """transformers makes no model of a configuration, or does not run it on tokens alone."""


def classes() -> dict[str, str]:
    """The name of each class that generates text -> the model type of its configuration."""
    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    named: dict[str, str] = {}
    for mapping in mappings:
        for model_type, name in mapping.items():
            for kind in (name,) if isinstance(name, str) else name:
                if kind not in named or model_type.endswith("_text"):  # Llama 4's is named for both
                    named[kind] = model_type
    return dict(sorted(named.items()))


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """The small sizes of the fields of a configuration, and of those inside it."""
    small: dict[str, Any] = {}
    for key, value in fields.items():
        if key in BY_LAYER:
            continue
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = {inner: size for inner, size in value.items() if inner not in BY_LAYER} | shrunk(value)
        elif type(value) is int and key in TOWERS | SIZES | SMALLER:
            small[key] = (TOWERS | SIZES | SMALLER)[key]
    return small | (LATENT_SIZES | {"head_dim": 16} if "kv_lora_rank" in fields else {})


def configuration_class(name: str, model_type: str) -> type[PreTrainedConfig]:
    """The configuration of the class `name`: its own, where transformers names the model around it."""
    kind = CONFIG_MAPPING[model_type]
    wanted = getattr(transformers, name).config_class
    if wanted is None or wanted is PreTrainedConfig or issubclass(kind, wanted):
        return kind
    return wanted  # type: ignore[no-any-return]


def configuration(name: str, model_type: str, text_sizes: Mapping[str, object] = NO_OTHERS) -> PreTrainedConfig:
    """A small configuration of the class `name`, with those of `text_sizes` that its text model has; raises UnmadeError
    where transformers makes none.
    """
    kind = configuration_class(name, model_type)
    chosen = kind.__name__
    try:
        default = kind()
        inside = default.get_text_config()
        if chosen in every() and chosen not in CONFIGURATIONS and inside is default:
            fields = sizes(chosen)
            if chosen not in FURTHER:
                fields |= {key: value for key, value in SMALLER.items() if key in fields}
        elif chosen in CONFIGURATIONS:
            fields = CONFIGURATIONS[chosen]
        else:
            fields = shrunk(default.to_dict())
            if "text_config" in fields:
                fields["text_config"] |= FURTHER.get(type(inside).__name__, {})
        for key, value in NEEDED.get(chosen, {}).items():
            fields = fields | {key: fields.get(key, {}) | value if isinstance(value, dict) else value}
        made: PreTrainedConfig = kind(**fields)
    except Exception as error:
        raise UnmadeError(f"{chosen}: {first_line(error)}") from error
    text = made.get_text_config()
    for field, size in text_sizes.items():
        if field in vars(text):  # not by `setattr`, which refuses what differs among layers
            vars(text)[field] = size
        elif hasattr(text, field):
            setattr(text, field, size)
    return made


def first_line(error: BaseException) -> str:
    """The type of an exception, and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def random_model(name: str, model_type: str, text_sizes: Mapping[str, object] = NO_OTHERS) -> PreTrainedModel:
    """The class `name` in BF16 with random weights, norms around what the class makes them."""
    torch.manual_seed(0)
    made = configuration(name, model_type, text_sizes)
    try:
        model: PreTrainedModel = getattr(transformers, name)(made)
    except Exception as error:
        raise UnmadeError(first_line(error)) from error
    for parameter in model.parameters():
        start = torch.zeros_like(parameter) if parameter.dim() > 1 else parameter.detach()
        parameter.data = start + 0.06 * torch.randn_like(start)
    torch.nn.Module.to(model, torch.bfloat16).eval()
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    """The logits of `model` on the same tokens, and of what else its class reads."""
    ids = (torch.arange(TOKENS) * 7 % 50 + 4).reshape(1, TOKENS)
    arguments: dict[str, Any] = {"input_ids": ids}
    if model.main_input_name == "input_features":
        mels: Any = getattr(model.config, "num_mel_bins", None) or getattr(model.config, "input_feat_per_channel", 80)
        length = 2 * getattr(model.config, "max_source_positions", 32)
        shape = (1, mels, length) if hasattr(model.config, "num_mel_bins") else (1, length, mels)
        arguments = {"input_features": torch.ones(shape)}
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = ids
    with torch.no_grad():
        output: torch.Tensor = model(**arguments, use_cache=False).logits.float()
    return output


def tried(name: str, model_type: str, folder: Path) -> Row:
    """Convert, load and run one class; raises InputError where convert refuses it."""
    model = random_model(name, model_type)
    linear = [module for module, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    model.save_pretrained(folder / "model")
    kind = type(model)
    row: Row = {"linear": len(linear), "stored": len(model.state_dict())}
    try:
        model = kind.from_pretrained(folder / "model", dtype=torch.float32)
        expected = logits(model)
    except Exception as error:
        raise UnmadeError(first_line(error)) from error
    written = convert(str(folder / "model"), folder / "fp8", ConvertOptions(threads=1), SILENT)
    row |= {"coded": written.quantized, "decided_by": written.decided_by}
    row["kept"] = {reason.partition(":")[0]: len(modules) for reason, modules in written.kept.items()}
    if written.unloadable is not None:
        return row | {"unloadable": loading_error(kind, folder / "fp8"), "said": written.unloadable}
    again: Any = kind.from_pretrained(folder / "fp8", dtype=torch.float32, output_loading_info=True)
    loaded, info = again
    row["misfits"] = sum(len(keys) for keys in info.values())
    p, q, zero = (
        torch.log_softmax(scores.double(), -1) for scores in (expected, logits(loaded), control(model, folder))
    )
    return row | {"kl": kl(p, q), "kl_without": kl(p, zero)}


def loading_error(kind: type[PreTrainedModel], checkpoint: Path) -> str:
    """The error with which transformers refuses a checkpoint that `convert` says it cannot load."""
    try:
        kind.from_pretrained(checkpoint, dtype=torch.float32)
    except (ValueError, RuntimeError) as error:
        return first_line(error)
    raise AssertionError("transformers loads what convert says it cannot")


def control(model: PreTrainedModel, folder: Path) -> torch.Tensor:
    """The logits of `model` with zeros in the place of all linear layers' weights that are codes in `folder`."""
    checkpoint = open_checkpoint(folder / "fp8")
    assert checkpoint is not None, "it was converted"
    ends = {module.rpartition(".")[2] for module in checkpoint.codes}
    for module_name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 or (leaf == "weight" and module_name.rpartition(".")[2] in ends):
                parameter.data.zero_()
    return logits(model)


def outcome(name: str, model_type: str) -> Row:
    """What became of one class: a row of numbers, or why it was not made, refused, or not caught."""
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        try:
            return tried(name, model_type, Path(folder))
        except InputError as refused:
            return {"refused": str(refused).replace(f"{folder}/", "").replace(f"{ROOT}/", "")}
        except UnmadeError as error:
            return {"unmade": str(error)}
        except Exception as error:  # noqa: BLE001 - the sweep goes on, and says what was not caught
            return {"failed": first_line(error)}


def guarded(work: Callable[[str, str], Row], until: float, name: str, model_type: str) -> Row | None:
    """The row of one class, from a process of its own; None where it would begin after the time `until`."""
    if monotonic() > until:
        return None
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(work(name, model_type)), daemon=True)
    process.start()
    there.close()
    try:
        return dict(here.recv()) if here.poll(SECONDS) else {"unmade": f"takes more than {SECONDS} s"}
    except EOFError:
        return {"unmade": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def right(row: Row) -> bool:
    """Tell whether a class that was converted is what it was."""
    return "kl" in row and row["kl"] < max(LIMIT, row["kl_without"] / 20) and not row["misfits"]


def shown(row: Row) -> str:
    """A row in words."""
    for key in OTHER:
        if key in row:
            return f"{key}: {row[key]}"
    reasons = ", ".join(f"{count} {reason}" for reason, count in row["kept"].items())
    return (
        f"{'right' if right(row) else 'WRONG'}: {row['linear']} linear layers, {row['coded']} coded; kept {reasons}; "
        f"KL {row['kl']:.2e} ({row['kl_without']:.1e} without), {row['misfits']} keys do not fit; {row['decided_by']}"
    )


def main() -> int:
    """Try each class, print, and say by the exit status whether all that are converted are right."""
    parser = arguments(__doc__)
    parser.add_argument("--names", help="only these classes or configurations, with commas between")
    parser.add_argument("--minutes", type=float, default=600.0, help="leave out what would begin later")
    options = parser.parse_args()
    head = described("convert_classes")
    wanted = options.names.split(",") if options.names else None
    rows: dict[str, Row] = {}
    earlier: dict[str, Any] = {}
    left_out: list[str] = []
    if wanted and options.save and (RESULTS / f"{options.save}.json").exists():
        before = json.loads((RESULTS / f"{options.save}.json").read_text(encoding="utf-8"))
        rows, earlier = before["rows"], {"kept": {"commit": before["commit"], "not": options.names}}
    chosen = {
        name: model_type
        for name, model_type in classes().items()
        if wanted is None or {name, CONFIG_MAPPING[model_type].__name__} & {*wanted}
    }
    with ThreadPoolExecutor(JOBS) as pool:
        for name, row in zip(
            chosen,
            pool.map(partial(guarded, outcome, STARTED + 60 * options.minutes), *zip(*chosen.items(), strict=True)),
            strict=True,
        ):
            if row is None:
                left_out.append(name)
                continue
            rows[name] = row
            print(f"{name}: {shown(row)}", flush=True)
    counts = Counter(
        next((key for key in OTHER if key in row), "right" if right(row) else "wrong") for row in rows.values()
    )
    print(dict(counts), file=sys.stderr)
    passed = not counts["failed"] and not counts["wrong"]
    figures = {
        "rows": dict(sorted(rows.items())),
        "counts": dict(counts),
        "left_out": left_out,
        "limit": LIMIT,
        "passed": passed,
    }
    return publish(head, earlier | figures, options.save)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
