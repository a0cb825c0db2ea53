"""A model and texts in memory give the run that their files give; what files would not hold is refused at once."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from seeing_models import picture
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from fp8q import api
from fp8q.calibrate.text.documents import load_documents
from fp8q.calibrate.text.image_rows import image_files
from fp8q.calibrate.text.rows import Reading
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.stages.loaded_checks import check_loaded
from fp8q.stages.loaded_texts import as_rows, written_texts
from fp8q.stages.pipeline.stages import QUANTIZE
from fp8q.stages.shared.texts import read_tokens

DOCUMENTS = 60


@pytest.fixture
def model(demo_checkpoint: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=torch.bfloat16)
    return loaded


@pytest.fixture(scope="module")
def tokenizer(demo_checkpoint: Path) -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo_checkpoint)
    return loaded


@pytest.fixture(scope="module")
def documents(demo_texts: Any) -> list[str]:
    return str(demo_texts.calibration.read_text(encoding="utf-8")).split("\n\n")[:DOCUMENTS]


def settings() -> dict[str, Any]:
    return {"samples": 4, "seq_len": 64, "graph": False, "progress": SILENT}


def test_a_model_in_memory_gives_the_scales_and_codes_of_its_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: list[str],
    demo_checkpoint: Path,
    tmp_path: Path,
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    of_files = api.calibrate(demo_checkpoint, rows, tmp_path / "files", tokenizer="auto", **settings())
    of_memory = api.quantize(model, tokenizer, documents, tmp_path / "memory", **settings())
    assert json.loads(of_memory.scales.read_text()) == json.loads(of_files.scales.read_text())
    shards = {path.name: load_file(path) for path in of_files.model.glob("*.safetensors")}
    assert sum(tensor.dtype == torch.float8_e4m3fn for shard in shards.values() for tensor in shard.values()) > 10
    for file, tensors in shards.items():
        written = load_file(of_memory.model / file)
        assert written.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert of_memory.record().model["name"] == "memory"
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    fp8 = api.load(of_memory.root)
    assert isinstance(fp8, PreTrainedModel)
    with pytest.raises(
        InputError, match=r"^LlamaForCausalLM: is quantized already: its model\.[a-z0-9_.]* is an? \w+ of "
    ):
        check_loaded(fp8)


def test_tokens_and_data_sets_are_the_tokens_of_their_text(
    tokenizer: PreTrainedTokenizerBase, documents: list[str], tmp_path: Path
) -> None:
    ids = tokenizer(documents)["input_ids"]
    padded = {
        "input_ids": [[*document, 0, 0] for document in ids],
        "attention_mask": [[*(1 for _ in document), 0, 0] for document in ids],
    }
    forms = {
        "texts": documents,
        "ids": ids,
        "arrays": tuple(np.array(document) for document in ids),
        "tensors": [torch.tensor(document) for document in ids],
        "answer": tokenizer(documents),
        "padded": padded,
        "rows": [{"text": document} for document in documents],
        "data set": datasets.Dataset.from_dict({"id": ["a"] * len(documents), "text": documents}),
    }
    wanted = np.concatenate([np.array(document) for document in ids])
    for name, texts in forms.items():
        spec, evaluation = written_texts(Run(tmp_path / name), as_rows(texts))
        assert evaluation is None
        read = read_tokens(spec, tokenizer, 2048, Reading(), SILENT)
        assert np.array_equal(read.ids, wanted), name
        assert len(read.documents.texts) == len(documents), name


def test_a_split_to_validate_on_is_evaluated_on(documents: list[str], tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": documents})
    splits = datasets.DatasetDict({"train": rows.select(range(40)), "test": rows.select(range(40, DOCUMENTS))})
    train, test = written_texts(Run(tmp_path), as_rows(splits))
    assert test is not None
    assert load_documents(train).texts == documents[:40]
    assert load_documents(test).texts == documents[40:]
    assert written_texts(Run(tmp_path), as_rows("a/name")) == ("a/name", None)


def test_chats_become_rows_of_messages(tmp_path: Path) -> None:
    """Also where one message's content is parts, and another's a string."""
    question = {"role": "user", "content": [{"type": "text", "text": "Why?"}]}
    chats: list[list[dict[str, Any]]] = [
        [question, {"role": "assistant", "content": "So."}],
        [{"role": "user", "content": "How?"}],
    ]
    as_tuple = tuple(tuple(chat) for chat in chats)
    for number, texts in enumerate(
        [chats, as_tuple, {"messages": chats}, [{"messages": chat, "id": 3} for chat in chats]]
    ):
        spec, _ = written_texts(Run(tmp_path / str(number)), as_rows(texts))
        lines = Path(spec).read_text(encoding="utf-8").splitlines()
        assert [json.loads(line) for line in lines] == [{"messages": chat} for chat in chats]


def with_image(image: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]}]


def test_images_of_chats_are_written_beside_them(tmp_path: Path) -> None:
    """Of Pillow, in RGB and upright, and at paths, byte for byte; of data sets too."""
    path = picture(tmp_path / "a.jpg")
    image = Image.open(picture(tmp_path / "b.png")).convert("RGBA")
    plain = [{"role": "user", "content": "Why?"}]
    data = datasets.Dataset.from_dict({"messages": [with_image(str(path))], "name": ["a"]})
    for texts, count in (([with_image(image), plain, with_image(path)], 2), (data, 1)):
        loaded = as_rows(texts)
        assert loaded.with_images
        spec, _ = written_texts(Run(tmp_path / f"run{count}"), loaded)
        rows = [json.loads(line)["messages"] for line in Path(spec).read_text(encoding="utf-8").splitlines()]
        files = [file for row in rows for file in image_files("row", row, Path(spec).parent)]
        assert len(files) == count
        assert Path(files[-1].path).read_bytes() == path.read_bytes()
        assert np.array_equal(np.asarray(files[-1].opened("row")), np.asarray(Image.open(path)))
        if count == 2:
            assert np.array_equal(np.asarray(files[0].opened("row")), np.asarray(image.convert("RGB")))
            assert rows[1] == plain
    splits = as_rows(datasets.DatasetDict({"train": data, "test": data}))
    assert [Path(str(name)).name for name in written_texts(Run(tmp_path / "splits"), splits)] == ["rows.jsonl"] * 2


def test_images_in_a_column_of_their_own_are_refused() -> None:
    rows = [{"messages": [{"role": "user", "content": "<image>What?"}], "images": ["a.png"]}]
    for texts in (rows, datasets.Dataset.from_list(rows), {name: [rows[0][name]] for name in rows[0]}):
        with pytest.raises(InputError, match="^texts: row 1 has images under `images`, and no part of a message"):
            as_rows(texts)


@pytest.mark.parametrize(
    ("image", "fault"),
    [
        (None, "has an image without a path; a part is like"),
        ("https://a/b.png", "its image https://a/b.png is no file; save it"),
        ("/nowhere/a.png", "its image /nowhere/a.png"),
        (3, "has an image without a path; a part is like"),
    ],
)
def test_an_image_that_is_none_is_named_with_its_row(image: object, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        as_rows([with_image(image)])
    assert str(refused.value).startswith(f"texts: row 1: {fault}")


@pytest.mark.slow
def test_the_same_call_goes_on_and_another_model_is_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, documents: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = api.quantize(model, tokenizer, documents, out, **settings())
    stages = run.record().stages
    again = api.quantize(model, tokenizer, documents, out, **settings()).record().stages
    assert {name: again[name] for name in ("corpus", "measure", "quantize")} == {
        name: stages[name] for name in ("corpus", "measure", "quantize")
    }
    moved = out.rename(tmp_path / "elsewhere")
    chosen = api.scales(moved, weight_method="amax", progress=SILENT)  # its source moved with it
    assert chosen.options(QUANTIZE).weight_method == "amax"
    before = chosen.record()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(InputError, match="is a run of another model, or of this one with other weights"):
        api.quantize(model, tokenizer, documents, moved, **settings())
    assert Run(moved).record() == before


def test_a_refused_call_leaves_nothing(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for texts in (["far too short"], [[10**6] * 500], datasets.Dataset.from_dict({"number": [1]})):
        with pytest.raises(InputError):
            api.quantize(model, tokenizer, texts, tmp_path / "run", **settings())
        assert not (tmp_path / "run").exists()
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="so it is no fp8q run"):
        api.quantize(model, tokenizer, ["text"], occupied, **settings())
    assert [path.name for path in occupied.iterdir() if path.name != ".lock"] == ["thesis.txt"]


def quantized(model: PreTrainedModel) -> object:
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def offloaded(model: PreTrainedModel) -> object:
    return model.to(torch.device("meta"))  # type: ignore[arg-type]


def hooked(model: PreTrainedModel) -> object:
    def double(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * 2

    model.get_submodule("model.layers.0.mlp.down_proj").register_forward_hook(double)
    return model


def of_whole_numbers(model: PreTrainedModel) -> object:
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    layer._parameters["weight"] = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    return model


def with_peft(model: PreTrainedModel) -> object:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))


def by_modelopt(model: PreTrainedModel) -> object:
    import modelopt.torch.quantization as mtq

    mtq.quantize(model, mtq.MXFP8_DEFAULT_CFG, lambda model: model(torch.zeros((1, 4), dtype=torch.int64)))
    return model


def by_torch(model: PreTrainedModel) -> object:
    return torch.ao.quantization.quantize_dynamic(model.float(), {torch.nn.Linear}, torch.qint8)


class OfAnotherLibrary(torch.Tensor):
    """Values of a class of their own, as torchao's weights are, which give the type of what they stand for."""


