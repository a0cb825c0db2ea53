"""The figures within sentences of docs: name -> the text, from results, as `tables` puts it between its markers."""

from collections.abc import Callable, Mapping

from markdown import load

from fp8q.calibrate.text.formats import SUFFIXES


def text_suffixes() -> str:
    """The suffixes of files that are read as text."""
    return ", ".join(f"`{suffix}`" for suffix in SUFFIXES)


def tail_operations() -> str:
    """Operations that a tail of 64 adds to a prompt of 2,048 tokens, over those of one term."""
    ratio = load("tail_cost")["results"]["tail of 64"]["operations_ratio"]
    return f"{100 * (ratio - 1):.0f} %"


def runtimes_apart() -> str:
    """The largest difference of perplexity between reference and ONNX Runtime, of the model with heads of 8."""
    forms = [found["perplexity"] for found in load("architectures")["results"]["stories260k"].values()]
    return f"{max(abs(found['onnxruntime'] / found['reference'] - 1) for found in forms):.1%}".replace("%", " %")


def families_quantized() -> str:
    """How many families of vLLM's recipes get a checkpoint and its proof, of those that were run."""
    measured = load("published_classes")
    rows = [measured["rows"].get(measured["models"][model], {}) for model in measured["families"]]
    ran = [row for row in rows if row]
    done = [row for row in ran if row.get("calibrate") == row.get("validate") == "yes"]
    return f"{len(done)} of {len(ran)}"


def two_terms_apart() -> str:
    """The largest mean KL of ONNX Runtime from the exact reference in two terms, of all architectures tried."""
    results = load("unseen_architectures")["results"].values()
    largest = max(found["two_terms"]["kl_nats"] for found in results if "two_terms" in found)
    return f"{largest:.1e} nats".replace("e-0", "e-")


def gpu_two_codes_decode() -> str:
    """How much longer two codes take than one on an H100: the GEMMs of a layer of an 8B, 16 rows."""
    return f"{100 * (_gpu_ratio('gpu_h100_products', '8B, 16 tokens') - 1):.0f} %"


def gpu_two_codes_prompt() -> str:
    """The time of two codes over BF16's on an H100: the GEMMs of a layer, 2,048 tokens."""
    return " to ".join(f"{_gpu_ratio('gpu_h100_products', f'{model}, 2048'):.1f}" for model in ("70B", "8B")) + " times"


def gpu_two_codes_prompt_again() -> str:
    """The same with the faster encoding."""
    name = "gpu_nvidia_h100_80gb_hbm3"
    return " to ".join(f"{_gpu_ratio(name, f'{model}, 2048'):.1f}" for model in ("70B", "8B")) + " times"


def gpu_vllm_two_codes() -> str:
    """How much faster than BF16 vLLM decodes in two codes, 32 clients and one."""
    return _vllm_speed("two codes")


def gpu_vllm_one_code() -> str:
    """How much faster than BF16 vLLM decodes in one code, 32 clients and one."""
    return _vllm_speed("one code")


def drafts_unchanged() -> str:
    """The number of answers with drafts that equal those without."""
    rows = [row for rows in load("drafts")["results"].values() for row in rows.values() if "error" not in row]
    return f"{sum(row['answers_unchanged'] for row in rows)} of {sum(row['answers'] for row in rows)}"


def quicker() -> str:
    """The minutes of `convert` and `compare` of a model that people know, and the verdict."""
    result = load("first_evening_quicker")
    *_, converted, compared = result["ways"]["quicker"]["commands"]
    minutes = (converted["seconds"] + compared["seconds"]) / 60
    return f"{minutes:.0f} minutes, “{compared['said'].partition(':')[0].lower()}”"


def _vllm_speed(form: str) -> str:
    """Tokens a second over BF16's, of 32 clients and of one."""
    speed = {(row["form"], row["prompt"], row["clients"]): row["tokens_per_second"] for row in load("vllm_8b")["rows"]}
    ratios = [speed[form, 256, clients] / speed["bf16", 256, clients] for clients in (32, 1)]
    return " to ".join(f"{ratio:.2f}" for ratio in sorted(ratios)) + " times"


def _gpu_ratio(name: str, begins: str) -> float:
    targets = load(name)["parts"]["products"]["targets"]
    (ratio,) = (float(each["found"]) for each in targets if each["target"].startswith(begins))
    return ratio


FIGURES: Mapping[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        text_suffixes,
        tail_operations,
        runtimes_apart,
        families_quantized,
        two_terms_apart,
        gpu_two_codes_decode,
        gpu_two_codes_prompt,
        gpu_two_codes_prompt_again,
        gpu_vllm_one_code,
        gpu_vllm_two_codes,
        drafts_unchanged,
        quicker,
    )
}
