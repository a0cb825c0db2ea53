"""Train the demo checkpoint: a small Llama that has really learned something, from text every machine has.

Calibration and perplexity say nothing of a random model: its activations have no structure and its perplexity is the
vocabulary's size whatever FP8 does. So this one is trained, from scratch and on one core, on the source of Python's
standard library, and is Llama in every respect that quantization sees: RMSNorm, RoPE, SwiGLU, grouped-query attention
with heads of 64, tied embeddings, a byte-level BPE tokenizer.

Files whose name's MD5 is divisible by 20 are held out of the training and of the tokenizer; whole ones of them become
`calibration.txt` and `evaluation.txt`. Tests and the tables under `encodings` are left out altogether: many Pythons
come without the first, and there is nothing to learn in the second.

The run is one of a fixed number of steps on one thread, so that the same Python, libraries and kind of CPU give the
same bytes. The matrices are trained with Muon (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural
networks"), the embedding and norms with AdamW; the learning rates rise over the first steps and then fall linearly to
zero.

usage: train.py [--steps N] [--out DIR]
"""

import argparse
import hashlib
import math
import platform
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

HERE = Path(__file__).parent
BOS, EOS = "<s>", "</s>"  # tokens 0 and 1
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}

VOCABULARY, POSITIONS = 2048, 512


def config() -> LlamaConfig:
    """The architecture: 3.5 million parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )


@dataclass(frozen=True)
class Training:
    """The hyperparameters; `length` is that of the model's positions, so that all of them are trained."""

    steps: int
    batch: int = 4
    length: int = POSITIONS
    warmup: int = 100
    matrix_rate: float = 0.02
    other_rate: float = 0.01
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Texts:
    """Whole files of the standard library, as (path under Lib, text)."""

    training: list[tuple[str, str]]
    held_out: list[tuple[str, str]]

    @classmethod
    def read(cls) -> "Texts":
        """Read the standard library of the running Python; what is not UTF-8 or next to empty is passed over."""
        root, texts = Path(sysconfig.get_paths()["stdlib"]), cls([], [])
        for path in sorted(root.rglob("*.py")):
            name = path.relative_to(root)
            if LEFT_OUT.isdisjoint(name.parts):
                text = path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
                if len(text) > 500 and "\ufffd" not in text:
                    (texts.held_out if _md5(path.name) % 20 == 0 else texts.training).append((name.as_posix(), text))
        return texts

    def excerpts(self, *sizes: int, largest: int = 40_000) -> list[list[tuple[str, str]]]:
        """Deal held-out files, in the order of their paths' MD5, into disjoint lists of at least `sizes` bytes; none
        larger than `largest`, so that no file dominates.
        """
        files = iter(
            sorted((file for file in self.held_out if len(file[1]) <= largest), key=lambda file: _md5(file[0]))
        )
        return [list(_until(files, size)) for size in sizes]


def _until(files: Iterator[tuple[str, str]], size: int) -> Iterator[tuple[str, str]]:
    while size > 0:
        name, text = next(files)
        size -= len(text.encode())
        yield name, text


def _md5(text: str) -> int:
    return int(hashlib.md5(text.encode()).hexdigest(), 16)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every text encodes, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=POSITIONS)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of whole texts, with nothing added and no warning that they are longer than the model's positions."""
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(texts)]


def batches(ids: torch.Tensor, training: Training) -> Iterator[torch.Tensor]:
    """Yield `input_ids` [batch, length]: every window of the text once an epoch, in random order, cut from another
    offset each epoch.
    """
    generator = torch.Generator().manual_seed(training.seed)
    while True:
        offset = int(torch.randint(training.length, (), generator=generator))
        windows = ids[offset : offset + (len(ids) - offset) // training.length * training.length].view(
            -1, training.length
        )
        for chosen in torch.randperm(len(windows), generator=generator).split(training.batch)[:-1]:
            yield windows[chosen]


def optimizers(model: LlamaForCausalLM, training: Training) -> list[torch.optim.Optimizer]:
    """Muon for the decoder's matrices, AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=training.matrix_rate, weight_decay=training.weight_decay),
        torch.optim.AdamW(others, lr=training.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, ids: torch.Tensor, training: Training) -> None:
    """Train in place: FP32 weights, BF16 products. Prints the loss in nats a token to standard error."""
    chosen, start, source = optimizers(model, training), time.monotonic(), batches(ids, training)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / training.warmup, 1 - step / training.steps))
        for o in chosen
    ]
    model.train()
    for step in range(training.steps):
        x = next(source)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_gradient_norm)
        for optimizer, schedule in zip(chosen, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 50 == 0 or step == training.steps - 1:
            print(
                f"step {step:5d} of {training.steps}   loss {loss.item():.3f}   {time.monotonic() - start:6.0f} s",
                file=sys.stderr,
                flush=True,
            )


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, ids: torch.Tensor, window: int = 256) -> float:
    """exp of the mean NLL over whole windows of `window` tokens, each scored alone (its first token is not scored)."""
    windows = ids[: len(ids) // window * window].view(-1, window)
    nll_nats = [model(input_ids=x, labels=x).loss.item() for x in windows.split(1)]
    return math.exp(sum(nll_nats) / len(nll_nats))


def save(checkpoint: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the checkpoint as Hugging Face reads it, replacing the one that is there."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1)
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    for file in checkpoint.iterdir():
        file.chmod(0o644)


def main() -> None:
    """Train, then write the checkpoint and the two texts under `--out`."""
    parser = argparse.ArgumentParser(description="Train the demo checkpoint on the standard library of this Python.")
    parser.add_argument("--steps", type=int, default=3600, help="optimizer steps of 2,048 tokens")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="directory for checkpoint/, calibration.txt, evaluation.txt"
    )
    options = parser.parse_args()
    training = Training(steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(training.seed)

    texts = Texts.read()
    calibration, evaluation = texts.excerpts(200_000, 100_000)
    for name, files in (("calibration", calibration), ("evaluation", evaluation)):
        (options.out / f"{name}.txt").write_text("".join(text for _, text in files), encoding="utf-8")
        print(f"{name}.txt: {', '.join(path for path, _ in files)}")

    documents = [text for _, text in texts.training]
    tokenizer = train_tokenizer(documents)
    random.Random(training.seed).shuffle(documents)
    ids = torch.tensor([i for e in encode(tokenizer, documents) for i in [0, *e, 1]])
    print(
        f"Python {platform.python_version()}; training: {len(documents)} files, {sum(map(len, documents)):,} "
        f"characters, {len(ids):,} tokens"
    )
    # a quarter faster than SDPA, whose backward is slow on CPU
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    train(model, ids, training)

    model.eval().to(torch.bfloat16)
    save(options.out / "checkpoint", model, tokenizer)
    held_out = torch.tensor(encode(tokenizer, ["".join(text for _, text in evaluation)])[0])
    print(
        f"parameters: {model.num_parameters():,}; evaluation: {len(held_out):,} tokens, perplexity "
        f"{perplexity(model, held_out):.2f}"
    )


if __name__ == "__main__":
    main()
