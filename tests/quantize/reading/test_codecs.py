"""A form that is written is read back as what was meant."""

from pathlib import Path
from typing import get_args

import pytest

from fp8q.options import BLOCK, DYNAMIC, ConvertLayout
from fp8q.quantize.reading.codecs import CODECS, declared_in
from fp8q.quantize.scales.scheme import UNQUANTIZED, Scheme

CONFIG = Path("config.json")


def test_the_layouts_of_convert_are_the_forms_that_are_written() -> None:
    assert {form for form, codec in CODECS.items() if codec.written is not None} == {*get_args(ConvertLayout)}


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("compressed-tensors", Scheme("channel", DYNAMIC)),
        ("compressed-tensors", Scheme("block", BLOCK)),
        ("fp8", Scheme("block", BLOCK)),
    ],
)
def test_what_is_written_of_a_scheme_declares_it(form: str, scheme: Scheme) -> None:
    written = CODECS[form].written
    assert written is not None
    quantization = declared_in({"quantization_config": written(scheme, ["lm_head"])}, CONFIG)
    assert quantization is not None
    assert (quantization.form, quantization.ignore, quantization.remarks) == (form, ("lm_head",), ())
    assert quantization.scheme("model.layers.0.mlp.up_proj") == scheme
    assert quantization.scheme("lm_head") == UNQUANTIZED
