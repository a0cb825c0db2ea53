"""Rows with images: the language model is measured on the embeddings that it gets in use, as transformers has them."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from seeing_models import PROCESSORS, asking, picture, write_rows
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from unseen_architectures import random_checkpoint

from fp8q import api
from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity, load_statistics
from fp8q.calibrate.measure.stream import Stream, measure_streamed
from fp8q.calibrate.model.processor import RowInputs, load_processor, placeholder
from fp8q.calibrate.model.source import Source, load_model, open_source
from fp8q.calibrate.model.tokenizer import load_tokenizer
from fp8q.calibrate.text.chat import content_parts, messages
from fp8q.calibrate.text.image_rows import ImageRow, image_files
from fp8q.core.errors import BackendError, InputError
from fp8q.core.reporter import SILENT
from fp8q.core.run import Run
from fp8q.options import PlanOptions, RunOptions
from fp8q.stages import plan_rates
from fp8q.stages.corpus import load_tokens
from fp8q.stages.image_inputs import row_inputs
from fp8q.stages.plan_images import seeing_products
from fp8q.stages.shared.run_images import load_image_rows
from fp8q.stages.shared.sources import source_of
from fp8q.validate.accuracy.document import load_accuracy
from fp8q.validate.accuracy.runtimes import Loading
from fp8q.validate.accuracy.seen_text import SeenText
from fp8q.validate.report.accuracy_rows import image_rows as image_accuracy_rows

from ..command_result import Result
from ..conftest import MadeOnce
from ..seeing import PICTURES, inputs_watched, transformers_inputs

pytestmark = pytest.mark.slow

OPTIONS = api.CalibrateOptions(chat_template=True, samples=4, seq_len=48, batch_size=2)
#: Two last bits of BF16: of sums in another order, and of what follows from them.
BITS = 2**-6


def calibrated(folders: Path, out: Path, *texts: str, config: str = "Gemma3Config", **changes: Any) -> Run:
    data = [str(folders / text) for text in texts]
    export = api.ExportOptions(graph=False)
    return api.calibrate(str(folders / config), data, out, options=OPTIONS, export_options=export, **changes)


@pytest.fixture(scope="module", params=PROCESSORS)
def run(request: pytest.FixtureRequest, folders: Path, made_once: MadeOnce) -> Run:
    """A run on windows of text and ten rows with images."""

    def make(folder: Path) -> None:
        calibrated(folders, folder / "run", "mixed.jsonl", config=request.param)

    return Run(made_once(f"seeing-{request.param}", make) / "run")


@pytest.mark.parametrize("config", PROCESSORS)
def test_a_plan_counts_the_products_of_the_part_that_sees(config: str, folders: Path) -> None:
    """Those that torch counts of the row with its image, without those of its text alone, to a tenth."""
    source = open_source(str(folders / config))
    chat = asking("1.png")["messages"]
    row = ImageRow(
        where="row", messages=messages("row", chat, content_parts), images=image_files("row", chat, folders), tokens=1
    )
    inputs = load_processor(source, load_tokenizer(source)).inputs(row)
    model = load_model(source, torch.float32)
    operations = []
    for given in (inputs, {"input_ids": torch.zeros_like(inputs["input_ids"])}):
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            model.base_model(**given, use_cache=False)
        operations.append(counter.get_total_flops())
    assert seeing_products(source, [row]) == pytest.approx((operations[0] - operations[1]) / 2, rel=0.1)


def test_a_plan_of_a_run_reads_a_row_in_the_middle(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[float] = []

    def counted(source: Source, rows: list[ImageRow]) -> float:
        assert len(rows) == 4 + 1, "to calibrate and to evaluate on"
        products.append(seeing_products(source, rows))
        return products[-1]

    monkeypatch.setattr(plan_rates, "seeing_products", counted)
    asked = RunOptions(calibrate=OPTIONS, export=api.ExportOptions(graph=False), planning=PlanOptions(plan=True))
    api.run(str(folders / "Gemma3Config"), str(folders / "mixed.jsonl"), tmp_path / "run", options=asked)
    assert products[0] > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("config", PROCESSORS)
def test_inputs_are_those_of_transformers_processor(config: str, folders: Path) -> None:
    source = open_source(str(folders / config))
    processor = load_processor(source, load_tokenizer(source))
    row = asking("1.png")
    chat = row["messages"]
    read = ImageRow(
        where="row", messages=messages("row", chat, content_parts), images=image_files("row", chat, folders)
    )
    (expected,) = transformers_inputs(folders / config, [row], folders)
    ours = processor.inputs(read)
    assert ours.keys() == expected.keys()
    assert int((ours["input_ids"] == 2047).sum()) == 4, "of 28 x 28 pixels in patches of 14"
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def test_amax_is_that_of_transformers_own_pass(run: Run, folders: Path) -> None:
    """Of every tensor, on each row with images and each batch of windows."""
    statistics = load_statistics(run)
    model: Any = AutoModelForMultimodalLM.from_pretrained(run.record().model["path"], dtype=torch.bfloat16)
    rows = [asking(f"{number}.png", f"What is in picture {number}?") for number in range(PICTURES)][:11]
    names = sorted(statistics.record.groups)
    assert all("language_model" in name for name in names)
    windows = torch.from_numpy(load_tokens(run, run.calibration))
    with inputs_watched(model, names) as amax, torch.inference_mode():
        for batch in windows.split(2):
            model(input_ids=batch)
        for inputs in [
            transformers_inputs(Path(run.record().model["path"]), rows, folders)[number] for number in CHOSEN
        ]:
            model(**inputs)
    for name in names:
        ours = statistics.tensors[f"{name}.input"].amax_batches
        assert len(ours) == 2 + len(CHOSEN)
        np.testing.assert_allclose(ours, amax[name], rtol=BITS)


#: Evenly spread over the 11 of 12 rows that are not held out.
CHOSEN = [0, 2, 5, 8]


def test_rows_change_what_is_measured_and_nothing_of_the_windows(run: Run, folders: Path, tmp_path: Path) -> None:
    config = Path(run.record().model["path"]).name
    text = calibrated(folders, tmp_path / "run", "plain.jsonl", config=config)
    alone, both = load_statistics(text), load_statistics(run)
    assert text.calibration.read_bytes() == run.calibration.read_bytes()
    assert not text.images.exists()
    changed = 0
    for name, tensor in alone.tensors.items():
        with_rows = both.tensors[name]
        assert np.array_equal(with_rows.amax_batches[:2], tensor.amax_batches)
        changed += int(with_rows.histogram != tensor.histogram)
    assert changed == len(alone.tensors)
    assert both.record.tokens > alone.record.tokens
    assert both.record.corpus.fingerprint != alone.record.corpus.fingerprint


def test_layer_by_layer_the_statistics_are_the_same(run: Run, folders: Path, tmp_path: Path) -> None:
    """Byte for byte: masks that look both ways within an image are a row's own."""
    config = Path(run.record().model["path"]).name
    streamed = calibrated(folders, tmp_path / "run", "mixed.jsonl", config=config, stream=True)
    assert streamed.statistics.read_bytes() == run.statistics.read_bytes()
    assert streamed.statistics_json.read_bytes() == run.statistics_json.read_bytes()
    assert streamed.record().stages["measure"].options == run.record().stages["measure"].options
    assert not [*streamed.root.glob(".*.work")]


