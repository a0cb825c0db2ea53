"""`--vision`: linear layers that text does not reach are quantized by the inputs that rows with images give them, and
loaders, the reference and every command know them.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_named_modules
from safetensors import safe_open
from seeing_models import PROCESSORS, asking
from torch import nn
from transformers import AutoModelForMultimodalLM

from fp8q import api
from fp8q.calibrate.measure.moments import load_moments
from fp8q.calibrate.measure.statistics import load_statistics
from fp8q.calibrate.model.source import open_source
from fp8q.core.errors import InputError, NoGraphError
from fp8q.core.run import Run
from fp8q.options import ScaleOptions
from fp8q.quantize.reference.fp8_model import load_reference
from fp8q.quantize.scales.decisions import load_scales
from fp8q.stages.shared import sources
from fp8q.validate.accuracy.document import load_accuracy

from ..command_result import Result
from ..conftest import MadeOnce
from ..seeing import inputs_watched, transformers_inputs

pytestmark = pytest.mark.slow

OPTIONS = api.CalibrateOptions(chat_template=True, samples=4, seq_len=48, batch_size=2, vision=("*",))
#: The rows of `mixed.jsonl` that are measured, evenly spread over the 11 of 12 that are not held out.
CHOSEN = [0, 2, 5, 8]
#: Two last bits of BF16: of sums in another order, and of what follows from them.
BITS = 2**-6


def calibrated(
    folders: Path, out: Path, data: str = "mixed.jsonl", config: str = "Gemma3Config", **changes: Any
) -> Run:
    settings: dict[str, Any] = {"graph": False} | changes
    return api.calibrate(str(folders / config), str(folders / data), out, options=OPTIONS, **settings)


@pytest.fixture(scope="module", params=PROCESSORS)
def run(request: pytest.FixtureRequest, folders: Path, made_once: MadeOnce) -> Run:
    """A run with all that sees in FP8 too."""

    def make(folder: Path) -> None:
        calibrated(folders, folder / "run", config=request.param)

    return Run(made_once(f"vision-{request.param}", make) / "run")


@pytest.fixture(scope="module")
def gemma(folders: Path, made_once: MadeOnce) -> Run:
    """Such a run of Gemma 3."""

    def make(folder: Path) -> None:
        calibrated(folders, folder / "run")

    return Run(made_once("vision-Gemma3Config", make) / "run")


def source_path(run: Run) -> Path:
    return Path(run.record().model["path"])


def loaded(path: Path) -> Any:
    """The model as transformers loads it, with all of its tensors and no other."""
    model, told = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.bfloat16, output_loading_info=True)
    assert not any(told.values())
    return model


def rows(run: Run, folders: Path, *numbers: int) -> list[Mapping[str, torch.Tensor]]:
    """transformers' own inputs of rows."""
    asked = [asking(f"{number}.png", f"What is in picture {number}?") for number in numbers]
    return transformers_inputs(source_path(run), asked, folders)


def reached_by_images(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    """The linear layers outside the language model that a pass over `inputs` runs."""
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "language_model" not in name and "lm_head" not in name
    ]
    with inputs_watched(model, linear) as amax, torch.inference_mode():
        model(**inputs)
    return sorted(amax)


def mean_kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    exact, other = (logits.double().log_softmax(-1) for logits in (exact, other))
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def test_every_layer_that_images_reach_is_quantized_by_its_own_inputs(run: Run, folders: Path) -> None:
    """Their amax, in each row, is that of transformers' own pass; windows of text do not reach them."""
    scales = load_scales(run)
    model = loaded(source_path(run))
    names = reached_by_images(model, rows(run, folders, 0)[0])
    assert len(names) > 10
    assert sorted(name for name in scales.vision or () if name in scales.weights) == names
    assert {len(scales.of_text.weights), len(scales.weights) - len(names)} == {14}
    statistics = load_statistics(run)
    first = {module: group for group, members in statistics.record.groups.items() for module in members}
    with inputs_watched(model, names) as amax, torch.inference_mode():
        for inputs in rows(run, folders, *CHOSEN):
            model(**inputs)
    for name in names:
        ours = statistics.tensors[f"{first[name]}.input"].amax_batches
        assert np.isnan(ours[:2]).all()
        np.testing.assert_allclose(ours[2:], amax[name], rtol=BITS)
        assert scales.activations[name].amax == float(ours[2:].max())


def test_layers_that_read_one_tensor_are_a_group(gemma: Run) -> None:
    groups = load_statistics(gemma).record.groups.values()
    of_tower = [[name.rpartition(".")[2] for name in members] for members in groups if "vision_tower" in members[0]]
    assert of_tower[:8] == [["q_proj", "k_proj", "v_proj"], ["out_proj"], ["fc1"], ["fc2"]] * 2


