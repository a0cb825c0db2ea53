"""What `fp8q doctor RUN` says of an FP8 cache in other servers, on a copy of the demo's checkpoint."""

import json
import shutil
from pathlib import Path

import pytest

from fp8q.core.run import Run
from fp8q.quantize.checkpoint.hf_layout import UNLOADABLE
from fp8q.validate.advice.served_cache import served_cache

FIRST = "model.layers.0.self_attn"


@pytest.fixture
def model(demo_run: Run, tmp_path: Path) -> Path:
    """The demo's checkpoint, whose cache is FP8."""
    return Path(shutil.copytree(demo_run.model, tmp_path / "model", ignore=shutil.ignore_patterns("*.onnx")))


def configured(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


def test_a_cache_whose_scales_are_read_is_good(model: Path) -> None:
    (check,) = served_cache(model)
    assert (check.verdict, check.value, check.said, check.remedy) == ("good", 0, "none", None)


def test_layers_that_a_server_must_be_told_of_are_named_with_its_option(model: Path) -> None:
    own = json.loads((model / "config.json").read_text(encoding="utf-8")).get("fp8q", {})
    configured(model, fp8q=own | {"wide_cache": [FIRST]})
    (check,) = served_cache(model)
    assert (check.verdict, check.module, check.value) == ("watch", "config.json", 1)
    assert check.said == "C126: has 1 layer whose cache stays in BF16, and other loaders store it in FP8"
    assert check.remedy == "give vLLM --kv-cache-dtype-skip-layers 0"


def test_scales_of_heads_are_told_of_with_the_gpus_that_read_them(model: Path) -> None:
    quantization = json.loads((model / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    quantization["kv_cache_scheme"]["strategy"] = "attn_head"
    configured(model, quantization_config=quantization)
    (check,) = served_cache(model)
    assert (check.verdict, check.module, check.value) == ("watch", "config.json", 1)
    assert check.said.startswith(
        "C127: says a scale for each head of the cache, which vLLM has attention for on Hopper"
    )
    assert check.remedy == "give one a layer for those"


@pytest.mark.parametrize("said", [None, UNLOADABLE], ids=["none", "of Conv1D"])
def test_a_checkpoint_that_no_other_server_loads_is_unknown(model: Path, said: dict[str, str] | None) -> None:
    """The second is GPT-2's, at whose run `fp8q doctor` ended with an error."""
    configured(model, quantization_config=said)
    (check,) = served_cache(model)
    assert check.verdict == "unknown"
    assert check.said == "other servers do not load this checkpoint, and fp8q's own read every scale"
