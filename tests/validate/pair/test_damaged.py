"""`fp8q compare ORIGINAL --model CANDIDATE` on the demo: a sound FP8 checkpoint passes, twelve damaged ones do not, and
the cause of each is named.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fp8q import api
from fp8q.calibrate.text.evaluation import Evaluation
from fp8q.core.errors import InputError
from fp8q.core.reporter import SILENT
from fp8q.options import ConvertOptions, PairOptions
from fp8q.options.scales import Layout
from fp8q.stages.compare_pair import CheckpointPair, results_folder
from fp8q.validate.pair.document import CheckpointIdentity, PairComparison, check_pair
from fp8q.validate.pair.models import ORIGINAL_IN_CODES
from tests.quantize.reading.fp8_checkpoints import fine_grained, modelopt
from tests.validate.pair import damaged
from tests.validate.pair.damaged import UP, quantized

Compare = Callable[..., PairComparison]


def test_a_sound_candidate_passes_and_its_numbers_are_written(compared: Compare, tmp_path: Path) -> None:
    found = compared(max_ppl_increase=0.05)
    assert found.passes
    assert found.causes == []
    check_pair(found)
    assert 0 < found.kl_nats.low < found.kl_nats.mean < found.kl_nats.high < 0.05
    assert found.modules[0].error is not None
    assert 0.005 < found.modules[0].error < 0.1, "FP8 rounds to some percent"
    assert [one.layer for one in found.hidden] == [0, 1, 2, 3, 4]
    assert found.hidden[0].error == 0, "the embedding stays"
    written = {"comparison.json", "report.html", "tokens.npz", ".lock"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == written
    stored = json.loads((tmp_path / "out" / "comparison.json").read_text(encoding="utf-8"))
    assert stored["candidate"]["quantization"] == "compressed-tensors float-quantized"
    assert stored["runtimes"]["candidate"]["divergences"].keys() >= {"bf16||this", "this||bf16"}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert found.modules[0].module.replace(".", ".<wbr>") in page


@pytest.mark.slow
def test_the_same_comparison_is_not_run_again_and_another_limit_judges_it_anew(
    compared: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compared(max_ppl_increase=0.05)
    monkeypatch.setattr("fp8q.stages.compare_pair._run", None)
    assert compared(max_ppl_increase=0.05) == first
    strict = compared(max_ppl_increase=0.0)
    rise = first.runtimes["candidate"].perplexity_increase
    assert rise is not None
    assert strict.verdict.kind == ("worse" if rise > 0 else "acceptable")
    assert strict.verdict.limit == 0.0


def test_two_comparisons_at_once_do_not_mix(compared: Compare, tmp_path: Path) -> None:
    with results_folder(tmp_path / "out"):  # as another process holds it
        told = "another fp8q process is comparing here; wait for it, or name another directory"
        with pytest.raises(InputError, match=told):
            compared()
    assert not (tmp_path / "out").exists(), "nothing was written there"


@pytest.mark.parametrize("block", [(128, 128), None])
def test_transformers_own_form_is_read(
    block: tuple[int, int] | None, compared: Compare, demo_checkpoint: Path, tmp_path: Path
) -> None:
    fine_grained(demo_checkpoint, tmp_path / "candidate", block)
    found = compared(max_ppl_increase=0.05, module_windows=1)
    assert found.passes
    assert found.candidate.quantization == ("fp8 blocks" if block else "fp8")
    assert 0 < found.kl_nats.mean < 0.05
    if not torch.cuda.is_available():
        assert "the rounding of the weights alone" in found.notes[0]


@pytest.mark.parametrize("stream", [False, True])
def test_an_original_in_blocks_counts_by_the_values_of_its_codes(
    stream: bool, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    """transformers dequantizes blocks of 128 on a CPU, none of another size, and does not run them in FP32."""
    original = fine_grained(demo_checkpoint, tmp_path / "original", (128, 128))
    candidate = quantized(demo_checkpoint, tmp_path / "candidate")
    options = PairOptions(
        data=str(demo_texts.evaluation), out=tmp_path / "out", context=64, max_tokens=660, stream=stream,
        module_windows=0, max_ppl_increase=0.05,
    )  # fmt: skip
    found = api.compare_checkpoints(original, candidate, options)
    assert found.passes
    assert found.notes == [ORIGINAL_IN_CODES]
    assert 0 < found.kl_nats.mean < 0.05


@pytest.mark.parametrize(
    ("damage", "rule", "said"),
    [
        (
            damaged.scale_times_8,
            "module",
            f"{UP}: its outputs are 8 times the original's: a scale is wrong by that factor",
        ),
        pytest.param(
            damaged.weight_of_another_layer,
            "module",
            f"{UP}: it has the weight of model.layers.0.mlp.up_proj",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            damaged.zero_weight,
            "module",
            f"{UP}: its output is zero: its weight, or its scale, is",
            marks=pytest.mark.slow,
        ),
        (damaged.norm_of_the_other_sign, "module", "model.norm: its outputs are -1 times the original's"),
        pytest.param(
            damaged.another_seed,
            "other-model",
            "28 of 39 modules compute something else than the original's",
            marks=pytest.mark.slow,
        ),
        (damaged.other_beginning, "special-tokens", "tokenizer.json: reads 'Hello' as"),
        (damaged.other_template, "chat-template", "chat template: is new"),
        pytest.param(
            damaged.endless,
            "end-of-text",
            "generation_config.json: answers end at tokens [1, 7], and the original's at [1]",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_candidate_does_not_pass_and_its_cause_is_named(
    compared: Compare, damage: damaged.Damage, rule: str, said: str
) -> None:
    found = compared(damage)
    assert not found.passes
    first = next(cause for cause in found.causes if cause.severity == "error")
    assert first.rule == rule
    assert said in str(first)


def test_a_nan_code_is_found_where_it_is(compared: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(damaged.nan_code)
    assert found.verdict.kind == "broken"
    assert str(found.causes[0]).startswith(f"{UP}: its output is not finite")
    assert found.modules[0].error is None
    monkeypatch.setattr("fp8q.stages.compare_pair._run", None)
    stored = compared(damaged.nan_code)
    assert (stored.modules, stored.hidden) == (found.modules, found.hidden), "results without a number are read again"


def test_scales_of_a_cache_that_were_never_set_are_told(compared: Compare) -> None:
    found = compared(damaged.cache_scales_of_one, cache=True, max_ppl_increase=0.05)
    assert {cause.rule for cause in found.causes} == {"C119 cache-default"}


def test_scales_of_a_cache_that_were_set_are_no_cause(compared: Compare) -> None:
    assert compared(cache=True, max_ppl_increase=0.05).causes == []


def test_weights_in_bf16_that_are_declared_as_codes_are_refused(compared: Compare) -> None:
    with pytest.raises(InputError, match=r"config\.json says compressed-tensors float-quantized, and no tensor"):
        compared(damaged.disguised)


def test_a_renamed_weight_is_refused_by_its_name(compared: Compare) -> None:
    with pytest.raises(
        InputError, match=r"has no model\.layers\.1\.mlp\.up_proj\.weight: a module is left out, or under another name"
    ):
        compared(damaged.renamed)


@pytest.mark.slow
def test_drafting_layers_that_the_candidate_lacks_are_told(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    """The original has a module `mtp`, whose tensors transformers drops; the candidate's files have none."""
    from safetensors.torch import load_file, save_file

    original = Path(shutil.copytree(demo_checkpoint, tmp_path / "original"))
    tensors = load_file(original / "model.safetensors")
    save_file(
        tensors | {"mtp.fc.weight": tensors["model.norm.weight"].clone()},
        original / "model.safetensors",
        {"format": "pt"},
    )
    candidate = quantized(demo_checkpoint, tmp_path / "candidate")
    options = PairOptions(
        data=str(demo_texts.evaluation), out=tmp_path / "out", context=64, max_tokens=660, module_windows=0
    )
    found = api.compare_checkpoints(original, candidate, options, SILENT)
    assert [cause.rule for cause in found.causes] == ["drafting-layers"]


