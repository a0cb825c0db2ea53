"""The application: OpenAI's endpoints, health, metrics and the page, with their description at /openapi.json.

Pages that show that description would load their scripts from elsewhere, so there are none. The page at `/` is one
file, which may load nothing and talk to its own server alone. Its script and style are allowed by their hashes (Content
Security Policy 3, section 8.4), so that text which a model writes could do nothing even if it became part of the page,
which it does not: it is inserted as text.
"""

import re
from base64 import b64encode
from collections.abc import Callable, Coroutine, Sequence
from hashlib import sha256
from importlib.resources import files
from time import perf_counter
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

from ... import __version__
from ..loop.request import Request as Asked
from .answering import AnswerResponse, Delivery
from .answers import ChatForm, CompletionForm, Writer
from .fields import ChatCompletion, ChatFields, Completion, CompletionFields, Health, ModelList, ModelObject, prompts
from .gate import KEYED, Gate
from .refusals import ErrorBody, Refusal, of_fields
from .serving import Handed, Model, Serving

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": words}
    for status, words in {
        400: "A field is wrong.", 401: "The key is missing.", 403: "Asked under another name.", 404: "No such model.",
        408: "The body does not come.", 413: "The body is too large.", 415: "The body is no JSON.",
        429: "Too many requests are here.", 500: "A fault of the server.", 503: "The server is closing.",
    }.items()
}  # fmt: skip
#: With `stream`: events whose data are chunks in JSON, and at the end [DONE].
STREAMED = {
    "content": {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}}
}


#: Log-probabilities that are kept of several prompts, some 100 bytes each.
MOST_LISTED = 1_000_000
Prompts = Sequence[str | tuple[int, ...]]


class JsonRequest(Request):
    """A request whose JSON is read with bounds: 200 levels, and numbers that are numbers."""

    async def json(self) -> Any:
        """The body, read; raises Refusal."""
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise Refusal(400, f"the body is no JSON that is read here ({error}); mend it") from None


class JsonRoute(APIRoute):
    """A route whose requests are read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own handler, given such a request."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handled


def application(serving: Serving) -> Gate:
    """Make the ASGI application that serves `serving` over HTTP."""
    app = FastAPI(title="fp8q serve", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.add_exception_handler(RequestValidationError, _wrong_fields)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    _add_models(app, serving)
    _add_answers(app, serving)
    _add_health(app, serving)
    page = page_response()
    app.add_api_route("/", lambda: page, include_in_schema=False)
    if serving.key is not None:
        _describe_key(app)
    return Gate(app, serving)


def _describe_key(app: FastAPI) -> None:
    """Say in the description that the endpoints under /v1 want the key; once all routes are there."""
    schema = app.openapi()
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        if path.startswith(KEYED):
            for operation in operations.values():
                operation["security"] = [{"key": []}]


async def _wrong_fields(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "it is registered for this"
    return of_fields(error.errors()).response()


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for this"
    refusal = error if isinstance(error, Refusal) else Refusal(error.status_code, error.detail)
    response = refusal.response()
    response.headers.update(error.headers or {})
    return response


async def _failed(request: Request, error: Exception) -> Response:
    """Starlette raises the error again once this is sent, and the gate writes it down."""
    return Refusal(500, "a fault of the server; its log says more").response()


def _add_models(app: FastAPI, serving: Serving) -> None:
    def shown(model: Model) -> dict[str, Any]:
        return {
            "id": model.name, "object": "model", "created": serving.created, "owned_by": "fp8q",
            "precision": model.precision, "runtime": model.runtime, "max_model_len": model.positions,
        }  # fmt: skip

    errors: dict[int | str, dict[str, Any]] = {status: REFUSALS[status] for status in (401, 403)}

    @app.get("/v1/models", response_model=ModelList, responses=errors)
    async def models() -> Response:
        """List the models."""
        return JSONResponse({"object": "list", "data": [shown(model) for model in serving.models]})

    @app.get("/v1/models/{name:path}", response_model=ModelObject, responses=errors | {404: REFUSALS[404]})
    async def model(name: str) -> Response:
        """One model."""
        return JSONResponse(shown(serving.find(name)))


def _add_answers(app: FastAPI, serving: Serving) -> None:
    responses = REFUSALS | {200: STREAMED, 422: {"description": "Never: 400 says what is wrong."}}

    @app.post("/v1/completions", response_model=Completion, responses=responses)
    async def completions(fields: CompletionFields, request: Request) -> Response:
        """Go on from a prompt, or from several."""
        begun = perf_counter()
        model = serving.find(fields.model)
        items = prompts(fields.prompt, model.positions)
        of_prompt = fields.prompt_logprobs
        if of_prompt is not None and (refused := _without_prompt_logprobs(fields, model, items)):
            raise Refusal(400, f"prompt_logprobs: {refused}", "prompt_logprobs")
        if fields.echo:
            of_prompt = _echoed_logprobs(fields, model, items)
        most = _most_tokens(fields, model) or 16
        asked = [fields.asked(prompt, most, fields.logprobs, of_prompt) for prompt in items]
        echoed = items if fields.echo else ()
        form = CompletionForm(
            model.vocabulary, fields.logprobs is not None, fields.prompt_logprobs is not None, echoed,
            fields.add_special_tokens is not False,
        )  # fmt: skip
        delivery = _delivery(fields, Writer(form, model.name), "prompt")
        return AnswerResponse(_handed(serving, model, asked, delivery, request), delivery, serving.counts(model), begun)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=responses)
    async def chat(fields: ChatFields, request: Request) -> Response:
        """Answer a chat, by the template of the model's tokenizer."""
        begun = perf_counter()
        model = serving.find(fields.model)
        if fields.top_logprobs and not fields.logprobs:
            raise Refusal(400, "top_logprobs: needs logprobs; set that to true, or leave this out", "top_logprobs")
        said = sum(message.characters for message in fields.messages)
        prompt = await serving.render([message.message for message in fields.messages], said, model.positions)
        most = _most_tokens(fields, model) or model.positions
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        asked = [fields.asked(prompt, most, logprobs, special_tokens=False)]
        form = ChatForm(model.vocabulary, bool(fields.logprobs))
        delivery = _delivery(fields, Writer(form, model.name), "messages")
        return AnswerResponse(_handed(serving, model, asked, delivery, request), delivery, serving.counts(model), begun)


