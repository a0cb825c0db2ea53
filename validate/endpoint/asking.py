"""Find a server's model, and ask it for all prompts: once each, in one form; answers of a killed call are used again.

The answer to the first prompt is asked for again, and what was kept is used only where it is the same: behind one
address there may be another model now.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ...core.errors import BackendError, Fp8qError, InputError
from ...core.reporter import Reporter
from ...serve.loop.text import Vocabulary
from ..accuracy.top_logits import TopTokens
from .answers import LikelyTokens, joined_answers, load_answers, save_answers
from .client import BUSY, Client, RefusedError
from .forms import FORMS, TRITON, Endpoint, Question
from .prompts import Prompt
from .schema import AnsweredModelList, ListedModel, TritonModel, TritonModels, UnansweredError, read_answer

#: Two answers to one prompt by the same server differ by less, in nats: a batch may add in another order.
SAME_NATS = 0.01
#: The most characters of models' names that are repeated.
MOST_NAMES = 300
#: The status of a fault in a server.
FAULT = 500


@dataclass(frozen=True)
class Asked:
    """The answers to all prompts, and the form and number of log-probabilities that were asked for."""

    answers: LikelyTokens
    form: str


@dataclass(frozen=True)
class ServedModel:
    """The name of a model on a server, the most tokens of its prompts where the server tells, and if it is Triton."""

    name: str
    longest: int | None
    triton: bool


def find_server(
    client: Client, served: str | None, tops: TopTokens, vocabulary: Vocabulary
) -> tuple[Endpoint, int | None]:
    """The model `served` by `client`, or its only one, and the most tokens of its prompts where it tells.

    Raises InputError for a server without that model, or with several and none named.
    """
    model = find_model(client, served)
    return Endpoint(client, model.name, tops, vocabulary, model.triton), model.longest


def find_model(client: Client, served: str | None) -> ServedModel:
    """Find the model `served` by `client`, or its only one; raises InputError as `find_server` does."""
    with translated(client):
        try:
            answer = client.get("/v1/models")
            triton = False
        except RefusedError as error:
            if error.status != 404:
                raise
            answer = client.post("/v2/repository/index", {"ready": True})
            triton = True
    try:
        listed = read_answer(TritonModels, answer) if triton else read_answer(AnsweredModelList, answer).data
    except UnansweredError as error:
        raise InputError(client.url, f"lists no models ({error})", "is it the address of a model's server?") from None
    limits = dict(map(_named, listed))
    if served not in limits and (served is not None or len(limits) != 1):
        option = client.option.replace("url", "served")
        names = ", ".join(limits)
        raise InputError(
            client.url,
            f"serves {names[:MOST_NAMES] or 'no model'}{f', and not {option} {served}' if served else ''}",
            f"name one with {option}",
        )
    name = served or next(iter(limits))
    limit = limits[name]
    return ServedModel(name, None if limit is None else limit - 1, triton)


def _named(model: ListedModel | TritonModel) -> tuple[str, int | None]:
    """The name of a listed model, and the tokens that it takes."""
    if isinstance(model, TritonModel):
        return (model.name, None)
    return (model.id, model.max_model_len)


def ask_all(
    server: Endpoint, prompts: Sequence[Prompt], folder: Path, tail: int | None, report: Reporter, losses: bool = False
) -> Asked:
    """Ask for all `prompts` in the first form that the server answers; `folder` keeps the answers.

    A prompt of a run with a `tail` of one position is not asked for whole: its last position alone has second terms.
    `losses`: only in forms that give the loss of every token of the text.
    """
    form, number, first = answered_form(server, prompts[0], tail, losses)
    first_file = folder / f"{prompts[0].window}.npz"
    if first_file.exists() and not same_answers(load_answers(first_file), first):
        report.note(f"{server.client.url}: another model answers than before; all prompts are asked again")
        for path in folder.glob("*.npz"):
            path.unlink()
    save_answers(first_file, first)
    per = "of each" if form.all_positions else "behind beginnings of each"
    report.note(
        f"{len(prompts)} requests of {sum(len(prompt.ids) for prompt in prompts):,} tokens of evaluation text, for "
        f"{form.name}" + (f": {number} log-probabilities {per}" if number else "")
    )
    parts: list[LikelyTokens] = []
    with report.track(f"Asking {server.client.url}", len(prompts), "prompts") as advance, translated(server.client):
        for prompt in prompts:
            path = folder / f"{prompt.window}.npz"
            if not path.exists():
                save_answers(path, form.ask(server, prompt, number))
            parts.append(load_answers(path))
            advance(1)
    answers = joined_answers(parts)
    if not len(answers.rows):
        raise InputError(
            server.client.url,
            "gives no token that can be compared",
            "no beginning of the evaluation text is read as the same tokens again",
        )
    return Asked(answers, form.name)


def answered_form(
    server: Endpoint, prompt: Prompt, tail: int | None, losses: bool = False
) -> tuple[Question, int, LikelyTokens]:
    """The first form that the server answers, its number of log-probabilities, and the answer to `prompt`.

    Raises InputError where it answers none, with its own words; `losses`: none that gives every token's loss.
    """
    reasons: list[str] = []
    fault = None
    with translated(server.client):
        for form in TRITON if server.triton else FORMS:
            if (form.all_positions and tail == 1) or (losses and not form.all_positions):
                continue
            for number in form.numbers:
                try:
                    return form, number, form.ask(server, prompt, number)
                except UnansweredError as error:
                    reasons.append(f"{form.name}: {error}")
                except RefusedError as error:  # some servers fail at a form that they do not know
                    if error.status != FAULT:
                        raise
                    fault = error
        if fault is not None:
            raise fault
    if losses:
        said = "; ".join(dict.fromkeys(reasons))[:600] or "Triton's generate"
        raise InputError(
            server.client.url,
            f"gives no log-probabilities of a prompt's tokens ({said}), and perplexity needs them",
            "vLLM, SGLang and `fp8q serve` give them; or compare it with a run",
        )
    raise InputError(
        server.client.url,
        f"answers no completion of {server.model} ({'; '.join(dict.fromkeys(reasons))[:600]})",
        "compare needs /v1/completions, since a chat's template would stand before the text",
    )


def same_answers(before: LikelyTokens, now: LikelyTokens) -> bool:
    """Tell whether two answers to one prompt are of one model."""
    if before.rows.tolist() != now.rows.tolist() or before.tokens.shape != now.tokens.shape:
        return False
    if not now.with_logprobs:
        return bool((before.tokens == now.tokens).all())
    return bool(np.abs(before.logprobs[:, 0] - now.logprobs[:, 0]).mean() < SAME_NATS)


def without_prefix(prompts: Sequence[Prompt], prefix: int, count: int) -> list[Prompt]:
    """The first `count` prompts without the `prefix` tokens that they begin with, nor the position behind these, which
    would be the first of a prompt and has no log-probability.
    """
    shortened: list[Prompt] = []
    for prompt in prompts[:count]:
        later = prompt.positions > prefix
        positions = prompt.positions[later] - prefix
        rows = prompt.rows[later]
        shortened.append(replace(prompt, ids=prompt.ids[prefix:], positions=positions, rows=rows))
    return shortened


@contextmanager
def translated(client: Client) -> Iterator[None]:
    """Raise a server's refusals in this block as errors with a remedy."""
    try:
        yield
    except UnansweredError as error:
        raise InputError(client.url, f"answered one prompt and not another ({error})", "ask it again") from None
    except RefusedError as error:
        raise server_refusal(client, error) from None


def server_refusal(
    client: Client, error: RefusedError, what: str = "", remedy: str = "is it the address of a model's server?"
) -> Fp8qError:
    """Return the error for a server that refused `what`, by its status: a key is missing, or the server failed or is
    busy; else with the `remedy`.
    """
    if error.status in (401, 403):
        return InputError(client.url, f"wants a key ({error})", "set OPENAI_API_KEY")
    if error.status >= FAULT or error.status in BUSY:
        return BackendError(client.url, f"failed ({error})", "see the server's log, and ask again")
    return InputError(client.url, f"refused{what} ({error})", remedy)
