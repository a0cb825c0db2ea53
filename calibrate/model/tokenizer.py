"""Load the checkpoint's tokenizer, and check that it can tokenize."""

from contextlib import suppress
from typing import TYPE_CHECKING

from ...core.errors import InputError
from ..checkpoint.companions import REMEDY
from ..input.silence import muted, quiet_transformers
from ..input.untrusted import error_text, foreign
from .source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokenized once as a test: rules that cannot be applied end in a panic at the first letters.
SAMPLE = "The 2 quick foxes' names: Zoë & 狐.\n\tdef f(x): return x**2  # ok\n"


def load_tokenizer(source: Source) -> "PreTrainedTokenizerBase":
    """Load the checkpoint's own tokenizer; raises InputError when its files make none, or one that cannot tokenize."""
    from transformers import AutoTokenizer

    def refusal(error: BaseException) -> InputError:
        if "trust_remote_code" in str(error):
            return InputError(
                f"{source.name}: its tokenizer wants code of its own; read it, and if you trust it, run it with "
                "--trust-remote-code"
            )
        return InputError(f"{source.name}: its tokenizer does not load: {error_text(error)}; {REMEDY}")

    with foreign(refusal), quiet_transformers(), muted():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source.path, local_files_only=True, trust_remote_code=source.trust_remote_code
        )
    with (
        foreign(refusal),
        quiet_transformers(),
        muted(),
        suppress(Exception),
    ):  # a vocabulary without these tokens may have those of the text
        tokenizer([SAMPLE], verbose=False)
    return tokenizer
