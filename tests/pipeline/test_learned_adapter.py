"""`fp8q distill --train adapter` on the demo: the adapter corrects the checkpoint, which stays byte for byte."""

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8q import api
from fp8q.calibrate.checkpoint.adapter import open_adapter
from fp8q.calibrate.model.adapter_base import adapter_remarks, with_adapters
from fp8q.calibrate.model.source import load_model, open_source
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import DistillOptions
from fp8q.quantize.learning.divergence import forward_kl
from fp8q.quantize.learning.document import AdapterLearning, load_adapter_learning
from fp8q.stages.distill import learning_text
from fp8q.stages.pipeline.stage import Notes
from fp8q.stages.shared.sources import source_of

from ..command_result import Result
from ..conftest import Texts
from ..mixtures import random_mixture

pytestmark = pytest.mark.slow

Fp8q = Callable[..., Result]
OPTIONS = DistillOptions(train="adapter", epochs=2.0, rank=8, alpha=32, adapter_rate=0.0005)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def learned(begun: Run) -> tuple[dict[str, bytes], AdapterLearning]:
    """The files of the run before, and what was learned."""
    before, found = contents(begun.root), api.distill(begun.root, options=OPTIONS)
    assert isinstance(found, AdapterLearning)
    return before, found


@pytest.fixture
def copied(begun: Run, learned: tuple[dict[str, bytes], AdapterLearning], tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(begun.root, tmp_path / "run")))


def test_the_adapter_is_written_and_everything_else_stays_byte_for_byte(
    begun: Run, learned: tuple[dict[str, bytes], AdapterLearning]
) -> None:
    (before, found), after = learned, contents(begun.root)
    assert after.keys() - before.keys() == {
        "adapter.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
    }  # fmt: skip
    assert [name for name in before if before[name] != after[name]] == ["run.json"]
    assert found.best.step > 0
    assert found.best.kl < 0.97 * found.start.kl
    assert found == load_adapter_learning(begun)
    read = open_adapter(begun.adapter)
    assert len(read.parts) == found.modules == 28
    assert {(part.rank, part.scale) for part in read.parts.values()} == {(8, 4.0)}
    assert sum(header.shape[0] * header.shape[1] for header in read.headers.values()) == found.parameters
    config = (begun.adapter / "adapter_config.json").read_text(encoding="utf-8")
    assert json.loads(config)["base_model_name_or_path"] == "demo"
    assert str(begun.root) not in config


def test_peft_and_fp8q_have_it_on_as_it_was_scored(
    begun: Run, learned: tuple[dict[str, bytes], AdapterLearning]
) -> None:
    """The student that was scored sums values, and the reference codes: sums round otherwise, and codes flip."""
    source = source_of(begun)
    windows = torch.from_numpy(learning_text(begun, source, None, OPTIONS, Notes(SILENT)).held_out)
    base, own = (api.load(begun.root, "float32", "exact", adapter=name) for name in (None, "learned"))
    with torch.no_grad():
        wanted, without = load_model(source, torch.float32)(windows).logits, base(windows).logits
        by_peft = peft.PeftModel.from_pretrained(base, str(begun.adapter)).eval()(input_ids=windows).logits
        assert torch.equal(by_peft, own(windows).logits)
    assert float(forward_kl(wanted, by_peft)) == pytest.approx(learned[1].best.kl, rel=0.02)
    assert float(forward_kl(wanted, without)) == pytest.approx(learned[1].start.kl, rel=0.02)
    assert float((by_peft - without).abs().max()) > 0.1


def test_generate_answers_with_it_on_the_reference_alone(
    begun: Run, learned: tuple[dict[str, bytes], AdapterLearning], fp8q: Fp8q
) -> None:
    asked = ("generate", begun.root, "--adapter", "learned", "--prompt", "def ", "--max-tokens", "4")
    shown = fp8q(*asked, "--runtime", "reference")
    assert shown.code == 0, shown.err
    assert fp8q(*asked, "--runtime", "onnxruntime").complaint() == (
        "--adapter learned: is in no graph; use --runtime reference, or vLLM with --lora-modules "
        f"learned={begun.adapter}"
    )


def test_it_is_read_as_any_adapter_is(
    begun: Run, learned: tuple[dict[str, bytes], AdapterLearning], demo_checkpoint: Path
) -> None:
    source = with_adapters(open_source(str(demo_checkpoint)), [begun.adapter], "beside")
    assert adapter_remarks(source) == []
    assert [variant.on and variant.on.name for variant in source.variants] == [None, "adapter"]


