"""How much memory does `fp8q compare ORIGINAL --model CANDIDATE --stream` take: no more for more layers.

    python benchmarks/compare_memory.py [--layers 8 16] [--width 1024] [--tokens 512] [--context 128]

Makes random originals of 8 and 16 layers (`synthetic`: 27 MB a layer, the demo's vocabulary), quantizes each by `fp8q
convert`, and compares the two by processes of their own, whole and layer by layer. The peak is that of anonymous
memory; the state is the most that the folder of a comparison in progress holds on disk: hidden states, and the logits
that are compared. Growth is the difference of the two streamed peaks, a layer; a layer that stayed in memory would be a
whole one or two. The allocator keeps some of freed tensors, so that a quarter of a layer may be added. The ceiling
beside it is what the peak of the whole models grows by, a layer. Prints one JSON line; exit status 1 where it grows
more, or where the two ways give another KL.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from math import prod
from pathlib import Path
from typing import Any

from result import arguments, described, publish
from synthetic import DEMO, layer_shapes, sampled, shape, write_checkpoint

from fp8q import api
from fp8q.core.reporter import SILENT

VOCABULARY, GROWTH_SHARE, MOST_APART = 2048, 0.25, 1e-3


def compare(folder: Path, asked: argparse.Namespace, stream: bool) -> None:
    """What the measured process does; leaves the bytes of the largest state in a file."""
    print("start", flush=True)
    import transformers

    assert transformers.__version__
    print("compare", flush=True)
    out, most, ended = folder / f"out-{stream}", [0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            sizes = [file.stat().st_size for file in out.glob(".compare.work/**/*") if file.is_file()]
            most.append(max(most.pop(), sum(sizes)))
            time.sleep(0.05)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        options = api.PairOptions(
            data=str(DEMO / "evaluation.txt"), out=out, context=asked.context, max_tokens=asked.tokens, stream=stream
        )
        api.compare_checkpoints(folder / "original", folder / "candidate", options, SILENT)
    finally:
        ended.set()
        watching.join()
    (folder / f"state-{stream}").write_text(str(most[0]), encoding="utf-8")


def measured(layers: int, asked: argparse.Namespace) -> dict[str, Any]:
    """Make the pair of one depth, and compare it in both ways."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        size = write_checkpoint(folder / "original", layers, asked.width, VOCABULARY)
        api.convert(str(folder / "original"), folder / "candidate", api.ConvertOptions(), SILENT)
        found: dict[str, Any] = {"layers": layers, "checkpoint_bytes": size}
        for name, stream in (("whole", False), ("streamed", True)):
            words = ["--tokens", str(asked.tokens), "--context", str(asked.context), "--child", directory, str(stream)]
            stages = sampled(__file__, words)
            stored = json.loads((folder / f"out-{stream}" / "comparison.json").read_bytes())
            found[name] = {
                **stages["compare"],
                "kl_nats": stored["kl_nats"]["mean"],
                "state_bytes": int((folder / f"state-{stream}").read_text(encoding="utf-8")),
            }
        return found


def main() -> int:
    """Measure, print, and say by the exit status whether the limits were met."""
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=[8, 16])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        compare(Path(asked.child[0]), asked, asked.child[1] == "True")
        return 0
    head = described("compare_memory")
    pairs = [measured(layers, asked) for layers in asked.layers]
    layer = sum(2 * prod(size) for size in layer_shapes(shape(asked.width)).values())
    growth = {
        name: (pairs[1][name]["peak_anonymous_bytes"] - pairs[0][name]["peak_anonymous_bytes"])
        / (asked.layers[1] - asked.layers[0])
        for name in ("whole", "streamed")
    }
    apart = max(abs(pair["streamed"]["kl_nats"] / pair["whole"]["kl_nats"] - 1) for pair in pairs)
    limit = GROWTH_SHARE * layer
    result = {
        "tokens": asked.tokens,
        "context": asked.context,
        "layer_bytes": layer,
        "checkpoints": pairs,
        "growth_bytes_a_layer": round(growth["streamed"]),
        "growth_limit_bytes_a_layer": round(limit),
        "whole_growth_bytes_a_layer": round(growth["whole"]),
        "kl_apart": apart,
        "passed": growth["streamed"] <= limit and apart <= MOST_APART,
    }
    return publish(head, result, asked.save)


if __name__ == "__main__":
    sys.exit(main())
