"""The tables of docs/guides: what a large model takes, by arithmetic on its sizes and on measured speeds."""

import statistics
from dataclasses import dataclass

from markdown import load, table

#: Operations a second of an H100 SXM in BF16 without sparsity, by NVIDIA's data sheet.
H100_PEAK = 989e12
#: The default: 512 windows of 2,048 tokens; and few, for a CPU.
WINDOWS = {"by default": (512, 2048), "64 windows of 512": (64, 512)}
#: What a process takes beside three times its largest layer, at most (`benchmarks/memory.py`).
BASE_BYTES = 1.2e9


@dataclass(frozen=True)
class Sizes:
    """A Llama's sizes; its output head is not tied to the embeddings."""

    layers: int
    width: int
    inner: int
    keys: int
    vocabulary: int

    @property
    def layer(self) -> int:
        """The weights of a layer's GEMMs."""
        return 2 * self.width**2 + 2 * self.width * self.keys + 3 * self.width * self.inner

    @property
    def moments(self) -> int:
        """The bytes of the second moments of a layer's inputs: of q, k and v, of o, of gate and up, and of down."""
        return 4 * (3 * self.width**2 + self.inner**2)

    @property
    def spent(self) -> int:
        """The most bytes of second moments and codes at a time, where each layer is rounded once it has run."""
        return self.moments + self.layers * self.layer

    @property
    def wide(self) -> int:
        """The weights of embeddings and head, which stay in BF16."""
        return 2 * self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All weights but those of norms."""
        return self.layers * self.layer + self.wide

    @property
    def fp8_bytes(self) -> int:
        """The size of the FP8 checkpoint."""
        return self.layers * self.layer + 2 * self.wide


LLAMA_8B = Sizes(32, 4096, 14336, 1024, 128256)
LLAMA_70B = Sizes(80, 8192, 28672, 1024, 128256)


def two_cores() -> float:
    """Operations a second of calibrating on the machine of `calibration.json`, in batches of four."""
    seconds = load("calibration")["batch_sizes"]["4"]["seconds"]["fp8q"]
    tokens = (load("calibration")["windows"]["long"] - load("calibration")["windows"]["short"]) * 512
    median: float = statistics.median(each["further_wall"] for each in seconds)
    operations: float = 2 * Sizes(4, 2048, 5632, 256, 0).parameters * tokens
    return operations / median


def gptq_seconds(model: Sizes) -> float:
    """One thread's time to round all weights of a model of Llama 8B's widths by GPTQ."""
    shapes = load("weight_shapes")["shapes"]
    square, wide, tall = (shapes[name] for name in ("4096x4096", "14336x4096", "1024x14336"))
    attention = 2 * (1 + model.keys / model.width) * square["round_s"] + 2 * square["factor_s"]
    mlp = 2 * wide["round_s"] + wide["factor_s"] + model.width / 1024 * tall["round_s"] + tall["factor_s"]
    return float(model.layers * (attention + mlp))


def took(seconds: float) -> str:
    """A time in the unit that fits it."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def gb(size: float) -> str:
    """A size in gigabytes."""
    return f"{size / 1e9:.2f} GB" if size < 2e9 else f"{size / 1e9:.{0 if size > 30e9 else 1}f} GB"


def power(value: float) -> str:
    """A large number by its power of ten."""
    mantissa, _, exponent = f"{value:.1e}".partition("e+")
    return f"{mantissa} · 10{exponent.lstrip('0').translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}"


def llama_on_one_gpu() -> str:
    """The time, memory and disk of an 8B Llama, for the default text and for a short one."""
    model, speed = LLAMA_8B, two_cores()
    tokens = [windows * length for windows, length in WINDOWS.values()]
    flop = [2 * model.parameters * count for count in tokens]
    counted = load("rounding_launches")["models"]["8B"]
    mse = load("weight_mse")["results"][0]["ours_s_per_billion"] * (model.parameters - model.wide) / 1e9
    rows = [
        ["tokens T", "windows · length", *(f"{count:,}" for count in tokens)],
        [
            "source checkpoint, on disk and in memory",
            "2 bytes · parameters",
            *[gb(2 * model.parameters)] * 2,
        ],
        ["FP8 checkpoint, written", "1 byte a weight, embeddings and head 2", *[gb(model.fp8_bytes)] * 2],
        [
            "calibrating at an H100 SXM's peak",
            f"FLOP / ({power(H100_PEAK)})",
            *(took(x / H100_PEAK) for x in flop),
        ],
        ["at two CPU cores' measured speed", f"FLOP / ({power(speed)})", *(took(x / speed) for x in flop)],
        ["choosing the weights' scales, two CPU cores", "measured for 10⁹ weights", *[took(mse)] * 2],
        [
            "`gptq`: second moments on disk",
            "4 bytes · 32 · (3 · 4,096² + 14,336²)",
            *[gb(model.layers * model.moments)] * 2,
        ],
        [
            "`gptq --stream --no-keep-moments`: on disk",
            "a layer's second moments, and all codes",
            *[gb(model.spent)] * 2,
        ],
        ["`gptq`: rounding, one CPU thread", "measured for a weight of each shape", *[took(gptq_seconds(model))] * 2],
        [
            "`gptq`: rounding, one H100 SXM's ceilings",
            f"FLOP, bytes and {counted['launches']:,} launches, counted",
            *[took(counted["bound_s"])] * 2,
        ],
        ["`gptq`: memory of the GPU at most, beside the model's", "counted", *[gb(counted["peak_bytes"])] * 2],
    ]
    return table(["what", "formula", *WINDOWS], rows)


