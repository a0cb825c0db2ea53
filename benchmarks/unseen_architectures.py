"""Does an architecture that nobody prepared fp8q for go the whole way, get a checkpoint alone, or is it refused?

    python benchmarks/unseen_architectures.py [--names Olmo2Config,BloomConfig] [--graph] [--save unseen_architectures]

Every class that transformers calls a causal language model (`small_configurations`), and models that also see, rotary
frequencies and heads in other forms (`CONFIGURATIONS`), two layers of width 128 each with random weights. First
attention, positions and cache, with nothing quantized: what the graph is traced from is run in FP32 and held against
transformers' eager attention at every position, for a prompt of 32 tokens at once, and for one of 12 with 20 tokens
decoded from a buffer (limit: 1e-4 of the largest logit; windows are 12); `--graph` ends there. Then all of it with an
FP8 KV cache, activations in one term: exported, ONNX Runtime's logits held against the exact reference, built by
TensorRT-RTX for sm89, loaded by transformers (which has no place for experts); those of `CONFIGURATIONS` again
in two. One term is compared at the first position of a row (limit 1e-4; later a code may differ); of two some code
differs there already, so that the mean KL is (limit 2e-5 nats: docs/two-terms.md). What no graph can be made of is
quantized, run by the exact reference (finite logits), and loaded by transformers: so are hybrids. Of what is no decoder
of text (a recurrence alone, an encoder) the configuration alone is opened. Nothing is said of accuracy: the weights are
random.

Prints a line for each, the shares, and last one line of JSON; `--names` with `--save` leaves the others as they were
saved. Exit status 1 when one neither works nor is refused, or a share is below its limit: of the dense decoders four in
five go the whole way, and nine in ten get a checkpoint.
"""

import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from result import RESULTS, arguments, described, publish
from small_configurations import CONFIGURATIONS, every, kind_of, sizes
from transformers import AutoConfig, PreTrainedModel
from two_implementations import kl

from fp8q.api import (  # fmt: skip
    CalibrateOptions,
    EngineOptions,
    InputError,
    RescaleOptions,
    build_engine,
    calibrate,
    engine,
    scales,
)
from fp8q.calibrate.model.architecture import load_config
from fp8q.calibrate.model.classes import auto_class
from fp8q.calibrate.model.expert_modules import experts_of
from fp8q.calibrate.model.gemms import cache_shapes
from fp8q.calibrate.model.latent_attention import cache_heads
from fp8q.calibrate.model.source import meta_model, open_source
from fp8q.core.run import Run
from fp8q.export.modules.graph_model import GraphPlan, prepare_graph
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.quantize.scales.scheme import in_two_codes
from fp8q.serve.loop.cache import BLOCK
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.stages.corpus import load_tokens
from fp8q.stages.shared.sources import gemms_of, source_of

DEMO = Path(__file__).parent.parent / "examples" / "demo"
LIMIT = 1e-4
#: Mean KL of ONNX Runtime from the exact reference, nats, where a value has two codes.
KL_LIMIT = 2e-5
PROMPT = 12
#: Configurations tried at a time, a thread each.
MOST_PROCESSES = 4
#: Of the dense decoders, the least shares that go the whole way and that get a checkpoint.
SHARES = {"whole_way": 0.8, "checkpoint": 0.9}
#: Kinds of which models are made; of the others the configuration is opened.
TRIED = ("dense", "mixture", "hybrid")


class UnmadeError(Exception):
    """transformers makes no model of a configuration."""


def random_checkpoint(path: Path, config: str, **more: object) -> Path:
    """A checkpoint of the configuration, with `more` of its fields, its norms around 1, with the demo's tokenizer."""
    torch.manual_seed(0)
    fields = (CONFIGURATIONS[config] if config in CONFIGURATIONS else sizes(config)) | more
    made = getattr(transformers, config.partition("-")[0])(**fields)
    try:
        model: PreTrainedModel = auto_class(made).from_config(made)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnmadeError(str(error).splitlines()[0]) from error
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.1)
    torch.nn.Module.to(model, torch.bfloat16).save_pretrained(path)
    shutil.copyfile(DEMO / "checkpoint" / "tokenizer.json", path / "tokenizer.json")
    # of no class of the architecture's own, which would want other files
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    return path