def test_losses_that_were_changed_since_are_refused(compared: Compare, tmp_path: Path) -> None:
    compared(module_windows=0)
    path = tmp_path / "out" / "tokens.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, allow_pickle=False, **(arrays | {"candidate": arrays["candidate"] * 2}))
    with pytest.raises(
        InputError,
        match=r"tokens\.npz: is not the file that comparison\.json was written with; remove the directory and compare",
    ):
        compared(module_windows=0)


def test_other_tokens_of_the_same_text_are_another_comparison() -> None:
    """Another tokenizer may cut a text into as many tokens."""
    identity, options = CheckpointIdentity(name="a", sha256="0" * 64), PairOptions()
    protocol = SimpleNamespace(model_dump_json=lambda: "{}")
    keys = {
        CheckpointPair(
            (Path("a"), Path("b")), ({}, {}), (identity, identity),
            cast(Evaluation, SimpleNamespace(ids=np.array([ids]), protocol=protocol)), options, SILENT,
        ).key
        for ids in ([1, 2, 3], [1, 2, 4], [1, 2, 3])
    }  # fmt: skip
    assert len(keys) == 2


def test_a_tokenizer_that_does_not_load_is_refused_in_a_line(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    original = Path(shutil.copytree(demo_checkpoint, tmp_path / "original"))
    candidate = quantized(original, tmp_path / "candidate")
    with open(original / "tokenizer_config.json", "ab") as file:
        file.write(b"\x94")
    options = PairOptions(data=str(demo_texts.evaluation), out=tmp_path / "out", context=64, max_tokens=660)
    with pytest.raises(InputError, match=r"original/tokenizer_config.json: is not JSON \('utf-8' codec can't decode"):
        api.compare_checkpoints(original, candidate, options, SILENT)


def test_other_models_and_other_directories_are_refused(
    compared: Compare, demo_checkpoint: Path, tmp_path: Path
) -> None:
    candidate = quantized(demo_checkpoint, tmp_path / "candidate")
    damaged.edit_json(candidate / "config.json", lambda fields: fields.update(num_hidden_layers=3))
    with pytest.raises(InputError, match=r"candidate: has 3 layers and the original 4, so that it is another model"):
        compared()
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "notes.txt").touch()
    damaged.edit_json(candidate / "config.json", lambda fields: fields.update(num_hidden_layers=4))
    with pytest.raises(InputError, match=r"out: holds notes\.txt, which no comparison wrote"):
        compared()


