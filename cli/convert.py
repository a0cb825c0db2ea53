"""Show what `fp8q convert` wrote."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from .views import emit

if TYPE_CHECKING:
    from ..stages.commands.convert import Converted
    from .console import Terminal


def show_converted(speak: "Terminal", found: "Converted", as_json: bool) -> None:
    """Show what `fp8q convert` wrote: what is kept and why, the sizes, the proof, and what comes next."""
    if as_json:
        emit(asdict(found) | {"path": str(found.path)})
        return
    rows = [(reason, f"{len(modules):,}", modules[0]) for reason, modules in found.kept.items()]
    speak.table("Matrices kept in the source's type", ("reason", "count", "first"), rows)
    for line in found.warnings:
        speak.note(line)
    speak.say(
        f"{found.quantized:,} tensors of codes in the form {found.form} ({found.layout}): "
        f"{found.source_bytes / 1e9:,.2f} -> {found.written_bytes / 1e9:,.2f} GB. Proof: every code decoded; the "
        f"largest error is {found.largest_error_steps:.3g} of a step, {found.largest_relative_error:.2%} of a value."
    )
    speak.say(f"next: `vllm serve {found.path}`   serve it; its accuracy is not measured")
