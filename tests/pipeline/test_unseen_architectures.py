"""`benchmarks/unseen_architectures.py` sees a wrong attention: a window ignored, a scale, a cache one slot off."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fp8q.export.modules import graph_model as graph
from fp8q.export.modules.attention import GraphLayer, attention

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unseen() -> ModuleType:
    return importlib.import_module("unseen_architectures")


@pytest.fixture(scope="module")
def windowed(unseen: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = unseen.random_checkpoint(tmp_path_factory.mktemp("olmo3") / "model", "Olmo3Config")
    return path


IDS = torch.arange(2, 66).reshape(2, 32)


def test_the_graph_says_what_eager_attention_says(unseen: ModuleType, windowed: Path) -> None:
    assert unseen.graph_difference(windowed, IDS) < unseen.LIMIT


@pytest.mark.parametrize(
    "broken",
    [
        lambda key, given: (key, given | {"sliding_window": None}),
        lambda key, given: (key, given | {"scaling": 1.5 * given["scaling"]}),
    ],
    ids=["window", "scale"],
)
def test_a_wrong_attention_is_seen(
    broken: Callable[[Any, Any], Any], unseen: ModuleType, windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        key, given = broken(key, given)
        return attention(module, query, key, value, attention_mask, **given)

    monkeypatch.setattr(graph, "attention", wrong)
    assert unseen.graph_difference(windowed, IDS) > 0.1


def test_a_cache_one_slot_off_is_seen(unseen: ModuleType, windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_new = GraphLayer.with_new

    def one_off(layer: GraphLayer, *states: Any, **settings: Any) -> list[torch.Tensor]:
        keys, values = with_new(layer, *states, **settings)
        return [keys.roll(1, 2) if keys.shape[2] > IDS.shape[1] else keys, values]

    monkeypatch.setattr(GraphLayer, "with_new", one_off)
    assert unseen.graph_difference(windowed, IDS) > 0.1


ONE: dict[str, Any] = {
    "first_position_difference": 1e-6,
    "kl_nats": 1e-4,
    "promised_products": 7,
    "fp8_products": 7,
    "two_terms": 0,
    "two_terms_found": 0,
    "keys_that_do_not_fit": 0,
}
TWO: dict[str, Any] = ONE | {"first_position_difference": 1e-3, "kl_nats": 1e-6, "two_terms": 7, "two_terms_found": 7}


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"first_position_difference": 1e-3}, {}),
        ({"fp8_products": 6}, {}),
        ({"keys_that_do_not_fit": 1}, {}),
        ({}, {"kl_nats": 1e-4}),
        ({}, {"fp8_products": 6}),
        ({}, {"two_terms": 6, "two_terms_found": 6}),
        ({}, {"two_terms_found": 6}),
    ],
)
def test_what_differs_in_one_term_or_in_two_does_not_work(
    unseen: ModuleType, one: dict[str, Any], two: dict[str, Any]
) -> None:
    assert unseen.works({"graph_difference": 1e-6, "one_term": ONE, "two_terms": TWO})
    assert not unseen.works({"graph_difference": 1e-6, "one_term": ONE | one, "two_terms": TWO | two})
    assert not unseen.works({"graph_difference": 1e-3, "one_term": ONE, "two_terms": TWO})
