"""What a prompt saves in a graph that gives only the logits that are asked for, on ONNX Runtime.

    python benchmarks/asked_logits.py [RUN] [--rounds 9] [--threads 1]

Two graphs of one run: `--logits asked` and `--logits all`. Each prompt is read in one call, and as the loop serves it:
to its first token, in the chunks of its pace. Rounds alternate, and medians over them of the processor's time are given
(of one thread, as other work on the machine would count otherwise). The ceiling is the head's share of the prompt's
multiplications: 1 less that is the least that the time can fall to. The bytes are of the logits that a call returns.
`llama_8b` is arithmetic: an 8B's chunk on a GPU, in the engine's BF16; the last position's alone came back before too.
Without RUN one is made of the demo, and thrown away. Fails where the answers of both graphs differ. Prints one JSON
line.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from generate import demo, prompt
from result import arguments, described, publish
from transformers import AutoConfig

from fp8q import api
from fp8q.core.run import Run
from fp8q.core.run_files import GRAPH_FP32
from fp8q.serve.loop.engine_session import CHUNK
from fp8q.serve.loop.generate import Generator
from fp8q.serve.loop.request import Piece, Request
from fp8q.serve.loop.sessions import OnnxRuntimeSession
from fp8q.serve.loop.text import Vocabulary

LENGTHS = (32, 128, 480)
KINDS = ("all", "asked")
#: Words, width, layers, width of the MLP, and that of keys and values, of a Llama 3.1 8B.
LLAMA_8B = (128_256, 4096, 32, 14_336, 1024)
BF16_BYTES = 2


def head_share(words: int, width: int, layers: int, inner: int, cache: int) -> float:
    """The share of the output head in the multiplications of weights by one position."""
    layer = 2 * width * width + 2 * width * cache + 3 * width * inner
    return words * width / (words * width + layers * layer)


def share_of(run: Run) -> float:
    """That share of a run's model."""
    config = AutoConfig.from_pretrained(run.model)
    cache = config.num_key_value_heads * config.head_dim
    sizes = config.vocab_size, config.hidden_size, config.num_hidden_layers, config.intermediate_size, cache
    return head_share(*sizes)


def call(session: OnnxRuntimeSession, length: int) -> tuple[float, np.ndarray]:
    """Milliseconds of a prompt in one call, and its last logits."""
    ids = np.array([prompt(length, length, session.vocabulary)])
    begun = time.process_time()
    logits, _ = session.forward(ids, np.ones_like(ids), np.arange(length)[None], scored=1)
    return (time.process_time() - begun) * 1e3, logits


def served(generator: Generator, length: int) -> tuple[float, int]:
    """Milliseconds from a request to its first token, and that token."""
    generator.submit(Request(prompt(length, length, generator.tokens), 1, ignore_end=True))
    begun, pieces = time.process_time(), list[Piece]()
    while not pieces:
        pieces = generator.step()
    return (time.process_time() - begun) * 1e3, pieces[0].token


def medians(rounds: int, measure: Callable[[str], tuple[float, Any]]) -> dict[str, float]:
    """Median milliseconds of each kind, in turn; raises SystemExit where what they give differs."""
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        given = {kind: measure(kind) for kind in KINDS}
        if not np.array_equal(*(answer for _, answer in given.values())):
            raise SystemExit("the two graphs answer differently")
        if number:  # the first is to warm up
            for kind, (spent, _) in given.items():
                found[kind].append(spent)
    return {f"{kind}_ms": round(statistics.median(spent), 3) for kind, spent in found.items()}


def returned(session: OnnxRuntimeSession, length: int) -> int:
    """The bytes of the logits that the graph gives when the last position's are wanted."""
    return 4 * session.vocabulary * (1 if session.asks else length)


def graphs(run: Run) -> dict[str, bytes]:
    """The graphs of each kind, for ONNX Runtime."""
    found = {}
    for kind in KINDS:
        api.export(run.root, api.ExportOptions(logits=kind))  # type: ignore[arg-type]  # one of KINDS
        found[kind] = (run.model / GRAPH_FP32).read_bytes()
    return found


def measure(run: Run, rounds: int, threads: int) -> dict[str, Any]:
    """All figures of a run."""
    sessions = {}
    for kind, graph in graphs(run).items():
        path = run.model / f"{kind}.onnx"
        path.write_bytes(graph)
        sessions[kind] = OnnxRuntimeSession(path, threads)
    vocabulary = Vocabulary.read(run.model)
    generators = {kind: Generator(session, vocabulary, 1) for kind, session in sessions.items()}
    rows = []
    for length in LENGTHS:
        in_one = medians(rounds, lambda kind, length=length: call(sessions[kind], length))  # type: ignore[misc]
        in_chunks = medians(rounds, lambda kind, length=length: served(generators[kind], length))  # type: ignore[misc]
        rows.append(
            {
                "length": length,
                "call": in_one | {"ratio": round(in_one["asked_ms"] / in_one["all_ms"], 3)},
                "served": in_chunks | {"ratio": round(in_chunks["asked_ms"] / in_chunks["all_ms"], 3)},
                "logits_bytes": {kind: returned(session, length) for kind, session in sessions.items()},
            }
        )
    words = LLAMA_8B[0] * BF16_BYTES
    return {
        "head_share": round(share_of(run), 4),
        "prompts": rows,
        "llama_8b": {
            "chunk": CHUNK,
            "head_share": round(head_share(*LLAMA_8B), 4),
            "logits_bytes": {"all": CHUNK * words, "asked": words},
            "downloaded_bytes": {"all": words, "asked": words},
        },
        "rounds": rounds,
        "threads": threads,
    }


def main() -> int:
    """Measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="a run of a Llama, whose graphs are made anew")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    head = described("asked_logits")
    with tempfile.TemporaryDirectory() as folder:
        run = Run(asked.run) if asked.run else demo(Path(folder))
        return publish(head, measure(run, asked.rounds, asked.threads), asked.save)


if __name__ == "__main__":
    sys.exit(main())
