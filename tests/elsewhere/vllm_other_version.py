"""Open a checkpoint in vLLM as if it were another version; runs in vLLM's environment, with the plugin on its path.

    python vllm_other_version.py MODEL VERSION PART

`VERSION`: the version that the plugin finds; `PART`: `module:name` of what this vLLM is to lack, or nothing. Prints one
line of JSON: `{"quantization": the format that vLLM takes the checkpoint for}` or `{"error": …}`.
"""

import json
import sys
from importlib import import_module

import fp8q_vllm
from vllm import EngineArgs


def main(model: str, version: str, part: str) -> dict[str, str]:
    """Open the checkpoint `model`."""
    fp8q_vllm.vllm_version = lambda: version
    if part:
        module, _, name = part.partition(":")
        *owners, last = name.split(".")
        owner = import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        delattr(owner, last)
    try:
        return {"quantization": str(EngineArgs(model=model).create_model_config().quantization)}
    except (RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
