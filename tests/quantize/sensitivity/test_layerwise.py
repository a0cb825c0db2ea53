"""Layer by layer the same is predicted as of the model in memory, and no more of it is there at a time than a layer."""

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8q import api
from fp8q.api import CalibrateOptions, SensitivityOptions
from fp8q.calibrate.model.memory import SHARE, weight_bytes
from fp8q.calibrate.model.source import open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT, Reporter, Silent
from fp8q.core.run import Run
from fp8q.quantize.sensitivity import backward, layerwise
from fp8q.quantize.sensitivity.document import Sensitivity
from fp8q.quantize.sensitivity.gradients import backward_losses
from fp8q.stages import corpus as corpus_stage
from fp8q.stages import measure as measure_stage
from fp8q.stages import quantize as quantize_stage
from fp8q.stages import sensitivity as sensitivity_stage
from fp8q.stages.gradients import LOSSES_PASS
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared import sources
from fp8q.stages.shared.sources import source_of

WINDOWS = 5
LAYERS = 4


class Report(Silent):
    """Remembers the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture(scope="module")
def run(demo_checkpoint: Path, demo_texts: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the demo with an FP8 cache, without graphs."""
    return calibrated(Run(tmp_path_factory.mktemp("layerwise") / "run"), demo_checkpoint, demo_texts.calibration, 256)


@pytest.fixture(autouse=True)
def two_windows_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three batches of the demo's windows, the last of them of one."""
    monkeypatch.setattr(sensitivity_stage, "TOKENS", 512)


def predicted(run: Run, report: Reporter = SILENT, **options: Any) -> Sensitivity:
    run.sensitivity.unlink(missing_ok=True)
    return api.sensitivity(run.root, SensitivityOptions(windows=WINDOWS, **options), report)


def same(found: Sensitivity, expected: Sensitivity) -> None:
    """To 1e-5 of each number, in the same order but where two are equal."""
    assert (found.windows, found.tokens) == (expected.windows, expected.tokens)
    numbers = [
        {(loss.module, loss.kind): (loss.kl_nats, *loss.kl_after.model_dump().values()) for loss in each.modules}
        for each in (found, expected)
    ]
    assert numbers[0].keys() == numbers[1].keys()
    for site, values in numbers[0].items():
        expectation = numbers[1][site]
        assert [value is None for value in values] == [value is None for value in expectation], site
        known = [(value, wanted) for value, wanted in zip(values, expectation, strict=True) if value is not None]
        assert [value for value, _ in known] == pytest.approx([wanted for _, wanted in known], rel=1e-5, abs=0), site
        assert known[0][0] > 0, site


@pytest.fixture(scope="module")
def in_memory(run: Run) -> Sensitivity:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity_stage, "TOKENS", 512)
        return predicted(run, measure=0, stream=False)


def test_layer_by_layer_the_same_is_predicted(run: Run, in_memory: Sensitivity, report: Report) -> None:
    """28 weights, 16 activations, 8 cache tensors."""
    found = predicted(run, report, stream=True)
    assert len(found.modules) == 28 + 16 + 8
    same(found, in_memory)
    assert report.lines[0] == (
        "sensitivity: 52 tensors on 1,280 tokens, layer by layer; about 5.8 forward passes; none is measured"
    )
    assert report.lines[1].startswith("sensitivity: by what the first layer took, some ")
    assert len(report.lines) == 2


