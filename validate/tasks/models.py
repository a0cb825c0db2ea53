"""Models as lm-eval calls them: one in this process, and one behind a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import InputError
from ..endpoint.asking import find_model
from ..endpoint.client import Client, RefusedError
from .harness import quiet_harness

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def local_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", batch_size: int) -> Any:
    """`model` in this process, as an LM of lm-eval; probabilities in FP32, also of a BF16 model."""
    import torch
    from lm_eval.models.huggingface import HFLM

    with quiet_harness():
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype=torch.float32)


def served_model(client: Client, served: str | None, tokenizer: Path, batch_size: int, longest: int) -> Any:
    """The model `served` by `client`, or its only one, as lm-eval's `local-completions`.

    Requests go through `client`, which bounds what is read, and sends text and key to no other address. Questions are
    sent as token ids of the tokenizer in the directory `tokenizer`, of which a prompt has `longest` at most. Raises
    InputError for a server without that model.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    found = find_model(client, served)
    if found.triton:
        raise InputError(f"{client.url}: is Triton, which has no /v1/completions; give a server of OpenAI's API")
    with quiet_harness():
        model = LocalCompletionsAPI(
            model=found.name,
            base_url=f"{client.url}/v1/completions",
            tokenizer_backend="huggingface",
            tokenizer=str(tokenizer),
            max_length=min(longest, found.longest or longest),
            batch_size=batch_size,
            max_retries=1,
        )

    def post(messages: Sequence[Any], *, generate: bool = True, gen_kwargs: Any = None, **more: Any) -> Any:
        """Take the place of lm-eval's `model_call`."""
        prompt = model.create_message(messages)
        fields = model._create_payload(
            prompt, generate=generate, gen_kwargs=dict(gen_kwargs or {}), seed=model._seed, eos=model.eos_string, **more
        )
        try:
            return client.post("/v1/completions", fields)
        except RefusedError as error:
            remedy = (
                "see the server's log"
                if generate
                else "likelihoods need `echo` with `logprobs`: vLLM answers them, and fp8q serve with --batch-size 1"
            )
            raise InputError(f"{client.url}: refused a question ({error}); {remedy}") from None

    model.model_call = post
    return model
