"""Rules S101, S102 and S111 to S118: the version, and forms that a server refuses, takes for another or in part."""

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.findings import Broken
from ...options import BF16, DYNAMIC
from ..reading.compressed_tensors import online_transforms
from ..reading.quantization_config import CONFIG, stated_quantization
from ..reading.run_checkpoint import FP8Q_CONFIG
from ..scales.clip import powers_of_two
from ..scales.scheme import BLOCK_SIDES, forms_in, in_two_codes
from ..scales.servers import MODELOPT_GRANULARITY, computed
from .rules_scales import readable
from .servers import READ, TITLES, Applies, Served, parse_version, server_rule

#: Compare what is served with what was meant.
ASK = "compare the served model by `fp8q compare --url`"
EVERY = tuple(Applies(server, "its version") for server in TITLES)


@server_rule("S101", "server-version", "note", *EVERY)
def server_version(served: Served) -> Broken:
    """A version was read when its rules were written: of a newer or an older one the nearest rules are applied, and it
    may do otherwise.
    """
    oldest, newest = READ[served.server]
    if served.asked is not None and not parse_version(oldest) <= served.version <= parse_version(newest):
        read = newest if oldest == newest else f"{oldest} to {newest}"
        yield (
            "",
            f"the source of {served.title} {served.asked} was not read, but of {read}: its rules are applied; {ASK}",
        )


@server_rule("S102", "form-unread", "note", *EVERY)
def form_unread(served: Served) -> Broken:
    """The form of quantization is one of those that fp8q reads: of others the names of tensors and config.json are held
    against the rules, and codes and scales are not.
    """
    if served.said and served.fp8 is None:
        method = served.said.get("quant_method")
        yield CONFIG, f"says quant_method {method!r}, of which codes and scales are not checked here; {ASK}"


def groups(said: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config_groups of compressed-tensors that are objects, by name."""
    stated = said.get("config_groups")
    for name, group in stated.items() if isinstance(stated, dict) else ():
        if isinstance(group, dict):
            yield name, group


def _part(group: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = group.get(key)
    return value if isinstance(value, dict) else {}


@server_rule(
    "S111",
    "form-refused",
    "error",
    Applies("vllm", "`quantization/fp8.py`, `compressed_tensors.py`"),
    Applies("sglang", "`quantization/fp8.py`, `modelopt_quant.py`"),
    Applies("tensorrt-llm", "`models/quant_config_utils.py`, `_torch/model_config.py`"),
)
def form_refused(served: Served) -> Broken:
    """A server has kernels for some pairs of weights and inputs, and ends with an error for others. TensorRT-LLM takes
    compressed-tensors with channel weights and inputs per token, and blocks of 128 with inputs in groups of 128; of
    ModelOpt's form it also takes a scale a tensor. (TensorRT-Model-Connect takes compressed-tensors with one static
    scale a tensor, `--weight-scale tensor --form one`.) Of ModelOpt's form SGLang takes that alone. vLLM and SGLang
    want the field activation_scheme of the form fp8, and no static inputs beside blocks; vLLM wants a cache that is
    symmetric and says so.
    """
    said = served.said
    yield from _modelopt(served)
    if served.server == "tensorrt-llm":
        yield from _tensorrt_llm(served.said)
        return
    if served.method == "fp8":
        if "activation_scheme" not in said:
            yield (
                CONFIG,
                f"has no activation_scheme, without which {served.title} ends with an error; set it to dynamic",
            )
        if said.get("weight_block_size") is not None and said.get("activation_scheme") == "static":
            yield CONFIG, f"says static inputs and blocks, which {served.title} refuses together; say dynamic"
    if served.method == "compressed-tensors" and served.server == "vllm":
        yield from _vllm_cache(said)


def _modelopt(served: Served) -> Broken:
    """Find forms that the server refuses in ModelOpt's layout; transformers does not know the layout (S112)."""
    stated = stated_quantization(served.config, served.root / CONFIG) or served.said
    if served.server == "vllm" and served.method == "modelopt" and not stated.get("quant_algo"):
        yield CONFIG, "has no quant_algo of ModelOpt's form, without which vLLM ends with an error; export it again"
    declared = served.declared
    if declared is None or declared.form != "modelopt":
        return
    for group in declared.groups:
        kind = group.scheme.input.kind
        said = MODELOPT_GRANULARITY.get(kind) == group.scheme.weights
        if said and computed(served.server, kind, "modelopt") is None:
            fault = (
                f"says a scale a {group.scheme.weights} and --form {kind}, which {served.title} refuses in this form"
            )
            yield declared.source.name, f"{fault}; write it by --layout compressed-tensors of fp8q scales or convert"
            return


