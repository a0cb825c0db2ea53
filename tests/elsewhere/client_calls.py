"""Ask a server by one of its clients, in the environment `clients`; the answers go to stdout as one line of JSON.

    python client_calls.py CLIENT URL

Each asks for a greedy text of a prompt and of a chat, whole and in a stream, and for the answer to a prompt that is too
long; what a client calls these is in its function.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

MODEL, PROMPT, TOKENS = "demo", "def read_file(path):", 8
SAID: list[Any] = [{"role": "user", "content": PROMPT}]
TOO_LONG = "a b " * 400


def openai(url: str) -> dict[str, Any]:
    """OpenAI's own, with the calls of a tool sent back."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history: list[Any] = [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "1", "content": "x"}]
    streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
    chunks: Any = client.chat.completions.create(messages=SAID, **streamed)
    parts = list(chunks)
    try:
        client.completions.create(prompt=TOO_LONG, **asked)
        code = None
    except openai.BadRequestError as error:
        code = error.code
    return {
        "text": client.completions.create(prompt=PROMPT, **asked).choices[0].text,
        "chat": client.chat.completions.create(messages=SAID, **asked).choices[0].message.content,
        "stream": "".join(part.choices[0].delta.content or "" for part in parts if part.choices),
        "tokens": parts[-1].usage.completion_tokens,
        "tools": client.chat.completions.create(messages=history, **asked).choices[0].finish_reason,
        "too_long": code,
    }


def litellm(url: str) -> dict[str, Any]:
    """LiteLLM, which sends an answer back as it came."""
    import litellm

    to: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": TOKENS, "temperature": 0}
    whole = litellm.completion(model=f"openai/{MODEL}", messages=SAID, **to)
    again = [*SAID, whole.choices[0].message.model_dump(), *SAID]
    stream = litellm.completion(
        model=f"openai/{MODEL}", messages=SAID, stream=True, stream_options={"include_usage": True}, **to
    )
    try:
        litellm.completion(model=f"openai/{MODEL}", messages=[{"role": "user", "content": TOO_LONG}], **to)
        refused = None
    except litellm.BadRequestError as error:
        refused = error.status_code
    return {
        "text": litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=PROMPT, **to).choices[0].text,
        "chat": whole.choices[0].message.content,
        "stream": "".join(part.choices[0].delta.content or "" for part in stream if part.choices),
        "again": litellm.completion(model=f"openai/{MODEL}", messages=again, **to).usage.completion_tokens,
        "too_long": refused,
    }


def langchain(url: str) -> dict[str, Any]:
    """LangChain's ChatOpenAI and OpenAI."""
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAI

    to: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL, "max_tokens": TOKENS}
    chat, text = ChatOpenAI(temperature=0, **to), OpenAI(temperature=0, **to)
    calls = [{"id": "1", "name": "f", "args": {"a": 1}}]
    history = [HumanMessage(PROMPT), AIMessage("", tool_calls=calls), ToolMessage("x", tool_call_id="1")]
    raised = []
    for prompt in (TOO_LONG, "x" * 9000):
        try:
            chat.invoke(prompt)
        except ContextOverflowError as error:
            raised.append(type(error).__name__)
    return {
        "text": text.invoke(PROMPT),
        "chat": chat.invoke(PROMPT).content,
        "stream": "".join(part.content for part in chat.stream(PROMPT)),
        "batch": text.generate([PROMPT, PROMPT]).generations[1][0].text,
        "tools": chat.invoke(history).response_metadata["finish_reason"],
        "too_long": raised,
    }


def llamaindex(url: str) -> dict[str, Any]:
    """LlamaIndex's OpenAILike."""
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    to: dict[str, Any] = {"model": MODEL, "api_base": f"{url}/v1", "api_key": "none", "max_tokens": TOKENS}
    text = OpenAILike(temperature=0, is_chat_model=False, max_retries=0, **to)
    chat = OpenAILike(temperature=0, is_chat_model=True, max_retries=0, **to)
    said = [ChatMessage(role="user", content=PROMPT)]
    return {
        "text": text.complete(PROMPT).text,
        "chat": chat.chat(said).message.content,
        "stream": "".join(part.delta or "" for part in chat.stream_chat(said)),
    }


CLIENTS: dict[str, Callable[[str], dict[str, Any]]] = {
    each.__name__: each for each in (openai, litellm, langchain, llamaindex)
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(CLIENTS[sys.argv[1]](sys.argv[2])) + "\n")
