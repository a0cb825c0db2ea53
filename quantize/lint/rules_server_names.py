"""Rules S131 to S133: names under which a server does not look for a weight."""

from itertools import pairwise

from ...calibrate.checkpoint.class_defaults import config_field
from ...core.findings import Broken
from .servers import Applies, Served, server_rule

INNER = "language_model."
#: Classes of a language model alone that take the names it has in a model of several modalities.
TAKE_INNER = ("Qwen3_5", "Gemma4", "MuseGlimmer", "Qwen4Exp")
#: Classes of several modalities whose language model is looked for under `model.language_model.` alone.
WANT_INNER = frozenset(
    (
        "Gemma3ForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    )
)  # fmt: skip
AGAIN = "save it again with the names of the original"


def _more(names: list[str]) -> str:
    if len(names) > 1:
        return f", and {len(names) - 1:,} more"
    return ""


@server_rule(
    "S131",
    "nested-names",
    "error",
    Applies("vllm", "`models/utils.py`, WeightsMapper: a prefix is replaced once"),
    Applies("sglang", "`models/qwen3_5.py`: a prefix is replaced once"),
)
def nested_names(served: Served) -> Broken:
    """A tensor bears the name that the original gives it. Exporters that saved a part of a model as if it were the
    whole repeated a part of the name (model.language_model.language_model…, llm-compressor 2568): vLLM then ends with a
    KeyError or ValueError, and SGLang warns, goes on, and serves what memory held.
    """
    nested = [name for name in sorted(served.tensors) if INNER * 2 in name]
    if nested:
        yield nested[0], f"repeats {INNER!r}{_more(nested)}: {served.title} looks for it with one; {AGAIN}"


@server_rule(
    "S132",
    "outer-names",
    "error",
    Applies("vllm", "`models/utils.py`, AutoWeightsLoader; hf_to_vllm_mapper of the classes"),
    Applies("sglang", "`models/*.py`: a name that no parameter has is passed over with a warning"),
)
def outer_names(served: Served) -> Broken:
    """The names fit the class that config.json names. A language model of its own has model.layers, and in a model of
    several modalities it has model.language_model.layers: of the one under the names of the other vLLM finds no module
    and ends with an error, and SGLang finds no parameter, and serves what memory held.
    """
    inner = [name for name in sorted(served.tensors) if name.startswith(f"model.{INNER}") and INNER * 2 not in name]
    drafts = served.drafts
    plain = [
        name for name in sorted(served.tensors) if name.startswith("model.layers.") and not name.startswith(drafts)
    ]
    named = served.architecture
    if inner and named.endswith("ForCausalLM") and not named.startswith(TAKE_INNER):
        yield inner[0], f"is looked for as {inner[0].replace(INNER, '', 1)} by {named}{_more(inner)}; {AGAIN}"
    if plain and not inner and named in WANT_INNER and served.server == "vllm":
        wanted = plain[0].replace("model.", f"model.{INNER}", 1)
        yield plain[0], f"is looked for as {wanted} by {named}{_more(plain)}; {AGAIN}"


@server_rule(
    "S133",
    "no-weights",
    "error",
    Applies("vllm", "`model_loader/default_loader.py`, track_weights_loading"),
    Applies("sglang", "`models/*.py`: a parameter without a tensor stays as it is"),
    Applies("transformers", "`modeling_utils.py`: missing keys are initialized anew"),
)
def no_weights(served: Served) -> Broken:
    """Every layer that config.json counts has tensors: a parameter without one is an error in vLLM, a random number in
    transformers, and what memory held in SGLang.
    """
    count = config_field(served.config, "num_hidden_layers")
    if served.problems or not isinstance(count, int) or not 0 < count < 10_000:
        return
    parts = [name.split(".") for name in served.tensors]
    layers = {
        int(following)
        for names in parts
        for word, following in pairwise(names)
        if word in ("layers", "h", "blocks") and following.isdecimal() and len(following) < 6
    }
    missing = [number for number in range(count) if number not in layers]
    if layers and missing:
        listed = ", ".join(map(str, missing[:5])) + (" …" if len(missing) > 5 else "")
        fault = f"counts {count} layers, and no tensor is of {len(missing)} of them ({listed})"
        yield "config.json", f"{fault}; copy or download the checkpoint again"
