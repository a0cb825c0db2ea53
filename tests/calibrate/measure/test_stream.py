"""Streaming layer by layer: the statistics of the model in memory, whatever the architecture; goes on when killed;
leaves nothing behind.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8q.calibrate.measure.hidden_states import HiddenStates
from fp8q.calibrate.measure.in_memory import measure_in_memory
from fp8q.calibrate.measure.measurement import Measurement
from fp8q.calibrate.measure.moments import SecondMoments
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, Statistics
from fp8q.calibrate.measure.stream import Stream, measure_streamed
from fp8q.calibrate.model.decoder import LayerOutput
from fp8q.calibrate.model.memory import SHARE, available_bytes, container_bytes, weight_bytes
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import CalibrateOptions
from fp8q.stages.corpus import save_tokens
from fp8q.stages.measure import measure as measure_stage
from fp8q.stages.measure import streamed
from fp8q.stages.pipeline.steps import Notes

IDENTITY = ModelIdentity(name="model", architecture="any", fingerprint="0")
#: The last batch is smaller than the others: a shape of its own.
CORPUS = Corpus(name="random tokens", fingerprint="0", windows=5, seq_len=24, batch_size=2)
WINDOWS = np.random.default_rng(0).integers(3, 500, (5, 24))
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
#: Architecture -> its configuration's class and what makes it differ from a Llama.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral with a window shorter than the text": (
        "MistralConfig",
        SMALL | {"num_key_value_heads": 2, "sliding_window": 8},
    ),
    "qwen3 with two layers of full and one of sliding attention": (
        "Qwen3Config",
        SMALL
        | {
            "num_key_value_heads": 2,
            "head_dim": 24,
            "sliding_window": 8,
            "use_sliding_window": True,
            "max_window_layers": 2,
        },
    ),
    "gemma2 alternating windows, softcapping": (
        "Gemma2Config",
        SMALL | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    ),
    "gemma3 with two rotary bases": (
        "Gemma3TextConfig",
        SMALL | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    ),
    "gpt-neox": ("GPTNeoXConfig", SMALL),
    "phi3": ("Phi3Config", SMALL | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "olmo2": ("Olmo2Config", SMALL | {"pad_token_id": 0}),
    "falcon with alibi, layers that return tuples": (
        "FalconConfig",
        {**SMALL, "ffn_hidden_size": 96, "alibi": True, "new_decoder_architecture": False},
    ),
    "gpt-j with rotary tables in its layers": (
        "GPTJConfig",
        {"vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": 64},
    ),
    "opt with projections before and after its layers": (
        "OPTConfig",
        {
            "vocab_size": 512,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
    ),
}


@pytest.fixture
def tiny(tmp_path: Path, demo_checkpoint: Path) -> Callable[..., Path]:
    """`tiny("PhiConfig", {…})`: the directory of a small random checkpoint of that configuration, in BF16, with the
    demo's tokenizer.
    """

    def make(config: str, fields: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Path:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        path = tmp_path / "model"
        torch.nn.Module.to(model, dtype).save_pretrained(path)
        shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
        return path

    return make


def in_memory(source: Source) -> Statistics:
    return measure_in_memory(load_model(source, torch.bfloat16), Measurement(WINDOWS, IDENTITY, CORPUS), SILENT)


def streaming(source: Source, folder: Path, **options: Any) -> Statistics:
    folder.mkdir(exist_ok=True)
    return measure_streamed(source, Measurement(WINDOWS, IDENTITY, CORPUS, **options), SILENT, folder)


def assert_same(streamed: Statistics, expected: Statistics) -> None:
    """Bit for bit: NaN equals NaN, 0.0 is not -0.0."""
    assert streamed.record == expected.record
    assert streamed.tensors.keys() == expected.tensors.keys()
    assert len(expected.tensors) >= 6
    for name, tensor in expected.tensors.items():
        assert streamed.tensors[name].histogram == tensor.histogram, name
        assert streamed.tensors[name].amax_batches.tobytes() == tensor.amax_batches.tobytes(), name
        assert streamed.tensors[name].amax_channels.tobytes() == tensor.amax_channels.tobytes(), name
    assert list(streamed.weights) == list(expected.weights)
    for name, amax in expected.weights.items():
        assert streamed.weights[name].tobytes() == amax.tobytes(), name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_gives_the_statistics_of_the_model_in_memory(
    name: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(str(tiny(*ARCHITECTURES[name])))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "opt", "gpt2"])
def test_trained_checkpoints_give_the_statistics_of_the_model_in_memory(
    name: str, shared_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = open_source(str(shared_checkpoint(name)))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_checkpoint_of_another_type_is_cast_as_in_memory(
    dtype: torch.dtype, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(str(tiny("LlamaConfig", SMALL | {"tie_word_embeddings": True}, dtype)))
    assert_same(streaming(source, tmp_path / "work"), in_memory(source))


def test_some_of_the_batches_add_up_to_all_of_them(demo_checkpoint: Path, tmp_path: Path) -> None:
    source = open_source(str(demo_checkpoint))
    parts = [streaming(source, tmp_path / f"work{part}", batches=batches) for part, batches in enumerate(([2], [1, 0]))]
    assert_same(parts[0].merge(parts[1]), in_memory(source))


class Killed(BaseException):
    """Stands for SIGKILL where the test must go on: like it, nothing of ours catches it."""


def measured(
    root: Path, checkpoint: Path, stream: bool | None, windows: np.ndarray = WINDOWS, report: Any = SILENT
) -> Run:
    """The stage `measure` of `checkpoint` on `windows` in the run directory `root`, streamed or not."""
    run = Run(root)
    if not run.exists():
        with run.stage("corpus", {}, {"data": "random tokens", "eval_data": "random tokens", "model": "demo"}) as log:
            save_tokens(run.calibration, windows)
            log.outputs.append(run.calibration)
    measure_stage(run, open_source(str(checkpoint)), CalibrateOptions(batch_size=2, stream=stream), Notes(report))
    return run


def written(run: Run) -> bytes:
    return run.statistics.read_bytes() + run.statistics_json.read_bytes()


def names(run: Run) -> set[str]:
    return {path.name for path in run.root.iterdir()}


@pytest.fixture(scope="module")
def unstreamed(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return measured(tmp_path_factory.mktemp("memory") / "run", demo_checkpoint, False)


def test_the_stage_writes_the_same_bytes_and_leaves_nothing_behind(
    demo_checkpoint: Path, unstreamed: Run, tmp_path: Path
) -> None:
    run = measured(tmp_path / "run", demo_checkpoint, True)
    assert written(run) == written(unstreamed)
    assert (
        names(run)
        == names(unstreamed)
        == {".lock", "run.json", "calibration.npz", "statistics.safetensors", "statistics.json"}
    )
    records = [made.record().stages["measure"] for made in (run, unstreamed)]
    assert records[0].options == records[1].options
    assert (records[0].options["batch_size"], records[0].options["moments"]) == (2, False)


@pytest.mark.parametrize("at", range(6))
def test_stopped_anywhere_it_goes_on_at_the_step_it_reached(
    at: int, demo_checkpoint: Path, unstreamed: Run, tmp_path: Path, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 is the embedding, 1 to 4 are the demo's layers, each stopped with its second batch written; 5 is after
    them.
    """
    ran: list[int] = []
    layer, write = Stream._layer, HiddenStates.write

    def counted(self: Stream, step: int, *arguments: Any) -> None:
        ran.append(step)
        layer(self, step, *arguments)

    def stopping(self: HiddenStates, batch: int, hidden: torch.Tensor) -> None:
        write(self, batch, hidden)
        if batch == 1 and max(ran, default=0) == at:
            raise Killed

    def stopped(steps: object) -> None:
        raise Killed

    monkeypatch.setattr(Stream, "_layer", counted)
    with monkeypatch.context() as once:
        once.setattr(HiddenStates, "write", stopping)
        if at == 5:
            once.setattr("fp8q.calibrate.measure.stream._added", stopped)
        with pytest.raises(Killed):
            measured(tmp_path / "run", demo_checkpoint, True)
    assert ".measure.work" in names(Run(tmp_path / "run"))
    ran.clear()
    run = measured(tmp_path / "run", demo_checkpoint, True, report=report)
    assert ran == list(range(max(at, 1), 5))
    assert written(run) == written(unstreamed)
    assert ".measure.work" not in names(run)
    assert report.lines == (
        [f"going on at decoder layer {min(at, 4)} of 4, where an earlier call stopped"] if at > 1 else []
    )


