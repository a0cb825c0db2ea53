"""What observers begin to hold in one layer does not keep the next layer from the memory of its large tensors."""

import subprocess
import sys

import pytest

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
