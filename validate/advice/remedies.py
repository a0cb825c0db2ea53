"""The command that helps, with the options it takes: written out, so that it can be copied."""

from dataclasses import dataclass
from shlex import quote

from ...core.commands import tune_command
from ...quantize.scales.decisions import TensorScale


@dataclass(frozen=True)
class Remedies:
    """Make the commands of remedies: `run` is the run's directory, `two_terms`, `skip` and `kv_skip` the patterns that
    `fp8q scales` was given; `cached`: the attention modules whose cache is codes. `graph`: the run has an
    ONNX graph.

    An option with several patterns replaces the run's, so the run's patterns are repeated.
    """

    run: str
    model: str
    data: str
    samples: int
    two_terms: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    kv_skip: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()
    graph: bool = True

    def scales(self, *words: str) -> str:
        """`fp8q scales RUN` with those options."""
        return self._command("scales", quote(self.run), *words)

    def two(self, pattern: str) -> str:
        """Take two terms for modules that match, and for those that have them already."""
        return self.scales(*_repeated("--two-terms", (*self.two_terms, pattern)))

    def wide(self, tensor: str) -> str:
        """A tensor in BF16: a module by --skip; keys and values with their layer by --kv-skip, or by the option of the
        cache where no other layer is in codes.
        """
        module, _, part = tensor.rpartition(".")
        if part in ("k", "v"):
            if module in self.cached and len(self.cached) > 1:
                return self.scales(*_repeated("--kv-skip", (*self.kv_skip, module)))
            return self.scales("--kv-cache", "v" if part == "k" else "off")
        return self.scales(*_repeated("--skip", (*self.skip, tensor)))

    def better(self, tensor: str, scale: TensorScale | None = None) -> str:
        """The next better form of a tensor with this `scale` (None: of one term): two terms for one, BF16 for two.

        A cache has no two terms.
        """
        exact = scale is not None and scale.grid.by_value
        return self.wide(tensor) if exact or tensor.endswith((".k", ".v")) else self.two(tensor)

    def again(self) -> str:
        """Choose all scales again by the same options, where the files differ from their result."""
        return f"`rm {quote(f'{self.run}/scales.json')}`, then {self.scales()}"

    def more_text(self) -> str:
        """Calibrate on twice the windows."""
        samples = str(2 * self.samples)
        return self._command(
            "calibrate", quote(self.model), "--data", quote(self.data), "--out", "OTHER", "--samples", samples
        )

    def tune(self) -> str:
        """Let `fp8q tune` find the change."""
        return f"`{tune_command(quote(self.run), '--max-ppl-increase 0.5%', self.graph)}`"

    def wide_graph(self) -> str:
        """The graphs in BF16 instead of FP16."""
        return self._command("export", quote(self.run), "--dtype", "bf16")

    def restored(self) -> str:
        """The remedy for a source that is gone."""
        return f"put the model back at {self.model}, or calibrate again"

    @staticmethod
    def _command(*words: str) -> str:
        return f"`fp8q {' '.join(words)}`"


def _repeated(option: str, patterns: tuple[str, ...]) -> list[str]:
    return [word for pattern in dict.fromkeys(patterns) for word in (option, quote(pattern))]
