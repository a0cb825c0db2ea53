"""The demo is what its README says: an ordinary Llama of at most 8 MB, really trained, and texts it has not seen."""

import hashlib
import math
import re
from pathlib import Path

import pytest

from tests.noise import mean_noise, root_mean_square

README = Path(__file__).resolve().parents[2] / "examples" / "demo" / "README.md"


def said(pattern: str) -> float:
    """The number that the README gives where `pattern` has its group."""
    found = re.search(pattern, README.read_text(encoding="utf-8"))
    assert found, pattern
    return float(found[1].replace(",", ""))


def test_no_file_of_the_demo_is_larger_than_eight_megabytes() -> None:
    assert [path for path in README.parent.rglob("*") if path.is_file() and path.stat().st_size > 8_000_000] == []


def test_the_architecture_has_grouped_queries_and_heads_of_64(demo_checkpoint: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(demo_checkpoint)
    assert (config.model_type, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        "llama",
        4,
        2,
        64,
    )
    assert (config.max_position_embeddings, config.vocab_size, config.tie_word_embeddings) == (512, 2048, True)


@pytest.mark.parametrize("name", ["calibration.txt", "evaluation.txt"])
def test_a_text_is_of_held_out_files_and_has_the_tokens_its_readme_says(demo_checkpoint: Path, name: str) -> None:
    from tokenizers import Tokenizer

    (row,) = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` |")]
    files = re.findall(r"`([^`]+\.py)`", row)
    assert len(files) >= 8
    assert [file for file in files if int(hashlib.md5(file.rpartition("/")[2].encode()).hexdigest(), 16) % 20] == []

    text = (README.parent / name).read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json")).encode(text).ids
    assert len(ids) == said(rf"`{re.escape(name)}` \| ([\d,]+) \|")
    assert Tokenizer.from_file(str(demo_checkpoint / "tokenizer.json")).decode(ids) == text


@pytest.mark.slow
def test_the_perplexity_is_the_one_its_readme_says(demo_checkpoint: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, exact = (AutoModelForCausalLM.from_pretrained(demo_checkpoint, dtype=dtype) for dtype in ("auto", "float32"))
    assert model.dtype == torch.bfloat16
    assert model.num_parameters() == said(r"parameters \| ([\d,]+);")
    text = (README.parent / "evaluation.txt").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(demo_checkpoint)(text, verbose=False).input_ids)
    windows = ids[: len(ids) // 256 * 256].view(-1, 256)
    with torch.inference_mode():
        losses, unrounded = (
            torch.cat(
                [
                    torch.nn.functional.cross_entropy(
                        loaded(batch).logits[:, :-1].float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none"
                    )
                    for batch in windows.split(8)
                ]
            ).numpy()
            for loaded in (model, exact)
        )
    perplexity = said(r"perplexity\*\* \| \*\*([\d.]+)\*\*")
    noise = perplexity * mean_noise(*root_mean_square(losses, unrounded))
    assert math.exp(losses.mean()) == pytest.approx(perplexity, abs=noise + 0.005), "two digits behind the point"
