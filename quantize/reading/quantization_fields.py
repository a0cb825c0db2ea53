"""Name the fields of a quantization configuration that fp8q does not read, and say which change what is computed.

A reader that passes over a field it does not know computes another model in silence: `transform_config` rotates the
inputs of a layer whose weights were rotated the other way. So each form has the list of its fields, from the classes
that read them: compressed-tensors 0.20 (`QuantizationConfig`, `QuantizationScheme`, `QuantizationArgs`), transformers
5.23 (`CompressedTensorsConfig`, `FineGrainedFP8Config`), ModelOpt 0.47 (`process_layer_quant_config`,
`convert_hf_quant_config_format`), vLLM 0.32 and SGLang 0.5.23 (their `from_config`).

`changes`: values of the model are others than code × scale, or pass through something else. `inputs`: how activations
are rounded, which a reader of weights leaves to whoever serves them. `unknown`: in no class that was read. A field that
is null, false or empty asks for nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Effect = Literal["changes", "inputs", "unknown"]


@dataclass(frozen=True)
class FieldRemark:
    """A field at `place` in the configuration that is not read: what it does, and its effect."""

    place: str
    effect: Effect
    what: str

    def __str__(self) -> str:
        """Name the field and what it does."""
        return f"{self.place} ({self.what})"


#: The fields of the arguments of codes, of a weight, an input or a cache: how scales were chosen, and sizes.
ARGUMENTS = (
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
)  # fmt: skip


@dataclass(frozen=True)
class FieldList:
    """The fields of an object of a configuration.

    `known`: those that are read, or that change nothing. `meant`: field -> its effect, and a function of its value that
    says what it does; None where that value does nothing.
    """

    known: tuple[str, ...]
    meant: Mapping[str, tuple[Effect, Callable[[Any], str | None]]] = field(default_factory=dict)

    def remarks(self, said: Any, prefix: str = "") -> Iterator[FieldRemark]:
        """Yield the fields of the object `said`, at `prefix` in the configuration, that are not read."""
        for key, value in said.items() if isinstance(said, dict) else ():
            place = f"{prefix}{key}"
            if key in self.meant:
                effect, describe = self.meant[key]
                if (what := describe(value)) is not None:
                    yield FieldRemark(place, effect, what if len(what) <= 160 else f"{what[:160]}…")
            elif key not in self.known and value not in (None, False, "", 0) and value != [] and value != {}:
                yield FieldRemark(place, "unknown", "in no class that was read")


def asymmetric(value: Any) -> str | None:
    """Say that codes are beside a zero point, where `value` is that of the field `symmetric`."""
    if value is False:
        return "values beside a zero point"
    return None


def unless(*usual: Any, what: str) -> Callable[[Any], str | None]:
    """Say `what` of a value that is none of the `usual` ones."""
    return lambda value: None if value in usual else f"{what} {value}"
