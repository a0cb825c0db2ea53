"""`fp8q generate`: generate text with a run's FP8 model, with its source model in BF16, or with both to compare."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..calibrate.checkpoint.companions import SPECIAL_TOKENS, TOKENIZER_CONFIG
from ..calibrate.text.chat import Message
from ..core.errors import InputError
from ..core.memory import release_memory
from ..core.record import FP8_STAGES
from ..core.run import Run
from ..options import GenerateOptions, Precision
from ..serve.local.chat_template import ChatTemplate
from ..serve.local.generation import answer_request, open_generator, open_run_session
from ..serve.loop.generate import Generator
from ..serve.loop.request import GeneratedAnswer, Request, RequestError
from ..serve.loop.sessions import Session
from ..serve.loop.text import Vocabulary
from ..serve.triton.repository import OPTIONAL_COMPANIONS, weight_files
from .pipeline.stage import CALIBRATE_MODULES, device, needs
from .shared.adapters import check_adapter
from .shared.model_files import fp8_files, refuse_unwritten, source_path

#: The runtimes that need torch.
TORCH_RUNTIMES = ("reference", "bf16")


def open_model(run: Run, runtime: str, max_batch: int = 1, adapter: str | None = None) -> Generator:
    """Open the FP8 model of `run`, or its source model, on `runtime` with `adapter` on, for up to `max_batch` requests
    at a time.

    Raises InputError for a run without the model, or with files that its stages did not write; BackendError for a
    missing runtime.
    """
    run.refuse_stale(*FP8_STAGES)
    refuse_unwritten(run)
    if runtime in TORCH_RUNTIMES:
        check_written(run, "config.json", "tokenizer.json", *OPTIONAL_COMPANIONS)
    check_adapter(run, adapter, runtime)
    session = session_of(run, runtime, adapter=adapter)
    if runtime not in TORCH_RUNTIMES:
        weight_files(run)
    return open_generator(run, session, max_batch)


def session_of(run: Run, runtime: str, precision: Precision = "fp8", adapter: str | None = None) -> Session:
    """Open a session of the run's model in a precision on a runtime, with an adapter on; `bf16` is the source model."""
    if runtime in TORCH_RUNTIMES:
        return _torch_session(run, runtime, adapter)
    return open_run_session(run, runtime_here(runtime), precision, adapter)


def runtime_here(runtime: str) -> str:
    """Choose the runtime of the model: for `auto` the fastest that this machine has."""
    return "onnxruntime" if runtime == "auto" else runtime


def check_written(run: Run, *names: str) -> None:
    """Raise InputError for a file of the model that changed after its stage wrote it; those of no stage are
    `refuse_unwritten`'s.
    """
    written = run.record().stages["quantize"].outputs if "quantize" in run.record().stages else {}
    for path in (run.model / name for name in names):
        if str(path.relative_to(run.root)) in written:
            run.require(path, "quantize")


def _torch_session(run: Run, runtime: str, adapter: str | None) -> Session:
    needs("calibrate", CALIBRATE_MODULES)
    import torch

    from ..calibrate.model.source import load_model
    from ..validate.accuracy.runtimes import TorchSession, open_reference
    from .shared.sources import source_of

    if runtime == "bf16":
        source = source_of(run)
        on = next((variant for variant in source.variants if variant.on and variant.on.name == adapter), source)
        return TorchSession(load_model(on, torch.bfloat16, device()))
    fp8_files(run, graph=False)
    reference = open_reference(run, "fast", device(), adapter)
    return TorchSession(reference.model, reference.new_cache)


def asked(prompt: str, options: GenerateOptions, special_tokens: bool = True) -> Request:
    """Make the request that `options` describe; raise InputError for values that the generation loop refuses.

    `special_tokens`: the tokenizer puts its own around the prompt.
    """
    drawn: dict[str, Any] = {"temperature": options.temperature, "top_p": options.top_p, "seed": options.seed}
    try:
        return Request(prompt, options.max_tokens, options.stop, special_tokens=special_tokens, **drawn)
    except RequestError as error:
        raise InputError("", str(error)) from None