def _vllm_cache(said: Mapping[str, Any]) -> Broken:
    cache = said.get("kv_cache_scheme")
    if not isinstance(cache, dict):
        return
    if cache.get("strategy") not in ("tensor", "attn_head"):
        yield CONFIG, f"has a cache of strategy {cache.get('strategy')!r}, which vLLM refuses; set it to 'tensor'"
    elif not cache.get("symmetric"):
        yield CONFIG, "has a cache that is not said to be symmetric, which vLLM refuses; set symmetric to true"


def _tensorrt_llm(said: Mapping[str, Any]) -> Broken:
    sizes = said.get("weight_block_size")
    if said.get("quant_method") == "fp8" and isinstance(sizes, list) and sizes != list(BLOCK_SIDES):
        yield CONFIG, f"has blocks of {sizes}, and TensorRT-LLM takes {list(BLOCK_SIDES)} alone; quantize in these"
    if said.get("quant_method") != "compressed-tensors":
        return
    several = len(dict(groups(said))) > 1
    for name, group in groups(said):
        where = f"{CONFIG} config_groups.{name}"
        weights = _part(group, "weights")
        inputs = _part(group, "input_activations")
        kind = weights.get("strategy")
        how = inputs.get("strategy")
        if weights.get("num_bits") != 8:
            continue
        takes = "channel weights with inputs per token, or blocks with groups of 128"
        if kind not in ("channel", "block"):
            fault = f"Unsupported weights_quant_strategy: {kind}"
            also = " (or in ModelOpt's layout, --layout modelopt)" * (kind == "tensor")
            yield where, f"has one scale a {kind}: TensorRT-LLM ends with `{fault}`; quantize as {takes}{also}"
        elif how != {"channel": "token", "block": "group"}[kind]:
            static = "static inputs" if inputs and not inputs.get("dynamic") else f"inputs by {how}"
            fault = (
                f"has {kind} weights with {static}: TensorRT-LLM ends with `Unsupported inputs_quant_strategy: {how}`"
            )
            yield where, f"{fault}; quantize as {takes}"
        elif kind == "block" and inputs.get("group_size") != BLOCK_SIDES[1]:
            yield where, f"has groups of {inputs.get('group_size')}, which TensorRT-LLM refuses; quantize as {takes}"
        targets = [target for target in group.get("targets") or [] if isinstance(target, str)]
        classes = [target for target in targets if "." not in target and not target.startswith("re:")]
        if several and classes:
            fault = (
                f"names the class {classes[0]} beside other groups, and TensorRT-LLM matches names alone and refuses it"
            )
            yield where, f"{fault}; name the modules by re: expressions"


#: Server -> the names that it reads of one scale of a weight and of an input in the form fp8, what becomes of others,
#: and who reads these.
ONE_SCALE = {
    "vllm": ((".weight_scale", ".input_scale"), "ends with an error over them", "transformers"),
    "transformers": ((".weight_scale_inv", ".activation_scale"), "goes on with 1.0", "vLLM or SGLang"),
}