def streaming() -> str:
    """The memory, disk and operations of calibrating layer by layer, for the default text."""
    models, tokens = (LLAMA_8B, LLAMA_70B), 512 * 2048
    counted = (load("rounding_launches")["models"]["8B"], load("rounding_launches_70b")["models"]["70B"])
    flop = [2 * model.parameters * tokens for model in models]
    rows = [
        ["source checkpoint", "2 bytes · parameters", *(gb(2 * model.parameters) for model in models)],
        [
            "FP8 checkpoint, written",
            "1 byte a weight, embeddings and head 2",
            *(gb(model.fp8_bytes) for model in models),
        ],
        [
            "hidden states on disk, until the end",
            "2 files · 2 bytes · T · width",
            *(gb(4 * tokens * model.width) for model in models),
        ],
        [
            "`gptq`: second moments on disk",
            "4 bytes · layers · (3 · width² + MLP width²)",
            *(gb(model.layers * model.moments) for model in models),
        ],
        [
            "`gptq --no-keep-moments`: on disk",
            "a layer's second moments, and all codes",
            *(gb(model.spent) for model in models),
        ],
        ["largest layer", "2 bytes · its weights", *(gb(2 * model.layer) for model in models)],
        [
            "memory of the process on a CPU, at most",
            "1.2 GB + 3 · largest layer",
            *(gb(BASE_BYTES + 6 * model.layer) for model in models),
        ],
        [
            "calibrating at an H100 SXM's peak",
            f"FLOP / ({power(H100_PEAK)})",
            *(took(x / H100_PEAK) for x in flop),
        ],
        [
            "at two CPU cores' measured speed",
            f"FLOP / ({power(two_cores())})",
            *(took(x / two_cores()) for x in flop),
        ],
        [
            "`gptq`: rounding, one H100 SXM's ceilings",
            "FLOP, bytes and launches, counted",
            *(took(model["bound_s"]) for model in counted),
        ],
        ["`gptq`: memory of the GPU at most", "counted", *(gb(model["peak_bytes"]) for model in counted)],
    ]
    return table(["what", "formula", "Llama 3.1 8B", "Llama 3.1 70B"], rows)


def convert_seconds() -> str:
    """What `fp8q convert` takes beside a copy of the same bytes."""
    result = load("convert")
    names = {
        "cp": "`cp -r`", "cp_sync": "`cp -r`, and `sync`", "dynamic": "`fp8q convert --form dynamic`",
        "block": "`fp8q convert --form block`",
    }  # fmt: skip
    rows = [
        [
            name,
            f"{result[command]['seconds']:.1f} s",
            f"{result[command]['seconds'] / result['cp']['seconds']:.1f}",
            f"{result[command]['processor_seconds']:.1f} s",
            gb(result[command]["peak_anonymous_bytes"]),
        ]
        for command, name in names.items()
    ]
    ceiling = result["ceiling_seconds"]
    rows.append(["quantizing alone, in memory", f"{ceiling:.1f} s", f"{ceiling / result['cp']['seconds']:.1f}", "", ""])
    return table([gb(result["bytes"]), "time", "of `cp -r`", "processor time", "memory"], rows)


def convert_classes() -> str:
    """What became of a tiny random model of each class that generates text, in `fp8q convert`."""
    result = load("convert_classes")
    rows = result["rows"]
    converted = {name: row for name, row in rows.items() if "kl" in row}
    right = [row for row in converted.values() if row["kl"] < result["limit"] and not row["misfits"]]
    others = [[kind, f"{sum(kind in row for row in rows.values())}"] for kind in ("refused", "unmade", "failed")]
    figures = [
        ["classes tried", f"{len(rows)}"],
        ["converted, and loaded again", f"{len(converted)}"],
        ["of these with a KL below the limit, and each key in its place", f"{len(right)}"],
        ["linear layers of these", f"{sum(row['linear'] for row in right):,}"],
        ["tensors of codes, single experts among them", f"{sum(row['coded'] for row in right):,}"],
        ["matrices kept", f"{sum(sum(row['kept'].values()) for row in right):,}"],
        ["largest KL of these, nats", f"{max(row['kl'] for row in right):.1e}"],
        *others,
    ]
    return table(["a tiny random model of each class", ""], figures)


def real_sizes() -> str:
    """What each command took for the largest of the models that people know, beside the bytes of its checkpoint."""
    result = load("real_sizes_qwen_coder")
    (model,) = result["results"].values()
    rows = []
    for command, figures in model["commands"].items():
        minutes = figures["processor_seconds"] / 60
        rows.append([f"`fp8q {command}`", gb(figures["peak_anonymous_bytes"]), f"{minutes:.1f} min"])
    tokens = f"{result['samples']} windows of {result['seq_len']} tokens"
    return table([f"{gb(model['checkpoint_bytes'])} of weights, {tokens}", "memory", "processor time"], rows)


ONE_GPU, MEMORY, CONVERT, CLASSES = (llama_on_one_gpu,), (streaming, real_sizes), (convert_seconds,), (convert_classes,)