def _delivery(fields: CompletionFields | ChatFields, writer: Writer, param: str) -> Delivery:
    return Delivery(writer, bool(fields.stream), fields.usage_wanted, param, fields.usage_counting)


def _most_tokens(fields: CompletionFields | ChatFields, model: Model) -> int | None:
    """The tokens that the request asks for, at most; None where it says nothing.

    Raises Refusal where no answer of `model` can have as many.
    """
    asked = {name: getattr(fields, name, None) for name in ("max_completion_tokens", "max_tokens")}
    name, most = next(((name, value) for name, value in asked.items() if value), ("", None))
    if most is not None and most > model.positions:
        raise Refusal(
            400,
            f"{name} must be at most {model.positions:,}, the positions that the model has for prompt and answer",
            name,
        )
    return most


def _echoed_logprobs(fields: CompletionFields, model: Model, prompts: Prompts) -> int | None:
    """The number of the best tokens that are listed in place of each of an echoed prompt; None: no logprobs are.

    Raises Refusal where the prompt cannot be echoed.
    """
    if fields.stream:
        raise Refusal(400, "echo: comes with a whole answer; leave out stream", "echo")
    if fields.prompt_logprobs is not None:
        raise Refusal(400, "echo: lists what prompt_logprobs does, in another form; leave one of them out", "echo")
    if fields.logprobs is not None and (refused := _without_prompt_logprobs(fields, model, prompts)):
        raise Refusal(400, f"echo: log-probabilities of a prompt {refused}", "echo")
    return fields.logprobs


def _without_prompt_logprobs(fields: CompletionFields, model: Model, prompts: Prompts) -> str | None:
    """The reason why the prompts' log-probabilities are not given, if there is one."""
    if fields.stream:
        return "come with a whole answer; leave out stream"
    # a text has at most a token for each of its bytes, and one or two that the tokenizer sets
    sizes = (len(prompt.encode(errors="replace")) + 2 if isinstance(prompt, str) else len(prompt) for prompt in prompts)
    listed_a_position = 1 + max(fields.logprobs or 0, fields.prompt_logprobs or 0)
    listed = sum(min(size, model.positions) for size in sizes) * listed_a_position
    if len(prompts) > 1 and listed > MOST_LISTED:
        return (
            f"are kept until all answers are whole, at most {MOST_LISTED:,} of several prompts, and these may have "
            f"{listed:,}; send fewer prompts in a request"
        )
    if model.tailed:
        return (
            "are of tokens taken in one by one, and this model reads the end of a prompt in another form than the rest "
            "of it; ask for the logprobs of one token behind beginnings of the prompt"
        )
    return None


def _handed(serving: Serving, model: Model, asked: list[Asked], delivery: Delivery, request: Request) -> Handed:
    return serving.submit(model, asked, delivery.streamed, request.client.host if request.client else "")


def _add_health(app: FastAPI, serving: Serving) -> None:
    failing: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "It does not."}}

    def health(ready: bool) -> Response:
        status = "dead" if not serving.alive else "closing" if ready and serving.closing else "ok"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    @app.get("/health", response_model=Health, responses=failing)
    @app.get("/health/ready", response_model=Health, responses=failing)
    async def ready() -> Response:
        """Tell whether requests are taken in."""
        return health(ready=True)

    @app.get("/health/live", response_model=Health, responses=failing)
    async def live() -> Response:
        """Tell whether the loop that generates runs; start the server again where it does not."""
        return health(ready=False)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Counts for Prometheus."""
        return Response(serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def page_response() -> HTMLResponse:
    """The page, with the headers that hold it to what it is."""
    text = files(__package__).joinpath("templates/page.html").read_text(encoding="utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": policy(text), **HEADERS})


HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


def policy(text: str) -> str:
    """The policy of a page: its one script, its one style, its own server, and nothing else."""
    allowed = {kind: _hash(text, kind) for kind in ("script", "style")}
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(text: str, kind: str) -> str:
    (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
    return f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'"
