"""Does an architecture that nobody prepared fp8q for work, or is it refused by name before any work?

    python benchmarks/unseen_architectures.py [--names Olmo2Config,BloomConfig]

Takes configurations from transformers' own list, two layers of width 128 each with random weights, and an FP8 KV cache: calibrated, exported, ONNX Runtime's logits held
against the exact reference at the first position (limit 1e-4: before any code can differ much), built by TensorRT-RTX for sm89, loaded by transformers.
Nothing is said of accuracy: the weights are random. Prints a line for each, and last one line of JSON; exit status 1 when one neither works nor is refused.
"""

import argparse
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8q.api import CalibrateOptions, EngineOptions, InputError, build_engine, calibrate
from fp8q.quantize.reference import load_reference
from fp8q.run import library_versions
from fp8q.serve.sessions import OnnxRuntimeSession
from fp8q.stages.corpora import load_tokens

DEMO = Path(__file__).parent.parent / "examples" / "demo"
LIMIT = 1e-4
SMALL = {
    "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 32}
GPT = {"vocab_size": 2048, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("ApertusConfig", "ArceeConfig", "CohereConfig", "Exaone4Config", "GraniteConfig", "NanoChatConfig", "NemotronConfig", "OlmoConfig"), GROUPED
    ),
    **dict.fromkeys(("Olmo2Config", "SmolLM3Config", "StableLmConfig", "Starcoder2Config"), GROUPED),
    **dict.fromkeys(("Ernie4_5Config", "GlmConfig", "Glm4Config", "HeliumConfig", "HunYuanDenseV1Config", "SeedOssConfig", "Gemma2Config"), HEADS),
    **dict.fromkeys(("Olmo3Config", "Cohere2Config"), GROUPED | {"sliding_window": 12}),
    **dict.fromkeys(("PhiConfig", "PersimmonConfig", "FalconConfig", "GPTNeoXJapaneseConfig"), SMALL),
    **dict.fromkeys(("GPTJConfig", "CodeGenConfig"), GPT | {"rotary_dim": 8}),
    "GPTBigCodeConfig": GPT | {"n_inner": 192},
    "BloomConfig": {"vocab_size": 2048, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "MptConfig": {"vocab_size": 2048, "d_model": 128, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
}


def random_checkpoint(path: Path, config: str) -> Path:
    """A checkpoint of the configuration, its norms around 1, with the demo's tokenizer."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(getattr(transformers, config)(**CONFIGURATIONS[config]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() > 1 else 1.0, std=0.1)
    torch.nn.Module.to(model, torch.bfloat16).save_pretrained(path)
    shutil.copyfile(DEMO / "checkpoint" / "tokenizer.json", path / "tokenizer.json")
    return path


def whole_way(config: str, folder: Path) -> dict[str, object]:
    """Calibrate, export, run, build and load one; raises InputError when it is refused."""
    text = folder / "text.txt"
    text.write_text((DEMO / "calibration.txt").read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    model = random_checkpoint(folder / "model", config)
    run = calibrate(str(model), str(text), folder / "run", options=CalibrateOptions(kv_cache="fp8", samples=4, seq_len=48))
    ids = load_tokens(run, run.evaluation)[:64].reshape(2, 32)
    reference = load_reference(run.model, "exact", torch.float32)
    with torch.inference_mode():
        expected = reference.model(input_ids=torch.from_numpy(ids), past_key_values=reference.new_cache(), use_cache=True).logits.numpy()
    logits, _ = OnnxRuntimeSession(run.onnx_fp32).forward(ids, np.ones_like(ids), np.ascontiguousarray(np.broadcast_to(np.arange(32), ids.shape)))
    (engine,) = build_engine(run.root, EngineOptions(runtime="tensorrt-rtx", targets=("sm89",), max_seq_len=48, min_fp8_share=0))
    loaded: Any = AutoModelForCausalLM.from_pretrained(run.model, output_loading_info=True)
    return {
        "first_position_difference": float(np.abs(logits - expected)[:, 0].max(-1).min()),
        "promised_products": engine.promised_products,
        "fp8_products": engine.fp8_products,
        "keys_that_do_not_fit": sum(len(keys) for keys in loaded[1].values()),
    }


def outcome(config: str) -> dict[str, object]:
    """What became of one configuration: numbers, or why it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return whole_way(config, Path(folder))
        except InputError as refused:
            return {"refused": str(refused).replace(f"{folder}/model: ", "")}


def works(result: dict[str, object]) -> bool:
    """Whether everything was as it should be."""
    difference = result.get("first_position_difference")
    return isinstance(difference, float) and difference < LIMIT and result["fp8_products"] == result["promised_products"] and not result["keys_that_do_not_fit"]


def main() -> int:
    """Try each, print, and say by the exit status whether each works or is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default=",".join(sorted(CONFIGURATIONS)))
    warnings.simplefilter("ignore")
    results = {}
    for config in parser.parse_args().names.split(","):
        results[config] = outcome(config)
        print(f"{config}: {'works' if works(results[config]) else results[config].get('refused', results[config])}", flush=True)
    good = all("refused" in result or works(result) for result in results.values())
    print(json.dumps({"results": results, "limit": LIMIT, "passed": good, "versions": library_versions()}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
