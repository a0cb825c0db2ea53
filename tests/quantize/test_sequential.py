"""Rounding layer by layer: the target it rounds to, that both models are what they claim to be, and what it refuses."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8q import api
from fp8q.calibrate.measure.observe import probe_groups
from fp8q.calibrate.model.products import observed_products, output_axis
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.calibrate.ranks.place import Place
from fp8q.calibrate.ranks.world import World
from fp8q.errors import InputError
from fp8q.options import CalibrateOptions, ExportOptions, RescaleOptions, ScaleOptions
from fp8q.quantize.residual import bases
from fp8q.quantize.rounded import Rounded
from fp8q.quantize.scales import Scales, TensorScale, load_scales
from fp8q.quantize.sequential import ProductInput, Sequence, check_sequential, exact_input, product_input
from fp8q.quantize.target import RIDGES, Sums, regression, target
from fp8q.quantize.weight_rounding import compensation
from fp8q.quantize.weights import QuantizedWeight, quantize_weight
from fp8q.reporter import SILENT
from fp8q.run import Run
from fp8q.stages.ahead import check_calibrate
from fp8q.stages.choosing import quantize, rescaled
from fp8q.stages.corpora import save_tokens
from fp8q.stages.measuring import check_batches, measure
from fp8q.stages.sources import products_of
from fp8q.stages.steps import Notes

SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SMALL | {"num_key_value_heads": 1}),
    "gemma2, whose layers end in norms": ("Gemma2Config", SMALL | {"num_key_value_heads": 1, "head_dim": 16}),
    "gpt2, whose weights lie the other way": (
        "GPT2Config",
        {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    ),
    "opt": ("OPTConfig", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
}
#: The last batch is smaller than the others.
BATCHES = {
    batch: np.random.default_rng(batch).integers(3, 500, shape)
    for batch, shape in enumerate([(2, 24), (2, 24), (1, 24)])
}
SCALE = TensorScale(method="amax", amax=4.0, clip=448 / 64, scale=2.0**-6, saturation=0, underflow=0, sqnr_db=30)


@pytest.fixture
def tiny(tmp_path: Path, demo_checkpoint: Path) -> Callable[..., Source]:
    """`tiny("OPTConfig", {…})`: a small random checkpoint of that configuration, opened."""

    def make(config: str, fields: dict[str, Any]) -> Source:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        path = tmp_path / "model"
        torch.nn.Module.to(model, torch.bfloat16).save_pretrained(path)
        shutil.copyfile(demo_checkpoint / "tokenizer.json", path / "tokenizer.json")
        return open_source(str(path))

    return make


def rounded(source: Source, folder: Path, seen: ProductInput) -> tuple[PreTrainedModel, Sequence, Rounded]:
    """The float model in FP32, and every product of its layers rounded."""
    folder.mkdir()
    model = load_model(source, torch.float32, "cpu")
    scales = Scales(weights={}, activations=dict.fromkeys(observed_products(model), SCALE), skipped={})
    sequence = Sequence(source, scales, "mse", BATCHES, folder, seen=seen)
    return model, sequence, sequence.run(SILENT)


def weight_of(module: torch.nn.Module) -> torch.Tensor:
    """The weight of a product, in BF16 as it is stored."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach().to(torch.bfloat16)


