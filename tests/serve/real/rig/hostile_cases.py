"""What hostile clients send: each case is drawn from a seed and an index, and told by them alone.

A case is bytes for one of the server's ports, and what must come of it. Bytes that are a whole HTTP request or gRPC
message must be answered, by a text or by a refusal; of others nothing is wanted but that they harm nobody. Left out is
what ends this old server by itself, whatever the model, and NVIDIA has mended since: JSON nested deeper than its stack
(triton-inference-server/common#156), and bodies in thousands of chunks (CVE-2025-23310).
"""

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from tritonclient.grpc import service_pb2

from fp8q.serve.triton.repository import INPUTS

Port = Literal["http", "grpc"]
#: Of JSON numbers, texts and structures, what programs trip over.
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, -(2**63), 1e39, 1e308, -0.0, 1.5,
    5e-324, "", " ", "0", "t1", "\x00", "\ud7ff", "é" * 100, "\U0001f600", "x" * 5000, "../../etc/passwd", "%s%n", [],
    [[]], [""], ["t1"], ["t1", "t2"], [1], [None], {}, {"a": 1},
]  # fmt: skip
#: Types of Triton's that a tensor may claim, and bytes of a value of those that a request has.
DATATYPES = ("BYTES", "INT32", "INT64", "UINT8", "UINT64", "BOOL", "FP32", "FP16", "BF16", "FP8", "", "x" * 300)
SIZES = {"BOOL": 1, "INT32": 4, "FP32": 4, "UINT64": 8}
SHAPES: list[list[int]] = [[1], [], [1, 2], [0, 1], [1, 0], [-1, 1], [2**40, 2**40], [1] * 50]
PATHS = (
    "/v2", "/v2/", "/v2/models", "/v2/models/{}", "/v2/models/{}/versions/1/generate", "/v2/models/{}/versions/-1",
    "/v2/models/{}/versions/99999999999999999999/generate", "/v2/models/%2e%2e%2f%2e%2e/generate", "/v2/models//infer",
    "/v2/models/" + "a" * 2000 + "/generate", "/v2/models/{}/config", "/v2/models/{}/stats", "/v2/models/{}/infer",
    "/v2/models/{}/trace/setting", "/v2/systemsharedmemory/status", "/v2/health/live?" + "q" * 900, "/%00",
    "/../../etc/passwd",
)  # fmt: skip


class Case(NamedTuple):
    """`asked`: the prompt whose own text must be the answer (None: any answer or refusal will do); `listens`: seconds
    until the client of what is not `whole` leaves.
    """

    kind: str
    port: Port
    path: str
    body: bytes
    whole: bool = True
    asked: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    listens: float = 0.2


def draw(seed: int, index: int, model: str, prompts: Sequence[str], tokens: int) -> Case:
    """The case of this seed and index; `prompts`: those whose texts of `tokens` tokens are known."""
    random_ = random.Random(f"{seed}:{index}")
    kinds, weights = zip(*KINDS.items(), strict=True)
    kind = random_.choices(kinds, [weight for weight, _ in weights])[0]
    return KINDS[kind][1](random_, model, prompts, tokens)._replace(kind=kind)


def _asking(prompt: str, tokens: int) -> bytes:
    return json.dumps({"text_input": prompt, "max_tokens": tokens}).encode()


