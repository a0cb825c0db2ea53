"""Rules S141 to S163: modules that a server joins, drafts by, or leaves out of quantization in a way of its own."""

import re
from fnmatch import fnmatchcase

import numpy as np

from ...calibrate.checkpoint.mtp_layers import vllm_name
from ...calibrate.input.patterns import BoundedPattern, PatternFile
from ...core.findings import Broken
from ...options import BF16
from ..reading.fp8_tensors import Checkpoint
from ..reading.quantization_config import CONFIG
from .rules_modules import joined_modules, vocabulary_table
from .rules_scales import FLOAT_TYPES, readable
from .rules_server_forms import ASK
from .servers import Applies, Served, server_rule

#: The projections of gated delta nets that servers join into one GEMM.
HYBRID = (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
#: The names that the forms give the list of modules that stay as they were.
ENTRIES = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
#: The joined name of projections, as servers build it.
FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
#: Parts of a layer for multi-token prediction of which vLLM makes plain layers, and those of them that are quantized
#: layers in families of these architectures.
PLAIN = {"eh_proj", "mtp_linear_proj", "input_proj", "shared_head"}
QUANTIZABLE = {"NemotronH": {"eh_proj"}, "LongcatFlash": {"eh_proj"}, "BailingMoeV3": {"eh_proj"}}


@server_rule(
    "S141",
    "drafts-unmatched",
    "error",
    Applies("sglang", "`models/qwen3_5_mtp.py`: no packed_modules_mapping (sglang 35797)", None, "0.5.21"),
)
def drafts_unmatched(served: Served) -> Broken:
    """Layers for multi-token prediction that the configuration leaves out are loaded in BF16. SGLang's class of
    Qwen3.5's drafts did not say which projections it joins: entries that name them one by one did not match the joined
    module, which was made quantized, and the weights were passed over. Drafts were then never accepted.
    """
    model_type = str(served.text_config.get("model_type", ""))
    prefixes = served.drafts
    declared = served.declared
    ignored = tuple(str(entry) for entry in served.said.get("ignore") or ())
    if not (model_type.startswith("qwen3_5") and prefixes and served.method == "compressed-tensors"):
        return
    source = PatternFile(served.root / CONFIG)
    for name in sorted(served.tensors):
        module = name.removesuffix(".weight")
        parent, _, last = module.rpartition(".")
        if name == module or last not in FUSED or not name.startswith(prefixes):
            continue
        fused = f"{parent}.{FUSED[last]}"
        leaves_out = declared.ignored_by(module) if declared else _matching(module, ignored, source)
        if leaves_out and not _matching(fused, ignored, source):
            fault = f"is left out, and {fused}, which SGLang makes of it, is not: these drafts are never loaded"
            yield name, f"{fault}; name re:.*mtp.* in ignore, or take SGLang 0.5.21"
            return


def _matching(module: str, entries: tuple[str, ...], source: PatternFile) -> bool:
    """Tell whether an entry matches a module as compressed-tensors has it: its name, or an expression behind `re:`."""
    return any(
        BoundedPattern(entry.removeprefix("re:"), source).matches(module)
        if entry.startswith("re:")
        else entry == module
        for entry in entries
    )


@server_rule(
    "S142",
    "drafts-dropped",
    "note",
    Applies("transformers", "`_keys_to_ignore_on_load_unexpected` of the classes"),
)
def drafts_dropped(served: Served) -> Broken:
    """Layers for multi-token prediction are of use where a server drafts by them. transformers makes no modules of
    them: it passes them over, and what it saves again lacks them.
    """
    if prefixes := served.drafts:
        count = sum(name.startswith(prefixes) for name in served.tensors)
        fault = f"has {count} tensors for multi-token prediction, which transformers passes over"
        yield prefixes[0].removesuffix("."), f"{fault}; copy them where you save this model again by it"


@server_rule(
    "S143",
    "drafts-in-codes",
    "error",
    Applies("vllm", "`models/*_mtp.py`: nn.Linear, scales without a place are passed over (0.32.0 tried)"),
)
def drafts_in_codes(served: Served) -> Broken:
    """A server that drafts by a layer for multi-token prediction reads its weights as they are meant. The projection
    that joins embedding and hidden state, and the layer's head, are no quantized layers in most of vLLM's classes: it
    takes their codes for values, without a word, and accepts no draft.
    """
    prefixes = served.drafts
    if served.fp8 is None or not prefixes:
        return
    architecture = str(next(iter(served.config.get("architectures") or ()), ""))
    plain = PLAIN.difference(*(parts for start, parts in QUANTIZABLE.items() if architecture.startswith(start)))
    for module in sorted(served.fp8.codes):
        if module.startswith(prefixes) and not plain.isdisjoint(module.split(".")):
            yield (
                f"{module}.weight",
                "is in FP8, and vLLM takes the codes for values: no draft is accepted; leave it in BF16",
            )


@server_rule(
    "S151",
    "joined-weight-scales",
    "warning",
    Applies("vllm", "`quantization/utils/w8a8_utils.py`, requantize_with_max_scale"),
    Applies("sglang", "`quantization/utils.py`, requantize_with_max_scale"),
    Applies("tensorrt-llm", "`_torch/modules/linear.py`, FP8QDQLinearMethod"),
)
def joined_weight_scales(served: Served) -> Broken:
    """Weights that a server joins into one GEMM, with one scale a tensor, have the same: it takes the largest for
    all of them, and rounds the codes of the others again, a second loss that no other loader has.
    """
    if served.fp8 is None:
        return
    for group in joined_modules(served.fp8):
        if ".experts." in group[0]:
            continue
        values = _tensor_scales(served.fp8, group)
        if len(values) == len(group) and len(set(values.values())) > 1:
            largest = max(values, key=lambda module: values[module])
            listed = ", ".join(f"{module.rpartition('.')[2]} {value:.4g}" for module, value in values.items())
            fault = f"differs from that of its GEMM ({listed}): {served.title} rounds the others again to the largest"
            yield f"{served.fp8.codes[largest].scale}", f"{fault}; give all of them one scale, or one a channel"


def _tensor_scales(checkpoint: Checkpoint, group: list[str]) -> dict[str, float]:
    """Module -> its scale, of those with one for the whole weight."""
    scales = {}
    for module in group:
        codes = checkpoint.codes.get(module)
        if codes and codes.granularity == "tensor" and codes.scale and readable(checkpoint, codes.scale):
            scales[module] = float(np.ravel(checkpoint.values(codes.scale))[0])
    return scales


#: FP16's least numbers are 2^-24 apart and E4M3's 2^-9: from this scale on a code times it is rounded by no more than
#: half a step of codes.
LEAST_IN_HALF = 2.0**-15


@server_rule(
    "S155",
    "tensor-scales-in-half",
    "warning",
    Applies("vllm", "`quantization/utils/w8a8_utils.py`, per_tensor_dequantize"),
    Applies("sglang", "`quantization/utils.py`, per_tensor_dequantize"),
)
def tensor_scales_in_half(served: Served) -> Broken:
    """Codes stay what they are. Those of a weight with one scale are multiplied by it in FP16 when vLLM or SGLang loads
    them, and coded again: under 2^-15 small ones become others. Inputs in BF16, and a scale for each channel, go
    without that.
    """
    if served.fp8 is None:
        return
    coded = [module for module, codes in served.fp8.codes.items() if codes.scheme.input != BF16]
    small = {name: scale for name, scale in _tensor_scales(served.fp8, coded).items() if 0 < scale < LEAST_IN_HALF}
    if small:
        module = min(small, key=lambda name: small[name])
        many = f", and of {len(small) - 1:,} more" if len(small) > 1 else ""
        fault = f"is {small[module]:.3g}{many}, under 2^-15: {served.title} multiplies codes by it in FP16"
        yield f"{served.fp8.codes[module].scale}", f"{fault}, and codes them again; give a scale for each channel"


@server_rule(
    "S152",
    "joined-hybrid",
    "error",
    Applies("vllm", "`models/qwen3_5.py`, packed_modules_mapping"),
    Applies("sglang", "`models/qwen3_5.py`, packed_modules_mapping"),
)
def joined_hybrid(served: Served) -> Broken:
    """The projections of a gated delta net that servers join are of one form: in_proj_qkv and in_proj_z, in_proj_b and
    in_proj_a. vLLM and SGLang end with an error where one is left out and the other is not.
    """
    types = {
        name.removesuffix(".weight"): tensor.dtype
        for name, tensor in served.tensors.items()
        if name.endswith(".weight")
    }
    for first, second in HYBRID:
        for module in sorted(types):
            parent, _, last = module.rpartition(".")
            other = f"{parent}.{second}"
            if last == first and other in types and types[module] != types[other]:
                fault = f"is {types[module]}, and {second} is {types[other]}, and {served.title} makes one GEMM of them"
                yield f"{module}.weight", f"{fault}; quantize both alike"


@server_rule(
    "S153",
    "hybrid-entries",
    "error",
    Applies("vllm", "vllm 34697 and 40252: packed_modules_mapping without in_proj_qkvz", None, "0.17"),
)
def hybrid_entries(served: Served) -> Broken:
    """A configuration of compressed-tensors that leaves out the projections of a gated delta net leaves out the
    GEMM that is made of them. Before 0.17 vLLM did not know which these are: it made them quantized, passed the
    weights over, and answered garbage, where the same weights under the form fp8 were right.
    """
    declared = served.declared
    if declared is None or declared.form != "compressed-tensors":
        return
    for name in sorted(served.tensors):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] == HYBRID[0][0] and declared.ignored_by(module):
            yield name, "is left out, and vLLM makes in_proj_qkvz of it, which is not; take vLLM 0.17"
            return


