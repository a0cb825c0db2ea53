"""Write the table of the defaults that transformers' configuration classes declare, or name what differs in it.

    python benchmarks/class_defaults.py [--write]

`fp8q.calibrate.checkpoint.class_defaults` reads it on hosts without transformers, and before it. A type has a line.
Exit status 1 when the table is not that of the installed transformers.
"""

import json
import sys

from fp8q.calibrate.checkpoint.class_defaults import TABLE, ClassDefaults, declared_by


def declared_types() -> dict[str, ClassDefaults]:
    """Model type -> what its class declares, of the classes that generate text, and of the language models in them."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    waiting = [*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES]
    table: dict[str, ClassDefaults] = {}
    while waiting:
        kind = waiting.pop()
        if kind in table or kind not in CONFIG_MAPPING:
            continue
        table[kind] = declared_by(CONFIG_MAPPING[kind])
        if untied := untied_classes(kind):
            table[kind]["untied"] = untied
        waiting += [inner] if (inner := table[kind].get("text")) else []
    return dict(sorted(table.items()))


def untied_classes(kind: str) -> list[str]:
    """The causal language models of the type `kind` that name no tied weights: transformers ties none then."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    mapped = NAMES.get(kind, ())
    names = [mapped] if isinstance(mapped, str) else list(mapped)
    return [name for name in names if not getattr(getattr(transformers, name), "_tied_weights_keys", None)]


def rendered(table: dict[str, ClassDefaults]) -> str:
    """The file of a table: JSON, a line for each type."""
    lines = (f"{json.dumps(kind)}: {json.dumps(declared)}" for kind, declared in table.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    """Write the table, or compare it."""
    wanted = rendered(declared_types())
    if "--write" in sys.argv[1:]:
        TABLE.write_text(wanted, encoding="utf-8")
        return 0
    if TABLE.read_text(encoding="utf-8") != wanted:
        print(f"{TABLE.name} is not that of the installed transformers; run this with --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
