"""A run of the command line in the process of the tests."""

import re
from dataclasses import dataclass

#: What a log has in place of a progress bar.
TOOK = re.compile(r".+: [\d,]+ [a-z]+ in [\d.]+ s")


@dataclass(frozen=True)
class Result:
    """What a command left: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    def complaint(self, code: int = 2, after_notes: bool = False) -> str:
        """The one line on standard error (the last, `after_notes`), without `fp8q: `; nothing is on standard output.

        What took more than a second on a busy machine may say so before it.
        """
        assert (self.code, self.out) == (code, ""), self.err
        *before, last = self.err.splitlines()
        assert after_notes or all(TOOK.fullmatch(line) for line in before), self.err
        assert last.startswith("fp8q: "), self.err
        return last.removeprefix("fp8q: ")
