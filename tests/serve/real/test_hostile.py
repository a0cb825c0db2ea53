"""Some hundred of the cases of `make hostile`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hostile import Campaign, resident

if TYPE_CHECKING:
    from clients import Http
    from tritonserver import Server


def test_hostile_clients_lose_nothing_and_harm_nobody(triton: Server, counting_model: str) -> None:
    found = Campaign(triton, counting_model).attack([(1, index) for index in range(300)])
    assert found.faults == []
    assert sum(map(sum, (counts.values() for counts in found.outcomes.values()))) == 300
    assert found.neighbours


def test_what_is_too_large_takes_no_memory_for_good(triton: Server, http: Http, counting_model: str) -> None:
    """All of it together, kept, were 90 MB."""
    fields: list[dict[str, Any]] = [
        {"text_input": "t0 " * 1_000_000},
        {"text_input": "t0", "stop_words": ["x" * 1000] * 3000},
        {"text_input": "t0", "max_tokens": 2**31 - 1},
    ]
    statuses = [http.generate(counting_model, **each)[0] for each in fields]
    before = resident(triton.process.pid)
    for each in fields * 15:
        http.generate(counting_model, **each)
    assert statuses == [400, 400, 200]
    assert resident(triton.process.pid) - before < 45_000_000
