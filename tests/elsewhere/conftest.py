"""The environments of what takes the output, and the runs whose `model/` goes there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import UnavailableError
from safetensors.torch import load_file, save_file

from fp8q import api
from fp8q.calibrate.model.bf16_gemms import has_bf16_units
from fp8q.core.run import Run

from ..architectures import Architecture, random_checkpoint, texts
from ..conftest import Texts, WithoutGraphs
from .packages import installed

__all__ = ["random_checkpoint", "texts"]  # fixtures

#: vLLM's KL over the reference's at most, and the reverse. Without BF16 units PyTorch sums BF16 GEMMs otherwise than
#: the reference does: mixtral's experts come to 1.24 there, gemma in two terms to 1.17.
MOST = 1.15 if has_bf16_units() else 1.3
#: Tokens that a window of `demo_validated` scores.
SCORED = 256


@pytest.fixture(scope="session")
def home_of() -> Callable[[str], Path]:
    """`home_of("vllm")`: that environment, or a skip that says why it cannot be had."""

    def find(name: str) -> Path:
        try:
            return installed(name)
        except UnavailableError as error:
            pytest.skip(f"{name} cannot be installed here: {error}")

    return find


@pytest.fixture(scope="session")
def vllm_python(home_of: Callable[[str], Path]) -> Path:
    """vLLM's Python, which multiplies static scales on a CPU too."""
    return home_of("vllm") / "bin" / "python"


@pytest.fixture(scope="session")
def quantized(
    tmp_path_factory: pytest.TempPathFactory, shared_checkpoint: Callable[[str], Path],
    random_checkpoint: Callable[..., Path], texts: Callable[[str], tuple[Path, Path]], without_graphs: WithoutGraphs,
) -> Callable[..., Run]:  # fmt: skip
    """`quantized(architecture, skip=("*.q_proj",))`: a run of it without graphs, which nobody elsewhere reads."""

    def calibrate(case: Architecture, skip: tuple[str, ...] = ()) -> Run:
        folder = tmp_path_factory.mktemp(case.name)
        model = (
            shared_checkpoint(case.name)
            if case.trained
            else random_checkpoint(folder / "model", case.config, case.fields)
        )
        calibration, evaluation = texts(case.text)
        options = api.CalibrateOptions(
            kv_cache=case.kv_cache, samples=16, seq_len=64, activation_terms=case.terms, skip=skip
        )
        with without_graphs():
            return api.calibrate(str(model), str(calibration), folder / "run", str(evaluation), options)

    return calibrate


@pytest.fixture(scope="session")
def demo_with_an_adapter(
    tmp_path_factory: pytest.TempPathFactory,
    demo_checkpoint: Path,
    demo_texts: Texts,
    made_adapter: Callable[..., Path],
    without_graphs: WithoutGraphs,
) -> Run:
    """The demo in FP8 with the adapter `style` beside it, without graphs."""
    folder = tmp_path_factory.mktemp("adapter")
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    style = made_adapter(demo_checkpoint, folder / "style", 0.2, r=4, lora_alpha=6, target_modules=targets)
    options = api.CalibrateOptions(samples=16, seq_len=64, adapter=(style,), adapter_mode="beside")
    with without_graphs():
        texts = str(demo_texts.calibration), str(demo_texts.evaluation)
        return api.calibrate(str(demo_checkpoint), texts[0], folder / "run", texts[1], options)


@pytest.fixture(scope="session")
def demo_with_a_learned_adapter(
    tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path, demo_texts: Texts, without_graphs: WithoutGraphs
) -> Run:
    """The demo in FP8 with an adapter that learned beside it, its B a hundred times as large, so that it is felt."""
    options = api.CalibrateOptions(samples=40, seq_len=128)
    learning = api.DistillOptions(train="adapter", rank=8, adapter_rate=0.0005)
    texts, folder = (str(demo_texts.calibration), str(demo_texts.evaluation)), tmp_path_factory.mktemp("learned")
    with without_graphs():
        run = api.calibrate(str(demo_checkpoint), texts[0], folder / "run", texts[1], options)
    api.distill(run.root, options=learning)
    (weights,) = run.adapter.glob("*.safetensors")
    learned = load_file(weights)
    save_file({name: each * 100 if "lora_B" in name else each for name, each in learned.items()}, weights)
    return run


@pytest.fixture(scope="session")
def validated(
    made_once: Callable[[str, Callable[[Path], object]], Path], demo_checkpoint: Path, demo_texts: Texts
) -> Callable[..., Run]:
    """`validated("two", activation_terms=2)`: the demo with its cache in FP8 and these options, and what `fp8q
    validate` says of a text that begins with BOS, in windows of which each scores `SCORED` tokens and begins with the
    last one of the window before.
    """

    def validate(name: str, **options: Any) -> Run:
        def make(folder: Path) -> None:
            evaluation = folder / "evaluation.txt"
            text = demo_texts.evaluation.read_text(encoding="utf-8")[:20_000]
            evaluation.write_text(f"<s>{text}", encoding="utf-8")
            asked = api.CalibrateOptions(kv_cache="fp8", samples=16, seq_len=256, **options)
            run = api.calibrate(
                str(demo_checkpoint), str(demo_texts.calibration), folder / "run", str(evaluation), asked
            )
            runtimes = ("bf16", "reference", "one-term")
            api.validate(run.root, None, api.ValidateOptions(runtimes, context=SCORED + 1, stride=SCORED))

        return Run(made_once(f"demo-validated-{name}", make) / "run")

    return validate


@pytest.fixture(scope="session")
def demo_validated(validated: Callable[..., Run]) -> Run:
    """In one term."""
    return validated("one")


@pytest.fixture(scope="session")
def demo_in_two_terms(validated: Callable[..., Run]) -> Run:
    """In two terms, rounded by GPTQ."""
    return validated("two", activation_terms=2, weight_rounding="gptq")
