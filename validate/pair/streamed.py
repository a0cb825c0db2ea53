"""Compare models of which one decoder layer each is in memory at a time, with hidden states on disk.

The windows go through a layer of the original in BF16, then the candidate's, then the original's in FP32, before the
next layer is read. While the original's runs on the windows for modules, each module of the candidate's runs on the
same inputs (`module_errors`). The batches are those of a comparison in memory, and layers get the arguments that their
model gives them, so the results are the same but for the rounding of another order of sums. Without a candidate to
compare modules with, the models go through their layers one after the other: the original whose candidate is behind a
server, or the runtimes of a run.

A step (the modules before the layers, each layer, the modules behind them) reads one file of hidden states for each
model, writes the other, and ends with a file of its results; a killed call goes on after the last complete step. The
logits are then computed from the hidden states that left the last layer, a batch at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from ...calibrate.input.untrusted import foreign
from ...calibrate.measure.chain import LayerChain, Observing
from ...calibrate.measure.hidden_states import Batches, files_in_turn, states_bytes
from ...calibrate.measure.stream import LayerPass, check_room, layers_to_run
from ...calibrate.model.bf16_gemms import gemms_in_fp32
from ...calibrate.model.decoder import LayerOutput, outputs_behind
from ...core.errors import BackendError
from ...core.files import Strict, read_document, write_document
from ...core.memory import release_memory
from ...core.reporter import Reporter
from ..accuracy.compare import BASELINE, FLOAT32, AnyForward, Opener, error_line
from .document import CANDIDATE, HiddenError, ModuleError, TableError
from .module_errors import ComparedModules, OutputSums, embedding_errors, expert_errors, sorted_by_error

#: What stands in an error of a full disk, and the remedy.
OPTION = "--stream"
REMEDY = "name another directory with --out, or give a smaller --max-tokens"


#: Parameter -> the relative errors of the experts that it holds.
Experts = dict[str, list[float | None]]


class StepResults(Strict):
    """The results of one step, in a file of its own: the errors of modules, experts and embeddings, and of the hidden
    states that enter a layer, or leave the model.
    """

    hidden: HiddenError | None = None
    modules: list[ModuleError] = Field(default=[])
    experts: Experts = Field(default={})
    tables: list[TableError] = Field(default=[])


@dataclass(frozen=True)
class StreamResults:
    """The results of all steps: errors of modules, hidden states, experts and embeddings."""

    modules: list[ModuleError]
    hidden: list[HiddenError]
    experts: Experts
    tables: list[TableError]


@dataclass(frozen=True)
class StreamedWindows:
    """The batches of windows whose logits are compared, and the windows on which modules are compared, both by number:
    int64 [windows, context] each.
    """

    scored: Batches
    modules: Batches

    @classmethod
    def cut(cls, ids: npt.NDArray[np.int64], at_once: int, modules: npt.NDArray[np.int64]) -> "StreamedWindows":
        """Cut `ids` [windows, context] into batches of `at_once` windows; `modules`: the numbers of windows for
        modules, each a batch.
        """
        scored = {number: ids[start : start + at_once] for number, start in enumerate(range(0, len(ids), at_once))}
        return cls(scored, {len(scored) + number: ids[[window]] for number, window in enumerate(modules.tolist())})

    def of(self, name: str) -> Batches:
        """The batches that a model runs; modules are compared in BF16 alone."""
        if name == FLOAT32:
            return dict(self.scored)
        return {**self.scored, **self.modules}


def check_disk(
    folder: Path, outputs: Mapping[str, LayerOutput], windows: StreamedWindows, disk: Path, remedy: str = REMEDY
) -> None:
    """Raise InputError where `disk` has no room for the hidden states in `folder` of models with these `outputs`, with
    a `remedy` besides freeing space.
    """
    sizes = {
        file: states_bytes(windows.of(name), output)
        for name, output in outputs.items()
        for file in files_in_turn(folder, name)
    }
    check_room(disk, sizes, OPTION, remedy)


@dataclass
class StreamedModel(LayerPass):
    """A model on its way through its layers. `name`: its name among the runtimes, which errors have."""

    name: str = ""

    def enter(self, done: bool, observing: Observing | None = None) -> None:
        """Enter the first layer, as `LayerPass` does, by default with the chain's own cache."""
        with self._named("before its layers"):
            super().enter(done, observing or self.chain.caching)

    def run(self, index: int, model: torch.nn.Module, observing: Observing | None = None) -> None:
        """Run all batches through layer `index`, as `LayerPass` does, by default with the chain's own cache."""
        with self._named(f"in decoder layer {index}"):
            super().run(index, model, observing or self.chain.caching)

    def _named(self, where: str) -> AbstractContextManager[None]:
        """Turn an exception of the model in this block into a BackendError; a disk's passes."""
        return foreign(lambda error: BackendError(self.name, f"failed {where} ({error_line(error)})"), OSError)

    def behind(self, model: Any, tokens: npt.NDArray[np.int64], leaving: torch.Tensor, **named: object) -> Any:
        """The outputs of `model`, with its modules outside the layers, for what left the last layer at `tokens`."""
        chain = self.chain
        ids = torch.from_numpy(tokens).to(chain.device)
        return outputs_behind(model, chain.layers, chain.layer_output, ids, leaving, **named)


