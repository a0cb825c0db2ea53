"""Write a tied output head so that every loader reads the same model.

config.json may tie the head to the embedding while the files say otherwise. Where both are there with other values,
transformers takes each as it is, and vLLM the embedding for both: the configuration then no longer ties them. Where the
head alone is there, transformers makes the embedding of it, and vLLM reads neither: the tensor is then stored as the
embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...calibrate.model.source import Source, meta_model

#: The field of config.json that ties the head to the embedding.
TIE = "tie_word_embeddings"


@dataclass(frozen=True)
class Ties:
    """Changes of tied tensors: `apart` (name -> the other name), whose values differ, and `renamed`, stored name ->
    the name to write.
    """

    apart: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def remark(self) -> str | None:
        """Describe the changes; None where there are none."""
        if self.apart:
            ((one, other), *_) = self.apart.items()
            return (
                f"{one}: is not {other}, and config.json ties both; transformers takes each as it is, vLLM the "
                f"embedding for both: model/config.json says {TIE} false, by which all take each"
            )
        if self.renamed:
            ((stored, under), *_) = self.renamed.items()
            return (
                f"{stored}: is there without {under}, to which config.json ties it; it is written as {under}, which "
                "all loaders read"
            )
        return None


def ties_of(source: Source) -> Ties:
    """Compare the tied tensors of `source`."""
    weights = source.weights()
    apart: dict[str, str] = {}
    renamed: dict[str, str] = {}
    for tied, tied_to in meta_model(source).all_tied_weights_keys.items():
        one = source.stored(tied)
        other = source.stored(tied_to)
        there = [name in weights.names() for name in (one, other)]
        if all(there) and one != other:
            if not _equal(weights.tensor(one), weights.tensor(other)):
                apart[one] = other
        elif there == [True, False]:
            renamed[one] = tied_to
    return Ties(apart, renamed)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare values row by row, whatever their types: a copy of a head in another type takes gigabytes."""
    return one.shape == other.shape and all(
        torch.equal(row.double(), against.double()) for row, against in zip(one, other, strict=True)
    )