def test_another_vocabulary_is_refused(compared: Compare, demo_checkpoint: Path, tmp_path: Path) -> None:
    candidate = quantized(demo_checkpoint, tmp_path / "candidate")

    def swap(fields: dict[str, Any]) -> None:
        words = fields["model"]["vocab"]
        first, second = sorted(words, key=words.get)[600:602]
        words[first], words[second] = words[second], words[first]

    damaged.edit_json(candidate / "tokenizer.json", swap)
    with pytest.raises(InputError, match=r"the tokens of one are not those of the other; compare checkpoints"):
        compared()


def test_an_expert_without_weights_is_named(shared_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Experts of a layer are one parameter [experts, …] in transformers, so that their module's error hides one."""
    from safetensors.torch import load_file, save_file

    original = shared_checkpoint("mixtral")
    candidate = Path(shutil.copytree(original, tmp_path / "candidate"))
    tensors = load_file(original / "model.safetensors")
    names = [name for name in tensors if ".layers.1." in name and ".experts.2." in name]
    assert names, "the files hold each expert by itself"
    save_file(tensors | {name: tensors[name] * 0 for name in names}, candidate / "model.safetensors", {"format": "pt"})
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl who had a red ball. " * 40, encoding="utf-8")
    options = PairOptions(data=str(text), out=tmp_path / "out", context=64, max_tokens=660)
    found = api.compare_checkpoints(original, candidate, options, SILENT)
    told = [str(cause) for cause in found.causes if cause.rule == "expert"]
    assert told[0].startswith(
        "model.layers.1.mlp.experts.gate_up_proj: the weight of expert 2 is zero or another weight"
    )


def test_a_form_that_transformers_cannot_run_is_dequantized_with_a_note(
    compared: Compare, demo_checkpoint: Path, tmp_path: Path
) -> None:
    """FP8_BLOCK: compressed-tensors splits inputs of width 704 into groups of 128, which they are not."""
    block = ConvertOptions(form="block", layout="compressed-tensors")
    api.convert(str(demo_checkpoint), tmp_path / "candidate", block, SILENT)
    comparison = compared(max_ppl_increase=0.05)
    assert comparison.candidate.loaded_by == "fp8q"
    (note,) = comparison.notes
    assert note.startswith("transformers does not run this form here, and fp8q dequantizes its weights")
    assert note.endswith("inputs stay in BF16, so what is measured is the rounding of the weights alone")
    assert 0 < comparison.kl_nats.mean < 0.05
    assert comparison.modules[0].error is not None
    assert 0.005 < comparison.modules[0].error < 0.1


Make = Callable[[Path, Path], object]


def in_layout(layout: Layout) -> Make:
    """A checkpoint of ours with a scale for each channel and token."""
    options = ConvertOptions(form="dynamic", layout=layout)
    return lambda original, out: api.convert(str(original), out, options, SILENT)


@pytest.mark.parametrize(
    ("in_modelopt", "in_compressed_tensors"),
    [
        (partial(quantized, damage=damaged.as_modelopt), partial(quantized, damage=damaged.as_static)),
        pytest.param(
            partial(quantized, damage=damaged.as_modelopt, cache=True),
            partial(quantized, damage=damaged.as_static, cache=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(in_layout("modelopt"), in_layout("compressed-tensors"), marks=pytest.mark.slow),
    ],
    ids=["static", "static, and a cache", "dynamic"],
)
def test_modelopts_form_is_computed_as_compressed_tensors(
    in_modelopt: Make, in_compressed_tensors: Make, demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    """transformers, which knows no ModelOpt, would take codes for values; inputs and caches are rounded as well."""
    comparisons = []
    for make, name in ((in_modelopt, "modelopt"), (in_compressed_tensors, "twin")):
        make(demo_checkpoint, tmp_path / name)
        options = PairOptions(
            data=str(demo_texts.evaluation), out=tmp_path / f"{name}, compared", context=64, max_tokens=660,
            max_ppl_increase=0.05, module_windows=1,
        )  # fmt: skip
        comparisons.append(api.compare_checkpoints(demo_checkpoint, tmp_path / name, options, SILENT))
    found, twin = comparisons
    assert found.candidate.quantization is not None
    assert found.candidate.quantization.startswith("modelopt")
    assert found.candidate.loaded_by == twin.candidate.loaded_by == "transformers"
    assert found.notes == ["transformers knows no ModelOpt, and gets these codes and scales as compressed-tensors"]
    assert (found.runtimes, found.modules, found.hidden) == (twin.runtimes, twin.modules, twin.hidden)
    assert 0 < found.kl_nats.mean < 0.05


@pytest.mark.filterwarnings("default")  # ModelOpt's export takes a warning that is an error for its own failure
@pytest.mark.slow
def test_modelopts_own_export_is_read(compared: Compare, demo_checkpoint: Path, tmp_path: Path) -> None:
    modelopt(demo_checkpoint, tmp_path / "candidate", cache=True)
    for tokenizer in demo_checkpoint.glob("tokenizer*"):  # which ModelOpt leaves to the caller
        shutil.copy(tokenizer, tmp_path / "candidate")
    comparison = compared(module_windows=1)
    assert (comparison.candidate.loaded_by, len(comparison.notes)) == ("transformers", 1)
    assert comparison.modules[0].error is not None
    assert comparison.modules[0].error < 0.2  # of inputs too, scaled by few tokens


def test_a_modelopt_checkpoint_that_contradicts_itself_is_named(compared: Compare) -> None:
    with pytest.raises(InputError, match="config.json: says quant_algo FP8_PER_CHANNEL_PER_TOKEN, and hf_quant_config"):
        compared(damaged.as_modelopt_that_contradicts)


def test_an_original_of_modelopts_that_contradicts_itself_is_named(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    original = quantized(demo_checkpoint, tmp_path / "original", damaged.as_modelopt_that_contradicts)
    options = PairOptions(data=str(demo_texts.evaluation), out=tmp_path / "out", context=64, max_tokens=660)
    with pytest.raises(InputError, match="config.json: says quant_algo FP8_PER_CHANNEL_PER_TOKEN, and hf_quant_config"):
        api.compare_checkpoints(original, demo_checkpoint, options)


def test_blocks_of_modelopt_are_dequantized_with_a_note(compared: Compare) -> None:
    """Their inputs are BF16 to ModelOpt, and no block of theirs need be of 128."""
    comparison = compared(damaged.as_modelopt_blocks, max_ppl_increase=0.05)
    assert (comparison.candidate.quantization, comparison.candidate.loaded_by) == ("modelopt", "fp8q")
    assert len(comparison.notes) == 1
    assert 0 < comparison.kl_nats.mean < 0.05


@pytest.mark.slow
def test_another_file_beside_the_weights_is_another_comparison(compared: Compare, tmp_path: Path) -> None:
    """What a cause is read from is part of what the stored results depend on."""
    assert compared(max_ppl_increase=0.05).passes
    damaged.endless({}, tmp_path / "candidate")
    assert [cause.rule for cause in compared(max_ppl_increase=0.05).causes] == ["end-of-text"]


def test_a_killed_comparison_goes_on_behind_the_models_that_have_run(
    compared: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr("fp8q.stages.compare_pair._explain", interrupted)
        with pytest.raises(KeyboardInterrupt):
            compared(max_ppl_increase=0.05)
    assert not (tmp_path / "out" / "comparison.json").exists()
    monkeypatch.setattr("fp8q.stages.compare_pair._logits", None)  # no model runs a window again
    assert compared(max_ppl_increase=0.05).passes
    assert not (tmp_path / "out" / ".compare.work").exists()


def test_what_cannot_be_loaded_leaves_nothing_behind(compared: Compare, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no"):
        compared(damaged.renamed)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "content", "fault"), [
    ("tokenizer_config.json", b"{", "is not JSON (Expecting property name enclosed in double quotes: line 1 column 2"),
    (
        "generation_config.json",
        b"[",
        "is not JSON (Expecting value: line 1 column 2 (char 1)); copy it again from the model",
    ),
    ("chat_template.jinja", b"\xff", "is no text in UTF-8 ('utf-8' codec can't decode byte 0xff in position 0:"),
])  # fmt: skip
def test_a_damaged_file_beside_the_weights_is_named_before_any_model_runs(
    name: str, content: bytes, fault: str, compared: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8q.stages.compare_pair._compared", None)
    with pytest.raises(InputError) as refused:
        compared(lambda tensors, path: (path / name).write_bytes(content))
    assert str(refused.value).startswith(f"{tmp_path / 'candidate' / name}: {fault}")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_behind(compared: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(pair: CheckpointPair, vocabulary: int, folder: Path) -> None:
        (folder / "windows").write_bytes(b"half")
        raise OSError("524096 requested and 2000 written")

    monkeypatch.setattr("fp8q.stages.compare_pair._run", run_out)
    with pytest.raises(InputError, match="a file could not be written to its end; free space there, or name another"):
        compared()
    assert not (tmp_path / "out").exists()


def test_the_command_shows_the_worst_modules_and_ends_by_the_verdict(
    fp8q: Callable[..., Any], demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    sound = quantized(demo_checkpoint, tmp_path / "sound")
    asked = ("--data", demo_texts.evaluation, "--context", "64", "--max-tokens", "800")
    good = fp8q(
        "compare", demo_checkpoint, "--model", sound, *asked, "--out", tmp_path / "a", "--max-ppl-increase", "5%"
    )
    assert good.code == 0
    assert "Acceptable" in good.out
    assert "_proj" in good.out
    broken = quantized(demo_checkpoint, tmp_path / "broken", damaged.scale_times_8)
    bad = fp8q("compare", demo_checkpoint, "--model", broken, *asked, "--out", tmp_path / "b", "--json")
    assert bad.code == 3
    shown = json.loads(bad.out)
    assert shown["causes"][0]["subject"] == UP
    assert shown["passes"] is False


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--url", "http://localhost:1"], "is no run, and two checkpoints are compared on a text"),
        (["--model", "x", "--windows", "3"], "--windows 3: is for a server"),
        ([], "is a checkpoint, and nothing to compare it with is given"),
        (["--model", "x"], "is no run, and two checkpoints are compared on a text"),
        (["--model", "x", "--data", "t", "--out", "o"], "--model x: there is no such directory"),
    ],
)
def test_arguments_that_do_not_go_with_a_checkpoint_are_refused(
    fp8q: Callable[..., Any], demo_checkpoint: Path, words: list[str], told: str
) -> None:
    assert told in fp8q("compare", demo_checkpoint, *words).complaint()


def test_options_of_two_checkpoints_are_refused_for_a_run(fp8q: Callable[..., Any], tmp_path: Path) -> None:
    done = fp8q("compare", tmp_path, "--model", "x", "--data", "text").complaint()
    assert done.startswith(f"--data text: is for two checkpoints, and {tmp_path} is a run or no checkpoint")
