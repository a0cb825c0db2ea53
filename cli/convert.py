"""Show what `fp8q convert` wrote."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from .views import emit

if TYPE_CHECKING:
    from ..stages.commands.convert import Converted
    from .console import Terminal


def show_converted(speak: "Terminal", written: "Converted", as_json: bool) -> None:
    """Show what `fp8q convert` wrote: what is kept and why, the sizes, the proof, and what comes next."""
    if as_json:
        emit(asdict(written) | {"path": str(written.path)})
        return
    rows = [(reason, f"{len(modules):,}", modules[0]) for reason, modules in written.kept.items()]
    speak.table("Matrices kept in the source's type", ("reason", "count", "first"), rows)
    for line in written.warnings:
        speak.note(line)
    speak.say(
        f"{written.quantized:,} tensors of codes in the form {written.form} ({written.layout}): "
        f"{written.source_bytes / 1e9:,.2f} -> {written.written_bytes / 1e9:,.2f} GB. Proof: every code decoded; the "
        f"largest error is {written.largest_error_steps:.3g} of a step, "
        f"{written.largest_relative_error:.2%} of a value."
    )
    speak.say(f"next: `vllm serve {written.path}`   serve it; its accuracy is not measured")