def _valid(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    prompt = random_.choice(prompts)
    path = f"/v2/models/{model}/{random_.choice(['generate', 'generate_stream'])}"
    return Case("", "http", path, _asking(prompt, tokens), asked=prompt)


def _values(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    """Fields of any number with values of any kind."""
    fields = {"text_input": random_.choice(prompts), "max_tokens": random_.randint(1, tokens)} | {
        name: random_.choice(ODD)
        for name in random_.sample([*INPUTS, "n", "", "parameters", "id"], random_.choice([1, 1, 2, 4]))
    }
    path = f"/v2/models/{model}/{random_.choice(['generate', 'generate_stream'])}"
    return Case("", "http", path, json.dumps(bounded(fields, tokens)).encode())


def bounded(fields: dict[Any, Any], tokens: int) -> dict[Any, Any]:
    """The fields, of which a `max_tokens` that would be granted is no larger than `tokens`: cases are to be many."""
    asked = fields["max_tokens"]
    return fields | ({"max_tokens": tokens} if type(asked) is int and tokens < asked < 2**31 else {})


def _json(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    """A request of whose bytes some are others."""
    body = mutated(random_, _asking(random_.choice(prompts), tokens))
    path = f"/v2/models/{model}/{random_.choice(['generate', 'generate', 'generate_stream', 'infer'])}"
    length = (("Inference-Header-Content-Length", random_.choice(["0", "-1", "5", "99999", "x", str(2**64)])),)
    return Case("", "http", path, body, headers=length if random_.random() < 0.1 else ())


def _nested(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    depth = random_.choice([10, 100, 500])
    opening, closing = random_.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = opening * depth + b"1" + closing * depth
    place = random_.choice([b'{"text_input": %s}', b'{"text_input": "t1", "max_tokens": %s}', b"%s"])
    return Case("", "http", f"/v2/models/{model}/generate", place % inner if b"%" in place else inner)


def _large(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    """A million characters of prompt, or stop words in their thousands; all must be refused."""
    prompt = random_.choice(prompts)
    fields: dict[str, Any] = random_.choice([
        {"text_input": prompt * (1_000_000 // len(prompt))},
        {"text_input": "\u0001" * 200_000},
        {"text_input": prompt, "stop_words": ["x"] * random_.choice([17, 1000, 50_000])},
        {"text_input": prompt, "stop_words": ["x" * 500_000]},
        {"text_input": [prompt] * 20_000},
        {"text_input": prompt, "temperature": [0.5] * 50_000},
    ])  # fmt: skip
    return Case("", "http", f"/v2/models/{model}/generate", json.dumps(fields).encode())


def _path(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    body = random_.choice([b"", b"{}", _asking(random_.choice(prompts), tokens)])
    return Case("", "http", random_.choice(PATHS).format(model), body)


def _request(model: str, body: bytes, path: str = "generate") -> bytes:
    head = f"POST /v2/models/{model}/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _http(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    """Bytes that began as an HTTP request, or as two in a row."""
    request = _request(model, _asking(random_.choice(prompts), tokens)) * random_.choice([1, 1, 2])
    return Case("", "http", "", mutated(random_, request), whole=False)


def _cut(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    request = _request(model, _asking(random_.choice(prompts), tokens))
    return Case("", "http", "", request[: random_.randrange(len(request))], whole=False)


def _hang_up(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    """A request whose client leaves: from a stream without end, or before its one answer, of which the server would
    learn at its end only.
    """
    asked: dict[str, Any] = {"text_input": random_.choice(prompts), "max_tokens": tokens}
    path = random_.choice(["generate", "generate_stream"])
    if path == "generate_stream":
        asked |= {"max_tokens": 10**9, "stream": True}
    body = _request(model, json.dumps(asked).encode(), path)
    return Case("", "http", "", body, whole=False, listens=random_.choice([1e-6, 0.003, 0.02]))


def _noise(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    preface = random_.choice([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
    return Case(
        "", random_.choice(["http", "grpc"]), "", preface + random_.randbytes(random_.randint(1, 600)), whole=False
    )


def _message(random_: random.Random, model: str, prompts: Sequence[str], tokens: int) -> Case:
    """A gRPC message with tensors of any content, some of any name, type and shape."""
    message = service_pb2.ModelInferRequest(model_name=random_.choice([model] * 9 + ["", "../x", "é"]))
    for name in ["text_input", *random_.sample(sorted(INPUTS), random_.randint(0, 2))]:
        declared = INPUTS[name][0].removeprefix("TYPE_").replace("STRING", "BYTES")
        kind = random_.choice(DATATYPES) if random_.random() < 0.1 else declared
        shape = random_.choice(SHAPES) if random_.random() < 0.1 else [1, 1]
        message.inputs.add(name=name, datatype=kind, shape=shape)
        text = random_.choice(prompts).encode()
        text = mutated(random_, text) if random_.random() < 0.3 else text
        raw = len(text).to_bytes(4, "little") + text if kind == "BYTES" else random_.randbytes(SIZES.get(kind, 2))
        if name == "max_tokens" and kind == "INT32":
            raw = struct.pack("<i", random_.choice([-(2**31), -1, 0, 1, tokens]))  # cases are to be many
        message.raw_input_contents.append(mutated(random_, raw) if random_.random() < 0.1 else raw)
    encoded = bytes(message.SerializeToString())
    return Case("", "grpc", "", mutated(random_, encoded) if random_.random() < 0.1 else encoded)


def mutated(random_: random.Random, data: bytes) -> bytes:
    """`data` with one to four changes: a byte flipped, bytes put in, taken out or said twice, or the rest cut off."""
    found = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(found) + 1)
        match random_.randrange(5):
            case 0 if found:
                found[at % len(found)] ^= 1 << random_.randrange(8)
            case 1:
                found[at:at] = random_.choice(
                    [b'"', b"\\", b"{", b"[", b"\x00", b"\xff", b"\r\n", b",", b"\xed\xa0\x80"]
                )
            case 2:
                del found[at : at + random_.randint(1, 8)]
            case 3:
                found[at:at] = found[at : at + random_.randint(1, 16)]
            case _ if random_.random() < 0.2:
                del found[at:]
    return bytes(found)


#: Kind -> how often, and what draws it.
KINDS: dict[str, tuple[int, Callable[[random.Random, str, Sequence[str], int], Case]]] = {
    "valid": (15, _valid), "values": (20, _values), "json": (20, _json), "nested": (3, _nested), "large": (1, _large),
    "path": (5, _path), "http": (10, _http), "cut": (5, _cut), "hang up": (5, _hang_up), "noise": (6, _noise),
    "message": (10, _message),
}  # fmt: skip
