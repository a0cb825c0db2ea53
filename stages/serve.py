"""`fp8q serve`: serve a run's FP8 model by OpenAI's API, and on request the BF16 source model beside it."""

import os
from collections.abc import Callable, Iterator

from ..calibrate.input.untrusted import read_json
from ..core.errors import InputError
from ..core.run import Run
from ..options import ServeOptions, model_name
from ..options.serve import plain_of
from ..quantize.reading.quantization_config import CONFIG
from ..quantize.reading.run_checkpoint import FP8Q_CONFIG
from ..quantize.scales.scheme import forms_in, tails_of
from ..serve.local.chat_template import ChatTemplate
from ..serve.web.server import Server
from ..serve.web.serving import Model, Serving
from .generate import open_model, open_template, runtime_here
from .shared.adapters import check_adapter

KEY = "FP8Q_API_KEY"


def serve(run: Run, options: ServeOptions, ready: Callable[[Server], object]) -> int:
    """Serve until stopped; return the number of requests that were cut off.

    Raises InputError for a run without a model and an address in use, BackendError for a missing runtime or library.
    """
    name = name_of(run, options)
    key = key_of(options)
    for adapter in options.adapter:
        check_adapter(run, adapter)
        if adapter in (name, f"{name}-bf16"):
            raise InputError(
                f"--adapter {adapter}", f"the model itself is served as {adapter}", "give it another --name"
            )
    if options.bf16 and options.runtime == "bf16":
        raise InputError("--runtime bf16", "is what --bf16 puts beside the FP8 model", "leave one of them out")
    serving = Serving(
        list(_models(run, options)),
        _template(run, options),
        key,
    )
    try:
        server = Server(serving, options.host, options.port, options.grace, ready)
    except InputError:
        serving.close()
        raise
    return server.serve_until_stopped()


def key_of(options: ServeOptions) -> str | None:
    """The key that clients must send: of the options, or else of the environment, under the same rule; None: no key.

    Raises InputError for a variable that is set to no key.
    """
    if options.api_key is not None or (variable := os.environ.get(KEY)) is None:
        return options.api_key
    if not variable:
        raise InputError(KEY, "is set and empty, which would let everybody in", "set it to a key, or unset it")
    return plain_of(KEY, variable)


def _template(run: Run, options: ServeOptions) -> ChatTemplate | InputError:
    """The chat template, or the reason of its absence, which requests for a chat are answered with.

    Raises InputError where the file of `options` is at fault.
    """
    try:
        return open_template(run, options.template)
    except InputError as error:
        if options.template is not None:
            raise
        return error


def name_of(run: Run, options: ServeOptions) -> str:
    """Choose the model's name for clients."""
    return options.name or model_name(run.record().model.get("name", run.root.resolve().name))


def _has_tails(run: Run) -> bool:
    """Tell whether the FP8 model's inputs have second codes in a prompt's last positions, and not in all of them."""
    fields = read_json(run.model / CONFIG).get(FP8Q_CONFIG)
    return bool(tails_of(forms_in(fields)))


def _models(run: Run, options: ServeOptions) -> Iterator[Model]:
    name = name_of(run, options)
    runtime = runtime_here(options.runtime)
    precision = "bf16" if runtime == "bf16" else "fp8"
    opened = open_model(run, options.runtime, options.max_batch)
    tailed = precision == "fp8" and _has_tails(run)
    yield Model(name, precision, runtime, opened, tailed=tailed)
    for adapter in options.adapter:
        opened = open_model(run, options.runtime, options.max_batch, adapter)
        yield Model(adapter, precision, runtime, opened, tailed=tailed)
    if options.bf16:
        yield Model(f"{name}-bf16", "bf16", "bf16", open_model(run, "bf16", options.max_batch))
