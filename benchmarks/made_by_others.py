"""What does `fp8q compare` say of FP8 files that llm-compressor, ModelOpt, transformers and fp8q make of one model?

    python benchmarks/made_by_others.py [MODEL=CALIBRATION,EVALUATION …] [--llmcompressor PYTHON] [--max-tokens 6000]
        [--save made_by_others]

Each makes its forms of the demo and llama (or of the models named), calibrated on 16 windows of 256 tokens of the same
text where it calibrates: llm-compressor FP8, FP8_DYNAMIC, FP8_BLOCK and W8A8 in an environment of its own; ModelOpt FP8
per tensor, per channel with inputs per token, and with an FP8 cache; transformers' block form, written by its rule,
since it quantizes on a GPU alone; fp8q in one code static, dynamic and in blocks. Then `fp8q compare ORIGINAL --model`
judges each (perplexity, KL, flips; the modules' comparison is part of its seconds), and `fp8q lint --for` names what
each server makes of it. The floor is BF16's own KL from FP32. Prints one JSON line; exit status 1 where a file cannot
be compared.
"""

import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, get_args

import numpy as np
from models import ModelTexts, model_texts, small_models
from result import arguments, described, publish

from fp8q import api
from fp8q.core.errors import Fp8qError
from fp8q.core.reporter import SILENT
from fp8q.options import CheckpointServer
from fp8q.tests.quantize.reading import fp8_checkpoints
from fp8q.validate.pair.document import CANDIDATE

PEER = Path(__file__).with_name("peer_checkpoint.py")
WINDOWS, CONTEXT = 16, 256
SCHEMES = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "W8A8")
#: Name -> ModelOpt's configuration, and if the cache is in FP8 too.
MODELOPT = {
    "FP8": ("FP8_DEFAULT_CFG", False),
    "FP8, inputs per token": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", False),
    "FP8, cache in FP8": ("FP8_DEFAULT_CFG", True),
}
Maker = Callable[[Path], object]


def makers(texts: ModelTexts, windows: Path, peer: str | None) -> Iterator[tuple[str, Maker]]:
    """The name of each file, and the function that writes it into a directory."""
    original = Path(texts.directory)
    short: dict[str, Any] = {"samples": WINDOWS, "seq_len": CONTEXT}

    def llmcompressor(scheme: str) -> Maker:
        words = [str(peer), str(PEER), str(original), str(windows)]

        return lambda folder: subprocess.run([*words, str(folder), scheme], check=True, capture_output=True)

    def modelopt(configuration: str, cache: bool) -> Maker:
        def make(folder: Path) -> None:
            fp8_checkpoints.modelopt(original, folder, configuration, cache, np.load(windows))
            for file in original.glob("*token*.json"):  # as its users do
                shutil.copyfile(file, folder / file.name)

        return make

    def calibrated(folder: Path, **form: Any) -> None:
        run = folder.with_name(f"{folder.name}-run")
        options = api.CalibrateOptions(**short, **form)
        api.calibrate(original, texts.data, run, texts.eval_data, options, api.ExportOptions(graph=False), SILENT)
        (run / "model").rename(folder)

    for scheme in SCHEMES if peer else ():
        yield f"llm-compressor {scheme}", llmcompressor(scheme)
    for name, (configuration, cache) in MODELOPT.items():
        yield f"ModelOpt {name}", modelopt(configuration, cache)
    yield "transformers FineGrainedFP8", lambda folder: fp8_checkpoints.fine_grained(original, folder)
    yield "fp8q", calibrated
    yield "fp8q, dynamic", lambda folder: calibrated(folder, form=("dynamic",))
    yield (
        "fp8q convert, blocks",
        lambda folder: api.convert(str(original), folder, api.ConvertOptions(form="block"), SILENT),
    )


def judged(texts: ModelTexts, candidate: Path, out: Path, most: int) -> dict[str, Any]:
    """Compare a candidate with its original, and name the rules that each server's lint finds."""
    options = api.PairOptions(data=texts.eval_data, out=out, max_tokens=most)
    start = monotonic()
    try:
        comparison = api.compare_checkpoints(Path(texts.directory), candidate, options, SILENT)
    except Fp8qError as error:
        return {"refused": str(error).replace(str(candidate), "FILE")}
    seconds, numbers = monotonic() - start, comparison.runtimes[CANDIDATE]
    rules = {
        server: sorted(
            {f"{one.severity} {one.rule}" for one in api.lint(candidate, options=api.LintOptions(server)).findings}
        )
        for server in get_args(CheckpointServer)
    }
    return {
        "verdict": comparison.verdict.kind,
        "perplexity_increase": numbers.perplexity_increase,
        "kl_nats": comparison.kl_nats.model_dump(),
        "flips": comparison.flips.model_dump(),
        "bf16_kl_fp32_nats": comparison.runtimes["bf16"].kl_fp32_nats,
        "sentence": comparison.verdict.sentence,
        "loaded_by": comparison.candidate.loaded_by,
        "causes": [cause.rule for cause in comparison.causes if cause.severity == "error"],
        "note": comparison.notes[0] if comparison.notes else None,
        "lint": rules,
        "tokens": comparison.protocol.tokens,
        "seconds": round(seconds, 1),
    }


def measure(texts: ModelTexts, peer: str | None, most: int) -> dict[str, dict[str, Any]]:
    """Make and judge every file of one model."""
    from transformers import AutoTokenizer

    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        text = Path(texts.data).read_text(encoding="utf-8")
        ids = AutoTokenizer.from_pretrained(texts.directory)(text)["input_ids"][: WINDOWS * CONTEXT]
        np.save(windows := root / "windows.npy", np.array(ids, np.int64).reshape(WINDOWS, CONTEXT))
        for name, make in makers(texts, windows, peer):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                make(candidate := root / "file" / name.replace(" ", "-").replace(",", ""))
            rows[name] = judged(texts, candidate, root / "out" / candidate.name, most)
            print(f"{texts.name}, {name}: {rows[name]}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Make and judge all files, and publish the result."""
    parser = arguments(__doc__)
    parser.add_argument("models", nargs="*", type=model_texts, metavar="MODEL=CALIBRATION,EVALUATION")
    parser.add_argument("--llmcompressor", metavar="PYTHON", help="the interpreter of an environment that has it")
    parser.add_argument("--max-tokens", type=int, default=6000, help="of the evaluation text")
    asked = parser.parse_args()
    head = described("made_by_others")
    models = asked.models or small_models("demo", "llama")
    rows = {texts.name: measure(texts, asked.llmcompressor, asked.max_tokens) for texts in models}
    passed = not any("refused" in row for of_model in rows.values() for row in of_model.values())
    return publish(head, {"results": rows, "passed": passed}, asked.save)


if __name__ == "__main__":
    sys.exit(main())
