"""README's table of the forms of FP8: what each loses as it is served, over ModelOpt's, and what a prompt costs."""

from markdown import Figures, load, table

from pages import forms, real

MODELOPT = "ModelOpt"
#: A toy whose heads have eight channels loses more in every form; docs/accuracy.md has it.
LEFT_OUT = "stories260k"
UNITS, ALL = "Ada, Hopper, Blackwell", "vLLM, transformers, TensorRT(-RTX), Triton"
GRAPHS = "TensorRT(-RTX), Triton; vLLM with `fp8q-vllm`"


def readme_forms() -> str:
    """The losses as shares of ModelOpt's, from the least to the most over the models."""
    results: dict[str, Figures] = load("as_served")["results"]
    cost: Figures = load("tail_cost")["results"]

    def loss(recipe: str) -> str:
        shares = sorted(found[recipe] / found[MODELOPT] for name, found in results.items() if name != LEFT_OUT)
        return f"{shares[0]:.2f} to {shares[-1]:.2f}"

    known = {name: real.rows_in(result) for result, name in forms.SERVED_RESULTS.items()}

    def shares(row: str) -> list[str]:
        """Over ModelOpt's loss on the decoded half of windows, on each of the models that people know."""
        return [
            f"{real.decoded_kl(rows, row) / real.decoded_kl(rows, forms.MODELOPT_WRITTEN):.2f}"
            for rows in known.values()
        ]

    def operations(form: str) -> str:
        return f"{cost[form]['operations_ratio']:.3g}"

    two = loss("fp8q, two terms, gptq")
    rows = [
        ["BF16 itself", *shares(real.BF16), loss("BF16"), operations("weights alone"), "any with BF16", "any"],
        [
            "`--preset fast`: one code", *shares("fp8q, one, gptq"), loss("fp8q, one term, gptq"),
            operations("one term"), UNITS, ALL,
        ],
        [
            "`--preset exact`, `--for vllm`, `sglang`, `transformers`: FP8 weights alone",
            *shares("fp8q, bf16, --preset exact"), "as two codes", operations("weights alone"),
            "any with BF16; in vLLM from Turing on, no CPU", ALL,
        ],
        [
            "`--preset exact`, `--for tensorrt`, `vllm-plugin`: two codes for decoded tokens and a prompt's last 64",
            *shares("fp8q, tail:64, --preset exact"), loss("fp8q, a tail of 64, gptq"), operations("tail of 64"), UNITS,
            GRAPHS,
        ],
        [
            "`--form two`: two codes everywhere", *shares("fp8q, two, gptq"), two, operations("two terms"),
            UNITS, GRAPHS,
        ],
    ]  # fmt: skip
    loss_of = "loss, over that of ModelOpt's FP8"
    head = [
        "form", *(f"{loss_of}: {name}" for name in known), "small models", "operations of a prompt of 2,048", "GPU",
        "server",
    ]  # fmt: skip
    return table(head, rows)


TABLES = (readme_forms,)
