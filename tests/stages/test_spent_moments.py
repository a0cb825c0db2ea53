"""`--no-keep-moments`: layers that are rounded by GPTQ once they have run give the codes of stored second moments."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8q import api
from fp8q.calibrate.measure.moments import FIRST
from fp8q.calibrate.measure.statistics import Statistics
from fp8q.calibrate.model.source import open_source
from fp8q.core.columns import size
from fp8q.core.errors import InputError
from fp8q.core.record import StageRecord
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages import calibrate as stage
from fp8q.stages import costliest
from fp8q.stages.measure import moments_bytes
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.quantize import LayerRounding

from ..calibrate.model.damage import rewrite
from ..mixtures import random_mixture

#: Options of scales that change what a layer is rounded by.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "first tokens, a tail, an FP8 cache, some weights in BF16": (
        "llama",
        {"weigh_first_token": True, "form": ("tail:4",), "kv_cache": "fp8", "bf16_weights": 0.1},
    ),
    "one scale a weight, forms by pattern": (
        "qwen2", {"weight_scale": "tensor", "form": ("dynamic", "*.down_proj=bf16"), "skip": ("*.1.*.o_proj",)},
    ),
    "blocks": ("gemma", {"form": ("block",), "method": "delayed"}),
    "gradients at outputs": ("llama", {"weigh_outputs": 2, "weight_method": "amax"}),
    "Conv1D": ("gpt2", {}),
    "learned positions": ("opt", {"only": ("*.fc1", "*.q_proj")}),
}  # fmt: skip


STORY = "Once upon a time there was a little girl who had a red ball. " * 40


#: Options that round the first layer alone, where a test needs no others.
ONE_LAYER: dict[str, Any] = {"only": ("*.layers.0.*",)}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some windows, to calibrate and to evaluate on."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(STORY, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stored(shared_checkpoint: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of "one code" with its moments, to be read."""
    return calibrated(shared_checkpoint("llama"), text, tmp_path_factory.mktemp("stored") / "run")


class Killed(BaseException):
    """A process that ends here."""


def calibrated(
    checkpoint: Path, texts: Path, out: Path, *, report: Any = SILENT, server: Any = None, **options: Any
) -> Run:
    """A run that was calibrated layer by layer, its weights rounded by GPTQ."""
    clip = api.Clipping(options.pop("method", "amax"))
    asked = {
        "samples": 9,
        "seq_len": 32,
        "batch_size": 2,
        "weight_rounding": "gptq",
        "stream": True,
        "clip": clip,
        "allow_overlap": True,
    }
    chosen = api.CalibrateOptions(**{**asked, "server": server, **options})
    data = str(texts), out, str(texts)
    return api.calibrate(str(checkpoint), *data, chosen, api.ExportOptions(graph=False), report)


def files(run: Run) -> dict[str, bytes]:
    """The statistics, scales and checkpoint of a run."""
    paths = [run.statistics, run.statistics_json, run.scales, *run.model.iterdir()]
    return {str(path.relative_to(run.root)): path.read_bytes() for path in paths}


def made_by(run: Run) -> dict[str, StageRecord]:
    """The records of the stages that measure and round."""
    stages = run.record().stages
    return {name: stages[name] for name in ("corpus", "measure", "quantize")}


def check_alike(spent: Run, stored: Run) -> None:
    """Hold a run whose moments were spent to one whose moments are stored."""
    assert files(spent) == files(stored)
    assert stored.moments.is_dir()
    assert not spent.moments.exists()
    assert not list(spent.root.glob(".*.work"))
    record = spent.record().stages["measure"]
    assert set(record.outputs) == {"statistics.safetensors", "statistics.json"}
    assert record.options["moments"] is False