def test_a_search_predicts_a_large_model_layer_by_layer(
    run: Run, in_memory: Sensitivity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though memory would hold it: in memory a 1.5B took 22.7 GB."""
    monkeypatch.setattr(backward, "WHOLE_BYTES", 0)
    monkeypatch.setattr(sensitivity_stage, "_locate", lambda *_: pytest.fail("the model is larger than that"))
    same(sensitivity_stage.predicted_losses(run, source_of(run), WINDOWS, tmp_path, Notes(SILENT)), in_memory)


def test_a_large_model_is_predicted_layer_by_layer_on_a_cpu_unless_it_is_to_be_measured(
    run: Run, in_memory: Sensitivity, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = predicted(run, measure=1)
    monkeypatch.setattr(backward, "WHOLE_BYTES", 0)
    assert predicted(run, measure=1) == measured
    same(predicted(run, report), in_memory)
    assert run.record().stages["sensitivity"].options["stream"] is True
    size = LOSSES_PASS.need(source_of(run), 256).bytes
    assert report.lines[0] == (
        f"--stream: the model in FP32, its codes and the tensors of a pass take {size / 1e9:,.3g} GB, and a model "
        "above 0.54 GB goes forward and back layer by layer on a CPU: predicting layer by layer"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "fields", "dtype"),
    [
        ("OPTConfig", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}, torch.bfloat16),
        ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True}, torch.float32),
        ("GPT2Config", {}, torch.bfloat16),
        ("GraniteConfig", {"num_hidden_layers": 3, "residual_multiplier": 0.5, "logits_scaling": 2.0}, torch.bfloat16),
    ],
    ids=["GEMMs before and after the layers", "stored in fp32, tied", "conv1d", "scaled"],
)
def test_so_it_is_of_other_architectures(
    config: str,
    fields: dict[str, Any],
    dtype: torch.dtype,
    tmp_path: Path,
    random_checkpoint: Callable[..., Path],
    demo_texts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sensitivity_stage, "TOKENS", 48)
    path = random_checkpoint(tmp_path / "model", config, fields)
    if dtype == torch.float32:  # numbers that BF16 has not
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.001)
        model.save_pretrained(path)
    run = calibrated(Run(tmp_path / "run"), path, demo_texts.calibration, 24)
    same(predicted(run, stream=True), predicted(run, measure=0, stream=False))


def calibrated(run: Run, model: Path, text: Path, seq_len: int) -> Run:
    """All of `fp8q calibrate` but the graphs."""
    source, notes = open_source(str(model)), Notes(SILENT)
    options = CalibrateOptions(samples=WINDOWS, seq_len=seq_len, kv_cache="fp8")
    collected = corpus_stage.collect(source, load_tokenizer(source), str(text), None, options, notes)
    corpus_stage.write_corpus(run, source, collected, notes)
    measure_stage.measure(run, source, options, notes)
    quantize_stage.quantize(run, source, sources.gemms_of(source), options, notes)
    return run


def test_one_layer_and_its_codes_are_there_at_a_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[set[int | None]] = []

    def looking(quantizer: Any, sites: Any, *further: Any) -> Any:
        layers = {
            int(name.split(".")[2]) if name.startswith("model.layers.") else None
            for name, parameter in quantizer.model.named_parameters()
            if not parameter.is_meta
        }
        held = {int(name.split(".")[2]) for name in quantizer.coded._layers}
        assert held == layers - {None}
        there.append(layers)
        return backward_losses(quantizer, sites, *further)

    monkeypatch.setattr(layerwise, "backward_losses", looking)
    predicted(run, stream=True)
    assert there == [{layer} for layer in (None, 3, 2, 1, 0) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed_at", "again"),
    [("layer 2 onward", {"onward": 2, "back": 5}), ("batch 1 back of layer 2", {"onward": 0, "back": 3})],
)
def test_a_killed_call_goes_on_at_the_layer_it_was_in(
    killed_at: str,
    again: dict[str, int],
    run: Run,
    in_memory: Sensitivity,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Back there are the head and four layers, of three batches each."""
    counted = {"onward": 0, "back": 0}
    onward = layerwise.Layerwise._onward
    killing = [True]

    def onward_counted(self: Any, index: int, calls: Any) -> None:
        if killing[0] and killed_at == "layer 2 onward" and index == 2:
            raise KeyboardInterrupt
        counted["onward"] += 1
        onward(self, index, calls)

    def back_counted(*given: Any) -> Any:
        if killing[0] and killed_at == "batch 1 back of layer 2" and counted["back"] == 2 * 3 + 1:
            raise KeyboardInterrupt
        counted["back"] += 1
        return backward_losses(*given)

    monkeypatch.setattr(layerwise.Layerwise, "_onward", onward_counted)
    monkeypatch.setattr(layerwise, "backward_losses", back_counted)
    with pytest.raises(KeyboardInterrupt):
        predicted(run, stream=True)
    counted.update(onward=0, back=0)
    killing[0] = False
    found = predicted(run, report, stream=True)
    assert counted == {"onward": again["onward"], "back": 3 * again["back"]}
    assert report.lines[1:] == ["going on at decoder layer 3 of 4, where an earlier call stopped"]
    same(found, in_memory)
    assert not (run.root / ".sensitivity.work").exists()


@pytest.mark.slow
def test_what_was_made_in_memory_is_taken_and_the_other_way_round_not(run: Run, in_memory: Sensitivity) -> None:
    """With --no-stream the worst are measured, so what has none is made anew."""
    options = SensitivityOptions(windows=WINDOWS, stream=True)
    predicted(run, stream=True)
    assert not any(loss.measured for loss in api.sensitivity(run.root, options).modules)
    measured = api.sensitivity(run.root, SensitivityOptions(windows=WINDOWS, stream=False))
    assert any(loss.measured for loss in measured.modules)
    assert api.sensitivity(run.root, options) == measured


def test_measuring_is_refused_layer_by_layer(run: Run, fp8q: Callable[..., Any]) -> None:
    shown = fp8q("sensitivity", run.root, "--stream", "--windows", WINDOWS, "--measure", 3)
    assert (shown.code, shown.out) == (2, "")
    assert " ".join(shown.err.split()) == (
        "fp8q: --measure 3: runs the whole model, and --stream has one decoder layer of it in memory; leave it out, or "
        "give --no-stream"
    )


def test_a_model_that_memory_does_not_hold_is_streamed_with_a_note(
    run: Run, in_memory: Sensitivity, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers in FP32 for the model, and as many for its codes: four times its BF16. The four layers read four tensors
    each, and with the logits 1,024 tokens take 77 MB of these, 77 of their gradients.
    """
    config = source_of(run).text_config
    width, inner = config.hidden_size, config.intermediate_size
    cache = config.num_key_value_heads * width // config.num_attention_heads
    values = 4 * (3 * width + inner + 3 * width + 2 * cache + 2 * inner) + config.vocab_size
    size = 4 * weight_bytes(source_of(run)) + 2 * 4 * 1024 * values
    for available, expected in ((int(size / SHARE) - 1, True), (int(size / SHARE) + 1, False)):
        monkeypatch.setattr("fp8q.stages.measure.available_bytes", lambda device, available=available: available)
        found = predicted(run, report, measure=0)
        same(found, in_memory)
        assert run.record().stages["sensitivity"].options.get("stream", False) is expected
    said = [line for line in report.lines if line.startswith("--stream")]
    assert said == [
        (
            f"--stream: the model in FP32, its codes and the tensors of a pass take {size / 1e9:,.3g} GB, and 80% of "
            f"the memory available is {size / 1e9:,.3g} GB: predicting layer by layer"
        )
    ]


Usage = namedtuple("Usage", ("total", "used", "free"))


def test_a_disk_without_room_is_refused_with_the_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What enters four layers and leaves the last, and two gradients: 7 · 1,280 tokens of 256 FP32 values."""
    size = (LAYERS + 3) * WINDOWS * 256 * 256 * 4
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - size + 1, size - 1))
    with pytest.raises(InputError) as refused:
        predicted(run, stream=True)
    assert str(refused.value) == (
        f"--stream: the hidden states take 9.18 MB on the disk of {run.root}, which has 9.18 MB free; "
        "free some, or ask for fewer --windows"
    )


def test_a_model_that_is_no_chain_of_layers_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = transformers.LlamaModel.__init__

    def nameless(self: Any, config: Any) -> None:
        made(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    monkeypatch.setattr(transformers.LlamaModel, "__init__", nameless)
    with pytest.raises(InputError) as refused:
        predicted(run, stream=True)
    assert str(refused.value) == (
        f"{source_of(run).name}: LlamaForCausalLM has no list of 4 decoder layers, so it cannot be streamed layer by "
        "layer; give `fp8q sensitivity` memory for the whole of it, with --no-stream"
    )
    assert not (run.root / ".sensitivity.work").exists()
