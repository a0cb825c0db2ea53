"""Which inputs share a pass when weights are rounded layer by layer, and that sharing one changes nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gpu.waits import host_waits

from fp8q.calibrate.model.gemms import observed_gemms
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.reporter import SILENT
from fp8q.quantize.scales.decisions import TensorScale
from fp8q.quantize.weights import paired_inputs
from fp8q.quantize.weights.channels import WeightScaling
from fp8q.quantize.weights.paired_inputs import HELD_BYTES, GroupInput, InputSums, passes
from fp8q.quantize.weights.sequential import SequentialRounding

from ...mixtures import random_mixture

SCALE = TensorScale(method="amax", amax=4.0, clip=448 / 64, scale=2.0**-6, saturation=0, underflow=0, sqnr_db=30)
BATCHES = {batch: np.random.default_rng(batch).integers(3, 500, (2, 24)) for batch in range(3)}


def group_input(name: str, width: int = 8, out: int = 4, paired: bool = False) -> GroupInput:
    return GroupInput(name, (name,), None, paired, (width, out))


def test_the_sums_of_an_input_are_two_of_h_and_where_they_are_known_two_of_m() -> None:
    assert group_input("down", 8, 4).sum_bytes == 2 * 4 * 8 * 8
    assert group_input("o_proj", 8, 4, paired=True).sum_bytes == 2 * 4 * 8 * (8 + 4)


def test_neighbours_whose_inputs_do_not_depend_on_one_another_share_a_pass() -> None:
    names = ["qkv", "o", "shared", "0", "1", "2", "after", "3"]
    found = passes(map(group_input, names), {"0", "1", "2", "3"})
    assert [[each.first for each in together] for together in found] == [
        ["qkv"], ["o"], ["shared"], ["0", "1", "2"], ["after"], ["3"],
    ]  # fmt: skip
    assert list(passes([], set())) == []


def test_the_experts_of_two_mixtures_share_none() -> None:
    """What the second gets may depend on the first's GEMMs."""
    names = [f"{block}.experts.{expert}.down_proj" for block in "ab" for expert in range(2)]
    found = passes(map(group_input, names), names)
    assert [[each.first for each in together] for together in found] == [names[:2], names[2:]]


def test_the_weights_of_experts_are_read_when_their_sums_are_used() -> None:
    read: list[str] = []

    def weight(name: str) -> torch.Tensor:
        read.append(name)
        return torch.ones(4, 8)

    sums = InputSums(group_input("down", 8, 4), weight)
    tokens = torch.ones(3, 8)
    sums.add(0, (tokens, tokens), (tokens, tokens), tokens, 3)
    assert read == []
    assert [*sums.weights] == [*sums.weights] == read == ["down"]


def test_batches_wait_for_nothing_once_the_weights_are_beside_them() -> None:
    """Counted on the meta device, which the model is not on: the first batch takes the weight there, in BF16."""
    sums = InputSums(group_input("o_proj", 8, 4, paired=True), lambda name: torch.ones(4, 8).bfloat16(), "meta")
    x, out = torch.empty(3, 8, device="meta"), torch.empty(3, 4, device="meta")
    counts = []
    for half in (0, 1, 0):
        with host_waits() as counted:
            sums.add(half, (x, out), (x, out), x, 3)
        counts.append((counted.waits, counted.to_device, counted.to_memory))
    assert sums.paired
    assert counts == [(1, 2 * 4 * 8, 0), (0, 0, 0), (0, 0, 0)]


def test_a_weight_that_the_model_has_beside_the_batches_is_not_copied() -> None:
    sums = InputSums(group_input("o_proj", 8, 4, paired=True), lambda name: torch.empty(4, 8, device="meta"), "meta")
    x, out = torch.empty(3, 8, device="meta"), torch.empty(3, 4, device="meta")
    with host_waits() as counted:
        sums.add(0, (x, out), (x, out), x, 3)
    assert (counted.waits, counted.to_device, counted.to_memory) == (0, 0, 0)


def test_a_pass_gathers_what_memory_is_there_for_and_one_input_at_the_least() -> None:
    half = int((HELD_BYTES // 2 // 8) ** 0.5)  # two of this width fit, three do not
    names = ["0", "1", "2", "3", "4"]
    found = list(passes([group_input(name, half) for name in names], names))
    assert [len(together) for together in found] == [2, 2, 1]
    assert [len(together) for together in passes([group_input(name, 2 * half) for name in names], names)] == [1] * 5


def rounded(source: Source, folder: Path) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], int]:
    """Codes and scales of every GEMM of the layers, and how often a batch went through one."""
    folder.mkdir()
    names = observed_gemms(load_model(source, torch.float32, "cpu"))
    sequence = SequentialRounding(source, dict.fromkeys(names, SCALE), WeightScaling("mse"), BATCHES, folder)
    count, record = 0, SequentialRounding._record_inputs

    def counting(*given: object) -> object:
        nonlocal count
        count += 1
        return record(*given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequentialRounding, "_record_inputs", counting)
        kept = sequence.run(SILENT)
    found = {name: made for name in names if (made := kept.get(name)) is not None}
    return {name: (made[0], made[1]) for name, made in found.items()}, count


def test_experts_that_share_a_pass_are_rounded_as_each_with_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(random_mixture(tmp_path / "mixtral", "mixtral")))
    together, few = rounded(source, tmp_path / "together")
    monkeypatch.setattr(paired_inputs, "HELD_BYTES", 0)
    apart, many = rounded(source, tmp_path / "apart")
    assert (few, many) == (2 * 2 * 3 * (3 + 1), 2 * 2 * 3 * (3 + 4))  # layers, models, batches, inputs
    assert together.keys() == apart.keys()
    assert len(together) == 2 * (4 + 3 * 4)
    for name, (codes, scale) in together.items():
        assert torch.equal(codes.view(torch.uint8), apart[name][0].view(torch.uint8))
        assert torch.equal(scale, apart[name][1])
