"""`continuations.json`: greedy continuations of the same prompts by BF16 and FP8.

They illustrate the numbers: most pairs of texts differ sooner or later, since one token of nearly equal probability is
enough, and the text after it is different, not worse.
"""

from html import escape

from ...core.files import FirstSchema, Strict, read_document
from ...core.run import Run

#: Tokens of a prompt, and tokens of a continuation.
PROMPT_TOKENS = 32
TOKENS = 48


class Continuation(Strict):
    """The answers of BF16 and FP8 to `prompt`; `common` is the text that they share, and `parts_at` the first token
    (from 0) in which they differ, null where they do not.
    """

    prompt: str
    bf16: str
    fp8: str
    common: str
    parts_at: int | None = None

    @property
    def rests(self) -> tuple[str, str]:
        """The texts of BF16 and FP8 after their common beginning."""
        return self.bf16[len(self.common) :], self.fp8[len(self.common) :]


class Continuations(Strict):
    """`continuations.json`; `tokens` are the most of an answer."""

    schema_: FirstSchema = 1
    tokens: int
    continuations: list[Continuation]

    def _repr_html_(self) -> str:
        """Render them for a notebook: side by side, with the differing ends bold."""
        if not self.continuations:
            return "<p>Not written: <code>fp8q report RUN</code> does so where the source model is.</p>"
        cell = "<td style='text-align:left;vertical-align:top;white-space:pre-wrap'>{}<b>{}</b></td>"
        rows = "".join(
            f"<tr>{''.join(cell.format(escape(pair.prompt + pair.common), escape(rest)) for rest in pair.rests)}</tr>"
            for pair in self.continuations
        )
        return f"<table><tr><th>BF16</th><th>FP8</th></tr>{rows}</table>"


def load_continuations(run: Run) -> Continuations:
    """Read `continuations.json`; raises InputError when it is missing or not the file `fp8q report` wrote."""
    return read_document(run.require(run.continuations, "continue"), Continuations)
