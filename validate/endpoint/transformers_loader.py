"""Load a checkpoint of anybody with transformers, or a part of it: in the class and with the attention that `calibrate`
takes (`calibrate.model.classes`), by transformers' own rules for each form of quantization, as its users run it.

transformers does not know ModelOpt's form, and gets such a checkpoint in compressed-tensors' (`modelopt_tensors`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from ...calibrate.input.silence import muted, quiet_transformers
from ...calibrate.input.untrusted import error_text, foreign
from ...calibrate.model.classes import auto_class, needed_attention
from ...core.errors import BackendError, Fp8qError, InputError
from ...quantize.reading.codecs import CODECS
from ...quantize.reading.modelopt_tensors import as_compressed_tensors

#: The remedy for a checkpoint that cannot be loaded.
AGAIN = "copy or download it again, or name another directory"
#: How the names of weights' scales end. transformers only warns of those that it does not read (Conv1D's, experts').
WEIGHT_SCALES = (".weight_scale_2", *(f".{name}" for codec in CODECS.values() for name in codec.weight_scales))


class TransformersLoader:
    """The checkpoint in `directory`, to be loaded onto a device in a type; `empty`: its model without values."""

    def __init__(self, directory: Path, subject: str, device: str, dtype: torch.dtype | None = None):
        """Find the model's class; `dtype` None: the checkpoint's own type. `subject`: what stands before the directory
        in errors. Raises InputError for a configuration that transformers makes no model of.
        """
        self.directory = directory
        self.subject = subject
        self.device = device
        with self.loading():
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            config._attn_implementation = needed_attention(config)
            coded = as_compressed_tensors(directory)
            self._files: dict[str, Any] = {"pretrained_model_name_or_path": directory}
            if coded is not None:
                config.quantization_config = coded.config
                self._files = {"pretrained_model_name_or_path": None, "state_dict": coded.tensors}
            with torch.device("meta"):
                self.empty: PreTrainedModel = auto_class(config).from_config(deepcopy(config))
        self._files |= {"config": config, "dtype": dtype or "auto", "local_files_only": True}

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Silence transformers in this block, and turn its exceptions into an InputError or BackendError."""

        def fault(error: BaseException) -> Fp8qError:
            subject = f"{self.subject}{self.directory}"
            if isinstance(error, ImportError):  # of a quantizer that its config.json names
                return BackendError(subject, f"needs what is not installed here ({typed_error(error)})")
            return InputError(subject, f"transformers cannot load it ({typed_error(error)})", AGAIN)

        with quiet_transformers(), muted(), foreign(fault):
            yield

    def load(
        self, kind: type[PreTrainedModel] | None = None, wanted: Callable[[str], bool] = lambda name: True
    ) -> PreTrainedModel:
        """Load the model in evaluation mode; `kind`: in this class, which has some of its modules.

        Raises InputError where it does not load or lacks weights, or where scales among the `wanted` names of tensors
        were not read; BackendError where a library that its quantization needs is missing.
        """
        kind = kind or type(self.empty)
        with self.loading():
            loaded: Any = kind.from_pretrained(**self._files, output_loading_info=True)
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            more = f", nor {len(missing) - 1:,} more tensors" if len(missing) > 1 else ""
            raise InputError(
                f"{self.subject}{self.directory}",
                f"has no {missing[0]}{more}, and would run with random weights",
                AGAIN,
            )
        unread = sorted(name for name in report["unexpected_keys"] if name.endswith(WEIGHT_SCALES) and wanted(name))
        if unread:
            raise InputError(
                f"{self.subject}{self.directory}",
                f"transformers does not know this quantization: it reads no {unread[0]}, nor {len(unread) - 1:,} more "
                "scales, and takes the codes of weights for their values",
                "serve it with a server that does, or export it in compressed-tensors' form",
            )
        on_device: PreTrainedModel = model.eval().to(self.device)
        return on_device


def typed_error(error: BaseException) -> str:
    """The type of an exception, and its text in one line."""
    return f"{type(error).__name__}: {error_text(error)}"