def test_killed_between_layers_it_goes_on_with_the_same_statistics(
    run: Run, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arguments of layers are recorded anew, hidden states are read again."""
    config = Path(run.record().model["path"]).name
    layer = Stream._layer

    def killed(stream: Stream, step: int, advance: Callable[[int], None]) -> None:
        if step == 2:
            raise KeyboardInterrupt
        layer(stream, step, advance)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stream, "_layer", killed)
        calibrated(folders, tmp_path / "run", "mixed.jsonl", config=config, stream=True)
    streamed = calibrated(folders, tmp_path / "run", "mixed.jsonl", config=config, stream=True)
    assert (
        "going on at decoder layer 2 of 2, where an earlier call stopped" in streamed.record().stages["measure"].notes
    )
    assert streamed.statistics.read_bytes() == run.statistics.read_bytes()


def test_the_record_has_the_rows(run: Run, folders: Path) -> None:
    rows = load_image_rows(run)
    assert rows is not None
    numbers = [
        [Path(file.path).stem for row in part for file in row.images] for part in (rows.calibration, rows.evaluation)
    ]
    assert numbers == [[str(number) for number in CHOSEN], ["11"]]
    assert rows.calibration[0].where == f"{folders / 'mixed.jsonl'}: line 1"
    corpus = load_statistics(run).record.corpus
    assert (corpus.windows, corpus.images, corpus.batches) == (4, 4, 6)
    assert corpus.sources
    assert [(source.windows, source.images) for source in corpus.sources] == [(4, 4)]
    assert load_statistics(run).record.tokens == 4 * 48 + sum(row.tokens for row in rows.calibration)
    assert (
        "4 of 12 rows with images are measured, each by itself, and 1 are evaluated on"
        in run.record().stages["corpus"].notes
    )


def test_the_checkpoint_leaves_the_tower_in_bf16_and_the_report_counts_rows(
    run: Run, fp8q: Callable[..., Result]
) -> None:
    ignored = json.loads((run.model / "config.json").read_text())["quantization_config"]["ignore"]
    assert any("vision_tower" in name for name in ignored)
    assert fp8q("inspect", run.root).code == 0


def test_the_card_says_that_rows_were_measured(run: Run) -> None:
    card = (run.model / "README.md").read_text(encoding="utf-8")
    assert "**The language model** is quantized, and was measured on text and 4 chats with images; `model." in card


def test_the_same_call_goes_on_and_other_rows_begin_anew(run: Run, folders: Path, tmp_path: Path) -> None:
    config = Path(run.record().model["path"]).name
    again = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    before = again.record().stages
    calibrated(folders, again.root, "mixed.jsonl", config=config)
    after = again.record().stages
    assert all(after[name] == before[name] for name in ("corpus", "measure", "quantize"))
    calibrated(folders, again.root, "plain.jsonl", config=config)
    assert not again.images.exists()
    assert load_statistics(again).record.corpus.images is None


def test_rows_alone_go_with_another_text(folders: Path, tmp_path: Path) -> None:
    run = calibrated(folders, tmp_path / "run", "images.jsonl", "text.txt")
    corpus = load_statistics(run).record.corpus
    assert corpus.sources
    assert [(Path(source.name).name, source.windows, source.images) for source in corpus.sources] == [
        ("images.jsonl", 0, 4),
        ("text.txt", 4, None),
    ]


def test_rows_of_the_evaluation_text_take_the_place_of_those_held_out(folders: Path, tmp_path: Path) -> None:
    run = calibrated(folders, tmp_path / "run", "images.jsonl", "text.txt", eval_data=str(folders / "mixed.jsonl"))
    rows = load_image_rows(run)
    assert rows is not None
    assert (len(rows.calibration), len(rows.evaluation)) == (4, 12)


def refused(folders: Path, out: Path, *texts: str, **changes: Any) -> str:
    """The error of a call that leaves nothing."""
    with pytest.raises(InputError) as error:
        calibrated(folders, out, *texts, **changes)
    assert not out.exists()
    return str(error.value)


def test_what_does_not_fit_rows_with_images_is_refused_first(folders: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    images = folders / "images.jsonl"
    assert refused(folders, out, "images.jsonl") == (
        f"{images}: has rows with images alone, and windows of text are calibrated and evaluated on too; give a text "
        "beside it by another --data"
    )
    assert refused(folders, out, "mixed.jsonl", batches=(0, 1)) == (
        "--batches: rows with images are measured by one process, in one run; leave the rows out"
    )
    assert refused(folders, out, "plain.jsonl", eval_data=str(images)) == (
        f"{images}: leaves 0 tokens for evaluation, less than one window of 48; give more text, --eval-data, or a "
        "smaller --seq-len"
    )
    assert refused(folders, out, "mixed.jsonl", chat_template=False) == (
        f"{folders / 'mixed.jsonl'}: holds chats, under `messages`; render them by the tokenizer's own template with "
        "--chat-template, or name a column of strings `text`"
    )


def test_a_faulty_image_is_one_line_with_its_row_and_nothing_is_written(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.png").write_bytes(b"GIF89a")
    for name, fault in {
        "a.png": " is none in PNG, JPEG, WEBP; convert it",
        "b.png": ": there is no such file; copy or download it again",
    }.items():
        path = write_rows(tmp_path / "rows" / "rows.jsonl", [asking(name)])
        said = refused(folders, tmp_path / "run", str(path), "text.txt")
        assert said == f"{path}: line 1: its image {(tmp_path / 'rows' / name).resolve()}{fault}"


def test_models_and_processors_that_do_not_fit_are_refused(
    folders: Path, demo_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def copied(config: str, **files: Mapping[str, object] | None) -> Path:
        folder = Path(shutil.copytree(folders / config, tmp_path / f"model{len([*tmp_path.iterdir()])}"))
        for name, content in files.items():
            file = folder / f"{name}.json"
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_text(json.dumps(content), encoding="utf-8")
        return folder

    blind = Path(shutil.copytree(demo_checkpoint, tmp_path / "blind"))
    shutil.copy(folders / "Gemma3Config" / "chat_template.jinja", blind)
    assert refused(folders, out, "mixed.jsonl", config=str(blind)) == (
        f"{blind}: LlamaForCausalLM takes no images; leave rows with images out"
    )
    without = copied("Gemma3Config", preprocessor_config=None, processor_config=None)
    said = refused(folders, out, "mixed.jsonl", config=str(without))
    assert said.startswith(f"{without}: its processor of images does not load: ")
    own_code = copied(
        "Gemma3Config",
        processor_config={"auto_map": {"AutoProcessor": "processing.Own"}, "processor_class": "OwnProcessor"},
        preprocessor_config=None,
    )
    assert refused(folders, out, "mixed.jsonl", config=str(own_code), trust_remote_code=True).startswith(
        f"{own_code}: its processor "
    )
    short = copied("LlavaConfig")
    template = "{% for message in messages %}{{ message.content if message.content is string else 'none' }}{% endfor %}"
    (short / "chat_template.jinja").write_text(template, encoding="utf-8")
    said = refused(folders, out, "mixed.jsonl", config=str(short))
    assert said.startswith(f"{folders / 'mixed.jsonl'}: line 1: the model's processor refuses it: ")
    assert said.endswith("; mend the row, or leave it out")


def test_without_pillow_one_line_says_what_to_install(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8q.stages.image_inputs.VISION", ("vision", ("no_such_module",)))
    with pytest.raises(BackendError) as error:
        calibrated(folders, tmp_path / "run", "mixed.jsonl")
    assert str(error.value) == (
        "no_such_module is not installed and this command needs it; install it with `pip install 'fp8q[vision]'`"
    )
    assert not (tmp_path / "run").exists()


def test_runs_with_rows_are_not_merged(folders: Path, run: Run, tmp_path: Path) -> None:
    config = Path(run.record().model["path"]).name
    other = calibrated(folders, tmp_path / "other", "plain.jsonl", config=config)
    with pytest.raises(InputError) as error:
        api.merge([run.root, other.root], tmp_path / "both")
    assert str(error.value) == (
        f"{run.root}: was calibrated on rows with images, and such runs are not added; calibrate with all of the text "
        "in one run"
    )


@pytest.fixture(scope="module")
def validated(run: Run, made_once: MadeOnce) -> Run:
    """The run, validated by BF16 and the reference."""
    name = f"seen-{Path(run.record().model['path']).name}"

    def make(folder: Path) -> None:
        shutil.copytree(run.root, folder / "run")
        api.validate(folder / "run", options=api.ValidateOptions(runtimes=("bf16", "reference")))

    return Run(made_once(name, make) / "run")


def test_losses_on_rows_are_those_of_both_models_by_hand(validated: Run, folders: Path) -> None:
    """transformers' own loading of source and checkpoint, its processor, and text behind the image alone."""
    accuracy = load_accuracy(validated)
    images = accuracy.images
    assert images is not None
    (inputs,) = transformers_inputs(
        Path(validated.record().model["path"]), [asking("11.png", "What is in picture 11?")], folders
    )
    ids = inputs["input_ids"][0]
    first = int(torch.nonzero(ids == 2047).min())
    targets = [place for place in range(first, len(ids)) if ids[place] != 2047]
    assert (images.rows, images.tokens) == (1, len(targets))
    assert images.runtimes.keys() == {"bf16", "reference"}
    logits = {}
    for name, path in (("bf16", validated.record().model["path"]), ("reference", validated.model)):
        model: Any = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.bfloat16)
        with torch.inference_mode():
            logits[name] = model(**inputs).logits[0].float().log_softmax(-1)
        loss = -np.mean([float(logits[name][place - 1, ids[place]]) for place in targets])
        assert images.runtimes[name].nll_nats == pytest.approx(loss, abs=0.05), name
    kl = [(logits["bf16"].exp() * (logits["bf16"] - logits["reference"])).sum(-1)[place - 1] for place in targets]
    assert images.runtimes["reference"].kl_mean_nats == pytest.approx(float(np.mean(kl)), rel=0.5)


