"""Measure again what docs state, part by part, and write the tables.

    python benchmarks/run.py [PART …] [--again] [--llmcompressor PYTHON]     or  make benchmarks PARTS='kv_cache memory'

A part is one benchmark and one file in `results/`. A part whose result is of today's code and options is passed over,
unless `--again`; so the same command goes on after Ctrl-C. A part that misses its limit, or fails, ends itself and not
the others; the exit status is 1 then. Parts of time (the last ones) want a quiet machine. What reads `../shared` leaves
its models out where they are not.

`BY_HAND` are run when they are named: those of `distill`, which take 10 to 60 minutes, and others by those who
installed what they need: mmaemu 0.1.0; lm-eval and vLLM, as `make test-elsewhere` does; SmolLM2, as `make real` does.
`PEERS` also measure llm-compressor, from an environment of its own. Without `--llmcompressor` they are passed over, but
for `accuracy`, which measures its other rows again and says so in the result.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from time import monotonic

from pages.accuracy import COMPRESSOR
from result import RESULTS, ROOT
from stale import is_fresh

#: Part -> its script and arguments; a name alone is the script of that name.
PARTS: Mapping[str, str] = {
    # Accuracy, files and memory: the same on a busy machine.
    **{
        name: f"{name}.py"
        for name in (
            "unseen_architectures", "validate_memory", "compare_memory", "weight_rounding",
            "architectures", "expert_tokens", "expert_rounding", "experts", "two_terms", "cache_traffic",
        )
    },
    "published_classes": "published_classes.py --minutes 9",
    "distill_memory": "distill_memory.py",
    "rounding_launches": "rounding_launches.py --models 8B",
    "rounding_launches_70b": "rounding_launches.py --models 70B",
    "memory_sequential": "memory.py --layers 2 7 --width 1024 --weight-rounding sequential",
    **{
        name: f"{name}.py"
        for name in (
            "forms", "engine_size", "kv_cache", "fp8_input", "adapter", "accumulator", "attention", "baselines",
            "fp16", "probabilities", "choosing_scales", "memory", "export_memory", "two_implementations", "accuracy",
            "tune", "culprit_proof", "bos", "doctor", "certificate", "top_logits", "exact_answers", "as_served",
            "needles",
        )
    },
    # Time.
    **{
        name: f"{name}.py"
        for name in (
            "tail_cost", "sensitivity", "weight_mse", "rescale", "export_time", "lint_time", "sampling", "asked_logits",
            "weight_shapes", "vision", "training", "bf16_products", "unread", "load", "calibration",
        )
    },
    "generate": "generate.py --peers --threads 1 --clock processor",
    "serve": "serve.py --threads 1",
}  # fmt: skip
BY_HAND: Mapping[str, str] = {
    "trained_parts": "trained_parts.py",
    "distill": "distill.py",
    "distill_ways": (
        "distill.py --learned 400 --forms 'two codes' --ways 'end to end' 'layer by layer' "
        "'layer by layer, then end to end' 'an adapter'"
    ),
    "distill_most": "distill.py --learned 3200 --forms 'two codes' --ways 'layer by layer, then end to end'",
    "distill_options": (
        "distill.py --learned 400 --forms 'two codes' --ways 'end to end, scales learned too' "
        "'end to end, gradients in E5M2' 'end to end, gradients in E4M3'"
    ),
    "distill_peer": "distill_peer.py --small demo stories260k",
    "distill_peer_others": "distill_peer.py --small llama qwen2",
    "accumulator_mmaemu": "accumulator.py --mmaemu",
    "drafts": "drafts.py --vllm .venv/vllm/bin/python",
    "tasks": "tasks.py --lm-eval .venv/lm-eval/bin/python",
    "tasks_smollm2": (
        "tasks.py build/real/smollm2=../shared/data/python-calibration.txt,../shared/data/python-evaluation.txt "
        "--questions 200 --samples 64 --context 512 --forms . --lm-eval .venv/lm-eval/bin/python"
    ),
    "needles_4096": "needles.py --lengths 4096 --trials 1 --sums 4096",
    "compare": "compare.py --vllm .venv/vllm --server .venv/vllm-server",
    "wrong_models": "wrong_models.py",
    "made_by_others": "made_by_others.py",
    "made_by_others_smollm2": (
        "made_by_others.py build/real/smollm2=../shared/data/wikitext-2-raw-valid.txt,"
        "../shared/data/wikitext-2-raw-test.txt"
    ),
    "convert": "convert.py",
    "decoded_windows": "decoded_windows.py --windows 8 --context 192 --prompt 128",
    "convert_classes": "convert_classes.py",
    "mxfp8": "mxfp8.py --rows '^(one|dynamic|block.*|MXFP8.*)$'",
    "weight_levers": "weight_levers.py smollm2 --rows '^(nearest|gptq, (16|256|the))'",
    "weight_levers_gemma3": "weight_levers.py gemma3 --rows '^(exact|gptq, (weighed|16|the worst)|nearest)'",
    "weight_levers_exact": "weight_levers.py smollm2 --rows '^(gptq, weighed|exact)'",
    "weight_levers_exact_gemma3": "weight_levers.py gemma3 --rows '^(gptq, weighed|exact)'",
    "input_mixes": "input_mixes.py smollm2 --runs build/runs",
    "input_mixes_gemma3": (
        "input_mixes.py gemma3 --rows '^(0% exact$|10%|25%|50%|100%)' --windows 24 --runs build/runs"
    ),
    "input_mixes_qwen_coder": (
        "input_mixes.py qwen_coder --rows '^(0% exact$|10%|25%|50%|100%)' --samples 16 --runs build/runs"
    ),
    "served_forms": "served_forms.py smollm2 --runs build/runs",
    "served_forms_gemma3": (
        "served_forms.py gemma3 --rows '^(?!fp8q, (block, gptq|one, --weight-scale tensor, gptq))' --windows 24 "
        "--runs build/runs"
    ),
    "served_forms_qwen_coder": (
        "served_forms.py qwen_coder --rows '^(?!fp8q, (block, gptq|one, --weight-scale tensor, gptq))' --samples 16 "
        "--runs build/runs"
    ),
    "weight_levers_outputs": "weight_levers.py smollm2 --rows '^(gptq, weighed|output side$)' --runs build/runs",
    "weight_levers_outputs_exact": (
        "weight_levers.py smollm2 --rows '^(gptq, weighed|exact$|output side, exact)' --runs build/runs"
    ),
    "weight_levers_outputs_gemma3": (
        "weight_levers.py gemma3 --rows '^(gptq, weighed|output side$)' --windows 24 --runs build/runs"
    ),
    "weight_levers_qwen_coder": (
        "weight_levers.py qwen_coder --rows '^(nearest|exact$|gptq, weighed)' --samples 16 --runs build/runs"
    ),
    "weight_levers_shrunk": (
        "weight_levers.py smollm2 --rows '^(gptq, weighed|output side$|exact|output side, exact(, 10%.*)?$)' "
        "--runs build/runs"
    ),
    "weight_levers_outputs_exact_gemma3": (
        "weight_levers.py gemma3 --rows '^(exact|output side, exact(, 10%.*)?$)' --windows 24 --runs build/runs"
    ),
    "weight_levers_shrunk_gemma3": (
        "weight_levers.py gemma3 --rows '^(gptq, weighed|exact$)' --windows 24 --runs build/runs"
    ),
    "weight_levers_learned": "weight_levers.py smollm2 --rows '^output side, exact' --runs build/runs",
    "weight_levers_most": "weight_levers.py smollm2 --rows '^every.*s$' --runs build/runs",
    "real_models_smollm2": "real_models.py smollm2 --rows '^(?!.*sequential)'",
    "real_models_gemma3": "real_models.py gemma3 --rows '^(?!.*(sequential|preset))'",
    "real_models_exact_smollm2": "real_models.py smollm2 --rows '^(BF16|ModelOpt|.*(preset|queries))'",
    "real_models_exact_gemma3": "real_models.py gemma3 --rows '^(BF16|ModelOpt|.*(preset|queries))'",
    "real_models_gptq_smollm2": "real_models.py smollm2 --rows '^(BF16|ModelOpt|.*(gptq|preset))'",
    "real_models_gptq_gemma3": "real_models.py gemma3 --rows '^(BF16|ModelOpt|.*(gptq|preset))'",
    "weight_levers_spent": "weight_levers.py smollm2 --rows 'exact, 10% in BF16$' --runs build/runs",
    "weight_levers_spent_exact": "weight_levers.py smollm2 --rows 'exact$' --runs build/runs",
    "weight_levers_spent_gemma3": (
        "weight_levers.py gemma3 --rows 'exact, 10% in BF16$' --windows 24 --runs build/runs"
    ),
    "weight_levers_learned_gemma3": (
        "weight_levers.py gemma3 --rows '^output side, exact, 10%' --windows 24 --runs build/runs"
    ),
    "real_models_chats_smollm2": (
        "real_models.py smollm2 --chats --rows '^(BF16|ModelOpt|fp8q, (default|dynamic|two codes, gptq)$|"
        "weights alone, (nearest|gptq)|cache alone, K and V$)'"
    ),
    "real_sizes_qwen_coder": "real_sizes.py qwen_coder --commands '^(convert|calibrate)'",
    "plan": (
        "plan.py build/real/smollm2=../shared/data/wikitext-2-raw-valid.txt,../shared/data/wikitext-2-raw-test.txt "
        "--samples 64 --context 512"
    ),
    "plan_gemma3": (
        "plan.py build/real/gemma3=../shared/data/wikitext-2-raw-valid.txt,../shared/data/wikitext-2-raw-test.txt "
        "--samples 64 --context 512"
    ),
    "plan_qwen_coder": (
        "plan.py build/real/qwen_coder=../shared/data/wikitext-2-raw-valid.txt,"
        "../shared/data/wikitext-2-raw-test.txt --samples 16 --context 512 --form one"
    ),
    "vllm_plugin": "vllm_plugin.py --vllm .venv/vllm/bin/python --samples 128 --steps 32",
    "vllm_plugin_h100": "vllm_plugin.py --answers FOLDER --samples 128 --windows 8 --steps 0",
    "vllm_8b": (
        "vllm_8b.py --plugin site-packages --folder shm --form bf16 --form 'two codes' --form 'one code' "
        "--form 'tail of 64' --form 'weights alone' --form dynamic"
    ),
    "first_evening_vllm": "first_evening.py --ways vllm --vllm .venv/vllm",
    "first_evening_quicker": "first_evening.py --ways quicker --model smollm2",
    "first_evening_triton": "first_evening.py --ways triton",
}
#: The longest that a part is to take on a quiet machine of two cores.
LONGEST_SECONDS = 600
PEERS = (
    "accuracy",
    "as_served",
    "calibration",
    "made_by_others",
    "made_by_others_smollm2",
    "real_models_smollm2",
    "real_models_gemma3",
    "served_forms",
    "served_forms_gemma3",
    "served_forms_qwen_coder",
)
#: Part of `PEERS` -> the arguments that leave the peer's rows as they are.
WITHOUT_PEER: Mapping[str, Sequence[str]] = {"accuracy": ("--again", f"^(?!{re.escape(COMPRESSOR)})")}


def words_of(part: str, peer: str | None) -> list[str]:
    """Return the command of a part, from the repository's root."""
    script, *arguments = shlex.split({**PARTS, **BY_HAND}[part])
    if part in PEERS:
        arguments += ["--llmcompressor", peer] if peer else WITHOUT_PEER.get(part, [])
    return [sys.executable, f"benchmarks/{script}", *arguments, "--save", part]