@server_rule(
    "S116",
    "scale-name-unread",
    "error",
    Applies("vllm", "`quantization/fp8.py`, Fp8LinearMethod; `models/mistral3.py`, which alone maps the names"),
    Applies("transformers", "`integrations/finegrained_fp8.py`, FP8Linear"),
)
def scale_name_unread(served: Served) -> Broken:
    """In the form fp8 a weight with one scale has it under the name that the server reads: weight_scale and input_scale
    in vLLM, which ends with an error over others but in Mistral 3; weight_scale_inv and activation_scale in
    transformers, which goes on with 1.0. SGLang takes both for Llama's classes.
    """
    if served.fp8 is None or served.fp8.declared.form != "fp8":
        return
    theirs, ends, other = ONE_SCALE[served.server]
    if served.server == "vllm" and served.architecture.startswith(("Mistral3", "Pixtral")):
        return
    named = [
        name
        for codes in served.fp8.codes.values()
        if codes.granularity == "tensor" and codes.scheme.weights in (None, "tensor")
        for name in (codes.scale, codes.input_scale)
        if name is not None and not name.endswith(theirs)
    ]
    if named:
        more = f" and {len(named) - 1:,} more are" if len(named) > 1 else " is"
        yield named[0], f"{more.strip()} not read by {served.title}, which {ends}; take {other} for this file"


@server_rule(
    "S112",
    "form-misread",
    "error",
    Applies("transformers", "`quantizers/auto.py`"),
    Applies("tensorrt-llm", "`_torch/model_config.py`, `load_hf_quant_config`"),
)
def form_misread(served: Served) -> Broken:
    """A server knows the form. transformers has no ModelOpt: it takes codes for values, and no scale. TensorRT-LLM
    knows the form fp8 by its blocks or by static inputs: without both it makes modules in BF16, and copies codes into
    them.
    """
    said = served.said
    if served.server == "transformers" and served.method.startswith("modelopt"):
        fault = "is ModelOpt's form, which transformers does not know: it takes codes for values, and no scale"
        yield CONFIG, f"{fault}; load it by vLLM, SGLang or TensorRT-LLM, or `fp8q compare` for its losses"
    if served.server == "tensorrt-llm" and served.method == "fp8":
        static = said.get("activation_scheme") == "static"
        if not said.get("weight_block_size") and not static and "weight_block_size" in said:
            fault = "is FP8 with one scale a tensor and dynamic inputs, for which TensorRT-LLM makes modules in BF16"
            yield CONFIG, f"{fault}, and copies codes into them; quantize in blocks of {BLOCK_SIDES[0]}"


@server_rule(
    "S114",
    "transforms-unread",
    "error",
    Applies("vllm", "`compressed_tensors/transform/linear.py`, get_linear_transform_schemes"),
    Applies("sglang", "`compressed_tensors.py`, from_config, which has no transform_config"),
    Applies("transformers", 'compressed-tensors\' `QuantizationConfig`, extra="ignore"'),
)
def transforms_unread(served: Served) -> Broken:
    """The transforms of `transform_config` that are computed while the model runs are computed: the weights were turned
    the other way. vLLM does so at inputs and outputs of linear layers, not at queries and the cache. SGLang and
    transformers leave all of them out in silence, and compute another model.
    """
    for name, places in online_transforms(served.said).items():
        unread = [place for place in places if served.server != "vllm" or place not in ("input", "output")]
        if unread:
            where = f"transform_config ({name} at {', '.join(dict.fromkeys(unread))})"
            fault = f"has {where}, which {served.title} leaves out, and computes another model"
            other = "leave them out, and export again" if served.server == "vllm" else "take vLLM"
            yield CONFIG, f"{fault}; {other}"


@server_rule(
    "S115",
    "field-refused",
    "error",
    Applies("vllm", 'compressed-tensors\' `QuantizationArgs`, extra="forbid"'),
    Applies("sglang", 'compressed-tensors\' `QuantizationArgs`, extra="forbid"'),
    Applies("transformers", 'compressed-tensors\' `QuantizationScheme` and `QuantizationArgs`, extra="forbid"'),
)
def field_refused(served: Served) -> Broken:
    """The objects of a group of compressed-tensors hold the fields of its classes, which refuse any other."""
    declared = served.declared
    for remark in declared.remarks if declared and declared.form == "compressed-tensors" else ():
        inner = remark.place.startswith("config_groups.") and remark.place.count(".") > 2
        of_group = remark.place.startswith("config_groups.") and served.server == "transformers"
        if remark.effect == "unknown" and (inner or of_group):
            yield CONFIG, f"has {remark.place}, for which {served.title} ends with a validation error; take it out"