def test_the_images_are_seen(validated: Run, folders: Path) -> None:
    """The loss of the same text behind another image is another."""
    rows = load_image_rows(validated)
    assert rows is not None
    source = source_of(validated)
    other = rows.evaluation[0].model_copy(update={"images": rows.calibration[0].images})
    losses = []
    for row in (rows.evaluation[0], other):
        text = SeenText("a row", row_inputs(source, [row]), placeholder(source))
        forward: Any = text.openers(("bf16",), Loading(validated, lambda: source, "cpu"))["bf16"]()
        evaluation = text.evaluation()
        with torch.inference_mode():
            logits = forward(evaluation.ids).float().log_softmax(-1)
        losses.append(logits[0, :-1][torch.from_numpy(evaluation.scored[0, 1:])])
    assert float((losses[0] - losses[1]).abs().max()) > 0.1


def test_summary_and_page_have_the_rows(validated: Run, fp8q: Callable[..., Result]) -> None:
    told = fp8q("validate", validated.root, "--runtimes", "bf16,reference")
    assert told.code == 0
    assert "reference on images" in told.out
    row = next(row for row in image_accuracy_rows(validated) if row.runtime == "reference on images")
    images = load_accuracy(validated).images
    assert images is not None
    assert (row.tokens, row.kl_mean_nats) == (images.tokens, images.runtimes["reference"].kl_mean_nats)


