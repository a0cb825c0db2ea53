"""Experts that are modules of their own: the same model, by whatever names the files have for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gpu.waits import host_waits
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from fp8q.calibrate.model.bf16_gemms import gemms_in_fp32
from fp8q.calibrate.model.classes import auto_class
from fp8q.calibrate.model.expert_modules import (
    AlternatingExpert,
    Expert,
    Experts,
    ExpertsOfScaledInputs,
    ExpertWithoutGate,
    ExpertWithOwnGate,
    ScaledInputExpert,
    computes_the_same,
    experts_of,
    routes,
    show_tokens,
)
from fp8q.calibrate.model.materialize import Materializer
from fp8q.calibrate.model.source import load_model, meta_model, open_source
from fp8q.core.errors import InputError
from fp8q.stages.shared.sources import gemms_of

from ...mixtures import (
    ALTERNATING,
    MIXTURES,
    SCALED_INPUTS,
    WITH_OWN_GATE,
    WITHOUT_GATE,
    random_mixture,
    random_of,
)
from ...noise import SAME_CODES, largest_noise
from ...published import ERNIE, MINIMAX, STEP, random_class
from .damage import refusal, rewrite


def transformers_own(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers loads it, its experts fused, computed as their class says."""
    kind = auto_class(transformers.AutoConfig.from_pretrained(path))
    model: PreTrainedModel = kind.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of transformers' own model too by the arithmetic that fp8q has on this processor."""
    ids = torch.randint(0, 2048, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), gemms_in_fp32():
        made: torch.Tensor = model(ids).logits
    return made


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("original", [True, False], ids=["an expert a tensor", "fused"])
def test_logits_are_those_of_transformers(name: str, original: bool, tmp_path: Path) -> None:
    path = random_mixture(tmp_path / name, name, save_original_format=original)
    source = open_source(str(path))
    assert not bool(source.parts) or not original
    check_logits(load_model(source, torch.float32), load_model(source, torch.bfloat16), path)


@pytest.mark.parametrize(
    ("mixture", "form"),
    [
        (WITHOUT_GATE, ExpertWithoutGate),
        (WITH_OWN_GATE, ExpertWithOwnGate),
        (ALTERNATING, AlternatingExpert),
        (SCALED_INPUTS, ScaledInputExpert),
    ],
)
def test_other_forms_compute_what_transformers_does(
    mixture: tuple[str, dict[str, Any]], form: type[Expert], tmp_path: Path
) -> None:
    """Nemotron 3's experts have no gate, MiniMax-M3's limit it, gpt_oss's have biases too, Llama 4's scaled inputs."""
    path = random_of(tmp_path / "model", *mixture)
    source = open_source(str(path))
    fp32 = load_model(source, torch.float32)
    assert {experts.form for experts in experts_of(fp32).values()} == {form}
    check_logits(fp32, load_model(source, torch.bfloat16), path)


def test_a_limit_on_the_gates_of_one_layer_is_of_that_layer_alone(tmp_path: Path) -> None:
    """The class was tried once, on the experts of its first layer: those of the last lost their limit."""
    path = random_class(tmp_path / "model", *STEP)
    source = open_source(str(path))
    fp32 = load_model(source, torch.float32)
    assert [experts.form for experts in experts_of(fp32).values()] == [Expert, ExpertWithOwnGate]
    check_logits(fp32, load_model(source, torch.bfloat16), path)
    limited = fp32.get_submodule("model.language_model.layers.1.mlp.experts.0").act_fn.__self__  # type: ignore[union-attr]
    before = logits(fp32)
    limited.limit = float("inf")  # type: ignore[union-attr]
    assert (logits(fp32) - before).abs().max() > SAME_CODES


