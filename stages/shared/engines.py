"""The engines of a run for this machine's GPU, and the windows that they take."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...core.errors import InputError
from ...core.files import sha256_file
from ...core.run import Run
from ...options import ValidateOptions, graph_runtime
from ...serve.local.generation import engine_here

if TYPE_CHECKING:
    from ...export.engine.info import EngineInfo
    from ...validate.accuracy.perplexity import Evaluation


@dataclass(frozen=True)
class EngineHere:
    """The engine that a runtime of `validate` runs: the runtime's `name`, the plan's name in the run with its SHA-256,
    and its record.
    """

    name: str
    file: dict[str, str]
    info: "EngineInfo"

    def check_windows(self, tokens: "Evaluation") -> None:
        """Raise InputError where windows, or the prompts of decoded ones, are longer than the engine takes."""
        context, prompt = tokens.protocol.context, tokens.protocol.prompt
        most = min(profile.capacity[2] for profile in self.info.profiles)
        if context > most:
            raise InputError(
                f"--runtimes {self.name}: its engine has room for {most:,} positions, and a window has {context:,}; "
                f"give --context {most}, or build it with --max-seq-len {context}"
            )
        longest = max(profile.seq[2] for profile in self.info.profiles)
        if prompt is not None and prompt > longest:
            raise InputError(
                f"--as-served {prompt}: the engine of {self.name} takes {longest:,} tokens in a call; give at most "
                f"that, or build it with --max-prompt {prompt}"
            )


def engines_here(run: Run, options: ValidateOptions) -> list[EngineHere]:
    """The engines that `options.runtimes` run; nothing is loaded. Raises what `engine_here` raises."""
    found = []
    for name in options.engines:
        runtime, precision = graph_runtime(name)
        assert runtime != "onnxruntime", "it runs graphs"
        plan, info = engine_here(run, runtime, precision)
        found.append(EngineHere(name, {str(plan.relative_to(run.root)): sha256_file(plan)}, info))
    return found