@dataclass
class Chat:
    """A conversation with a model; `messages`: the messages so far, by `user` and `assistant`."""

    generator: Generator
    template: ChatTemplate
    options: GenerateOptions
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str, on_piece: Callable[[str], None]) -> GeneratedAnswer:
        """Send `text` and return the answer, which is also passed to `on_piece` piece by piece.

        Raises InputError where the template refuses the conversation, or it no longer fits the model.
        """
        said = [*self.messages, {"role": "user", "content": text}]
        request = asked(self.template.render(said), self.options, special_tokens=False)
        answer = answer_request(self.generator, request, on_piece)
        self.messages = [*said, {"role": "assistant", "content": answer.text}]
        return answer


def open_template(run: Run, file: Path | None = None) -> ChatTemplate:
    """The chat template of `run`, or the one in `file`; raises InputError where there is none, or it was changed."""
    check_written(run, "chat_template.jinja", TOKENIZER_CONFIG, SPECIAL_TOKENS)
    return ChatTemplate(run.model, file)


def open_chat(run: Run, options: GenerateOptions) -> Chat:
    """Open a conversation with the model of `run`; raise InputError where it has no chat template."""
    template = open_template(run, options.template)
    return Chat(open_model(run, options.runtime, adapter=options.adapter), template, options)


@dataclass(frozen=True)
class Comparison:
    """The answers of FP8 and BF16 to one prompt: the first token (from 0) in which they differ (None: they are equal),
    the common text, and the text of the tokens from there on.
    """

    fp8: GeneratedAnswer
    bf16: GeneratedAnswer
    parts_at: int | None
    common: str
    fp8_token: str
    bf16_token: str


def compare_both(run: Run, prompt: str, options: GenerateOptions) -> Comparison:
    """Let FP8, on the runtime that `options` name, and BF16 answer `prompt`: `compare_all` of one."""
    return compare_all(run, [prompt], options)[0]


def compare_all(run: Run, prompts: Sequence[str], options: GenerateOptions) -> list[Comparison]:
    """Let FP8, on the runtime of `options`, and then BF16 answer `prompts`: one model is in memory at a time.

    Raises InputError where that runtime is BF16 itself, and where the source model is missing.
    """
    if options.runtime == "bf16":
        raise InputError(
            "--runtime bf16", "is what --compare holds FP8 against", "name an FP8 runtime, or leave it out"
        )
    needs("calibrate", CALIBRATE_MODULES)
    source_path(run)
    requests = [asked(prompt, options) for prompt in prompts]

    def answers(runtime: str) -> tuple[list[GeneratedAnswer], Vocabulary]:
        generator = open_model(run, runtime, adapter=options.adapter)
        return [answer_request(generator, request, lambda _: None) for request in requests], generator.vocabulary

    fp8, _ = answers(options.runtime)
    release_memory()
    bf16, vocabulary = answers("bf16")
    return [_comparison(*both, vocabulary) for both in zip(fp8, bf16, strict=True)]


def _comparison(fp8: GeneratedAnswer, bf16: GeneratedAnswer, vocabulary: Vocabulary) -> Comparison:
    at = parting(fp8.tokens, bf16.tokens)
    text = vocabulary.token_text
    there = [text(answer.tokens[at]) if at is not None and at < len(answer.tokens) else "" for answer in (fp8, bf16)]
    common = 0
    while common < min(len(fp8.text), len(bf16.text)) and fp8.text[common] == bf16.text[common]:
        common += 1
    return Comparison(fp8, bf16, at, fp8.text[:common], *there)


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two sequences differ; None for equal sequences."""
    differs = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, None if len(one) == len(other) else min(len(one), len(other)))