@pytest.mark.usefixtures("quick_work_shown")
def test_it_is_not_learned_again(
    begun: Run, learned: tuple[dict[str, bytes], AdapterLearning], caplog: pytest.LogCaptureFixture
) -> None:
    record = json.loads(begun.record_file.read_text(encoding="utf-8"))["stages"]
    with caplog.at_level(logging.INFO):
        assert api.distill(begun.root, options=OPTIONS) == learned[1]
    assert "Learning" not in caplog.text
    assert json.loads(begun.record_file.read_text(encoding="utf-8"))["stages"]["adapter"] == record["adapter"]


def test_on_another_checkpoint_it_is_outdated(copied: Run, fp8q: Fp8q) -> None:
    shown = fp8q("scales", copied.root, "--weight-method", "amax", "--activation-terms", "2")
    assert shown.code == 0, shown.err
    assert (
        "outdated, since the run has changed: adapter; `fp8q distill "
        f"{copied.root} --train adapter` does it again" in shown.out
    )
    with pytest.raises(InputError, match="what the stage adapter wrote is of other files than are there now"):
        api.load(copied.root, adapter="learned")


def test_a_changed_file_is_refused(copied: Run) -> None:
    config = copied.adapter / "adapter_config.json"
    config.write_text(config.read_text(encoding="utf-8").replace('"lora_alpha": 32', '"lora_alpha": 64'))
    with pytest.raises(InputError) as refused:
        api.load(copied.root, adapter="learned")
    assert str(refused.value).startswith(
        f"{config}: is not the file that `fp8q distill {copied.root} --train adapter` wrote"
    )


def test_where_nothing_gets_better_no_adapter_is_there(copied: Run, fp8q: Fp8q) -> None:
    before = contents(copied.model)
    shown = fp8q("distill", copied.root, "--train", "adapter", "--adapter-rate", "5", "--samples", "20")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("Nothing better was found in 2 steps: the held-out KL is ")
    assert "nats a token as it was, and no adapter is written." in shown.out
    assert not copied.adapter.exists()
    assert load_adapter_learning(copied).best.step == 0
    assert contents(copied.model) == before
    with pytest.raises(InputError) as refused:
        api.load(copied.root, adapter="learned")
    assert str(refused.value) == (
        f"--adapter learned: none was written, since nothing got better ({copied.adapter_learning})"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--rank", "4"), "--rank 4: is for --train adapter, and this is --train weights"),
        (("--adapter-rate", "0.1"), "--adapter-rate 0.1: is for --train adapter, and this is --train weights"),
        (
            ("--train", "adapter", "--learning-rate", "0.1"),
            "--learning-rate 0.1: is for --train weights, and this is --train adapter",
        ),
    ],
    ids=["rank", "adapter rate", "learning rate"],
)
def test_options_of_the_other_mode_are_refused(begun: Run, fp8q: Fp8q, given: tuple[str, ...], told: str) -> None:
    assert fp8q("distill", begun.root, *given).complaint() == f"{told}; choose that one, or leave this out"


def test_without_peft_the_extra_is_named(begun: Run, fp8q: Fp8q, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    assert fp8q("distill", begun.root, "--train", "adapter").complaint(4) == (
        "peft is not installed and this command needs it; install it with `pip install 'fp8q[calibrate]'`"
    )


def test_text_that_it_is_evaluated_on_is_refused(begun: Run, demo_texts: Texts) -> None:
    with pytest.raises(InputError, match="is in it, or the other way round; learn from other text"):
        api.distill(begun.root, str(demo_texts.evaluation), OPTIONS)


def test_layers_of_experts_get_none_since_its_file_has_no_name_for_them(tmp_path: Path, demo_texts: Texts) -> None:
    """Hugging Face's models hold all experts of a layer as one tensor; the others are named in full, since those of
    experts are called so too.
    """
    model, root = random_mixture(tmp_path / "model", "qwen2_moe"), tmp_path / "run"
    texts, exported = (str(demo_texts.calibration), root, str(demo_texts.evaluation)), api.ExportOptions(graph=False)
    api.calibrate(str(model), *texts, api.CalibrateOptions(samples=60, seq_len=64, activation_terms=2), exported)
    found = api.distill(root, options=DistillOptions(train="adapter", epochs=4.0, adapter_rate=0.002))
    assert found.best.step > 0
    parts = open_adapter(root / "adapter").parts
    linear = {
        name
        for name, module in AutoModelForCausalLM.from_pretrained(model).named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head" and not name.endswith("shared_expert_gate")
    }
    assert len(parts) == 2 * (4 + 3)
    assert parts.keys() == linear
    targets = json.loads((root / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))["target_modules"]
    assert targets == sorted(parts)
