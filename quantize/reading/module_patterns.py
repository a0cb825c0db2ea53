"""Match the names of modules as the configurations of FP8 checkpoints do, each form in its own way.

compressed-tensors has names, regular expressions after `re:`, and classes of modules. ModelOpt has file name patterns.
transformers' fine-grained FP8 takes each entry both for a regular expression, matched from the first letter on, and for
the end of a name (`should_convert_module`).
"""

from fnmatch import fnmatchcase
from typing import Literal

from ...calibrate.input.patterns import BoundedPattern, PatternFile

Form = Literal["compressed-tensors", "modelopt", "fp8"]


class Matcher:
    """One entry of a list of modules, matched as the form's own loader does.

    `rank`: 0 for a name, 1 for a pattern, 2 for a class; of several entries that match, the lowest rank counts.
    """

    def __init__(self, text: str, form: Form, source: PatternFile):
        """Take the entry `text` of the file `source`.

        Raises InputError for an expression that does not compile, or that might take forever to match.
        """
        self.text, self.form = text, form
        expression = text.removeprefix("re:") if form == "compressed-tensors" else text
        is_expression = form == "fp8" or expression != text
        self.is_class = not is_expression and text.isidentifier() and text[:1].isupper()
        self.rank = 2 if self.is_class or text == "*" else 1 if is_expression else 0
        self.expression = BoundedPattern(expression, source) if is_expression else None

    def matches(self, module: str) -> bool:
        """Tell whether the entry matches `module`; a class matches all, since a checkpoint does not tell classes.

        Raises InputError where that may take forever.
        """
        if self.is_class:
            return True
        if self.form == "modelopt":
            return fnmatchcase(module, self.text)
        if self.expression is None:
            return module == self.text
        return self.expression.matches(module) or (self.form == "fp8" and module.endswith(self.text))
