"""Small models whose tokenizer.json reads digits in threes, as Llama 3's does, and whose AutoTokenizer may not."""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from fp8q.calibrate.model.source import Source, open_source


def numbers() -> list[str]:
    return [f"line {i}: in {1900 + i % 130} the sum was {i * 7919}, don't {chr(97 + i % 26)}" for i in range(3000)]


def two_tokenizers(path: Path, config: str, kind: str) -> Source:
    """A random model of `config`, whose tokenizer_config.json names the class `kind`, written to `path`."""
    made = Tokenizer(models.BPE())
    split = Regex(r"\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        numbers(), trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": kind}))
    torch.manual_seed(0)
    fields = getattr(transformers, config)(
        vocab_size=600, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(fields).bfloat16().save_pretrained(path)
    return open_source(str(path))
