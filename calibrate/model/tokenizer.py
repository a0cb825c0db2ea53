"""The checkpoint's tokenizer, loaded: it must come out whole, and be able to read."""

from contextlib import suppress
from typing import TYPE_CHECKING

from ...core.errors import InputError
from ..checkpoint.companions import REMEDY
from ..input.silence import muted, quiet_transformers
from ..input.untrusted import error_text, foreign
from .source import Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Read once to see whether the tokenizer can: rules that cannot be applied end in a panic at the first letters.
SAMPLE = "The 2 quick foxes' names: Zoë & 狐.\n\tdef f(x): return x**2  # ok\n"


def load_tokenizer(source: Source) -> "PreTrainedTokenizerBase":
    """The checkpoint's own tokenizer. Raises InputError when its files do not make one, or one that reads nothing."""
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
    ):  # one without a word for this may have one for the text
        tokenizer([SAMPLE], verbose=False)
    return tokenizer