def test_the_codes_are_those_of_stored_moments_bit_for_bit(
    stored: Run, shared_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    spent = calibrated(shared_checkpoint("llama"), text, tmp_path / "spent", keep_moments=False)
    check_alike(spent, stored)
    assert "gptq" in {weight.rounding for weight in load_scales(spent).weights.values()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_they_are_whatever_a_layer_is_rounded_by(
    case: str, shared_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    name, options = CASES[case]
    stored = calibrated(shared_checkpoint(name), text, tmp_path / "stored", **options)
    spent = calibrated(shared_checkpoint(name), text, tmp_path / "spent", keep_moments=False, **options)
    check_alike(spent, stored)
    assert "gptq" in {weight.rounding for weight in load_scales(spent).weights.values()}


@pytest.mark.slow
def test_a_weight_of_zeros_stays_in_bf16(shared_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(shared_checkpoint("llama"), tmp_path / "zeros"))
    zeros = "model.layers.1.self_attn.v_proj"
    rewrite(checkpoint, lambda tensors: tensors[f"{zeros}.weight"].zero_())
    stored = calibrated(checkpoint, text, tmp_path / "stored")
    spent = calibrated(checkpoint, text, tmp_path / "spent", keep_moments=False)
    check_alike(spent, stored)
    assert zeros in load_scales(spent).skipped


@pytest.mark.parametrize("at", ["a layer", "the checkpoint"])
def test_a_killed_call_goes_on_with_the_layers_that_were_rounded(
    at: str,
    stored: Run,
    shared_checkpoint: Callable[[str], Path],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = shared_checkpoint("llama")
    steps: list[Sequence[str]] = []
    spend = LayerRounding.spend
    alive = at != "a layer"

    def counted(self: LayerRounding, moments: Path, names: Sequence[str], statistics: Statistics) -> None:
        spend(self, moments, names, statistics)
        steps.append(names)
        if not alive and len(steps) == 3:
            raise Killed

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as once:
        once.setattr(LayerRounding, "spend", counted)
        if at == "the checkpoint":
            once.setattr(costliest, "quantize", killed)
        with pytest.raises(Killed):
            calibrated(checkpoint, text, tmp_path / "spent", keep_moments=False)
    layers = len({name.split(".")[2] for step in steps for name in step})
    assert (tmp_path / "spent" / ".codes.work").is_dir()
    steps.clear()
    alive = True
    monkeypatch.setattr(LayerRounding, "spend", counted)
    listening = Notes(SILENT)
    spent = calibrated(checkpoint, text, tmp_path / "spent", keep_moments=False, report=listening)
    check_alike(spent, stored)
    if at == "the checkpoint":
        assert steps == []
    else:
        assert layers == 2  # behind the step before the layers, and begun anew in the second
        assert any(line.startswith("going on at decoder layer 2 of ") for line in listening.lines)


def test_a_disk_without_room_for_them_stores_none_and_the_same_command_does_nothing_again(
    shared_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = shared_checkpoint("llama")
    listening = Notes(SILENT)
    free = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as small:
        small.setattr(stage, "moments_bytes", lambda source: free.total + 10**15)
        run = calibrated(checkpoint, text, tmp_path / "run", report=listening, **ONE_LAYER)
    (line,) = [line for line in listening.lines if "moments" in line and line.startswith("--")]
    assert line.startswith(f"--no-keep-moments: second moments take {size(free.total + 10**15)} on the disk of ")
    assert line.endswith(" free: each layer is rounded once it has run, and none are stored")
    assert not run.moments.exists()
    before = made_by(run)
    again = calibrated(checkpoint, text, tmp_path / "run", **ONE_LAYER)
    assert made_by(again) == before
    assert not again.moments.exists()


def test_moments_that_are_stored_stay_where_they_leave_no_room_for_others(
    shared_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = calibrated(shared_checkpoint("llama"), text, tmp_path / "run", **ONE_LAYER)
    before = made_by(run)
    monkeypatch.setattr(stage, "moments_bytes", lambda source: 10**15)
    again = calibrated(shared_checkpoint("llama"), text, tmp_path / "run", **ONE_LAYER)
    assert made_by(again) == before
    assert again.moments.is_dir()


def test_other_codes_of_such_a_run_need_another_measurement(
    shared_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    checkpoint = shared_checkpoint("llama")
    run = calibrated(checkpoint, text, tmp_path / "run", keep_moments=False, **ONE_LAYER)
    with pytest.raises(InputError) as refused:
        api.scales(run.root, form=("dynamic",))
    assert str(refused.value) == (
        f"--weight-rounding gptq: needs the second moments of inputs, which {run.root} has not, since its layers were "
        "rounded while they were measured; use `fp8q calibrate` with the options of the run and --keep-moments"
    )
    dynamic = {"form": ("dynamic",), **ONE_LAYER}
    other = calibrated(checkpoint, text, tmp_path / "run", **dynamic)
    expected = calibrated(checkpoint, text, tmp_path / "expected", keep_moments=True, **dynamic)
    check_alike(other, expected)
    kept = calibrated(checkpoint, text, tmp_path / "run", keep_moments=True, **ONE_LAYER)
    assert kept.moments.is_dir()
    api.scales(kept.root, form=("dynamic",))
    assert files(kept) == files(expected)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"weight_rounding": "nearest"}, "--weight-rounding nearest stores none; leave it out"),
        ({"batches": (0, 2)}, "`fp8q merge` adds those of parts; leave it out"),
        ({"stream": False}, "a model in memory has those of all layers at once; give --stream, or leave it out"),
    ],
)
def test_where_all_of_them_are_needed_together_it_is_refused(
    options: dict[str, Any], fault: str, shared_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        calibrated(shared_checkpoint("llama"), text, tmp_path / "run", keep_moments=False, **options)
    assert str(refused.value) == f"--no-keep-moments: {fault}"
    assert not (tmp_path / "run").exists()


def test_experts_and_the_search_of_a_form_need_all_of_them(
    shared_checkpoint: Callable[[str], Path], text: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        calibrated(random_mixture(tmp_path / "m", "qwen3_moe"), text, tmp_path / "run", keep_moments=False)
    assert str(refused.value) == (
        "--no-keep-moments: what experts are rounded by depends on other layers; leave it out"
    )
    options = api.CalibrateOptions(
        samples=9, seq_len=32, weight_rounding="gptq", stream=True, keep_moments=False, allow_overlap=True
    )
    texts = str(text), tmp_path / "run", str(text)
    with pytest.raises(InputError) as refused:
        api.run(str(shared_checkpoint("llama")), *texts, api.RunOptions(calibrate=options))
    assert str(refused.value) == (
        "--no-keep-moments: the search of a form rounds by them again; give --form FORM, or leave it out"
    )


def test_the_bytes_of_second_moments_are_those_of_their_files(
    stored: Run, shared_checkpoint: Callable[[str], Path]
) -> None:
    sums = [np.load(path, mmap_mode="r") for path in stored.moments.iterdir() if not path.name.endswith(FIRST)]
    assert moments_bytes(open_source(str(shared_checkpoint("llama")))) == sum(file.nbytes for file in sums)
    assert torch.float32.itemsize * sums[0].shape[0] ** 2 == sums[0].nbytes
