"""The table of docs/validate.md."""

from markdown import gigabytes, load, table


def validate_memory() -> str:
    """The peak of each runtime by itself, and of all in one call."""
    found = load("validate_memory")
    rows = [[name, gigabytes(each["peak_anonymous_bytes"])] for name, each in found["runtimes"].items()]
    limit = f"{gigabytes(found['together']['peak_anonymous_bytes'])} (limit {gigabytes(found['limit_bytes'])})"
    return table(["`--runtimes`", "peak of memory"], [*rows, ["all of them in one call", limit]])


TABLES = (validate_memory,)