def test_what_is_no_linear_layer_and_what_images_do_not_reach_stays_with_its_reason(run: Run) -> None:
    scales = load_scales(run)
    blind = {name: skipped.reason for name, skipped in scales.skipped.items() if name in (scales.vision or ())}
    (patches,) = (name for name in blind if name.endswith("patch_embedding"))
    assert blind[patches] == "of class Conv2d, which does not compute as a linear layer does"


def test_compressed_tensors_matches_the_layers_in_fp8_and_no_others(run: Run) -> None:
    """By its own reading of config.json, over the modules of transformers' class."""
    said = json.loads((run.model / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    config = QuantizationConfig.model_validate({key: said[key] for key in said if key != "quant_method"})
    (group,) = config.config_groups.values()
    model = AutoModelForMultimodalLM.from_pretrained(source_path(run))
    matched = {name for name, _ in match_named_modules(model, group.targets, config.ignore or [])}
    assert matched == load_scales(run).weights.keys()


def test_codes_have_a_scale_for_each_channel(gemma: Run) -> None:
    scales = load_scales(gemma)
    stored: dict[str, torch.Tensor] = {}
    for file in gemma.model.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            stored |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict
    model = loaded(source_path(gemma))
    for name in scales.vision or ():
        if name not in scales.weights:
            continue
        weight = model.get_submodule(name).weight.detach().float()
        codes, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        assert (codes.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, (len(weight), 1))
        assert float((codes.float() * scale - weight).norm() / weight.norm()) < 0.04
        assert float(stored[f"{name}.input_scale"]) == np.float32(scales.activations[name].scale)


def test_transformers_loads_it_and_says_what_the_reference_says_of_images(run: Run, folders: Path) -> None:
    (inputs,) = rows(run, folders, 11)
    ours: Any = load_reference(run.model, "fast", torch.bfloat16).model
    with torch.inference_mode():
        theirs, reference = (model(**inputs).logits[0] for model in (loaded(run.model), ours))
    assert mean_kl(theirs, reference) < 0.05, "two roundings to BF16; a lost scale gives > 1"


def test_the_reference_computes_the_tower_on_codes(gemma: Run, folders: Path) -> None:
    """The features of images are those of a tower whose inputs and weights are rounded by hand."""
    (inputs,) = rows(gemma, folders, 11)
    scales = load_scales(gemma)
    reference = load_reference(gemma.model, "exact", torch.float32).model
    model: Any = AutoModelForMultimodalLM.from_pretrained(source_path(gemma), dtype=torch.float32)
    exact = features(model, inputs)

    def rounded(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    for name in scales.vision or ():
        if name not in scales.weights:
            continue
        module = model.get_submodule(name)
        stored = load_reference_layer(reference, name)
        module.weight.data = stored
        scale = scales.activations[name].scale
        module.register_forward_pre_hook(lambda _, x, scale=scale: (rounded(x[0], scale),))
    by_hand = features(model, inputs)
    ours = features(reference, inputs)
    error = float((by_hand - exact).norm() / exact.norm())
    assert error > 0.01
    assert float((by_hand - ours).norm() / exact.norm()) < error / 10


def load_reference_layer(reference: nn.Module, name: str) -> torch.Tensor:
    """The weight of an FP8 layer of the reference in FP32."""
    layer: Any = reference.get_submodule(name)
    weight: torch.Tensor = layer.codes.float() * layer.weight_scale[:, None]
    return weight


def features(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What enters the language model in the place of an image."""
    held: list[torch.Tensor] = []
    language: Any = model.model.language_model
    handle = language.register_forward_pre_hook(
        lambda module, args, named: held.append(named["inputs_embeds"]), with_kwargs=True
    )
    with torch.inference_mode():
        model(**inputs)
    handle.remove()
    return held[0][0][inputs["input_ids"][0] == 2047]


def test_validation_on_rows_measures_both_parts(run: Run, folders: Path, tmp_path: Path) -> None:
    """The loss on rows is that of transformers' own models."""
    copied = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    api.validate(copied.root, options=api.ValidateOptions(runtimes=("bf16", "reference")))
    images = load_accuracy(copied).images
    assert images is not None
    (inputs,) = rows(run, folders, 11)
    ids = inputs["input_ids"][0]
    first = int(torch.nonzero(ids == 2047).min())
    scored = [number - 1 for number in range(first, len(ids)) if ids[number] != 2047]
    with torch.inference_mode():
        exact, fp8 = (loaded(path)(**inputs).logits[0][scored] for path in (source_path(run), run.model))
    kl = images.runtimes["reference"].kl_mean_nats
    assert kl == pytest.approx(mean_kl(exact, fp8), rel=0.5)


def test_patterns_choose_among_them(folders: Path, tmp_path: Path) -> None:
    """`--vision` names what may be quantized, and `--skip` and `--only` apply to it as to all else."""
    run = calibrated(folders, tmp_path / "run", vision=("model.vision_tower.*",), skip=("*.fc2",))
    scales = load_scales(run)
    kinds = {name.rpartition(".")[2] for name in scales.vision or () if name in scales.weights}
    assert kinds == {"q_proj", "k_proj", "v_proj", "out_proj", "fc1"}
    reasons = {skipped.reason for name, skipped in scales.skipped.items() if name.endswith("fc2")}
    assert reasons == {"stays in BF16 (--skip *.fc2)"}
    api.scales(run.root, options=api.RescaleOptions(skip=("",), only=("model.vision_tower.*",)))
    alone = load_scales(run)
    assert alone.of_text.weights == {}
    assert {name.rpartition(".")[2] for name in alone.weights} == kinds | {"fc2"}


def test_without_it_scales_are_those_of_a_run_that_never_had_it(gemma: Run, folders: Path, tmp_path: Path) -> None:
    """Byte for byte: scales.json, config.json, card and weights."""
    plain = calibrated(folders, tmp_path / "plain", vision=())
    other = Run(Path(shutil.copytree(gemma.root, tmp_path / "other")))
    with pytest.raises(InputError) as refused:
        api.scales(plain.root, options=api.RescaleOptions(vision=("*",)))
    first = next(name for name in load_scales(gemma).vision or () if name.endswith("k_proj"))
    assert str(refused.value) == (
        f"--vision *: the input of {first} was not measured; use `fp8q calibrate` with it and rows with images, or "
        "leave it out"
    )
    api.scales(other.root, options=api.RescaleOptions(vision=("",)))
    assert plain.scales.read_bytes() == other.scales.read_bytes()
    written = sorted(path.relative_to(plain.model) for path in plain.model.rglob("*") if path.is_file())
    assert written == sorted(path.relative_to(other.model) for path in other.model.rglob("*") if path.is_file())
    assert [name for name in written if (plain.model / name).read_bytes() != (other.model / name).read_bytes()] == []


def test_gptq_rounds_them_by_the_second_moments_of_images(folders: Path, tmp_path: Path) -> None:
    """Those of transformers' own pass."""
    run = calibrated(folders, tmp_path / "run", weight_rounding="gptq")
    scales = load_scales(run)
    blind = [name for name in scales.vision or () if name in scales.weights]
    assert {scales.weights[name].rounding for name in blind} == {"gptq"}
    name = next(name for name in blind if name.endswith("fc1"))
    model = loaded(source_path(run))
    total = 0.0
    seen: list[torch.Tensor] = []
    model.get_submodule(name).register_forward_pre_hook(lambda _, x: seen.append(x[0].flatten(0, -2).float()))
    with torch.inference_mode():
        for inputs in rows(run, folders, *CHOSEN):
            model(**inputs)
    expected = sum(((x.T @ x) for x in seen), torch.tensor(total))
    torch.testing.assert_close(load_moments(run.moments, name), expected, rtol=BITS, atol=BITS * float(expected.max()))


@pytest.mark.parametrize("keep_moments", [True, False])
def test_layer_by_layer_codes_are_the_same(keep_moments: bool, folders: Path, tmp_path: Path) -> None:
    """Byte for byte, with second moments that are stored or spent."""
    runs = [
        calibrated(folders, tmp_path / "whole", weight_rounding="gptq", stream=False),
        calibrated(folders, tmp_path / "parts", weight_rounding="gptq", stream=True, keep_moments=keep_moments),
    ]
    whole, parts = ({path.name: path.read_bytes() for path in run.model.glob("*.safetensors")} for run in runs)
    assert whole == parts
    assert runs[0].scales.read_bytes() == runs[1].scales.read_bytes()


def test_a_tail_is_one_code_where_images_have_no_last_positions(gemma: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(gemma.root, tmp_path / "run")))
    api.scales(run.root, options=api.RescaleOptions(form=("tail:8",)))
    scales = load_scales(run)
    assert {scales.forms[name].kind for name in scales.of_text.weights} == {"tail"}
    assert {scales.forms[name].kind for name in scales.vision or () if name in scales.weights} == {"one"}
    assert (
        "--vision: images have no last positions, so modules of the vision part take one code in place of a tail"
        in run.record().stages["quantize"].notes
    )
    api.validate(run.root, options=api.ValidateOptions(runtimes=("bf16", "reference")))


def test_card_and_record_say_so_and_there_is_no_graph(gemma: Run) -> None:
    card = (gemma.model / "README.md").read_text(encoding="utf-8")
    assert "**Modules that text does not reach** are in FP8 too, by the inputs that they had of images: " in card
    assert "What else is in\n`model.vision_tower`, `model.multi_modal_projector` stays as it was, in BF16." in card
    reason = "--vision quantizes what text does not reach, and graphs take text alone"
    assert gemma.without_graph() == reason
    with pytest.raises(NoGraphError, match=reason):
        api.export(gemma.root)


@pytest.mark.parametrize(
    "command",
    [("inspect",), ("report",), ("sensitivity", "--windows", "2"), ("doctor",)],
    ids=lambda c: c[0],
)
def test_other_commands_take_such_a_run(
    command: tuple[str, ...], gemma: Run, fp8q: Callable[..., Result], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(gemma.root, tmp_path / "run"))
    done = fp8q(command[0], root, *command[1:])
    assert done.code == 0, done


def test_pairs_take_such_a_checkpoint(gemma: Run, fp8q: Callable[..., Result], tmp_path: Path) -> None:
    source = source_path(gemma)
    data = ("--data", source.parent / "text.txt", "--out", tmp_path / "pair")
    done = fp8q("compare", source, "--model", gemma.model, *data)
    assert done.code in (0, 3), done  # 3: random weights, and what the lint says of a tower's names
    assert (tmp_path / "pair" / "report.html").is_file()


def test_losses_of_text_leave_them_out(gemma: Run, tmp_path: Path) -> None:
    """Text says nothing of what they cost."""
    run = Run(Path(shutil.copytree(gemma.root, tmp_path / "run")))
    found = api.sensitivity(run.root, options=api.SensitivityOptions(windows=2, measure=0))
    assert {loss.module.split(".layers.")[0] for loss in found.modules} == {"model.language_model"}
    before = load_scales(run)
    api.scales(run.root, options=api.RescaleOptions(bf16_weights=0.1))
    after = load_scales(run)
    assert len(after.of_text.weights) < len(before.of_text.weights)
    assert len(after.weights) - len(after.of_text.weights) == len(before.weights) - len(before.of_text.weights)
    with pytest.raises(InputError) as refused:
        api.distill(run.root, str(source_path(run).parent / "text.txt"))
    assert str(refused.value) == (
        f"{run.root}: has modules in FP8 by --vision, and what is learned from text would leave them rounded to "
        f"nearest; `fp8q scales {run.root} --vision ''` keeps them in BF16"
    )


def refused(folders: Path, out: Path, data: str = "mixed.jsonl", **changes: Any) -> str:
    """The error of a call that leaves nothing."""
    with pytest.raises(InputError) as error:
        calibrated(folders, out, data, **changes)
    assert not out.exists()
    return str(error.value)


def test_what_does_not_fit_is_refused_first(folders: Path, demo_checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert refused(folders, out, "plain.jsonl") == (
        "--vision *: takes the inputs of rows with images, and --data has none; give chats with images too, with "
        "--chat-template, or leave it out"
    )
    assert refused(folders, out, vision=("model.language_model.*",)).startswith(
        "--vision model.language_model.*: matches no module that text does not reach; one is model."
    )
    assert refused(folders, out, weight_rounding="sequential") == (
        "--weight-rounding sequential: rounds decoder layers one after the other, and --vision * names other modules; "
        "give --weight-rounding gptq or nearest, or leave --vision out"
    )
    blind = Path(shutil.copytree(demo_checkpoint, tmp_path / "blind"))
    assert refused(folders, out, "text.txt", config=str(blind)) == (
        "--vision *: LlamaForCausalLM has no part that text does not reach; leave it out"
    )


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("--only", {"only": ("*.vision_tower.*",)}),
        ("--skip", {"skip": ("*.vision_tower.*",)}),
        ("--form", {"form": ("*.vision_tower.*=two",)}),
    ],
)
def test_other_patterns_that_name_them_alone_say_what_does(
    written: str, options: dict[str, Any], folders: Path
) -> None:
    source = open_source(str(folders / "Gemma3Config"), fingerprinted=False)
    with pytest.raises(InputError) as error:
        sources.gemms_of(source, ScaleOptions(**options))
    assert str(error.value).startswith(f"{written} *.vision_tower.*")
    assert ": matches only modules that text does not reach, such as model.vision_tower." in str(error.value)
    assert str(error.value).endswith(
        ", and they stay in BF16; name them by --vision too, which takes rows with images, or leave it out"
    )
