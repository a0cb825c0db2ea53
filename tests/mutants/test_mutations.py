"""Every mutation still fits the sources; whether tests notice it, `make mutants` tells in an hour."""

import re
from collections import Counter

import pytest

from .mutation import ROOT, Mutation, mutations

MUTATIONS = mutations()
FOLDERS = {"calibrate", "quantize", "export", "validate", "serve", "stages", "integrations"}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_changes_one_line_that_is_there_and_names_tests_that_are(name: str) -> None:
    mutation = MUTATIONS[name]
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    changed = mutation.applied(source)
    assert changed != source
    compile(changed, mutation.file, "exec")
    for test in mutation.tests:
        file, _, function = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not function or re.search(rf"^(?:async )?def {re.escape(function)}\(", text, re.MULTILINE), test


def test_there_are_mutations_of_every_folder_that_computes() -> None:
    of_folders = Counter(mutation.file.partition("/")[0] for mutation in MUTATIONS.values())
    assert of_folders.keys() == FOLDERS
    assert of_folders.total() >= 60


def test_a_text_that_is_there_twice_or_not_at_all_is_no_mutation() -> None:
    mutation = Mutation("twice", "a.py", "x = 1", "x = 2", ())
    assert mutation.applied("x = 1\ny = 1\n") == "x = 2\ny = 1\n"
    for source, count in (("x = 1\nx = 1\n", 2), ("y = 1\n", 0)):
        with pytest.raises(ValueError, match=rf"^twice: a.py has its old text {count} times, not once$"):
            mutation.applied(source)
