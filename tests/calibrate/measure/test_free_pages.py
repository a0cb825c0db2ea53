"""What observers begin to hold in one layer does not keep the next layer from the memory of its large tensors."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from fp8q.calibrate.measure.measurement import weight_amax

#: Measures a random Llama of 12 layers on 2,048 tokens, and says by how many MB that raises the peak of its memory.
CHILD = """
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from fp8q.calibrate.measure.measurement import Measurement, measure_in_memory
from fp8q.calibrate.measure.statistics import Corpus, ModelIdentity
from fp8q.calibrate.model.bf16_gemms import compute_gemms_in_fp32
from fp8q.core.record import peak_memory_bytes, reset_peak_memory
from fp8q.core.reporter import SILENT

torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=64, hidden_size=384, intermediate_size=1152, num_hidden_layers=12, num_attention_heads=6,
    num_key_value_heads=2, dtype="bfloat16",
)
model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
compute_gemms_in_fp32(model, torch.bfloat16, "cpu")
windows = np.zeros((4, 512), np.int64)
identity = ModelIdentity(name="", revision=None, architecture="", fingerprint="", tokenizer="")
corpus = Corpus(name="", fingerprint="", windows=4, seq_len=512, batch_size=4)
peaks = []
def begin(*_):
    reset_peak_memory()
def end(*_):
    peaks.append(peak_memory_bytes())
for layer in model.model.layers:
    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(end)
measure_in_memory(model, Measurement(windows, identity, corpus), SILENT)
print((peaks[-1] - peaks[12]) // 1_000_000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_layers_do_not_take_more_memory_one_after_the_other() -> None:
    grown = subprocess.run([sys.executable, "-c", CHILD], check=True, capture_output=True, text=True).stdout
    assert int(grown) < 60


class LargestResult(TorchDispatchMode):
    """Notes the numbers of the largest tensor that anything in its block makes, views left out."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:
            made = result if isinstance(result, tuple) else (result,)
            self.numbers = max(self.numbers, *(tensor.numel() for tensor in made))
        return result


@pytest.mark.parametrize(
    ("kind", "axis"), [(torch.nn.Linear, 1), (Conv1D, 0)], ids=["a row a channel", "a column a channel"]
)
def test_the_amax_of_a_weight_needs_no_copy_of_it(kind: type[torch.nn.Module], axis: int) -> None:
    """Copies of a 1.5B's 196 weights left 0.5 GB behind: each result took the begin of what the copy before it left."""
    module = kind(32, 48).to(torch.bfloat16)
    weight = module.get_parameter("weight").detach()
    weight.view(-1)[:100] = 0.0
    weight[1, 1], weight[2, 2] = -7.0, 7.0
    with LargestResult() as largest:  # type: ignore[no-untyped-call]  # torch's own
        found = weight_amax(module)
    assert largest.numbers == weight.shape[1 - axis]
    np.testing.assert_array_equal(found.view(np.int32), weight.abs().amax(axis).float().numpy().view(np.int32))