def test_an_image_that_changed_stops_validation_in_one_line(run: Run, folders: Path, tmp_path: Path) -> None:
    changed = Run(Path(shutil.copytree(run.root, tmp_path / "run")))
    rows = load_image_rows(changed)
    assert rows is not None
    path = Path(rows.evaluation[0].images[0].path)
    content = path.read_bytes()
    picture(path, 99)
    try:
        with pytest.raises(InputError) as error:
            api.validate(changed.root, options=api.ValidateOptions(runtimes=("bf16", "reference")))
    finally:
        path.write_bytes(content)
    assert str(error.value) == (
        f"{folders / 'mixed.jsonl'}: line {rows.evaluation[0].where.rpartition(' ')[2]}: its image {path} has changed "
        "since it was read; restore it"
    )
    assert not changed.accuracy.exists()


def test_another_text_is_validated_alone(validated: Run, folders: Path, tmp_path: Path) -> None:
    other = Run(Path(shutil.copytree(validated.root, tmp_path / "run")))
    options = api.ValidateOptions(runtimes=("bf16", "reference"))
    assert api.validate(other.root, str(folders / "text.txt"), options=options).images is None


class HandMade:
    """A processor that gives the same inputs for any row."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]):
        self.made = inputs

    def inputs(self, row: ImageRow) -> Mapping[str, torch.Tensor]:
        return self.made


def three_axes(config: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor], Measurement]:
    """A checkpoint of a Qwen in `folder`, the inputs of a row, and a measurement of two windows and two such rows.

    Qwen's processors want torchvision, so that their inputs are made by hand.
    """
    tokens = {
        "image_token_id": 2045,
        "vision_start_token_id": 2046,
        "vision_end_token_id": 2044,
        "video_token_id": 2047,
    }
    path = random_checkpoint(folder / "model", config, **tokens)
    vision = AutoConfig.from_pretrained(path).vision_config
    ids = torch.tensor([[5, 6, 2046, *[2045] * 6, 2044, *range(20, 40)]])
    drawn = torch.Generator().manual_seed(0)
    patch_values = 3 * vision.temporal_patch_size * vision.patch_size**2
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 2045).int(),
        "pixel_values": torch.randn(24, patch_values, generator=drawn).bfloat16(),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    }
    windows = np.arange(96).reshape(2, 48)
    corpus = Corpus(name="by hand", fingerprint="0", windows=2, seq_len=48, batch_size=1, images=2)
    rows = RowInputs([ImageRow(where="row", messages=[], images=[], tokens=30)] * 2, cast("Any", HandMade(inputs)))
    identity = ModelIdentity(name="model", architecture="any", fingerprint="0")
    return path, inputs, Measurement(windows, identity, corpus, images=rows, vision=("*",))


@pytest.mark.parametrize("config", ["Qwen2VLConfig", "Qwen2_5_VLConfig", "Qwen3VLConfig"])
def test_positions_of_three_axes_are_those_of_transformers(config: str, tmp_path: Path) -> None:
    """Windows of text follow an image."""
    path, inputs, what = three_axes(config, tmp_path)
    model: Any = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.bfloat16)
    measured = measure_in_memory(load_model(open_source(str(path)), torch.bfloat16), what, SILENT)
    names = sorted(measured.record.groups)
    with inputs_watched(model, names) as amax, torch.inference_mode():
        model(**inputs)
        for window in torch.from_numpy(what.windows).split(1):
            model(input_ids=window)
    assert measured.record.tokens == 2 * 48 + 2 * 30
    for name in names:
        ours = measured.tensors[f"{name}.input"].amax_batches
        of_row, *of_windows = amax[name]
        blind = [float("nan")] * (2 - len(of_windows))
        np.testing.assert_allclose(ours, [*of_windows, *blind, of_row, of_row], rtol=BITS)


@pytest.mark.parametrize("config", ["Qwen2VLConfig", "Qwen2_5_VLConfig", "Qwen3VLConfig"])
def test_layer_by_layer_rows_have_positions_and_features_of_their_own(config: str, tmp_path: Path) -> None:
    """Positions of three axes, other than those of windows, and features that Qwen3-VL adds behind its first layer; the
    inputs of the vision part are observed before the layers.
    """
    path, _, what = three_axes(config, tmp_path)
    source = open_source(str(path))
    (tmp_path / "steps").mkdir()
    streamed = measure_streamed(source, what, SILENT, tmp_path / "steps")
    whole = measure_in_memory(load_model(source, torch.bfloat16), what, SILENT)
    assert streamed.record == whole.record
    assert streamed.tensors.keys() == whole.tensors.keys()
    assert any("visual" in name for name in whole.tensors)
    for name, tensor in whole.tensors.items():
        assert tensor.histogram == streamed.tensors[name].histogram, name
        assert np.array_equal(tensor.amax_batches, streamed.tensors[name].amax_batches, equal_nan=True), name
    for name, amax in whole.weights.items():
        assert np.array_equal(amax, streamed.weights[name]), name


def test_a_model_that_scales_between_layers_where_images_are_is_no_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3VLTextModel, "_deepstack_process", lambda self, hidden, places, features: 2 * hidden)
    path, _, what = three_axes("Qwen3VLConfig", tmp_path)
    (tmp_path / "steps").mkdir()
    with pytest.raises(InputError) as error:
        measure_streamed(open_source(str(path)), what, SILENT, tmp_path / "steps")
    assert str(error.value) == (
        f"{path}: Qwen3VLForConditionalGeneration does more between its layers than add features of images to hidden "
        "states, so it cannot be streamed layer by layer; calibrate it in memory, with --no-stream"
    )