def loader(path: Path) -> Any:
    """transformers' class for the checkpoint at `path`."""
    return auto_class(AutoConfig.from_pretrained(path))


def graph_difference(path: Path, ids: torch.Tensor) -> float:
    """How far the graph's attention, positions and cache are from transformers' own: the largest difference of any
    logit at any position, as a share of the largest logit.

    `ids` int64 [rows, length] run at once, and again prefilled up to `PROMPT` and decoded token by token from a buffer
    that is longer than the text.
    """
    with torch.inference_mode():
        # with transformers' experts, all of them: of fp8q's the graph traces one
        model: PreTrainedModel = loader(path).from_pretrained(path, dtype=torch.float32)
        cache_heads(model)
        # Falcon's eager attention (transformers 5.14 and 5.23) adds ALiBi twice: in the mask, and itself
        own = "sdpa" if getattr(model.config, "alibi", False) else "eager"
        eager: Any = loader(path).from_pretrained(path, dtype=torch.float32, attn_implementation=own)
        expected = eager(input_ids=ids).logits
        shapes = cache_shapes(model.config.get_text_config())
        graph, (rows, length) = prepare_graph(model, GraphPlan({}, (), torch.float32)), ids.shape
        positions, capacity = torch.arange(length).expand(rows, -1), -(-length // BLOCK) * BLOCK

        def past(slots: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
            def empty(heads: int, size: int) -> torch.Tensor:
                return torch.zeros(rows * heads * (slots // BLOCK), BLOCK, size)

            return [(empty(*shapes[0]), empty(*shapes[1])) for _ in graph.attention]

        at_once = graph(ids, torch.ones_like(ids), positions, past(0))[0]
        buffers, filled, parts = past(capacity), torch.zeros(rows, capacity, dtype=torch.int64), []
        for span in (slice(PROMPT), *(slice(at, at + 1) for at in range(PROMPT, length))):
            step = ids[:, span]
            logits, *new = graph(step, torch.cat([filled, torch.ones_like(step)], 1), positions[:, span], buffers)
            parts.append(logits)
            filled[:, span] = 1
            for buffer, states in zip((part for pair in buffers for part in pair), new, strict=True):
                buffer.view(rows, states.shape[1], capacity, -1)[:, :, span] = states
    differences = [float((logits - expected).abs().max()) for logits in (at_once, torch.cat(parts, 1))]
    return max(differences) / float(expected.abs().max())


def whole_way(config: str, folder: Path) -> dict[str, Any]:
    """Calibrate, and with one term and with two export, run, build and load one; raises InputError when it is
    refused.
    """
    text = folder / "text.txt"
    text.write_text((DEMO / "calibration.txt").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    model = random_checkpoint(folder / "model", config)
    try:
        options = CalibrateOptions(kv_cache="fp8", samples=4, seq_len=48)
        run = calibrate(str(model), str(text), folder / "run", options=options)
    except InputError as error:
        if not str(error).startswith("--kv-cache fp8"):
            raise
        run = calibrate(str(model), str(text), folder / "run", options=replace(options, kv_cache="off"))
    ids = load_tokens(run, run.evaluation)[:64].reshape(2, 32)
    if reason := run.without_graph():
        return {"no_graph": reason} | checkpoint_alone(run, ids)
    found = {"graph_difference": graph_difference(model, torch.from_numpy(ids))}
    one = as_it_is(run, ids)
    if config not in CONFIGURATIONS:
        return found | {"one_term": one}
    return found | {"one_term": one, "two_terms": as_it_is(scales(run.root, RescaleOptions(activation_terms=2)), ids)}


def misfits(run: Run) -> int | None:
    """How many keys transformers does not find, or does not know, when it loads `model/`; None where it says that it
    has no place for it, or its card does: of Conv1D, of mixtures.
    """
    config = json.loads((run.model / "config.json").read_text(encoding="utf-8"))
    if "quant_method" not in config["quantization_config"] or experts_of(meta_model(source_of(run))):
        return None
    loaded: Any = loader(run.model).from_pretrained(run.model, output_loading_info=True)
    return sum(len(keys) for keys in loaded[1].values())


def opened(config: str, folder: Path) -> dict[str, Any]:
    """What fp8q says of the configuration alone: raises InputError when it is refused."""
    try:
        made = getattr(transformers, config)()
    except StrictDataclassError as error:
        raise UnmadeError(str(error).splitlines()[0]) from error
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    raw = made.to_dict() | {"architectures": [names[made.model_type]]}
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(raw, default=str), encoding="utf-8")
    return {"opened": load_config(folder / "model", str(folder / "model"), raw)[1]}


def checkpoint_alone(run: Run, ids: np.ndarray) -> dict[str, Any]:
    """Whether the exact reference gives numbers for `ids` int64 [rows, length], and transformers loads the
    checkpoint.
    """
    reference = load_reference(run.model, "exact", torch.float32)
    with torch.inference_mode():
        logits = reference.model(
            input_ids=torch.from_numpy(ids), past_key_values=reference.new_cache(), use_cache=True
        ).logits
    return {
        "finite": bool(torch.isfinite(logits).all()),
        "quantized": len(load_scales(run).weights),
        "keys_that_do_not_fit": misfits(run),
    }


def as_it_is(run: Run, ids: np.ndarray) -> dict[str, Any]:
    """How far ONNX Runtime is from the exact reference on `ids` int64 [rows, length], what the engine runs, and whether
    transformers loads the checkpoint.
    """
    reference = load_reference(run.model, "exact", torch.float32)
    with torch.inference_mode():
        expected = reference.model(
            input_ids=torch.from_numpy(ids), past_key_values=reference.new_cache(), use_cache=True
        ).logits.numpy()
    logits, _ = OnnxRuntimeSession(run.onnx_fp32).forward(
        ids, np.ones_like(ids), np.ascontiguousarray(np.broadcast_to(np.arange(ids.shape[1]), ids.shape))
    )
    p, q = (torch.log_softmax(torch.from_numpy(each).double(), -1) for each in (expected, logits))
    build_engine(run.root, EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=48, min_fp8_share=0))
    (view,) = engine(run.root)
    return {
        "first_position_difference": float(np.abs(logits - expected)[:, 0].max(-1).min()),
        "kl_nats": kl(p, q),
        "promised_products": view.promised_products,
        "fp8_products": view.fp8_products,
        "two_terms": len(in_two_codes(load_scales(run).forms)),
        "two_terms_found": view.terms_found or 0,
        "keys_that_do_not_fit": misfits(run),
    }


def graph_alone(config: str, folder: Path) -> dict[str, Any]:
    """The graph's module alone; raises InputError when the configuration is refused."""
    model = random_checkpoint(folder / "model", config)
    if reason := gemms_of(open_source(str(model))).no_graph:
        return {"no_graph": reason}
    return {"graph_difference": graph_difference(model, torch.arange(2, 66).reshape(2, 32))}


def outcome(config: str, way: Callable[[str, Path], dict[str, Any]] = whole_way) -> dict[str, Any]:
    """What became of one configuration: numbers, or why it is refused, or what was not caught; and its kind."""
    kind = kind_of(config) if config in every() else "variant"
    with tempfile.TemporaryDirectory() as folder:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        try:
            made = kind in TRIED or config in CONFIGURATIONS
            found = (way if made else opened)(config, Path(folder))
        except InputError as refused:
            found = {"refused": str(refused).replace(f"{folder}/model: ", "").replace(f"{folder}/", "")}
        except UnmadeError as error:
            found = {"unmade": str(error)}
        except Exception as error:  # noqa: BLE001 - the sweep goes on, and says what was not caught
            found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
    return {"kind": kind} | found


def shares(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Kind -> how many were tried, go the whole way, get a checkpoint at least."""
    counts: dict[str, dict[str, int]] = {}
    for result in results.values():
        if "unmade" in result:
            continue
        own = counts.setdefault(result["kind"], {"tried": 0, "whole_way": 0, "checkpoint": 0, "refused": 0})
        whole = "refused" not in result and works(result) and not {"no_graph", "opened"} & result.keys()
        own["tried"] += 1
        own["whole_way"] += whole
        own["checkpoint"] += whole or ("no_graph" in result and works(result))
        own["refused"] += "refused" in result
    return counts


def works(result: dict[str, Any]) -> bool:
    """Whether everything that was tried was as it should be."""
    if "failed" in result:
        return False
    if "opened" in result or "unmade" in result:
        return True
    if "no_graph" in result:
        return bool(result.get("finite", True)) and not result.get("keys_that_do_not_fit")
    one, two = ([result[name]] if name in result else [] for name in ("one_term", "two_terms"))
    return (
        result.get("graph_difference", 1) < LIMIT
        and all(found["first_position_difference"] < LIMIT for found in one)
        and all(found["kl_nats"] < KL_LIMIT and found["two_terms"] == found["promised_products"] for found in two)
        and all(
            found["fp8_products"] == found["promised_products"]
            and found["two_terms_found"] == found["two_terms"]
            and not found["keys_that_do_not_fit"]
            for found in (*one, *two)
        )
    )


def told(result: dict[str, Any]) -> str:
    """What became of one, in a line: the whole way, a checkpoint alone, refused, or what was found."""
    if "refused" in result:
        return f"refused: {result['refused']}"
    if "opened" in result:
        return "its configuration is taken"
    if "unmade" in result:
        return f"transformers makes no model of it: {result['unmade']}"
    if not works(result):
        return f"does not work: {result}"
    return f"checkpoint only: {result['no_graph']}" if "no_graph" in result else "the whole way"


def main() -> int:
    """Try each, print, and say by the exit status whether each works or is refused."""
    parser = arguments(__doc__)
    parser.add_argument("--names")
    parser.add_argument(
        "--graph",
        action="store_true",
        help="only hold the graph's attention against eager attention: seconds each, nothing quantized or built",
    )
    options = parser.parse_args()
    head = described("unseen_architectures")
    results: dict[str, dict[str, Any]] = {}
    kept: dict[str, Any] = {}
    names = options.names.split(",") if options.names else sorted({*every(), *CONFIGURATIONS})
    if options.names and options.save:
        before = json.loads((RESULTS / f"{options.save}.json").read_text(encoding="utf-8"))
        results, kept = before["results"], {"kept": {"commit": before["commit"], "not": options.names}}
    way = partial(outcome, way=graph_alone if options.graph else whole_way)
    with get_context("spawn").Pool(min(os.cpu_count() or 1, MOST_PROCESSES)) as pool:
        for config, found in zip(names, pool.imap(way, names), strict=True):
            results[config] = found
            print(f"{config}: {told(found)}", flush=True)
    counts = shares(results)
    print(counts, file=sys.stderr)
    dense = counts.get("dense", {})
    good = all("refused" in result or works(result) for result in results.values())
    enough = all(dense[what] >= share * dense["tried"] for what, share in SHARES.items()) if dense else True
    figures = {"results": dict(sorted(results.items())), "counts": counts, "shares": SHARES, "limit": LIMIT}
    return publish(head, {**kept, **figures, "kl_limit": KL_LIMIT, "passed": good and enough}, options.save)


if __name__ == "__main__":
    sys.exit(main())