def test_what_was_left_by_other_options_is_not_used(
    demo_checkpoint: Path, unstreamed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as once:
        once.setattr("fp8q.calibrate.measure.stream._added", lambda steps: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            measured(tmp_path / "run", demo_checkpoint, True)
    key = tmp_path / "run" / ".measure.work" / "key.json"
    key.write_text(json.dumps(json.loads(key.read_text()) | {"threads": 99}))
    (key.parent / "00001.safetensors").write_bytes(b"of another machine")
    assert written(measured(tmp_path / "run", demo_checkpoint, True)) == written(unstreamed)


def test_without_streaming_nothing_of_a_stopped_stream_stays(demo_checkpoint: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.stage("corpus", {}, {"data": "random tokens", "eval_data": "random tokens", "model": "demo"}) as log:
        save_tokens(run.calibration, WINDOWS)
        log.outputs.append(run.calibration)
    (run.root / ".measure.work").mkdir()
    measured(run.root, demo_checkpoint, False)
    assert ".measure.work" not in names(run)


CHILD = """
import sys, numpy as np
from pathlib import Path
from fp8q.calibrate.model.source import open_source
from fp8q.options import CalibrateOptions
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.stages.measure import measure
from fp8q.stages.pipeline.steps import Notes
measure(Run(Path(sys.argv[1])), open_source(sys.argv[2]), CalibrateOptions(batch_size=2, stream=True), Notes(SILENT))
"""


@pytest.mark.slow
def test_sigkill_at_random_points_then_the_same_bytes(demo_checkpoint: Path, tmp_path: Path) -> None:
    windows = np.random.default_rng(1).integers(3, 500, (48, 64))
    expected = measured(tmp_path / "memory", demo_checkpoint, False, windows)
    shutil.copytree(expected.root, tmp_path / "run")
    run, random = Run(tmp_path / "run"), np.random.default_rng(2)
    run.statistics.unlink()
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(run.root), str(demo_checkpoint)]
    for step in (0, 2):
        with subprocess.Popen(command) as child:
            while not (run.root / ".measure.work" / f"{step:05}.safetensors").exists():
                assert child.poll() is None, "the process ended before it was killed"
                time.sleep(0.001)
            time.sleep(random.uniform(0, 0.2))
            child.send_signal(signal.SIGKILL)
        assert not run.statistics.exists()
    subprocess.run(command, check=True, timeout=300)
    assert written(run) == written(expected)
    assert ".measure.work" not in names(run)


Usage = namedtuple("Usage", ("total", "used", "free"))


def test_a_disk_without_room_is_refused_with_the_numbers(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of 5 · 24 tokens, 256 BF16 values each: 122,880 bytes; said in kB."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - 122_879, 122_879))
    with pytest.raises(InputError) as refused:
        measured(tmp_path / "run", demo_checkpoint, True)
    assert str(refused.value) == (
        f"--stream: the hidden states take 123 kB on the disk of {tmp_path}/run, which has 123 kB free; "
        "free some, name another directory with --out, or ask for fewer --samples"
    )
    assert names(Run(tmp_path / "run")) == {".lock", "run.json", "calibration.npz"}
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**9, 10**9 - 122_880, 122_880))
    assert measured(tmp_path / "run", demo_checkpoint, True).statistics.is_file()


def test_a_disk_that_fills_is_one_line_and_leaves_nothing(
    demo_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fp8q.calibrate.measure.stream.save_arrays", full)
    with pytest.raises(
        InputError, match=f"^{tmp_path}/run: no space left on the disk; free some or name another directory$"
    ):
        measured(tmp_path / "run", demo_checkpoint, True)
    assert names(Run(tmp_path / "run")) == {".lock", "run.json", "calibration.npz"}


def test_hidden_states_have_their_blocks_before_they_are_written(tmp_path: Path) -> None:
    """A mapped write to a full disk is a signal that kills the process; taking the blocks first is an error that can be
    told.
    """
    HiddenStates(tmp_path / "hidden", {0: WINDOWS[:2], 2: WINDOWS[4:]}, LayerOutput(0, 8192, torch.bfloat16))
    found = (tmp_path / "hidden").stat()
    assert found.st_size == 3 * 24 * 8192 * 2
    assert found.st_blocks * 512 >= found.st_size


def refused(source: Source, folder: Path) -> str:
    with pytest.raises(InputError) as refusal:
        streaming(source, folder)
    return str(refusal.value)


def test_a_model_without_a_list_of_layers_is_refused_by_name(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("LlamaConfig", SMALL)
    source = open_source(str(path))
    monkeypatch.setattr(transformers.LlamaModel, "__init__", _nameless(transformers.LlamaModel.__init__))
    assert refused(source, tmp_path / "work") == (
        f"{path}: LlamaForCausalLM has no list of 3 decoder layers, so it cannot be streamed layer by layer; "
        "calibrate it in memory, with --no-stream"
    )


def _nameless(init: Callable[..., None]) -> Callable[..., None]:
    def changed(self: Any, config: Any) -> None:
        init(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    return changed


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda hidden, first, ids: (hidden * 2, None), "changes the hidden states between layer 0 and layer 1"),
        (lambda hidden, first, ids: (hidden, first), "gives layer 1 more of an earlier layer than its hidden states"),
        (lambda hidden, first, ids: (hidden, ids), "gives its decoder layers more of the text than hidden states"),
    ],
)
def test_a_model_that_is_no_chain_is_refused_by_what_it_does(
    change: Callable[..., Any], what: str, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama whose forward pass does between its layers what some models do: scale, hand on the first layer's output,
    hand on the tokens.
    """
    path = tiny("LlamaConfig", SMALL)
    source = open_source(str(path))

    def forward(self: Any, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> None:
        hidden = self.embed_tokens(input_ids)
        embeddings = self.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        first, extra = None, None
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=embeddings, past_key_values=past_key_values, extra=extra)
            first = hidden if first is None else first
            hidden, extra = change(hidden, first, input_ids)

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    assert refused(source, tmp_path / "work") == (
        f"{path}: LlamaForCausalLM {what}, so it cannot be streamed layer by layer; calibrate it in memory, with "
        "--no-stream"
    )


def test_a_checkpoint_that_memory_does_not_hold_is_streamed_with_a_note(
    demo_checkpoint: Path, report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(str(demo_checkpoint))
    size = weight_bytes(source)
    assert size == sum(2 * parameter.numel() for parameter in load_model(source, torch.bfloat16).parameters())
    for available, expected in ((int(size / SHARE) + 1, False), (int(size / SHARE) - 1, True), (None, False)):
        monkeypatch.setattr(
            "fp8q.calibrate.model.memory.available_bytes", lambda device, available=available: available
        )
        assert streamed(source, None, Notes(report)) is expected
        assert streamed(source, False, Notes(report)) is False
        assert streamed(source, True, Notes(report)) is True
    assert report.lines == [
        (
            "--stream: the weights take 0.00695 GB in BF16, and 80% of the memory available is 0.00695 GB: calibrating "
            "layer by layer"
        )
    ]


def test_a_containers_limit_is_what_it_leaves_and_its_caches(tmp_path: Path) -> None:
    for name, content in {
        "memory.max": "1000\n",
        "memory.current": "700\n",
        "memory.stat": "anon 500\ninactive_file 150\nactive_file 50\n",
    }.items():
        (tmp_path / name).write_text(content)
    assert container_bytes(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert container_bytes(tmp_path) is None
    assert 0 < (available_bytes("cpu") or 0) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("name", ["opt with projections before and after its layers", "phi3"])
def test_second_moments_are_those_of_the_model_in_memory_even_when_killed(
    name: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    source = open_source(str(tiny(*ARCHITECTURES[name])))
    expected, folder = SecondMoments(tmp_path / "expected"), tmp_path / "work"
    measure_in_memory(
        load_model(source, torch.bfloat16), Measurement(WINDOWS, IDENTITY, CORPUS, moments=expected), SILENT
    )
    expected.close()
    streaming(source, folder, moments=SecondMoments(folder / "moments"))
    for step in sorted(folder.glob("*.safetensors"))[3:]:  # as if killed in the last layer
        step.unlink()
    streaming(source, folder, moments=SecondMoments(folder / "moments"))
    files = {path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()}
    assert len(files) >= 3 * 4
    assert {path.name: path.read_bytes() for path in (folder / "moments").iterdir()} == files