def passed_over(part: str, again: bool, peer: str | None) -> str | None:
    """Tell why a part is not run; None: it is."""
    if part in PEERS and not peer and part not in WITHOUT_PEER:
        return "needs --llmcompressor"
    path = RESULTS / f"{part}.json"
    if not again and path.is_file() and is_fresh(json.loads(path.read_text(encoding="utf-8"))):
        return "is of today's code and options"
    return None


def measure(parts: Sequence[str], again: bool, peer: str | None) -> list[str]:
    """Run parts one after the other, with a line each, and return those that missed a limit or failed."""
    missed = []
    for number, part in enumerate(parts, 1):
        head = f"{number}/{len(parts)} {part}"
        if reason := passed_over(part, again, peer):
            print(f"{head}: passed over, {reason}", flush=True)
            continue
        print(f"{head} …", flush=True)
        start = monotonic()
        status = subprocess.run(words_of(part, peer), cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode
        seconds = monotonic() - start
        long = f", over {LONGEST_SECONDS} s: make it smaller" if seconds > LONGEST_SECONDS else ""
        print(f"{head}: {seconds:.0f} s{f', exit status {status}' if status else ''}{long}", flush=True)
        missed += [part] if status else []
    return missed


def main() -> int:
    """Measure the parts, write the tables, and name the parts that missed a limit or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; by hand {', '.join(BY_HAND)}")
    parser.add_argument("--again", action="store_true", help="measure parts again whose result is of today")
    parser.add_argument("--llmcompressor", metavar="PYTHON", help="the interpreter of an environment that has it")
    asked = parser.parse_args()
    if unknown := [part for part in asked.parts if part not in {**PARTS, **BY_HAND}]:
        parser.error(f"{unknown[0]}: is no part; parts are {', '.join({**PARTS, **BY_HAND})}")
    try:
        missed = measure(asked.parts or list(PARTS), asked.again, asked.llmcompressor)
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the part that was running", file=sys.stderr)
        return 130
    subprocess.run([sys.executable, "benchmarks/tables.py", "--write"], cwd=ROOT, check=False)
    if missed:
        print(f"missed a limit, or failed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
