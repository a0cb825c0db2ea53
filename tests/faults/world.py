"""The valid world that every case begins with, made once: a model of two layers that a case measures in a fraction of a
second, one text in each form that is read, runs at each stage, a graph and a plan.

Everything is drawn from a fixed seed and no path in it is the machine's own, so that a case is the same anywhere.
"""

import json
import random
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

WORDS = "the a one this that each scale code layer weight token graph model value clip batch window run is has of in to"
SEQ_LEN, SAMPLES = 16, 8
#: What makes `calibrate` short.
SHORT = ("--samples", str(SAMPLES), "--seq-len", str(SEQ_LEN), "--batch-size", "4")
TARGET = "sm89"
#: How two checkpoints are compared: on all of a text, within any limit of loss.
COMPARED = ("--data", "texts/other.txt", "--max-ppl-increase", "50%", "--json")
#: Steps enough for codes and an adapter to get better, and tasks that are asked.
LEARNING = ("--data", "texts/text.txt", "--allow-overlap", "--epochs", "2", "--samples", "60")
ASKED = ("--tasks", "word", "--include-path", "tasks", "--limit", "2")
#: Of a run: its graph, and the file that holds its weights.
GRAPH, WEIGHTS = "model.onnx", "model-00001-of-00001.safetensors"
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"

#: `command(argv)`: fp8q in a process of its own; raises when it does not end well.
Command = Callable[..., None]


def prose(seed: int, sentences: int) -> list[str]:
    """Sentences of random words: no two texts share a passage."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS.split(), k=9)) + "." for _ in range(sentences)]


def make_texts(folder: Path) -> None:
    """One text in every form: plain, rows, a table, a saved data set, chats; and another to evaluate on."""
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir()
    documents = [" ".join(prose(seed, 8)) for seed in range(12)]
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    (folder / "other.txt").write_text("\n\n".join(" ".join(prose(seed, 8)) for seed in range(50, 56)), encoding="utf-8")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    parquet.write_table(pa.table({"text": documents}), folder / "text.parquet")
    datasets.Dataset.from_dict({"text": documents}).save_to_disk(folder / "saved")
    chats = [
        [{"role": role, "content": " ".join(prose(90 + 2 * chat + turn, 4))} for turn, role in enumerate(ROLES)]
        for chat in range(12)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


ROLES = ("user", "assistant")


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE of 300 tokens, in today's form."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(prose(7, 60), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": CHAT}, indent=1))


def make_model(folder: Path) -> None:
    """A Llama of two layers in BF16 with random weights, in one file of safetensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=304, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, initializer_range=0.1,
    )  # fmt: skip
    torch.nn.Module.to(LlamaForCausalLM(config), torch.bfloat16).save_pretrained(folder)
    make_tokenizer(folder)


def shard(model: Path, folder: Path) -> None:
    """The same checkpoint with its weights in two files and an index."""
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file as save

    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    tensors = load(model / "model.safetensors")
    names = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, held in parts.items():
        save({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def make_options(folder: Path) -> None:
    """TOML files: options of two commands, and the rules of a conversion."""
    from fp8q.quantize.conversion.rules import RULES

    folder.mkdir()
    lines = ['model = "../tiny"', 'data = ["../texts/text.txt"]', 'eval-data = "../texts/other.txt"', 'batches = "0:1"']
    lines += [f"samples = {SAMPLES}", f"seq-len = {SEQ_LEN}", "batch-size = 4", 'kv-cache = "off"', "stream = false"]
    (folder / "calibrate.toml").write_text("\n".join([*lines, ""]))
    (folder / "rules.toml").write_bytes(RULES.read_bytes())
    (folder / "scales.toml").write_text('method = "percentile"\npercentile = 99.9\nmargin = 1\n')


def make_tasks(folder: Path, text: Path) -> None:
    """Tasks of a text, for lm-eval."""
    from fp8q.examples.demo.tasks import write_tasks

    write_tasks(folder, text.read_text(encoding="utf-8"), 4)
    for file in folder.glob("*.yaml"):  # read from the folder that a case runs in
        file.write_text(file.read_text(encoding="utf-8").replace(str(folder), folder.name), encoding="utf-8")


def make_log(folder: Path) -> None:
    """The log of a training of four steps."""
    import torch

    from fp8q import api

    torch.manual_seed(0)
    model, values = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), torch.ones(3, 4)
    with api.watch(model, folder, api.WatchOptions(every=1)) as log:
        for _ in range(4):
            loss = model(values).square().sum()
            loss.backward()
            log.step(loss)


def make_inputs(root: Path) -> None:
    """What there is before any command: models, texts and a configuration."""
    root.mkdir(parents=True, exist_ok=True)
    make_model(root / "tiny")
    shard(root / "tiny", root / "sharded")
    make_texts(root / "texts")
    make_options(root / "options")
    make_tasks(root / "tasks", root / "texts" / "text.txt")
    make_log(root / "log")


def make_runs(fp8q: Command) -> None:
    """Runs, by the commands themselves, in the current directory: `run` has all, `quantized` ends with the graphs,
    `part-0` and `part-1` are to be merged, `learned` has learned codes, an adapter and answers of tasks; a graph away
    from its run; a converted checkpoint, and its comparison with the original.
    """
    text = ("--data", "texts/text.txt", "--eval-data", "texts/other.txt")
    fp8q("calibrate", "tiny", *text, "--out", "run", "--kv-cache", "fp8", *SHORT)
    shutil.copytree("run", "quantized")
    for part in (0, 1):
        fp8q("calibrate", "tiny", *text, "--out", f"part-{part}", "--batches", f"{part}:{part + 1}", *SHORT)
    fp8q("validate", "run", "--runtimes", "bf16,reference")
    fp8q("build-engine", "run", "--runtime", "tensorrt-rtx", "--target", TARGET, "--max-batch", "2")
    fp8q("triton", "run")
    fp8q("generate", "run", "--prompt", "the scale of", "--max-tokens", "1", "--json")
    Path("alone").mkdir()
    for name, called in ((GRAPH, "graph.onnx"), (WEIGHTS, WEIGHTS)):
        shutil.copyfile(Path("run", "model", name), Path("alone", called))
    fp8q("calibrate", "tiny", *text, "--out", "learned", "--form", "two", "--no-graph", *SHORT)
    fp8q("distill", "learned", *LEARNING)
    fp8q("distill", "learned", *LEARNING, "--train", "adapter")
    fp8q("validate", "learned", "--runtimes", "bf16,reference")
    if find_spec("lm_eval"):
        fp8q("evaluate", "learned", *ASKED)
    fp8q("convert", "tiny", "--out", "converted")
    fp8q("compare", "tiny", "--model", "converted", *COMPARED, "--out", "pair")