@server_rule(
    "S154",
    "hybrid-reported",
    "warning",
    Applies("vllm", "the report vllm 54252, of 0.28 on ROCm, closed without a cause", "0.28", "0.29"),
)
def hybrid_reported(served: Served) -> Broken:
    """Qwen3.8's hybrids answer under a configuration of compressed-tensors as under fp8. With vLLM 0.28 on ROCm they
    were reported to repeat themselves; no cause was found, and no source that was read shows one.
    """
    model_type = str(served.config.get("model_type", ""))
    if model_type.startswith("qwen4_exp") and served.method == "compressed-tensors":
        yield CONFIG, f"is compressed-tensors of a hybrid, which vLLM 0.28 was reported to garble; {ASK}"


@server_rule(
    "S161",
    "ignore-unmatched",
    "note",
    Applies("vllm", "`quantization/utils/config_utils.py`"),
    Applies("sglang", "`compressed_tensors/utils.py`, `quantization/utils.py`"),
    Applies("tensorrt-llm", "`models/modeling_utils.py`"),
    Applies("transformers", "`quantizers_utils.py`"),
)
def ignore_unmatched(served: Served) -> Broken:
    """Every path in the list of what is left out names a module of the checkpoint. One that matches nothing was meant
    for a module of another name, which is then quantized, or looked for in codes. Patterns and single words are
    defaults of exporters, and are passed over.
    """
    stored = _modules(served)
    source = PatternFile(served.root / CONFIG)
    modules = [*stored, *(vllm_name(served.config, module) for module in stored)]
    parents = {module[: dot.start()] for module in modules for dot in re.finditer(r"\.", module)}
    plain = [entry for entry in _entries(served) if "." in entry and not re.search(r"[*?\[\\^$]|^re:", entry)]
    for entry in plain:
        if not any(_leaves_out(served, entry, module, source) for module in modules) and entry not in parents:
            yield CONFIG, f"leaves out {entry!r}, which {served.title} finds in no module; name it as the tensors do"


