"""A server in a thread whose model is a table, bigrams: it answers every form that `compare` asks in, or a part of
them, and does to prompts what servers do to prompts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from fp8q.serve.loop.text import Vocabulary
from fp8q.validate.accuracy.top_logits import TopLogits, TopTokens

TOKENS, WINDOWS, CONTEXT, TOP, BOS = 40, 12, 16, 16, 0
Table = np.ndarray


def table(seed: int, noise: float = 0.0, of: Table | None = None) -> Table:
    """Log-probabilities float64 [TOKENS, TOKENS]: random ones, or those `of` another with so much noise."""
    random = np.random.default_rng(seed).normal(size=(TOKENS, TOKENS))
    logits = 2 * random if of is None else of + noise * random
    found: Table = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return found


def vocabulary() -> Vocabulary:
    """The tokens `t0` to `t39`, with spaces between them in a text."""
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(TOKENS)}, unk_token="t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Vocabulary(tokenizer, BOS, frozenset(), 64)


def kept_tokens(runtimes: dict[str, Table]) -> TopTokens:
    """The likeliest tokens of `runtimes` on windows of a random text that begin with `BOS`."""
    ids = np.random.default_rng(7).integers(1, TOKENS, (WINDOWS, CONTEXT))
    ids[:, 0] = BOS
    kept = np.zeros(ids.shape, np.bool_)
    kept[:, 2:] = True
    before, own = ids[:, 1:-1].ravel(), ids[:, 2:].ravel()
    tops, nll = {}, {}
    for name, logprobs in runtimes.items():
        rows = logprobs[before]
        order = np.argsort(-rows, axis=1)
        best = np.take_along_axis(rows, order, axis=1)
        rest = np.log(np.exp(best[:, TOP:]).sum(axis=1))
        tops[name] = TopLogits(
            order[:, :TOP].astype(np.int32), best[:, :TOP].astype(np.float32), rest.astype(np.float32)
        )
        nll[name] = -rows[np.arange(len(own)), own].astype(np.float32)
    return TopTokens(np.arange(WINDOWS), ids, kept, tops, nll)


@dataclass
class StandIn:
    """A server of a `model`. `forms`: those that it answers; `most`: log-probabilities that it gives; `names`: its
    models; `positions`: its context, where it tells, and `cuts`: where it cuts prompts in silence.

    `echoes`: what it does with `echo`: the prompt's tokens are listed, or the one behind it alone, or it fails.
    `returns_ids`: it lists the prompt's tokens where `return_token_ids` asks for them; else it refuses that field.
    `bos`: what it sets before a text; `template`: what a chat begins with.

    `before`: tokens that it sets before a prompt; `second_bos`: its model where a prompt begins with two. `other`: what
    its tokenizer reads a token as. `statuses`: what the next answers are, before it answers well; `slow_s`: how long it
    takes.
    """

    model: Table
    forms: Sequence[str] = ("prompt_logprobs", "echo", "logprobs", "text")
    most: int = TOP
    names: Sequence[str] = ("m",)
    positions: int | None = None
    cuts: int | None = None
    before: Sequence[int] = ()
    second_bos: Table | None = None
    other: int = 0
    counts: bool = True
    key: str | None = None
    as_ids: bool = True
    echoes: Literal["prompt", "last", "fails"] = "prompt"
    returns_ids: bool = False
    bos: str = ""
    template: str | None = None
    statuses: list[int] = field(default_factory=list)
    slow_s: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, fields: dict[str, Any] | None, key: str | None) -> tuple[int, Any]:
        """The status and body for one request."""
        if fields is not None:
            self.asked.append(fields)
        time.sleep(self.slow_s)
        if self.statuses:
            return self.statuses.pop(0), {"error": {"message": "not now"}}
        if self.key is not None and key != f"Bearer {self.key}":
            return 401, {"error": "no key"}
        if path == "/v1/models":
            limit = {} if self.positions is None else {"max_model_len": self.positions}
            return 200, {"data": [{"id": name, **limit} for name in self.names]}
        if fields and "return_token_ids" in fields and not self.returns_ids:
            return 400, {"error": {"message": "return_token_ids is not known"}}
        if path == "/v1/chat/completions" and fields and self.template is not None:
            ids = vocabulary().encode(f"{self.template} {fields['messages'][0]['content']}")
            return 200, {"choices": [], "usage": {"prompt_tokens": len(ids)}, **self._ids(ids, fields)}
        if path != "/v1/completions" or fields is None:
            return 404, {"detail": "Not Found"}
        if "echo" in fields and self.echoes == "fails":
            return 500, {"error": {"message": "can only concatenate str"}}
        for name in ("prompt_logprobs", "echo", "logprobs"):
            if name in fields and name not in self.forms and not (name == "logprobs" and "echo" in fields):
                return 400, {"error": {"message": f"{name} is not known"}}
        return self._completion(fields)

    def _ids(self, ids: list[int], fields: dict[str, Any]) -> dict[str, Any]:
        return {"prompt_token_ids": ids} if "return_token_ids" in fields else {}

    def _completion(self, fields: dict[str, Any]) -> tuple[int, Any]:
        given = fields["prompt"]
        several = isinstance(given, list) and not isinstance(given[0], int)
        prompts = given if several else [given]
        if not self.as_ids and not all(isinstance(each, str) for each in prompts):
            return 422, {"detail": "prompt must be a text"}
        if "text" not in self.forms and not {"prompt_logprobs", "echo", "logprobs"} & fields.keys():
            return 400, {"error": "never"}
        ids = [self._read(each) for each in prompts]
        choices = [self._choice(index, each, fields) for index, each in enumerate(ids)]
        usage = {"usage": {"prompt_tokens": sum(map(len, ids))}} if self.counts else {}
        return 200, {"choices": choices[::-1], **usage}

    def _read(self, prompt: list[int] | str) -> list[int]:
        ids = vocabulary().encode(f"{self.bos} {prompt}") if isinstance(prompt, str) else prompt
        moved = [token if token == BOS else 1 + (token - 1 + self.other) % (TOKENS - 1) for token in ids]
        return [*self.before, *moved][: self.cuts]

    def _after(self, ids: list[int]) -> Table:
        table = self.second_bos if self.second_bos is not None and ids[:2] == [BOS, BOS] else self.model
        found: Table = table[ids[-1]]
        return found

    def _best(self, ids: list[int], number: int) -> list[tuple[int, float]]:
        row = self._after(ids)
        return [(int(token), float(row[token])) for token in np.argsort(-row)[: min(number, self.most)]]

    def _choice(self, index: int, ids: list[int], fields: dict[str, Any]) -> dict[str, Any]:
        (token, logprob), *_ = self._best(ids, 1)
        choice: dict[str, Any] = {"index": index, "text": f"t{token}", "finish_reason": "length"}
        choice |= self._ids(ids, fields)
        beginnings = [ids[:end] for end in range(1, len(ids))]
        own = [float(self._after(begun)[ids[len(begun)]]) for begun in beginnings]
        if "prompt_logprobs" in fields:
            number = fields["prompt_logprobs"]
            entries = [
                {
                    str(token): {"logprob": each}
                    for token, each in [*self._best(begun, number), (ids[len(begun)], value)]
                }
                for begun, value in zip(beginnings, own)
            ]
            choice["prompt_logprobs"] = [None, *entries]
        if "logprobs" in fields:
            number = fields["logprobs"]
            tops: list[dict[str, float] | None] = [{f"t{token}": each for token, each in self._best(ids, number)}]
            tokens, values = [f"t{token}"], [logprob]
            if "echo" in fields and self.echoes == "prompt":
                before = [{f"t{token}": each for token, each in self._best(begun, number)} for begun in beginnings]
                tops, tokens = [None, *before, *tops], [*(f"t{token}" for token in ids), *tokens]
                values = [0.0, *own, *values]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops}
        return choice


@contextmanager
def serving(stand_in: StandIn) -> Iterator[StandIn]:
    """Serve on a free port of this machine until the block ends; `url` is where."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(*stand_in.answer(self.path, None, self.headers["Authorization"]))

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*stand_in.answer(self.path, fields, self.headers["Authorization"]))

        def _send(self, status: int, body: Any) -> None:
            content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *values: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        stand_in.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield stand_in
        finally:
            server.shutdown()
            thread.join()
