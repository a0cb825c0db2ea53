"""A form that is written is read back as what was meant."""

import re
from pathlib import Path
from typing import get_args

import pytest

from fp8q.calibrate.input.patterns import PatternFile
from fp8q.options import BLOCK, DYNAMIC, ONE, ConvertLayout, Layout
from fp8q.quantize.reading.codecs import CODECS, declared_in
from fp8q.quantize.reading.compressed_tensors import COMPRESSED_TENSORS, quantization_config
from fp8q.quantize.reading.modelopt import MODELOPT
from fp8q.quantize.reading.quantization_config import CacheUnit
from fp8q.quantize.scales.scheme import UNQUANTIZED, Scheme

CONFIG = Path("config.json")


def test_the_layouts_of_convert_are_the_forms_that_are_written() -> None:
    assert {form for form, codec in CODECS.items() if codec.written is not None} == {*get_args(ConvertLayout)}


def test_what_vllm_asks_of_experts_is_named_by_an_expression_too() -> None:
    """Its class of gpt_oss renames `experts.0.down_proj`, and experts in BF16 were taken for two schemes."""
    asked = "model.layers.0.mlp.experts.0.down_proj"
    written = COMPRESSED_TENSORS.written
    assert written is not None
    both = [
        written(Scheme("channel", DYNAMIC), [asked, "lm_head"]),
        quantization_config(
            [asked, "lm_head"], None, {"model.layers.0.self_attn.q_proj": Scheme("channel", ONE)}, True
        ),
    ]
    for config in both:
        quantization = declared_in({"quantization_config": config}, CONFIG)
        assert quantization is not None
        *named, expression = quantization.ignore or ()
        assert named == [asked, "lm_head"]
        assert re.match(expression.removeprefix("re:"), asked)
        for other in (f"{asked}.weight", asked.replace(".0.down", ".1.down"), asked.replace("layers.0", "layers.10")):
            assert quantization.ignored_by(other) is None


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("compressed-tensors", Scheme("channel", DYNAMIC)),
        ("compressed-tensors", Scheme("block", BLOCK)),
        ("fp8", Scheme("block", BLOCK)),
        ("modelopt", Scheme("channel", DYNAMIC)),
        ("modelopt", Scheme("tensor", ONE)),
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


def test_the_layouts_of_runs_are_the_forms_that_runs_are_written_in() -> None:
    assert {form for form, codec in CODECS.items() if codec.of_run is not None} == {*get_args(Layout)}


@pytest.mark.parametrize("cache", ["tensor", None])
@pytest.mark.parametrize("scheme", [Scheme("tensor", ONE), Scheme("channel", DYNAMIC)], ids=["static", "dynamic"])
def test_modelopt_makes_our_config_of_our_file(scheme: Scheme, cache: CacheUnit | None) -> None:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    assert MODELOPT.of_run is not None
    said = MODELOPT.of_run(["lm_head"], cache, {"model.layers.0.mlp.up_proj": scheme}, False)
    (file,) = MODELOPT.beside(said).values()
    assert said == convert_hf_quant_config_format(file)
    quantization = MODELOPT.declared(CONFIG, file["quantization"])
    assert (quantization.cache, quantization.ignore, quantization.remarks) == (bool(cache), ("lm_head",), ())
    assert quantization.scheme("model.layers.0.mlp.up_proj") == scheme


def test_all_below_a_name_are_one_entry_of_each_forms_list() -> None:
    for layout in get_args(Layout):
        codec = CODECS[layout]
        entry = codec.matcher(codec.below("mtp.layers."), PatternFile(CONFIG))
        assert entry.matches("mtp.layers.0.mlp.up_proj")
        assert not entry.matches("model.layers.0.mlp.up_proj")