def leaving(model: PreTrainedModel, sequence: Sequence) -> dict[int, torch.Tensor]:
    """What leaves the last layer of a model in memory, for each batch."""
    found: list[torch.Tensor] = []
    last = sequence.layers.of(model)[-1]
    handle = last.register_forward_hook(lambda m, i, out: found.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        for ids in BATCHES.values():
            model.base_model(input_ids=torch.from_numpy(ids))
    handle.remove()
    return dict(zip(BATCHES, found, strict=True))


def test_what_two_terms_leave_of_an_input_is_all_of_it() -> None:
    x = torch.tensor([3.140625, -0.0712890625, 27.5, 2.0**-10])  # of BF16's eight digits
    scale = {"method": "amax", "amax": 27.5, "clip": 28.0, "scale": 2.0**-4, "saturation": 0, "underflow": 0}
    two, one = (
        product_input(x, TensorScale.model_validate(scale | {"terms": terms, "sqnr_db": None})) for terms in (2, 1)
    )
    assert two.tolist() == x.tolist()
    assert one.tolist() == [3.25, -0.0703125, 28.0, 2.0**-10]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("seen", [exact_input, product_input])
def test_what_leaves_the_last_layer_is_that_of_both_models_in_memory(
    name: str, seen: ProductInput, tiny: Callable[..., Source], tmp_path: Path
) -> None:
    """The oracle runs whole models; the quantized one has the weights that were kept, and rounds its inputs."""
    model, sequence, kept = rounded(tiny(*ARCHITECTURES[name]), tmp_path / "work", seen)
    for batch, hidden in leaving(model, sequence).items():
        torch.testing.assert_close(sequence.float[0].read(batch, "cpu"), hidden, rtol=1e-5, atol=1e-5)
    products = observed_products(model)
    inside = [module for module in products if sequence.layers.index(module) is not None]
    for module in inside:
        made = kept.of(module)
        assert made is not None
        weight = (made[0].float() * made[1][:, None]).movedim(0, output_axis(products[module])).contiguous()
        products[module].weight = torch.nn.Parameter(weight, requires_grad=False)
        products[module].register_forward_pre_hook(lambda m, inputs: (seen(inputs[0], SCALE), *inputs[1:]))
    for batch, hidden in leaving(model, sequence).items():
        torch.testing.assert_close(sequence.quantized[0].read(batch, "cpu"), hidden, rtol=1e-4, atol=1e-4)


def test_the_first_group_is_rounded_as_gptq_rounds_it_and_the_last_to_another_weight(
    tiny: Callable[..., Source], tmp_path: Path
) -> None:
    """Nothing was lost before the first product, so its drift is zero to the bit; before the last one something was."""
    model, _, kept = rounded(tiny(*ARCHITECTURES["llama"]), tmp_path / "work", exact_input)
    products = observed_products(model)
    first, last = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    for name, equal in ((first, True), (last, False)):
        inputs: list[torch.Tensor] = []
        handle = products[name].register_forward_pre_hook(lambda m, given, into=inputs: into.append(given[0]))
        with torch.inference_mode():
            for ids in BATCHES.values():
                model.base_model(input_ids=torch.from_numpy(ids))
        handle.remove()
        weight = weight_of(products[name])
        moments = torch.zeros(weight.shape[1], weight.shape[1])
        for x in inputs:
            moments += x.flatten(0, 1).T @ x.flatten(0, 1)
        expected = quantize_weight(weight, "mse", compensation(moments))
        made = kept.of(name)
        assert isinstance(expected, QuantizedWeight)
        assert made is not None
        assert torch.equal(made[0].view(torch.uint8), expected.codes.view(torch.uint8)) is equal


def halves(tokens: torch.Tensor, drift: torch.Tensor, residue: torch.Tensor | None = None) -> tuple[Sums, Sums]:
    """Sums of the even and of the odd of `tokens` [tokens, in]."""
    made = tuple(Sums(tokens.shape[1], None if residue is None else residue.shape[1]) for _ in range(2))
    for half, sums in enumerate(made):
        sums.add(tokens[half::2], drift[half::2], (drift if residue is None else residue)[half::2])
    return made[0], made[1]


@pytest.mark.parametrize("seed", range(3))
def test_the_target_is_the_ridge_regression_of_the_float_outputs(seed: int) -> None:
    """Least squares in float64 on the inputs themselves, with √λ rows for λ, where what was lost follows from the
    inputs, so that λ is the weakest.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 12, generator=generator) @ torch.randn(12, 12, generator=generator)
    got, weight = 0.8 * x, torch.randn(5, 12, generator=generator)
    mean = float((got.T @ got).diagonal().double().mean())
    ridge = (RIDGES[-1] * mean) ** 0.5 * torch.eye(12, dtype=torch.float64)
    rows = torch.cat([got.double(), ridge])
    lost = got @ torch.randn(12, 5, generator=generator)
    wanted = torch.cat([x.double() @ weight.double().T + lost.double(), ridge @ weight.double().T])
    expected = torch.linalg.lstsq(rows, wanted).solution.T
    found = target(weight, *halves(got, x - got, lost))
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)


def test_what_is_lost_by_chance_alone_is_not_made_up_for() -> None:
    """Two tokens of a half say that 1 is lost for each, and two of the other that it is -1."""
    tokens, lost = torch.ones(4, 1), torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    weight = torch.tensor([[10.0]])
    assert target(weight, *halves(tokens, torch.zeros(4, 1), lost)).tolist() == [[10.0]]
    assert float(target(weight, *halves(tokens, torch.zeros(4, 1), lost.abs()))) == pytest.approx(10 + 4 / 4.04)


def test_lambda_is_what_is_best_on_the_other_half_worked_by_hand() -> None:
    """One half says that 6 is lost where the input is 2: alone it gives 12 / (4 + λ) with λ of 8 · (4, 1, ¼ …). The
    other says 4, and so wants 8 / 4 = 2, which λ = 2 gives. Both together give 20 / (8 + 2).
    """
    first, second = halves(torch.tensor([[2.0], [2.0]]), torch.zeros(2, 1), torch.tensor([[6.0], [4.0]]))
    assert float(regression(first.moments, 2.0, first.lost(torch.zeros(1, 1)))) == pytest.approx(2, rel=1e-6)
    assert float(target(torch.tensor([[10.0]]), first, second)) == pytest.approx(12, rel=1e-6)


def test_a_weight_makes_up_for_what_the_layer_before_lost_worked_by_hand() -> None:
    """Two tokens, each 3 in the float model and 2 in the quantized one: H = 8, λ = 0.08, D = 2·(3-2)·2 = 4, and w* is
    w (1 + 4 / 8.08).
    """
    found = target(torch.tensor([[10.0]]), *halves(torch.full((2, 1), 2.0), torch.ones(2, 1)))
    assert float(found) == pytest.approx(10 * (1 + 4 / 8.08), rel=1e-6)


def test_a_product_makes_up_for_what_it_is_added_to_worked_by_hand() -> None:
    """Both models give it 2, twice, and it is added to 7 in one and to 6 in the other: H = 8, λ = 0.08, M = 2·1·2 = 4,
    so that w* = w + 4 / 8.08.
    """
    found = target(
        torch.tensor([[10.0]]), *halves(torch.full((2, 1), 2.0), torch.zeros(2, 1), torch.tensor([[1.0], [1.0]]))
    )
    assert float(found) == pytest.approx(10 + 4 / 8.08, rel=1e-6)


def test_one_batch_alone_has_nothing_to_choose_lambda_on_and_the_weight_stays() -> None:
    learned, none = Sums(1), Sums(1)
    learned.add(torch.tensor([[2.0]]), torch.tensor([[1.0]]), torch.zeros(1, 1))
    assert target(torch.tensor([[10.0]]), learned, none).tolist() == [[10.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"self_attn.o_proj": "", "mlp.down_proj": "post_attention_layernorm"}),
        ("opt", {"self_attn.out_proj": "", "fc2": "final_layer_norm"}),
        ("gpt2, whose weights lie the other way", {"attn.c_proj": "", "mlp.c_proj": "ln_2"}),
        ("gemma2, whose layers end in norms", {}),
    ],
)
def test_what_a_product_is_added_to_is_found_in_the_layer(
    name: str, expected: dict[str, str], tiny: Callable[..., Source]
) -> None:
    model = load_model(tiny(*ARCHITECTURES[name]), torch.float32, "cpu")
    prefix, layers = next(
        (name, list(module.children()))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
    )
    products = {name: module for name, module in observed_products(model).items() if name.startswith(f"{prefix}.0.")}
    entering: list[torch.Tensor] = []

    def see(module: torch.nn.Module, args: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor]) -> None:
        entering.append(args[0] if args else given["hidden_states"])

    def whole() -> torch.Tensor:
        left: list[torch.Tensor] = []
        handle = layers[0].register_forward_hook(
            lambda m, i, out: left.append(out[0] if isinstance(out, tuple) else out)
        )
        model.base_model(input_ids=torch.from_numpy(BATCHES[0]))
        handle.remove()
        return left[0]

    handle = layers[0].register_forward_pre_hook(see, with_kwargs=True)
    with torch.inference_mode():
        whole()
        handle.remove()
        found = bases(model, layers[0], products, entering[0], whole)
    short = {module.removeprefix(f"{prefix}.0."): base.removeprefix(f"{prefix}.0.") for module, base in found.items()}
    assert short == expected


def test_the_float_outputs_are_closer_than_with_the_moments_of_the_float_model(
    tiny: Callable[..., Source], tmp_path: Path
) -> None:
    """What the second layer is for: against `gptq` of every product on its float input."""
    source = tiny(*ARCHITECTURES["llama"])
    model, sequence, _ = rounded(source, tmp_path / "work", exact_input)
    exact = leaving(model, sequence)
    products = observed_products(model)
    moments: dict[str, torch.Tensor] = {}

    def see(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            x = given[0].flatten(0, 1)
            moments[name] = moments.get(name, torch.zeros(())) + x.T @ x

        return hook

    handles = [products[first].register_forward_pre_hook(see(first)) for first in probe_groups(model, products)]
    leaving(model, sequence)
    for handle in handles:
        handle.remove()
    groups = {member: first for first, members in sequence.groups.items() for member in members}
    for name, module in products.items():
        made = quantize_weight(weight_of(module), "mse", compensation(moments[groups[name]]))
        assert isinstance(made, QuantizedWeight)
        module.weight.data = made.codes.float() * made.scale[:, None]
    gptq = leaving(model, sequence)
    lost = [
        sum(float((states[batch] - exact[batch]).square().sum()) for batch in BATCHES)
        for states in (gptq, {batch: sequence.quantized[0].read(batch, "cpu") for batch in BATCHES})
    ]
    assert lost[1] < 0.95 * lost[0]


@pytest.fixture(scope="module")
def measured(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the demo with nothing quantized yet, on two batches."""
    run, source = Run(tmp_path_factory.mktemp("measured") / "run"), open_source(str(demo_checkpoint))
    with run.stage("corpus", {}, {"data": "random tokens"}) as log:
        save_tokens(run.calibration, np.random.default_rng(0).integers(3, 500, (3, 24)))
        log.outputs.append(run.calibration)
    measure(run, source, CalibrateOptions(batch_size=2), Notes(SILENT))
    return run


def quantized(run: Run, checkpoint: Path, **options: Any) -> dict[str, bytes]:
    """What the stage `quantize` writes of `run`: the checkpoint's files, and the decisions."""
    source = open_source(str(checkpoint))
    chosen = ScaleOptions(only=("*.o_proj",), weight_rounding="sequential", **options)
    quantize(run, source, products_of(source), chosen, Notes(SILENT))
    assert not any(path.name.endswith(".work") for path in run.root.iterdir())
    return {path.name: path.read_bytes() for path in [run.scales, *sorted(run.model.iterdir())]}


@pytest.fixture(scope="module")
def uninterrupted(measured: Run, demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    root = shutil.copytree(measured.root, tmp_path_factory.mktemp("whole") / "run")
    return quantized(Run(root), demo_checkpoint)


def test_the_checkpoint_has_it_and_scales_cannot_choose_again(
    measured: Run, demo_checkpoint: Path, tmp_path: Path
) -> None:
    run, options = Run(shutil.copytree(measured.root, tmp_path / "run")), CalibrateOptions(weight_rounding="sequential")
    check_calibrate(open_source(str(demo_checkpoint)), options, ExportOptions())
    quantized(run, demo_checkpoint)
    scales = load_scales(run)
    assert list(scales.weights) == [f"model.layers.{layer}.self_attn.o_proj" for layer in range(4)]
    assert {weight.rounding for weight in scales.weights.values()} == {"sequential"}
    assert not run.moments.exists()
    before = run.record().stages["quantize"]
    assert "calibration.npz" in before.inputs
    quantized(run, demo_checkpoint)
    assert run.record().stages["quantize"] == before
    with pytest.raises(InputError) as refused:
        rescaled(run, RescaleOptions(kv_cache="fp8"))
    assert str(refused.value) == (
        "--weight-rounding sequential: runs the model, and scales are chosen again without it; use `fp8q calibrate` "
        "with the options of the run and those that are to change"
    )
    assert rescaled(run, RescaleOptions(weight_rounding="nearest")).weight_rounding == "nearest"


class Killed(BaseException):
    """Stands for SIGKILL where the test must go on: like it, nothing of ours catches it."""


@pytest.fixture
def layers_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that are rounded, as they begin."""
    begun: list[int] = []
    layer = Sequence._layer

    def counted(self: Sequence, index: int, calls: Any) -> None:
        begun.append(index)
        layer(self, index, calls)

    monkeypatch.setattr(Sequence, "_layer", counted)
    return begun


@pytest.mark.parametrize("at", [0, 3, 6])
def test_stopped_anywhere_it_goes_on_at_the_layer_it_was_in(
    at: int, measured: Run, uninterrupted: dict[str, bytes], demo_checkpoint: Path, layers_run: list[int],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Step 1 is the embedding, 2 to 5 are the demo's layers: 3 stops when all of the second is written but not yet said
    to be. 0 stops at the first layer's first product, 6 while the checkpoint is written.
    """
    run, end = Run(shutil.copytree(measured.root, tmp_path / "run")), Rounded.end

    def stopped(*arguments: Any, **named: Any) -> None:
        raise Killed

    def stopping(self: Rounded, step: int) -> None:
        if step == at:
            raise Killed
        end(self, step)

    with monkeypatch.context() as once:
        if at in (0, 6):
            once.setattr("fp8q.quantize." + ("checkpoint.quantize_checkpoint" if at else "sequential.target"), stopped)
        once.setattr(Rounded, "end", stopping)
        with pytest.raises(Killed):
            quantized(run, demo_checkpoint)
    assert (run.root / ".quantize.work").is_dir()
    assert not run.scales.exists()
    layers_run.clear()
    assert quantized(run, demo_checkpoint) == uninterrupted
    assert layers_run == list(range(max(at - 2, 0), 4))
    assert run.record().stages["quantize"].notes == (
        [f"going on at decoder layer {at - 1} of 4, where an earlier call stopped"] if at == 3 else []
    )


def test_what_was_left_by_other_options_is_rounded_anew(
    measured: Run, uninterrupted: dict[str, bytes], demo_checkpoint: Path, layers_run: list[int], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def stopped(*arguments: Any) -> None:
        raise Killed

    run = Run(shutil.copytree(measured.root, tmp_path / "run"))
    with monkeypatch.context() as once:
        once.setattr("fp8q.quantize.checkpoint.quantize_checkpoint", stopped)
        with pytest.raises(Killed):
            quantized(run, demo_checkpoint, weight_method="amax")
    layers_run.clear()
    assert quantized(run, demo_checkpoint) == uninterrupted
    assert layers_run == [0, 1, 2, 3]


CHILD = """
import os, signal, sys
from pathlib import Path
from fp8q.calibrate.model.source import open_source
from fp8q.options import ScaleOptions
from fp8q.quantize.rounded import Rounded
from fp8q.reporter import SILENT
from fp8q.run import Run
from fp8q.stages.ahead import check_calibrate
from fp8q.stages.choosing import quantize
from fp8q.stages.sources import products_of
from fp8q.stages.steps import Notes
import torch
torch.set_num_threads(int(sys.argv[3]))
add = Rounded.add
def adding(self, module, made):
    add(self, module, made)
    if module == "model.layers.1.self_attn.o_proj":
        os.kill(os.getpid(), signal.SIGKILL)
Rounded.add = adding
source = open_source(sys.argv[2])
options = ScaleOptions(only=("*.o_proj",), weight_rounding="sequential")
quantize(Run(Path(sys.argv[1])), source, products_of(source), options, Notes(SILENT))
"""


def test_killed_in_the_second_layer_the_next_call_gives_the_same_bytes(
    measured: Run, uninterrupted: dict[str, bytes], demo_checkpoint: Path, layers_run: list[int], tmp_path: Path
) -> None:
    run = Run(shutil.copytree(measured.root, tmp_path / "run"))
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(run.root), str(demo_checkpoint)]
    killed = subprocess.run([*command, str(torch.get_num_threads())], check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL
    assert quantized(run, demo_checkpoint) == uninterrupted
    assert layers_run == [1, 2, 3]


@pytest.mark.parametrize(("ranks", "batches", "how"), [(2, None, "2 ranks"), (1, (0, 2), "--batches")])
def test_it_is_refused_in_parts(ranks: int, batches: tuple[int, int] | None, how: str) -> None:
    with pytest.raises(InputError) as refused:
        check_batches(CalibrateOptions(weight_rounding="sequential", batches=batches), 99, World(Place(0, ranks)))
    assert str(refused.value) == (
        "--weight-rounding sequential: runs all batches through one layer after the other, in one process; use `fp8q "
        f"calibrate` without {how}, or leave it out"
    )


def test_merging_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        api.merge([tmp_path / "one"], tmp_path / "out", options=ScaleOptions(weight_rounding="sequential"))
    assert str(refused.value) == (
        "--weight-rounding sequential: runs the model; use `fp8q calibrate` on all of the text in one run, or leave it "
        "out"
    )


def test_a_model_without_a_list_of_layers_is_refused_by_name(
    tiny: Callable[..., Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, init = tiny(*ARCHITECTURES["llama"]), transformers.LlamaModel.__init__

    def nameless(self: Any, config: Any) -> None:
        init(self, config)
        self.layers = torch.nn.Sequential(*self.layers)

    monkeypatch.setattr(transformers.LlamaModel, "__init__", nameless)
    with pytest.raises(InputError) as refused:
        check_sequential(source, "cpu")
    assert str(refused.value) == (
        f"{source.name}: LlamaForCausalLM has no list of 2 decoder layers, so it cannot be rounded layer by layer; use "
        "--weight-rounding gptq"
    )
