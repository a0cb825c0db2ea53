"""The option of what tokenizes, of `calibrate` and of every stage after it."""

from typing import Annotated, Literal

from .declare import MODEL, option

#: What tokenizes: tokenizer.json as it is, or what transformers' AutoTokenizer makes of the files.
TokenizerChoice = Literal["file", "auto"]
#: The option's type and help.
TokenizerOption = Annotated[
    TokenizerChoice,
    option(
        MODEL,
        "file: tokenizer.json as it is, where there is one, to calibrate, validate and serve by. auto: what "
        "transformers' AutoTokenizer, and so vLLM, makes of the files, written to model/ as tokenizer.json. A note "
        "shows where they differ.",
    ),
]