def by_torchao(model: PreTrainedModel) -> object:
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    weight = layer.get_parameter("weight").data
    layer._parameters["weight"] = torch.nn.Parameter(weight.as_subclass(OfAnotherLibrary))
    return model


class Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def parametrized(model: PreTrainedModel) -> object:
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    return model


def with_injected_adapter(model: PreTrainedModel) -> object:
    import peft

    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], r=2), model)
    return model


def cut(model: PreTrainedModel) -> object:
    del model.get_submodule("model.layers")[-1]  # type: ignore[operator]
    return model


def with_an_observer(model: PreTrainedModel) -> object:
    model.get_submodule("model.layers.0").add_module("observer", torch.nn.Identity())
    return model


def narrower(model: PreTrainedModel) -> object:
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    layer.weight = torch.nn.Parameter(layer.weight[:, :-8])
    return model


def with_a_bias(model: PreTrainedModel) -> object:
    layer: Any = model.get_submodule("model.layers.0.mlp.down_proj")
    layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features))
    return model


def called_otherwise(model: PreTrainedModel) -> object:
    layer = model.get_submodule("model.layers.0.mlp.down_proj")

    def doubled(hidden: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.linear(hidden, layer.get_parameter("weight"))

    layer.forward = doubled
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::UserWarning", "ignore:torch.ao")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            by_modelopt,
            (
                "is quantized already: its model.embed_tokens is a QuantEmbedding of modelopt; give the "
                "model as it was before, in BF16"
            ),
        ),
        (
            by_torch,
            (
                "is quantized already: its model.layers.0.self_attn.q_proj is a Linear of torch; give "
                "the model as it was before, in BF16"
            ),
        ),
        (
            parametrized,
            (
                "has parametrizations, which its files would not hold: its model.layers.0.mlp.down_proj "
                "is a ParametrizedLinear of torch; call remove_parametrizations of torch.nn.utils.parametrize before"
            ),
        ),
        (
            with_injected_adapter,
            (
                "has adapters loaded, which its files would not hold: its "
                "model.layers.0.self_attn.q_proj is a Linear of peft; merge them into the weights, or save the base "
                "and give it to calibrate with adapter="
            ),
        ),
        (
            by_torchao,
            (
                "its model.layers.0.mlp.down_proj.weight is an OfAnotherLibrary of "
                f"{__name__.partition('.')[0]}, where its config has a Parameter; give the model as its class makes it "
                "of its config"
            ),
        ),
        (
            with_an_observer,
            (
                "its model.layers.0.observer is an Identity of torch, where its config has none; give "
                "the model as its class makes it of its config"
            ),
        ),
        (
            cut,
            ("lacks model.layers.LAST, which its config has; give the model as its class makes it of its config"),
        ),
        (
            narrower,
            (
                r"its model.layers.0.mlp.down_proj.weight is of shape \[\d+, \d+\], and \[\d+, \d+\] by "
                "its config; make the config say so, or give the model as its class makes it of its config"
            ),
        ),
        (
            with_a_bias,
            (
                "its model.layers.0.mlp.down_proj.bias is a Parameter of torch, where its config has "
                "none; give the model as its class makes it of its config"
            ),
        ),
        (
            called_otherwise,
            (
                r"the forward of model.layers.0.mlp.down_proj was replaced "
                r"\(called_otherwise.<locals>.doubled\), which no file would hold; remove it before \(`del "
                r"module.forward`\)"
            ),
        ),
    ],
)
def test_what_its_config_does_not_make_is_named(
    change: Callable[[PreTrainedModel], object], message: str, model: PreTrainedModel
) -> None:
    last = str(model.config.num_hidden_layers - 1)
    with pytest.raises(InputError, match=f"^LlamaForCausalLM: {message.replace('LAST', last)}$"):
        check_loaded(change(model))