@server_rule(
    "S117",
    "blocks-rounded-again",
    "warning",
    Applies("vllm", "`utils/fp8_utils.py`, deepgemm_post_process_fp8_weight_block; VLLM_USE_DEEP_GEMM_E8M0"),
    Applies("sglang", "`quantization/fp8_utils.py`, requant_weight_ue8m0_inplace"),
    Applies("tensorrt-llm", "`_torch/modules/linear.py`, resmooth_to_fp8_e8m0"),
)
def blocks_rounded_again(served: Served) -> Broken:
    """The scales of blocks are powers of two. DeepGEMM takes no others on Blackwell, and by default none in vLLM on
    Hopper: the server rounds other scales up to powers of two when it loads a checkpoint, and its codes a second time,
    which about doubles the error of weights (vLLM's pull request 38083 has a model that lost 12 points of 100 so).
    """
    if served.fp8 is None:
        return
    checkpoint = served.fp8
    named = [codes for codes in checkpoint.codes.values() if codes.granularity == "block" and codes.scale is not None]
    again = [
        codes.scale for codes in named if codes.scale and readable(checkpoint, codes.scale)
        and not powers_of_two(checkpoint.values(codes.scale))
    ]  # fmt: skip
    if again:
        where = "on Hopper and Blackwell" if served.server == "vllm" else "on Blackwell"
        more = f"and {len(again) - 1:,} more are" if len(again) > 1 else "is"
        fault = f"{more} no powers of two, to which {served.title} rounds them {where}, and the codes a second time"
        yield again[0], f"{fault}; write them so by `fp8q convert CHECKPOINT --out DIR --form block`"


@server_rule(
    "S118",
    "inputs-coded-anyway",
    "warning",
    Applies("transformers", "`integrations/compressed_tensors.py`, CompressedTensorsFP8Linear", "5.23"),
)
def inputs_coded_anyway(served: Served) -> Broken:
    """Inputs are computed as the checkpoint has them. With `use_optimized_inference` transformers gives the input of
    every FP8 layer a scale for each token where FP8 GEMMs run: static scales are left out, and inputs in BF16 are
    rounded too, which no file asked for.
    """
    if served.fp8 is None or served.method != "compressed-tensors":
        return
    others = [codes for codes in served.fp8.codes.values() if codes.scheme.input != DYNAMIC]
    if others and served.said.get("use_optimized_inference") is True:
        has = "in BF16" if others[0].scheme.input == BF16 else f"in {others[0].scheme.input.words}"
        many = f" and {len(others) - 1:,} more" if len(others) > 1 else ""
        fault = f"has use_optimized_inference, and {others[0].module}{many} with inputs {has}"
        yield CONFIG, f"{fault}: transformers codes them under a scale for each token on GPUs; take the field out"


@server_rule(
    "S113",
    "second-codes",
    "warning",
    Applies("vllm", "`quantization/compressed_tensors`, which knows no second codes"),
    Applies("sglang", "`quantization/compressed_tensors`, the same"),
    Applies("transformers", "`quantizers/auto.py` and compressed-tensors, the same"),
)
def second_codes(served: Served) -> Broken:
    """Activations in two codes, or in a tail of them, are fp8q's own form. Other loaders read the same file and
    multiply the first code alone, without a word: answers are those of one code an activation. In vLLM the plugin
    fp8q-vllm computes both.
    """
    forms = forms_in(served.config.get(FP8Q_CONFIG))
    modules = [name for name in in_two_codes(forms) if computed(served.server, forms[name].kind) == "one"]
    if modules:
        more = f" and {len(modules) - 1:,} more" if len(modules) > 1 else ""
        remedy = "write another form by `fp8q scales RUN --form dynamic`, or --form bf16"
        if served.server == "vllm":
            remedy = f"install the plugin fp8q-vllm beside vLLM, or {remedy}"
        fault = f"has {modules[0]}{more} in two codes, of which {served.title} multiplies the first alone"
        yield CONFIG, f"{fault}; {remedy}"