@server_rule(
    "S162",
    "ignore-differs",
    "error",
    Applies("vllm", "`quantization/fp8.py`, `is_layer_skipped`: whole names"),
    Applies("sglang", "`compressed_tensors/utils.py`, `quantization/utils.py`"),
    Applies("tensorrt-llm", "`models/modeling_utils.py`, is_module_excluded_from_quantization"),
)
def ignore_differs(served: Served) -> Broken:
    """A server leaves out the modules that the exporter left out. Each matches the list in a way of its own: vLLM takes
    the entries of the form fp8 for whole names, SGLang for parts between dots, and transformers for expressions and
    ends of names. Of a module that the file has in BF16, and it makes in FP8, a server looks for a scale in vain.
    """
    checkpoint = served.fp8
    if checkpoint is None:
        return
    entries = _entries(served)
    source = PatternFile(served.root / CONFIG)
    in_codes = {module.rpartition(".")[2] for module in checkpoint.codes}
    drafts = served.drafts
    for module in _modules(served):
        last = module.rpartition(".")[2]
        tensor = checkpoint.tensors[f"{module}.weight"]
        served_as = vllm_name(served.config, module) if served.server == "vllm" else module
        if last not in in_codes or (module.startswith(drafts or ("\0",)) and served_as == module):
            continue
        meant = checkpoint.declared.ignored_by(module) is not None
        taken = any(_leaves_out(served, entry, served_as, source) for entry in entries)
        if meant and not taken and tensor.dtype in FLOAT_TYPES:
            fault = f"is {tensor.dtype}, and {served.title} matches no entry of the list with it: it makes it FP8"
            yield f"{module}.weight", f"{fault}; name {served_as} there"
        elif taken and not meant and module in checkpoint.codes:
            fault = f"is in FP8, and {served.title} leaves it out by the list: it takes codes for values"
            yield f"{module}.weight", f"{fault}; name whole modules there"


#: The beginnings of the classes whose head TensorRT-LLM makes in BF16, whatever the file has (its issue 17723).
BF16_HEADS = ("Qwen3_5",)
#: From this version on SGLang reads the head as codes where a target of compressed-tensors names it.
SGLANG_HEADS = "0.5.19"


