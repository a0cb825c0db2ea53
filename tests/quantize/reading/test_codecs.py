"""A form that is written is read back as what was meant."""

from pathlib import Path

import pytest

from fp8q.options import BLOCK, DYNAMIC
from fp8q.quantize.reading.codecs import CODECS, declared_in
from fp8q.quantize.reading.quantization_config import DeclaredScheme
from fp8q.quantize.scales.scheme import Scheme

CONFIG = Path("config.json")
CHANNELS, BLOCKS = Scheme("channel", DYNAMIC), Scheme("block", BLOCK)


def test_every_form_has_a_codec_of_its_name() -> None:
    assert [*CODECS] == ["compressed-tensors", "modelopt", "fp8"]
    assert [form for form, codec in CODECS.items() if codec.written is None] == ["modelopt"]


@pytest.mark.parametrize(
    ("form", "scheme", "declared"),
    [
        ("compressed-tensors", CHANNELS, DeclaredScheme("channel", "dynamic")),
        ("compressed-tensors", BLOCKS, DeclaredScheme("block", "dynamic", (128, 128))),
        ("fp8", BLOCKS, DeclaredScheme("block", "dynamic", (128, 128))),
    ],
)
def test_what_is_written_of_a_scheme_declares_it(form: str, scheme: Scheme, declared: DeclaredScheme) -> None:
    written = CODECS[form].written
    assert written is not None
    quantization = declared_in({"quantization_config": written(scheme, ["lm_head"])}, CONFIG)
    assert quantization is not None
    assert (quantization.form, quantization.ignore, quantization.remarks) == (form, ("lm_head",), ())
    assert quantization.scheme("model.layers.0.mlp.up_proj") == declared
    assert quantization.scheme("lm_head") is None