class PairStream:
    """The steps of one comparison.

    Invariant: if the results of step n exist, the hidden states that step n + 1 reads are complete.
    """

    def __init__(self, chains: Mapping[str, LayerChain], windows: StreamedWindows, folder: Path):
        """Take the disk's room for the hidden states of the models `chains`. Where `candidate` is among them, its
        modules are compared with those of `bf16`; without it there are no windows for modules.

        `folder` exists; a killed call's files there are continued, so it must have had the same arguments.
        """
        self.windows = windows
        self.folder = folder
        self.models = {name: self._model(name, chain) for name, chain in chains.items()}
        candidate = self.models.get(CANDIDATE)
        self.pair = None if candidate is None else (self.models[BASELINE], candidate)
        self.layers = next(iter(self.models.values())).chain.layers

    def _model(self, name: str, chain: LayerChain) -> StreamedModel:
        model = StreamedModel.of(chain, self.windows.of(name), files_in_turn(self.folder, name))
        model.name = name
        return model

    def run(self, report: Reporter, doing: str = "Comparing") -> None:
        """Run all steps that are not finished; `doing`: the work, in the progress."""
        count = self.layers.count
        steps = layers_to_run(self._file, count, report)
        with gemms_in_fp32(), torch.inference_mode():
            for model in self.models.values():
                model.enter(0 not in steps)
                release_memory()
            if 0 in steps:
                self._save(0, StepResults())
            remaining = [step for step in steps if step]
            with report.track(f"{doing} {len(remaining)} layers, one by one", len(remaining), "layers") as advance:
                for step in remaining:
                    self._layer(step)
                    advance(1)
            if self.pair and self.windows.modules and not self._file(count + 1).is_file():
                self._save(count + 1, self._behind(*self.pair))

    def _file(self, step: int) -> Path:
        return self.folder / f"{step:05}.json"

    def _save(self, step: int, results: StepResults) -> None:
        write_document(self._file(step), results)

    def _layer(self, step: int) -> None:
        """Step n: run all batches through decoder layer n - 1 of each model."""
        results = self._both(*self.pair, step - 1) if self.pair else StepResults()
        release_memory()
        for name, model in self.models.items():
            if self.pair is None or name not in (BASELINE, CANDIDATE):
                self._alone(model, step - 1)
                release_memory()
        for model in self.models.values():
            model.states[step % 2].flush()
        self._save(step, results)

    def _both(self, base: StreamedModel, compared_with: StreamedModel, index: int) -> StepResults:
        """Run a layer of the original in BF16 and of the candidate `compared_with`, and compare their modules."""
        hidden = OutputSums()
        for batch in self.windows.modules:
            states = (model.states[index % 2].read(batch, "cpu") for model in (base, compared_with))
            hidden.add(*states)
        with (
            base.chain.open_layer(index) as original,
            compared_with.chain.open_layer(index) as candidate,
        ):
            compared = ComparedModules(original, candidate, self._in_part(index))
            of_modules = self.windows.modules
            base.run(
                index, original, lambda batch: compared.adding() if batch in of_modules else base.chain.caching(batch)
            )
            compared_with.run(index, candidate)
            if not self.windows.modules:
                return StepResults()
            return self._results(index, hidden, compared, (original, candidate))

    def _alone(self, model: StreamedModel, index: int) -> None:
        """Run a layer of a model without comparing modules."""
        with model.chain.open_layer(index) as opened:
            model.run(index, opened)

    def _behind(self, base: StreamedModel, compared_with: StreamedModel) -> StepResults:
        """The last step: compare the modules outside the layers, and the hidden states behind the last norm."""
        hidden = OutputSums()
        with (
            base.chain.open_outside(head=True) as original,
            compared_with.chain.open_outside(head=True) as candidate,
        ):
            compared = ComparedModules(original, candidate, self._in_part(None))
            for batch in self.windows.modules:
                ids = self.windows.modules[batch]
                with compared.adding():
                    ours = base.behind(original, ids, base.leaving(batch), output_hidden_states=True)
                theirs = compared_with.behind(candidate, ids, compared_with.leaving(batch), output_hidden_states=True)
                hidden.add(ours.hidden_states[-1], theirs.hidden_states[-1])
            return self._results(None, hidden, compared, (original, candidate))

    def _in_part(self, part: int | None) -> Callable[[str], bool]:
        return lambda name: self.layers.index(name) == part

    def _results(
        self,
        part: int | None,
        hidden: OutputSums,
        compared: ComparedModules,
        models: tuple[torch.nn.Module, torch.nn.Module],
    ) -> StepResults:
        """The results of a layer, or (None) of what lies outside the layers."""
        layer = self.layers.count if part is None else part
        return StepResults(
            hidden=HiddenError(layer=layer, error=hidden.error),
            modules=compared.errors(),
            experts=expert_errors(*models, self._in_part(part)),
            tables=embedding_errors(*models, self._in_part(part)),
        )

    def results(self, names: Iterable[str]) -> "StreamResults":
        """The errors of modules, the worst first, and equal ones in the order of `names`; of hidden states, in order;
        of experts, and of embeddings.
        """
        steps = [read_document(file, StepResults) for file in sorted(self.folder.glob("*.json"))]
        order = {name: number for number, name in enumerate(names)}
        modules = sorted((entry for step in steps for entry in step.modules), key=lambda entry: order[entry.module])
        return StreamResults(
            sorted_by_error(modules),
            [step.hidden for step in steps if step.hidden is not None],
            {name: errors for step in steps for name, errors in step.experts.items()},
            [table for step in steps for table in step.tables],
        )

    @contextmanager
    def openers(self) -> Iterator[dict[str, Opener]]:
        """Give what opens each model for the windows that were run: its modules behind the layers, which one model at a
        time has in memory.

        They may be asked for in smaller batches than were run, where the disk has no room for the logits of those.
        """
        rows: dict[bytes, tuple[int, slice]] = {}
        for batch, ids in self.windows.scored.items():
            rows |= {window.tobytes(): (batch, slice(row, row + 1)) for row, window in enumerate(ids)}
        rows |= {ids.tobytes(): (batch, slice(None)) for batch, ids in self.windows.scored.items()}

        def leaving(model: StreamedModel, ids: npt.NDArray[np.int64]) -> torch.Tensor:
            parts = [ids] if ids.tobytes() in rows else ids
            stored = [rows[part.tobytes()] for part in parts]
            return torch.cat([model.leaving(batch)[row] for batch, row in stored])

        def opener(model: StreamedModel) -> Opener:
            def open_model() -> AnyForward:
                opened.close()
                behind = opened.enter_context(model.chain.open_outside(head=True))

                def forward(ids: npt.NDArray[np.int64]) -> torch.Tensor:
                    with gemms_in_fp32():
                        logits: torch.Tensor = model.behind(behind, ids, leaving(model, ids)).logits
                    return logits

                return forward

            return open_model

        with ExitStack() as opened:
            yield {name: opener(model) for name, model in self.models.items()}
