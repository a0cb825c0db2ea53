"""The help of a command: examples first, then the options that most users need; `--help-all` shows every option.

cyclopts lays out the panels. A command without a selection here shows all of its options in either help.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

from cyclopts.help import DefaultFormatter

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

#: The flag that asks for the help with every option.
ALL = "--help-all"


@dataclass(frozen=True)
class Page:
    """The help of one command: example calls, each with its purpose, and the options shown first (none: all)."""

    examples: tuple[tuple[str, str], ...]
    selection: tuple[str, ...] = ()


_SCALES = ("--method", "--kv-cache", "--skip", "--only", "--form")
PAGES: Mapping[str, Page] = {
    "run": Page(
        (
            ("fp8q run MODEL --data text.jsonl --out RUN", "all stages; calling it again resumes"),
            ("fp8q run MODEL --data text.jsonl --out RUN --preset exact", "for engines and Triton: loses far less"),
            ("fp8q run MODEL --data text.jsonl --out RUN --preset exact --for vllm", "the same for vLLM"),
            ("fp8q run MODEL --data text.jsonl --out RUN --target sm89", "an engine for this GPU (Ada) alone"),
            ("fp8q run MODEL --data text.jsonl --out RUN --max-ppl-increase 1%", "exit code 3 where it loses more"),
        ),
        (
            "--data", "--eval-data", "--out", "--samples", "--seq-len", "--chat-template", "--preset", "--kv-cache",
            "--skip", "--stream", "--graph", "--for", "--max-ppl-increase",
        ),
    ),
    "calibrate": Page(
        (
            ("fp8q calibrate MODEL --data text.jsonl --out RUN", "measure, choose scales, write RUN/model"),
            ("fp8q calibrate MODEL --data chats.jsonl --out RUN --chat-template", "rows of messages"),
            ("fp8q calibrate MODEL --data text.jsonl --out RUN --preset exact --for vllm", "loses far less"),
            ("fp8q calibrate MODEL --data text.jsonl --out RUN --kv-cache fp8", "the KV cache in FP8 too"),
            ("fp8q calibrate MODEL --data code.jsonl=3 --data prose.txt=1 --out RUN", "a mixture of texts"),
        ),
        (
            "--data", "--eval-data", "--out", "--samples", "--seq-len", "--chat-template", "--preset", "--kv-cache",
            "--skip", "--form", "--stream", "--graph", "--for",
        ),
    ),
    "convert": Page(
        (
            ("fp8q convert MODEL --out DIR", "channels, and a scale for each token: every server reads it"),
            ("fp8q convert MODEL --out DIR --form block", "128 x 128 blocks, as DeepSeek and Qwen publish"),
            ("fp8q convert MODEL --out DIR --skip '*.layers.0.*'", "keep the first layer too"),
            ("fp8q convert MODEL --out DIR --rules my-rules.toml", "another rule of what is kept"),
        ),
    ),
    "scales": Page(
        (
            ("fp8q scales RUN --skip '*.down_proj'", "keep these modules in BF16"),
            ("fp8q scales RUN --skip ''", "quantize again what the run keeps in BF16"),
            ("fp8q scales RUN --kv-cache fp8", "the KV cache in FP8"),
            ("fp8q scales RUN --form tail:64", "exact answers (docs/exact-answers.md)"),
            ("fp8q scales RUN --method percentile --percentile 99.99", "clip outliers of activations"),
        ),
        ("--weight-method", "--percentile", *_SCALES),
    ),
    "merge": Page(
        (
            ("fp8q merge RUN1 RUN2 --out RUN", "one run of two halves of the text"),
            ("fp8q merge RUN1 RUN2 --out RUN --model MODEL", "where the checkpoint lies elsewhere here"),
            ("fp8q merge RUN1 RUN2 --out RUN --kv-cache fp8", "with the KV cache in FP8"),
        ),
        ("--out", "--model", "--graph", "--weight-method", *_SCALES),
    ),
    "export": Page(
        (
            ("fp8q export RUN", "the graphs of RUN/model once more"),
            ("fp8q export RUN --precision bf16", "the source as a BF16 graph, to compare with"),
            ("fp8q export RUN --apply-scales mul", "channels' scales behind the GEMM"),
        ),
    ),
    "lint": Page(
        (
            ("fp8q lint RUN", "all in a run: graphs, engines, repository"),
            ("fp8q lint CHECKPOINT", "an FP8 checkpoint, whoever made it"),
            ("fp8q lint CHECKPOINT --for vllm", "what this server does with it"),
            ("fp8q lint model.onnx", "a graph, without a run"),
        ),
    ),
    "build-engine": Page(
        (
            ("fp8q build-engine RUN", "for this machine's GPU; without one, for sm89 and sm120"),
            ("fp8q build-engine RUN --runtime tensorrt", "on the GPU that serves (Hopper, data-centre Blackwell)"),
            ("fp8q build-engine RUN --target sm120", "for GeForce RTX 50, on any machine"),
            ("fp8q build-engine RUN --max-batch 64 --max-seq-len 8192", "for more and longer sequences"),
            ("fp8q build-engine RUN --precision bf16", "the BF16 engine, to compare with"),
        ),
        ("--runtime", "--target", "--max-batch", "--max-seq-len", "--max-prompt", "--min-fp8-share", "--precision"),
    ),
    "engine": Page(
        (
            ("fp8q engine RUN", "every GEMM of every engine"),
            ("fp8q engine RUN --target sm89", "of one engine"),
            ("fp8q engine RUN --plan other.plan", "of an engine that another program built"),
        ),
    ),
    "validate": Page(
        (
            ("fp8q validate RUN", "BF16, the FP8 reference and ONNX Runtime on the held-out text"),
            ("fp8q validate RUN --runtimes bf16,reference,tensorrt", "the engine, on the GPU that serves"),
            ("fp8q validate RUN --as-served 128", "a prompt, then token by token, as a server does"),
            ("fp8q validate RUN --data other.txt", "another text"),
            ("fp8q validate RUN --needles 1024,4096", "sentences hidden in long prompts, asked for at their end"),
            ("fp8q validate RUN --max-ppl-increase 0.5%", "exit code 3 where it loses more"),
        ),
        ("--data", "--runtimes", "--context", "--max-ppl-increase", "--as-served", "--max-tokens", "--needles"),
    ),
    "compare": Page(
        (
            ("fp8q compare RUN --url http://localhost:8000", "is this server the model that was validated?"),
            ("fp8q compare RUN --model CHECKPOINT", "is this checkpoint?"),
            ("fp8q compare ORIGINAL --model CHECKPOINT --data TEXT --out DIR", "two checkpoints, whoever made them"),
        ),
        ("--url", "--model", "--served", "--windows", "--data", "--out", "--max-ppl-increase"),
    ),
    "evaluate": Page(
        (
            ("fp8q evaluate RUN --tasks hellaswag,arc_easy", "BF16 and FP8, by transformers on this machine"),
            ("fp8q evaluate RUN --tasks mine --include-path tasks", "tasks of your own"),
            ("fp8q evaluate RUN --tasks gsm8k --limit 200", "the first 200 questions"),
            ("fp8q evaluate RUN --tasks mmlu --url URL --bf16-url URL", "two servers"),
        ),
        (
            "--tasks", "--include-path", "--limit", "--num-fewshot", "--chat", "--seeds", "--batch-size", "--url",
            "--bf16-url",
        ),
    ),
    "generate": Page(
        (
            ("fp8q generate RUN --prompt 'Once upon a time'", "continue a text"),
            ("fp8q generate RUN --chat", "hold a conversation"),
            ("fp8q generate RUN --prompt 'Once upon a time' --compare", "FP8 and BF16, and where they part"),
            ("fp8q generate RUN --prompt 'Once' --temperature 0.8 --seed 1", "draw instead of the likeliest"),
        ),
        (
            "--prompt", "--chat", "--compare", "--max-tokens", "--temperature", "--top-p", "--seed", "--stop",
            "--runtime",
        ),
    ),
    "serve": Page(
        (
            ("fp8q serve RUN", "on 127.0.0.1:8000, with a page to try it"),
            ("fp8q serve RUN --bf16", "BF16 beside FP8, to compare"),
            ("FP8Q_API_KEY=secret fp8q serve RUN --host 0.0.0.0", "to other machines, with a key"),
        ),
    ),
    "bench": Page(
        (
            ("fp8q bench RUN", "all engines here, or ONNX Runtime"),
            ("fp8q bench RUN --batch-sizes 1,16 --prompt-lengths 128,2048", "at these sizes"),
            ("fp8q bench RUN --against OTHER", "beside another run of the same model"),
        ),
    ),
    "triton": Page(
        (
            ("fp8q triton RUN", "a repository in RUN/triton"),
            ("fp8q triton RUN --out models", "elsewhere"),
            ("fp8q triton RUN --engine-model", "and the plain TensorRT model, for a loop of your own"),
        ),
    ),
    "push": Page(
        (
            ("fp8q push RUN --repo owner/name", "what would be uploaded"),
            ("fp8q push RUN --repo owner/name --yes", "upload it"),
        ),
    ),
    "report": Page((("fp8q report RUN", "RUN/report.html, and the notebook that makes it"),)),
    "inspect": Page(
        (
            ("fp8q inspect RUN", "scale and error of every module"),
            ("fp8q inspect RUN --against text.jsonl", "what would saturate on another text"),
            ("fp8q inspect RUN --delayed", "what delayed scaling would have done"),
        ),
    ),
    "distill": Page(
        (
            ("fp8q distill RUN --data text.jsonl", "learn from that text; the more the better"),
            ("fp8q distill RUN", "from the text it was calibrated on"),
            ("fp8q distill RUN --data text.jsonl --train adapter", "a LoRA adapter, and the model stays"),
            ("fp8q distill RUN --data text.jsonl --stream", "layer by layer, for models larger than memory"),
            ("fp8q distill RUN --data text.jsonl --stream --end-to-end", "then all of it: what wins most"),
        ),
        (
            "--data", "--samples", "--train", "--stream", "--end-to-end", "--shard", "--epochs", "--batch-size",
            "--learning-rate", "--rank",
        ),
    ),
    "sensitivity": Page((("fp8q sensitivity RUN", "each tensor's own loss, the worst first"),)),
    "tune": Page(
        (
            ("fp8q tune RUN", "the cost of every loss"),
            ("fp8q tune RUN --max-ppl-increase 0.5%", "the cheapest mix that loses no more"),
            ("fp8q tune RUN --max-ppl-increase 0.5% --for vllm --apply", "for vLLM without a plugin; write it"),
        ),
    ),
    "doctor": Page(
        (
            ("fp8q doctor", "what this machine can do"),
            ("fp8q doctor RUN", "known problems of this run"),
        ),
    ),
}  # fmt: skip


class HelpFormatter(DefaultFormatter):
    """cyclopts' panels, with examples under the description, and without the options that a page leaves out."""

    def __init__(self, command: str, all_options: bool) -> None:
        """`all_shown`: show every option."""
        super().__init__()
        self.page = PAGES[command]
        self.command = command
        self.all_shown = all_options or not self.page.selection
        self.hidden = 0

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        """Draw a panel, without the options that are not selected; a panel without entries is left out."""
        shown = [entry for entry in panel.entries if self.shows(entry)]
        self.hidden += len(panel.entries) - len(shown)
        super().__call__(console, options, panel.copy(entries=shown))

    def shows(self, entry: "HelpEntry") -> bool:
        """Tell whether the page shows `entry`: arguments without a name, and selected options."""
        return self.all_shown or not entry.positive_names or any(name in self.page.selection for name in entry.names)

    def render_description(self, console: "Console", options: "ConsoleOptions", description: Any) -> None:
        """Print the description, and the examples below it."""
        super().render_description(console, options, description)
        width = max(len(call) for call, _ in self.page.examples)
        lines = [f"  {call:<{width}}  # {purpose}" for call, purpose in self.page.examples]
        if max(map(len, lines)) > options.max_width:
            lines = [f"  {call}\n      # {purpose}" for call, purpose in self.page.examples]
        console.print("\n".join(("Examples:", *lines, "")), markup=False, soft_wrap=True)


def set_help(app: "App", words: Sequence[str]) -> list[str]:
    """Give the command in `words` its help page; returns `words` with cyclopts' own flag in the place of `ALL`."""
    all_options = ALL in words
    if words and words[0] in PAGES:
        command = app[words[0]]
        page = PAGES[words[0]]
        command.help_formatter = HelpFormatter(words[0], all_options)
        paragraphs = re.sub(r"(?<!\n)\n(?=\S)", " ", cleandoc(command.help))
        command.help = paragraphs  # a terminal breaks lines where it ends
        rest = f"These are the options that are used most. `fp8q {words[0]} {ALL}` shows all."
        command.help_epilogue = rest if page.selection and not all_options else None
    return ["--help" if word == ALL else word for word in words]