@server_rule(
    "S163",
    "head-in-codes",
    "error",
    Applies("vllm", "`compressed_tensors.py` and `fp8.py`, get_quant_method: ParallelLMHead is no LinearBase"),
    Applies("sglang", "`compressed_tensors.py`, get_lm_head_scheme (0.5.19); `fp8.py`: the head is no LinearBase"),
    Applies("tensorrt-llm", "`_torch/models/modeling_utils.py`, _resolve_lm_head_quant_config; issue 17723"),
    Applies("transformers", "`quantizers/base.py`, get_keys_to_not_convert; an embedding is no nn.Linear"),
)
def head_in_codes(served: Served) -> Broken:
    """An output head or an embedding in codes is made of codes by the server. vLLM and SGLang make a head of its own
    class, which the target Linear does not name: compressed-tensors' targets must name it, by a name or an expression,
    and the form fp8 has no such list. They copy its codes into BF16, without the scale, or end with an error over it;
    so does transformers with the form fp8 where no list says which modules stay, and with any embedding. TensorRT-LLM
    knows a head in codes by its `weight_scale`, and makes that of Qwen3.5's classes in BF16 all the same. SGLang ends
    with an error over a head in blocks.
    """
    checkpoint = served.fp8
    if checkpoint is None or checkpoint.declared.form == "modelopt":
        return
    for module, codes in checkpoint.codes.items():
        table = vocabulary_table(checkpoint, module)
        head = table == "head"
        if head and served.server == "sglang" and codes.granularity == "block":
            fault = "is an output head in blocks, over which SGLang ends with an error, or copies the codes"
            yield codes.weight, f"{fault}; give it a scale for each channel, or leave it in BF16"
        elif table is not None and not _made_of_codes(served, checkpoint, module, head):
            what = "output head" if head else "embedding"
            ends = ", or ends with an error over it" if served.server == "vllm" else ""
            copied = f"it copies the codes without their scale{ends}"
            fault = f"is an {what} in FP8, and {served.title} makes it in BF16: {copied}"
            if checkpoint.declared.form == "compressed-tensors" and head and served.server in ("vllm", "sglang"):
                newer = served.server == "sglang" and not served.is_since(SGLANG_HEADS)
                naming = f"take SGLang {SGLANG_HEADS}, and name" if newer else "name"
                remedy = f"{naming} {module} among the targets, or leave it in BF16"
            else:
                remedy = "leave it in BF16"
            yield codes.weight, f"{fault}; {remedy}"


def _made_of_codes(served: Served, checkpoint: Checkpoint, module: str, head: bool) -> bool:
    """Tell whether the server makes codes of a head, or of an embedding."""
    declared = checkpoint.declared
    target = declared.target_of(module)
    if served.server == "tensorrt-llm":
        named = f"{module}.weight_scale" in checkpoint.tensors and declared.ignored_by(module) is None
        return head and named and not served.architecture.startswith(BF16_HEADS)
    if declared.form == "fp8":
        return head and served.server == "transformers" and declared.ignore is not None
    if target is None or declared.ignored_by(module) is not None:
        return False
    if served.server == "transformers":
        return head or not target.is_class or "Embedding" in target.text
    newer = served.server != "sglang" or served.is_since(SGLANG_HEADS)
    return head and newer and not target.is_class


def _modules(served: Served) -> list[str]:
    """The modules with a matrix for a weight."""
    return [
        name.removesuffix(".weight")
        for name, tensor in sorted(served.tensors.items())
        if name.endswith(".weight") and len(tensor.shape) == 2
    ]


def _entries(served: Served) -> tuple[str, ...]:
    """The entries of the list of modules that stay as they were, whatever the form calls it."""
    stated = [served.said[key] for key in ENTRIES if isinstance(served.said.get(key), list)]
    return tuple(dict.fromkeys(entry for entries in stated for entry in entries if isinstance(entry, str)))


def _leaves_out(served: Served, entry: str, module: str, source: PatternFile) -> bool:
    """Tell whether the server leaves `module` out by this entry."""
    if entry.startswith("re:") or entry == module:
        return _matching(module, (entry,), source)
    if served.server == "tensorrt-llm":
        parts = module.split(".")
        above = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return any(fnmatchcase(name, entry) for name in above)
    if served.method.startswith("modelopt"):
        return fnmatchcase(module, entry) or (served.server == "vllm" and entry in module)
    if served.server == "transformers":
        return served.declared is not None and served.declared.codec.matcher(entry, source).matches(module)
    if served.server == "sglang":
        if served.method == "compressed-tensors":
            newer = served.is_since("0.5.18")
            if newer:
                return module.endswith(f".{entry}")
            return entry.lower() in module.lower()
        return f".{entry.rstrip('.')}." in f".{module}."
    return False
