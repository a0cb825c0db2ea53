"""The engines of a run for this machine's GPU, and the windows that they take."""

from dataclasses import dataclass

from ...calibrate.text.evaluation import Evaluation
from ...core.commands import engine_stage, stage_command
from ...core.errors import InputError
from ...core.files import sha256_file
from ...core.run import Run
from ...export.engine.info import EngineInfo
from ...options import RUNTIMES, ValidateOptions
from ...serve.local.generation import engine_here
from ...validate.accuracy.document import with_adapter
from ..pipeline.stage import Notes
from .adapters import adapters_of


@dataclass(frozen=True)
class EngineHere:
    """The engine that a runtime of `validate` runs: the runtime's `name`, the plan's name in the run with its SHA-256,
    and its record.
    """

    name: str
    file: dict[str, str]
    info: EngineInfo

    def check_windows(self, tokens: Evaluation) -> None:
        """Raise InputError where windows, or the prompts of decoded ones, are longer than the engine takes."""
        context = tokens.protocol.context
        prompt = tokens.protocol.prompt
        most = min(profile.capacity[2] for profile in self.info.profiles)
        if context > most:
            raise InputError(
                f"--runtimes {self.name}",
                f"its engine has room for {most:,} positions, and a window has {context:,}",
                f"give --context {most}, or build it with --max-seq-len {context}",
            )
        longest = max(profile.seq[2] for profile in self.info.profiles)
        if prompt is not None and prompt > longest:
            raise InputError(
                f"--as-served {prompt}",
                f"the engine of {self.name} takes {longest:,} tokens in a call",
                f"give at most that, or build it with --max-prompt {prompt}",
            )


def engines_here(run: Run, options: ValidateOptions) -> list[EngineHere]:
    """The engines that `options.runtimes` run, and those with an adapter that were built; nothing is loaded.

    Raises what `engine_here` raises.
    """
    engines = []
    for name in options.engines:
        runtime = RUNTIMES[name]
        assert runtime.library in ("tensorrt", "tensorrt-rtx"), "it runs engines"
        for adapter in (None, *(adapter for adapter in adapters_of(run) if takes_adapter(run, name, adapter))):
            plan, info = engine_here(run, runtime.library, runtime.precision, adapter)
            file = {str(plan.relative_to(run.root)): sha256_file(plan)}
            engines.append(EngineHere(with_adapter(name, adapter), file, info))
    return engines


def takes_adapter(run: Run, runtime: str, adapter: str) -> bool:
    """Tell whether a runtime of `validate` runs the model with that adapter on: of engines those that were built."""
    if RUNTIMES[runtime].adapters:
        return True
    if not RUNTIMES[runtime].runs_engine or RUNTIMES[runtime].precision != "fp8":
        return False
    return engine_stage("fp8", adapter) in run.record().stages


def note_without_engines(run: Run, options: ValidateOptions, notes: Notes) -> None:
    """Note the adapters that no engine was built with, for each runtime that runs engines of the FP8 model."""
    lacking = [adapter for adapter in adapters_of(run) if engine_stage("fp8", adapter) not in run.record().stages]
    for name in options.engines if lacking else ():
        if RUNTIMES[name].precision == "fp8":
            notes.note(
                f"{name}: left out with {', '.join(lacking)}, with which no engine was built; "
                f"`{stage_command(engine_stage('fp8', lacking[0]), run.root)}` builds one"
            )
