"""The plugin for vLLM, imported with a stand-in for vLLM."""

from collections.abc import Iterator

import pytest

from tests.stand_in.vllm import Plugin, plugin_in_vllm


@pytest.fixture
def plugin() -> Iterator[Plugin]:
    """The plugin's modules."""
    with plugin_in_vllm() as found:
        yield found