def test_a_forward_that_a_removed_hook_gave_back_is_taken(model: PreTrainedModel) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module  # type: ignore[import-untyped]

    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    add_hook_to_module(layer, ModelHook())
    remove_hook_from_module(layer)
    assert "forward" in vars(layer)
    check_loaded(model)


@pytest.fixture
def new_accelerate() -> Iterator[None]:
    """Forget what accelerate holds for the whole process, before the test and after it."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("new_accelerate")
def test_a_model_that_was_trained_is_taken(model: PreTrainedModel) -> None:
    """In mixed precision by accelerate, as the Trainer does, which wraps `forward`; with an adapter that is merged."""
    import peft
    from accelerate import Accelerator  # type: ignore[import-untyped]

    model.activation_checkpointing_enable()
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    trained = accelerator.prepare(model)
    assert "forward" in vars(trained)
    check_loaded(trained)
    check_loaded(accelerator.unwrap_model(trained, keep_fp32_wrapper=False))
    check_loaded(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).merge_and_unload())
    model.forward = functools.wraps(type(model).forward)(lambda **named: None)
    with pytest.raises(InputError, match="the forward of the model was replaced"):
        check_loaded(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (quantized, "LlamaForCausalLM: is quantized already; load it without quantization_config, in BF16"),
        (offloaded, "LlamaForCausalLM: its model.embed_tokens.weight has no values here"),
        (hooked, r"model\.layers\.0\.mlp\.down_proj has a forward hook \(hooked\.<locals>\.double\), which no file"),
        (of_whole_numbers, "its model.layers.0.mlp.down_proj.weight is of int8, and weights are of float32"),
        (with_peft, r"PeftModel: is no PreTrainedModel of transformers; give one \(PEFT: `model\.merge_and_unload"),
        (lambda model: model.model.layers[0], "LlamaDecoderLayer: is no PreTrainedModel"),
    ],
)
def test_what_files_would_not_hold_is_refused(
    change: Callable[[PreTrainedModel], object], message: str, model: PreTrainedModel
) -> None:
    check_loaded(model)
    with pytest.raises(InputError, match=message):
        check_loaded(change(model))


def test_a_model_that_accelerate_moves_is_refused(model: PreTrainedModel) -> None:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(InputError, match=r"load (it|the model) on one device, or give its directory to calibrate$"):
        check_loaded(model)


def test_transformers_own_hooks_are_taken(model: PreTrainedModel) -> None:
    model(input_ids=torch.zeros((1, 4), dtype=torch.int64), output_hidden_states=True, output_attentions=True)
    check_loaded(model)


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        ([], "texts: holds nothing; give a list of texts"),
        (["text", 3], "texts: holds int, str; give a list of texts"),
        ([3.5], "texts: holds float; give"),
        ([["nested"]], "texts: holds list; give"),
        (5, "texts: is no list but int; give a list of texts"),
        (None, "texts: is no list but NoneType; give a list of texts"),
        (torch.tensor(5), "texts: is no list but Tensor; give a list of texts"),
        ({"text": 5}, "texts: `text`: is no list but int; give a list of texts"),
        ({"text": "a text"}, "texts: `text`: is no list but str; give a list of texts"),
        ({"text": ["a"], "more": []}, "texts: makes no data set"),
        (datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset(), "texts: is a stream"),
        ({"input_ids": [[1], ["a"]]}, "texts: makes no data set"),
    ],
)
def test_what_is_no_text_is_named(texts: Any, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        as_rows(texts)
    assert str(refused.value).startswith(fault)


def test_several_processes_are_refused(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="is called in 2 processes, and a loaded model is written by one"):
        api.quantize(model, tokenizer, ["text"], tmp_path / "run", **settings())
    assert not (tmp_path / "run").exists()
