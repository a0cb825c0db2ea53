"""Train a small Llama of 4,096 positions that finds a number hidden anywhere in a long text.

`fp8q validate --needles` asks a model for what stands far back in its prompt. A model that cannot do that in BF16 shows
nothing about FP8, and the demo has 512 positions. This one learns two things at once, on the source of Python's
standard library: the next token, as the demo does, and "The secret number of Bavodi is 4821.", said somewhere and asked
for later. A short text holds several such sentences and asks for all, so that a step teaches many retrievals; the texts
grow from 128 tokens to 4,096, in which most of the distance lies. The base of the rotary embedding is 1e6: half of its
frequencies turn less than once in 4,096 tokens, and can compare contents at any distance.

Digits are tokens of their own, so that an answer is copied and not remembered. The texts, the optimizer and the form of
the checkpoint are those of `examples/demo/train.py`, whose held-out files are held out here too: that folder's
`calibration.txt` and `evaluation.txt` are this model's.

usage: train_needles.py [--out DIR]
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from fp8q.examples.demo.train import BOS, EOS, Texts, Training, encode, optimizers, perplexity, save

HERE = Path(__file__).parent
VOCABULARY, POSITIONS = 1024, 4096
WIDTH, HEAD, ROTARY_BASE = 128, 64, 1e6
#: Texts of so many tokens, so many a step, for so many steps.
CURRICULUM = ((128, 16, 200), (256, 8, 150), (512, 4, 100), (1024, 2, 100), (2048, 1, 70), (4096, 1, 70))
#: Steps, before these, of texts of random tokens that repeat themselves, for the heads that copy.
REPEATING = 120
#: Up to so many tokens plain attention is faster on a processor than torch's fused one, and above it slower.
SHORT = 256
SENTENCE, QUESTION = "\nThe secret number of {key} is {value}.\n", "\nThe secret number of {key} is"


def config() -> LlamaConfig:
    """The architecture: 0.7 million parameters."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )


@torch.no_grad()
def begin_with_copying(model: LlamaForCausalLM) -> None:
    """Let the untrained model (changed in place) look for the token at hand, and copy what stood behind it.

    Such heads form by themselves too, later (Olsson et al., 2022, "In-context Learning and Induction Heads"). Here two
    heads of the first layer begin by reading the token one place and two places before: every embedding has the same
    number in its first dimension, and a query made of that alone, turned back by so many places, agrees with the key
    there. Two heads of the second layer compare what those read with the token at hand, and with the one before it, in
    the slow frequencies of the rotary embedding, and copy the token they attend to.
    """
    width, size, std = WIDTH, HEAD, model.config.initializer_range
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    model.model.embed_tokens.weight[:, 0] = 4 * std
    frequencies = ROTARY_BASE ** (-torch.arange(size // 2) * 2 / size)
    quick, slow = (torch.arange(size // 2) < 10) * 2.0, torch.arange(size) % (size // 2) >= 20
    read, written = [], []
    for head in range(2):
        queries, keys = slice(2 * head * size, (2 * head + 1) * size), slice(head * size, (head + 1) * size)
        angle = frequencies * (head + 1)
        for matrix, rows, turned in (
            (first.k_proj, keys, torch.cat([quick, quick * 0])),
            (first.q_proj, queries, torch.cat([quick * angle.cos(), -quick * angle.sin()])),
        ):
            matrix.weight[rows] = 0
            matrix.weight[rows, 0] = turned
        read.append(torch.nn.init.orthogonal_(torch.empty(size, width)))
        read[head][:, 0] = 0
        written.append(torch.nn.init.orthogonal_(torch.empty(width, size)))
        first.v_proj.weight[keys], first.o_proj.weight[:, queries] = read[head], written[head] * std
    for head, asked in enumerate((read[0], written[0].T)):
        queries, keys = slice(2 * head * size, (2 * head + 1) * size), slice(head * size, (head + 1) * size)
        copied = torch.nn.init.orthogonal_(torch.empty(size, width))
        second.q_proj.weight[queries] = asked * slow[:, None] * 2
        second.k_proj.weight[keys] = written[head].T * slow[:, None] * 2
        second.v_proj.weight[keys], second.o_proj.weight[:, queries] = copied, copied.T * std


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=POSITIONS)


def name(draw: random.Random) -> str:
    """A made name: three syllables."""
    return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)).capitalize()


@dataclass(frozen=True)
class Needles:
    """Texts with sentences to find. `ids` int64 [tokens]: the text that they are hidden in."""

    tokenizer: PreTrainedTokenizerFast
    ids: torch.Tensor
    draw: random.Random

    def text(self, length: int) -> tuple[list[int], list[bool]]:
        """Token ids of a text, and which of them belong to an answer; one sentence is hidden for every 64 tokens of a
        text, four at most, and all are asked for at its end, in random order.
        """
        count = self.draw.randint(1, min(4, length // 64))
        pairs = [(name(self.draw), str(self.draw.randint(1000, 9999))) for _ in range(count)]
        hidden = encode(self.tokenizer, [SENTENCE.format(key=key, value=value) for key, value in pairs])
        asked = list[tuple[list[int], list[int]]]()
        for key, value in self.draw.sample(pairs, count):
            question, answer = encode(self.tokenizer, [QUESTION.format(key=key), f" {value}."])
            asked.append((question, answer))
        room = length - sum(map(len, hidden)) - sum(len(question) + len(answer) for question, answer in asked)
        start = self.draw.randrange(len(self.ids) - room)
        filler = self.ids[start : start + room].tolist()
        cuts = [0, *sorted(self.draw.randint(0, room) for _ in hidden), room]
        tokens = list(filler[: cuts[1]])
        for number, sentence in enumerate(hidden, 1):
            tokens += sentence + filler[cuts[number] : cuts[number + 1]]
        wanted = [False] * len(tokens)
        for question, answer in asked:
            tokens += question + answer
            wanted += [False] * len(question) + [True] * len(answer)
        return tokens, wanted

    def repeating(self, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`size` texts of random tokens that repeat themselves every 8 to 48, as `batch` has them."""
        period = self.draw.randint(8, 48)
        text = torch.tensor([[self.draw.randrange(2, VOCABULARY) for _ in range(period)] for _ in range(size)])
        again = torch.arange(length) >= period
        return text.repeat(1, length // period + 1)[:, :length], again.expand(size, -1)

    def batch(self, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`size` texts: ids int64 [size, length], and bool of the same shape, true in an answer."""
        texts = [self.text(length) for _ in range(size)]
        return torch.tensor([tokens for tokens, _ in texts]), torch.tensor([wanted for _, wanted in texts])

    def steps(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The texts of each step."""
        for _ in range(REPEATING):
            yield self.repeating(*CURRICULUM[0][:2])
        for length, size, steps in CURRICULUM:
            for _ in range(steps):
                yield self.batch(length, size)


def train(model: LlamaForCausalLM, needles: Needles, training: Training) -> None:
    """Train in place: FP32 weights, BF16 products. Prints the losses in nats a token, and the share of answers' tokens
    that are right, to standard error.
    """
    chosen, start = optimizers(model, training), time.monotonic()
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / training.warmup, 1 - step / training.steps))
        for o in chosen
    ]
    model.train()
    for step, (ids, wanted) in enumerate(needles.steps()):
        model.set_attn_implementation("eager" if ids.shape[1] <= SHORT else "sdpa")
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids).logits[:, :-1].float()
        losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        of_answers = wanted[:, 1:]
        text, answers = losses[~of_answers].mean(), losses[of_answers].mean()
        model.zero_grad()
        (text + answers if step >= REPEATING else answers).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_gradient_norm)
        for optimizer, schedule in zip(chosen, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % 10 == 0 or step == training.steps - 1:
            right = (logits.argmax(-1) == ids[:, 1:])[of_answers].float().mean()
            print(
                f"step {step:5d} of {training.steps}   {ids.shape[1]:5d} tokens   text {text.item():.3f}   answers "
                f"{answers.item():.3f}, {right.item():.0%} right   {time.monotonic() - start:6.0f} s",
                file=sys.stderr,
                flush=True,
            )


def main() -> None:
    """Train, then write the checkpoint under `--out`."""
    parser = argparse.ArgumentParser(description="Train the checkpoint that finds needles in 4,096 tokens.")
    parser.add_argument("--out", type=Path, default=HERE, help="directory for checkpoint/")
    options = parser.parse_args()
    training = Training(warmup=40, steps=REPEATING + sum(steps for _, _, steps in CURRICULUM))
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(training.seed)

    texts = Texts.read()
    documents = [text for _, text in texts.training]
    tokenizer = train_tokenizer(documents)
    random.Random(training.seed).shuffle(documents)
    ids = torch.tensor([i for e in encode(tokenizer, documents) for i in [0, *e, 1]])
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa")
    begin_with_copying(model)
    train(model, Needles(tokenizer, ids, random.Random(training.seed)), training)

    model.eval().to(torch.bfloat16)
    save(options.out / "checkpoint", model, tokenizer)
    held_out = torch.tensor(
        encode(tokenizer, [(HERE.parent / "demo" / "evaluation.txt").read_text(encoding="utf-8")])[0]
    )
    print(
        f"parameters: {model.num_parameters():,}; evaluation: {len(held_out):,} tokens, perplexity "
        f"{perplexity(model, held_out):.2f}"
    )


if __name__ == "__main__":
    main()