def test_stacks_that_hold_gate_and_up_apart_are_cut_into_experts(tmp_path: Path) -> None:
    """By hand: `moe.gate_proj.weight` is [experts, inner, width], and no half of it is an up projection."""
    path = random_class(tmp_path / "model", *STEP)
    source = open_source(str(path))
    weights = source.weights()
    with safe_open(path / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    for gemm in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.3.{gemm}.weight"
        assert torch.equal(weights.tensor(name), stored[f"model.layers.1.moe.{gemm}.weight"][3])
        assert source.stored(f"model.language_model.layers.1.mlp.experts.3.{gemm}.weight") == name
    assert not any(".moe." in name and name.endswith("_proj.weight") for name in weights.names())
    assert source.stored("model.language_model.layers.1.mlp.gate.weight") == "model.layers.1.moe.gate.weight"


def test_a_stack_that_is_missing_is_named_by_its_experts(tmp_path: Path) -> None:
    path = random_class(tmp_path / "model", *STEP)
    rewrite(path, lambda tensors: tensors.pop("model.layers.1.moe.up_proj.weight"))
    assert refusal(path).startswith(
        f"{path}: the weights are not those of this Step3p7ForConditionalGeneration: "
        "model.language_model.layers.1.mlp.experts.0.up_proj.weight is missing (and "
    )


def test_gate_and_up_that_transformers_joins_are_one_weight(tmp_path: Path) -> None:
    """By hand: the gate's rows, then those of up, under the names of the file."""
    path = random_class(tmp_path / "model", *MINIMAX)
    source = open_source(str(path))
    weights = source.weights()
    shared = "language_model.model.layers.1.block_sparse_moe.shared_experts"
    with safe_open(path / "model.safetensors", "pt") as file:
        gate, up = (file.get_tensor(f"{shared}.{gemm}.weight") for gemm in ("gate_proj", "up_proj"))
    joined = f"{shared}.gate_up_proj.weight"
    assert source.stored("model.language_model.layers.1.mlp.shared_experts.gate_up_proj.weight") == joined
    assert torch.equal(weights.tensor(joined), torch.cat([gate, up]))
    assert (weights.shape(joined), weights.dtype(joined)) == ((2 * len(gate), gate.shape[1]), "BF16")
    assert not weights.coded(joined)
    assert f"{shared}.up_proj.weight" not in weights.names()
    check_logits(load_model(source, torch.float32), load_model(source, torch.bfloat16), path)


def test_experts_of_two_modules_are_found_in_one_list(tmp_path: Path) -> None:
    """ERNIE 4.5 VL's files number those of images behind those of text; its routers lie turned in the files."""
    path = random_class(tmp_path / "model", *ERNIE)
    source = open_source(str(path))
    ours, theirs = load_model(source, torch.float32), transformers_own(path, torch.float32)
    layer = "model.language_model.layers.1.mlp"
    count = len(experts_of(ours)[f"{layer}.vision_moe.experts"].experts)
    assert source.stored(f"{layer}.text_moe.experts.1.up_proj.weight") == (
        "model.layers.1.mlp.experts.1.up_proj.weight"
    )
    assert source.stored(f"{layer}.vision_moe.experts.1.up_proj.weight") == (
        f"model.layers.1.mlp.experts.{count + 1}.up_proj.weight"
    )
    check_logits(ours, load_model(source, torch.bfloat16), path)
    images = torch.tensor([[0, 1, 1, 0] * 6])
    ids = torch.arange(3, 27)[None]
    with torch.inference_mode():
        outputs = [
            model.model.language_model(input_ids=ids, moe_mm_token_type_ids=images)[0] for model in (ours, theirs)
        ]
        text = ours.model.language_model(input_ids=ids)[0]
    torch.testing.assert_close(*outputs, rtol=0, atol=SAME_CODES)
    assert (outputs[0] - text).abs().max() > SAME_CODES


def test_what_transformers_turns_and_cuts_is_read_a_module_at_a_time(tmp_path: Path) -> None:
    path = random_class(tmp_path / "model", *ERNIE)
    source = open_source(str(path))
    whole = load_model(source, torch.bfloat16)
    block = "model.language_model.layers.1.mlp"
    names = [f"{block}.{kind}_moe.{end}" for kind in ("text", "vision") for end in ("gate", "gate.moe_statics")]
    materializer = Materializer(meta_model(source), source, "cpu")
    with materializer.filled(names):
        for name in names:
            for key, held in materializer.model.get_submodule(name).named_parameters(recurse=False):
                expected = whole.get_submodule(name).get_parameter(key)
                assert (held.dtype, expected.dtype) == (torch.float32, torch.float32)
                assert torch.equal(held, expected), f"{name}.{key}"


@pytest.mark.parametrize("mixture", [STEP, ERNIE], ids=["Step 3.7", "ERNIE 4.5 VL"])
def test_stacks_of_published_classes_get_the_names_that_files_have(
    mixture: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    apart, fused = (
        open_source(str(random_class(tmp_path / str(original), *mixture, original))) for original in (True, False)
    )
    assert fused.parts
    mine, theirs = fused.weights(), apart.weights()
    experts = {stored for stored in theirs.names() if ".experts." in stored}
    assert experts
    assert experts == {stored for stored in mine.names() if ".experts." in stored}
    assert all(torch.equal(mine.tensor(stored), theirs.tensor(stored)) for stored in experts)


@pytest.mark.parametrize("change", [lambda tensor: tensor[:, :40].clone(), lambda tensor: tensor[0].clone()])
def test_matrices_that_make_no_weight_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    path = random_class(tmp_path / "model", *MINIMAX)
    up = "language_model.model.layers.1.block_sparse_moe.shared_experts.up_proj.weight"
    rewrite(path, lambda tensors: tensors.update({up: change(tensors[up])}))
    assert "MiniMaxM3SparseForConditionalGeneration" in refusal(path)


def test_matrices_of_two_types_are_not_joined(tmp_path: Path) -> None:
    path = random_class(tmp_path / "model", *MINIMAX)

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("shared_experts.up_proj.weight")]:
            tensors[name] = tensors[name].half()

    rewrite(path, halve)
    with pytest.raises(InputError) as refused:
        gemms_of(open_source(str(path)))
    assert "stores no model.language_model.layers.0.mlp.shared_experts.gate_up_proj.weight" in str(refused.value)


def check_logits(fp32: PreTrainedModel, bf16: PreTrainedModel, path: Path) -> None:
    """Not bit for bit: transformers multiplies by gate and up at once, and MKL for AVX2 adds in another order then."""
    exact, rounded = (logits(transformers_own(path, dtype)) for dtype in (torch.float32, torch.bfloat16))
    torch.testing.assert_close(logits(fp32), exact, rtol=0, atol=SAME_CODES)
    difference = logits(bf16).float().log_softmax(-1) - rounded.float().log_softmax(-1)
    assert difference.abs().max() <= largest_noise(rounded, exact)


def test_the_trained_mixtral_is_the_same(shared_checkpoint: Callable[[str], Path]) -> None:
    path = shared_checkpoint("mixtral")
    fp32, ours = (load_model(open_source(str(path)), dtype) for dtype in (torch.float32, torch.bfloat16))
    check_logits(fp32, ours, path)
    names = [name for name, module in ours.named_modules() if isinstance(module, nn.Linear) and ".0.mlp." in name]
    assert names == [
        f"model.layers.0.mlp.experts.{expert}.{part}_proj" for expert in range(4) for part in ("gate", "up", "down")
    ]


def test_experts_have_the_names_of_their_files(shared_checkpoint: Callable[[str], Path]) -> None:
    source = open_source(str(shared_checkpoint("mixtral")))
    ours = "model.layers.3.mlp.experts.2"
    theirs = "model.layers.3.block_sparse_moe.experts.2"
    assert [source.stored(f"{ours}.{part}_proj.weight") for part in ("gate", "up", "down")] == [
        f"{theirs}.{part}.weight" for part in ("w1", "w3", "w2")
    ]
    assert source.stored("model.layers.3.mlp.gate.weight") == "model.layers.3.block_sparse_moe.gate.weight"


def test_fused_experts_get_the_names_that_files_had(tmp_path: Path) -> None:
    apart, fused = (
        open_source(str(random_mixture(tmp_path / str(kept), "mixtral", save_original_format=kept)))
        for kept in (True, False)
    )
    assert fused.parts
    assert not apart.parts
    mine, theirs = fused.weights(), apart.weights()
    assert set(mine.names()) == set(theirs.names())
    for name in mine.names():
        assert (mine.shape(name), mine.dtype(name)) == (theirs.shape(name), theirs.dtype(name))
        assert torch.equal(mine.tensor(name), theirs.tensor(name))
    assert fused.renamed == apart.renamed


def test_a_part_of_a_fused_tensor_is_a_view_of_the_file(tmp_path: Path) -> None:
    path = random_mixture(tmp_path / "fused", "qwen3_moe", save_original_format=False)
    weights = open_source(str(path)).weights()
    part = weights.tensor("model.layers.1.mlp.experts.2.up_proj.weight")
    with safe_open(path / "model.safetensors", "pt") as file:
        fused = file.get_tensor("model.layers.1.mlp.experts.gate_up_proj")
    assert part.untyped_storage().nbytes() == fused.untyped_storage().nbytes() > part.nbytes
    assert torch.equal(part, fused[2, fused.shape[1] // 2 :])


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    path = random_mixture(tmp_path / "mixtral", "mixtral")
    rewrite(path, lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"))
    assert refusal(path) == (
        f"{path}: the weights are not those of this MixtralForCausalLM: model.layers.1.mlp.experts.3.down_proj.weight "
        "is missing; copy or download the checkpoint again"
    )


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    path = random_mixture(tmp_path / "mixtral", "mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    rewrite(path, lambda tensors: tensors.update({name: tensors[name][:10]}))
    assert refusal(path) == (
        f"{path}: the weights are not those of this MixtralForCausalLM: model.layers.1.mlp.experts.3.gate_proj.weight "
        "has shape [10, 64] where the model has [96, 64]; copy or download the checkpoint again"
    )


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    path = random_mixture(tmp_path / "olmoe", "olmoe")
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name.format(9): tensors[name.format(0)].clone()}))
    assert refusal(path) == (
        f"{path}: the weights are not those of this OlmoeForCausalLM: {name.format(9)} is unknown to the model; copy "
        "or download the checkpoint again"
    )


def test_experts_of_one_layer_under_other_names_than_those_of_another(tmp_path: Path) -> None:
    path = random_mixture(tmp_path / "mixtral", "mixtral")
    start = "model.layers.1.block_sparse_moe.experts."

    def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(path, without_prefix)
    assert refusal(path) == (
        f"{path}: its files name layers.1.block_sparse_moe.experts.0.w1 in another way than "
        "model.layers.0.block_sparse_moe.experts.0.w1, and loaders find experts by one pattern of names; write the "
        "checkpoint again, as `save_pretrained` of transformers does"
    )


class Fused(nn.Module):
    """Two experts as transformers holds them; each method is a way to differ from the form that is taken."""

    def __init__(self, **more: nn.Parameter) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(2, 12, 8, device="meta"))
        self.down_proj = nn.Parameter(torch.empty(2, 8, 6, device="meta"))
        self.act_fn = nn.SiLU()
        self.num_experts = 2

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for expert, weight in zip(index[token], weights[token], strict=True):
                gate, up = self.split(self.gate_up_proj[expert] @ x[token])
                out[token] += weight * (self.down_proj[expert] @ (self.act_fn(gate) * up))
        return out

    def split(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = both.chunk(2)
        return gate, up


class Interleaved(Fused):
    def split(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return both[::2], both[1::2]


class Limited(Fused):
    def split(self, both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = both.clamp(-7, 7).chunk(2)
        return gate, up


class LimitedByFunction(Fused):
    """As MiniMax-M3 does, by the function that transformers calls too."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for token in range(len(x)):
            for expert, weight in zip(index[token], weights[token], strict=True):
                inner = self._apply_gate(self.gate_up_proj[expert] @ x[token])
                out[token] += weight * (self.down_proj[expert] @ inner)
        return out

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.clamp(-7, 7).chunk(2, dim=-1)
        return (up + 1) * gate


def test_the_parts_of_a_stack_whose_gate_and_up_take_turns(tmp_path: Path) -> None:
    """By hand: of [experts, in, 2 · inner] the even columns of an expert are its gate's rows, of biases the same."""
    path = random_of(tmp_path / "model", *ALTERNATING)
    weights = open_source(str(path)).weights()
    with safe_open(path / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    experts = "model.layers.1.mlp.experts"
    stack, biases = stored[f"{experts}.gate_up_proj"], stored[f"{experts}.gate_up_proj_bias"]
    for gemm, start in (("gate_proj", 0), ("up_proj", 1)):
        assert torch.equal(weights.tensor(f"{experts}.3.{gemm}.weight"), stack[3, :, start::2].T)
        assert torch.equal(weights.tensor(f"{experts}.3.{gemm}.bias"), biases[3, start::2])
        assert weights.shape(f"{experts}.3.{gemm}.weight") == (96, 64)
        assert weights.shape(f"{experts}.3.{gemm}.bias") == (96,)
    assert torch.equal(weights.tensor(f"{experts}.3.down_proj.weight"), stored[f"{experts}.down_proj"][3].T)
    assert torch.equal(weights.tensor(f"{experts}.3.down_proj.bias"), stored[f"{experts}.down_proj_bias"][3])
    assert not any(name.endswith(("gate_up_proj", "_bias")) for name in weights.names())


def test_a_class_is_taken_for_what_it_computes() -> None:
    assert computes_the_same(Fused(), Expert)
    assert not any(computes_the_same(Interleaved(), form) for form in (Expert, ScaledInputExpert))
    assert not computes_the_same(Limited(), Expert)
    assert computes_the_same(LimitedByFunction(), ExpertWithOwnGate)
    assert not computes_the_same(LimitedByFunction(), Expert)


def experts() -> Experts:
    torch.manual_seed(0)
    made = Experts(Expert(8, 6, nn.SiLU(), torch.empty(0)) for _ in range(3))
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


ROUTED = (torch.tensor([[0, 2], [0, 2]]), torch.tensor([[0.25, 0.75], [1.0, 0.0]]))


def test_experts_add_what_their_tokens_give() -> None:
    module, x = experts(), torch.randn(2, 8)
    by_hand = torch.stack([0.25 * module.experts[0](x)[0] + 0.75 * module.experts[2](x)[0], module.experts[0](x)[1]])
    assert torch.allclose(module(x, *ROUTED), by_hand, atol=1e-7)


def test_showing_every_expert_every_token_changes_no_output() -> None:
    module, x = experts(), torch.randn(2, 8)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for expert, tokens in zip(module.experts, seen.values(), strict=True):
        down = expert.get_submodule("down_proj")
        down.register_forward_pre_hook(lambda _, inputs, tokens=tokens: tokens.append(len(inputs[0])))
    routed = module(x, *ROUTED)
    assert seen == {0: [2], 1: [], 2: [2]}
    with show_tokens([module], "every"):
        assert torch.equal(module(x, *ROUTED), routed)
    assert seen == {0: [2, 2], 1: [2], 2: [2, 2]}
    assert module.shown == "routed"


def test_experts_of_scaled_inputs_read_what_is_not_zero() -> None:
    """Three tokens for each of three experts: expert 0 has token 1, expert 2 tokens 0 and 2; windows of one token."""
    torch.manual_seed(0)
    module = ExpertsOfScaledInputs(ScaledInputExpert(8, 6, nn.SiLU(), torch.empty(0)) for _ in range(3))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.zeros(9, 8)
    x[[1, 6, 8]] = torch.randn(3, 8)
    seen: list[torch.Tensor] = []
    late: list[list[int]] = []
    module.input.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    hooks = [
        expert.register_forward_pre_hook(lambda *_: late.append(module.rows_from(1, 3).tolist()))
        for expert in module.experts
    ]
    y = module(x)
    for hook in hooks:
        hook.remove()
    assert torch.equal(torch.cat(seen), x[[1, 6, 8]])
    assert module.choices(x).tolist() == [[0], [2], [2]]
    assert late == [[0], [1]]
    wanted = torch.zeros(9, 8)
    wanted[1] = module.experts[0](x[1:2])[0]
    wanted[[6, 8]] = module.experts[2](x[[6, 8]])
    assert torch.allclose(y, wanted, atol=1e-6)


def test_on_the_meta_device_all_experts_see_the_layers_own_input(tmp_path: Path) -> None:
    model: Any = meta_model(open_source(str(random_mixture(tmp_path / "olmoe", "olmoe"))))
    got: list[object] = []
    (name, module) = next(iter(experts_of(model).items()))
    assert name == "model.layers.0.mlp.experts"
    module.register_forward_pre_hook(lambda _, inputs: got.append(inputs[0]))
    for expert in module.experts:
        expert.get_submodule("up_proj").register_forward_pre_hook(lambda _, inputs: got.append(inputs[0]))
    model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device="meta"))
    assert len(got) == 5
    assert len(set(map(id, got[1:]))) == 1
    assert got[0] is not got[1]


@pytest.mark.parametrize(
    ("model_type", "architecture", "module", "kind"),
    [
        ("jetmoe", "JetMoeForCausalLM", "model.layers.0.mlp.input_linear", "JetMoeParallelExperts"),
        ("longcat_flash", "LongcatFlashForCausalLM", "model.layers.0.mlp.experts", "LongcatFlashExperts"),
    ],
)
def test_other_forms_are_refused_by_name(
    tmp_path: Path, model_type: str, architecture: str, module: str, kind: str
) -> None:
    config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=2, architectures=[architecture])
    path = random_mixture(tmp_path / "given", "olmoe")
    config.save_pretrained(path)
    assert refusal(path) == (
        f"{path}: {architecture} is a mixture of experts ({module}, {kind}) in a form that fp8q does not do for now: "
        "its weights are not gate_up_proj (or up_proj) and down_proj alone, or it computes something else with "
        "them; give a model of another architecture, or use `fp8q convert`"
    )


@pytest.mark.parametrize(("experts", "tokens", "chosen"), [(8, 40, 2), (128, 33, 8), (4, 1, 1)])
def test_each_expert_gets_its_places_in_the_order_of_a_search(experts: int, tokens: int, chosen: int) -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(tokens)])
    found = [(number, position.tolist(), token.tolist()) for number, position, token in routes(index, experts)]
    assert found == [
        (number, *(each.tolist() for each in torch.where(index.T.eq(number)))) for number in index.unique().tolist()
    ]


@pytest.mark.parametrize("experts", [8, 128])
def test_the_host_waits_once_for_the_places_of_all_experts(experts: int) -> None:
    with host_waits() as counted:
        list(routes(torch.zeros(64, 8, dtype=torch.int64, device="meta"), experts))
    assert (counted.waits, counted.to_memory) == (1, 8 * experts)
