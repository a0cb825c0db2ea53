"""The names of modules as the configurations of FP8 checkpoints match them, each form in its own way.

compressed-tensors takes a name as it is, `re:` and a regular expression, or a class of modules; ModelOpt's are file
name patterns; transformers' fine-grained FP8 takes each for a regular expression, from the first letter on, and for the
end of a name (`should_convert_module`).
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from ...core.errors import InputError

Form = Literal["compressed-tensors", "modelopt", "fp8"]


class Matcher:
    """One entry of a list of modules, as the form's loader takes it.

    `rank`: 0 for a name, 1 for a pattern, 2 for whole classes: the most specific counts.
    """

    def __init__(self, text: str, form: Form, source: Path):
        """`source` is the file that has it. Raises InputError for an expression that does not compile, or might be
        tried for ever.
        """
        self.text, self.form = text, form
        expression = text.removeprefix("re:") if form == "compressed-tensors" else text
        is_expression = form == "fp8" or expression != text
        self.is_class = not is_expression and text.isidentifier() and text[:1].isupper()
        self.rank = 2 if self.is_class or text == "*" else 1 if is_expression else 0
        self.expression = _compiled(expression, source) if is_expression else None

    def matches(self, module: str) -> bool:
        """Tell whether a module is meant. Of a class every module may be: a checkpoint does not say."""
        if self.is_class:
            return True
        if self.form == "modelopt":
            return fnmatchcase(module, self.text)
        if self.expression is None:
            return module == self.text
        found = self.expression.match(module) is not None
        return found or (self.form == "fp8" and module.endswith(self.text))


def _compiled(expression: str, source: Path) -> re.Pattern[str]:
    """A regular expression of somebody else's. One that repeats a group, or repeats often, may take longer than anyone
    waits, and no loader needs it.
    """
    plain = re.sub(r"\\.|\[[^]]*\]", "x", expression)
    try:
        if len(expression) > 1000 or re.search(r"\)[*+{]", plain) or len(re.findall(r"[*+{]", plain)) > 8:
            raise ValueError("it repeats too much to be tried")
        return re.compile(expression)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{source}: has the pattern {expression[:80]!r}, which is not read ({error}); name the modules plainly"
        ) from None
