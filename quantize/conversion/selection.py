"""Choose the tensors to quantize: the model's class says what is a linear layer, or names and shapes where none does.

Among linear layers the rule then chooses (`rules.toml`, `--skip`). Whatever is kept although it is a matrix is listed
with its reason, and declared: loaders make an FP8 module of each linear layer that is not named to them, vLLM also of
each stack of experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ...calibrate.checkpoint.mtp_layers import mtp_prefixes
from ...core.errors import InputError
from ...core.headers import StoredTensor
from .class_tensors import ClassTensors, Place, class_tensors
from .model_class import NoClassError
from .name_tensors import WEIGHT, NamedTensors
from .reasons import EMBEDDING
from .rules import RULES, Keep, Rules, kept_by_name

#: The types that are quantized, as safetensors spells them.
FLOAT_TYPES = ("BF16", "F16", "F32")
#: The names under which vLLM asks whether the experts of a layer are quantized: those of the first one.
_VLLM_EXPERT = ("0.gate_proj", "0.up_proj", "0.down_proj")


@dataclass(frozen=True)
class Stack:
    """A stack of experts to cut into `modules`, expert by expert; `turned`: each is stored [in, out]."""

    modules: tuple[str, ...]
    turned: bool = False


@dataclass(frozen=True)
class Selection:
    """The tensors to quantize, `matrices` and `stacks` by name, and those `unquantized` although they are matrices: the
    reason of each, by the name of its tensor.

    `declared`: the modules that loaders must not take for FP8; `renamed`: tensors that are written under another name;
    `decided_by`: the class of transformers that said what is a linear layer, or that names did, and why; `unloadable`:
    why transformers loads no FP8 checkpoint of the class, if it does not.
    """

    matrices: tuple[str, ...]
    stacks: Mapping[str, Stack]
    unquantized: Mapping[str, str]
    declared: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    decided_by: str = ""
    unloadable: str | None = None


@dataclass(frozen=True)
class _Candidate:
    """A matrix or stack of experts: why it is kept, if it is known already; the names of its modules, and its place."""

    reason: str | None
    stack: Stack | None = None
    place: "Place | None" = None


def select_tensors(
    rules: Rules,
    config: Mapping[str, Any],
    headers: Mapping[str, StoredTensor],
    skip: Sequence[str] = (),
    mtp: bool = False,
) -> Selection:
    """Choose the tensors of `headers` to quantize by the model's class, `rules`, `config` (config.json) and the
    patterns `skip`.

    `mtp`: quantize the layers of multi-token prediction too. Raises InputError for a pattern that matches no matrix,
    and where nothing is left to quantize.
    """
    judged, why = _ask_class(config, headers)
    candidates = _candidates(rules, config, headers, judged)
    chooser = _Chooser(rules, config, () if mtp else mtp_prefixes(config, headers), skip)
    unquantized: dict[str, str] = {}
    matrices: list[str] = []
    stacks: dict[str, Stack] = {}
    for name, candidate in candidates.items():
        reason = chooser.reason(name, headers[name], candidate)
        if reason is not None:
            unquantized[name] = reason
        elif candidate.stack is not None:
            stacks[name] = candidate.stack
        else:
            matrices.append(name)
    for name in _parted(stacks, unquantized):
        unquantized[name] = "a stack of experts of a layer whose other stack is kept"
        del stacks[name]
    for pattern in skip:
        if pattern not in chooser.used:
            raise InputError(f"--skip {pattern}", "matches no matrix of the checkpoint", "`*` stands for any letters")
    if not matrices and not stacks:
        raise InputError(
            "",
            f"all {len(unquantized)} matrices of the checkpoint stay as they are, so there is nothing to quantize",
            f"skip fewer with --skip, or change a copy of {RULES} and give it with --rules",
        )
    selection = Selection(tuple(matrices), stacks, unquantized, decided_by=why)
    if judged is not None:
        selection = replace(selection, renamed=judged.renamed, unloadable=_unloadable(judged, matrices))
    return replace(selection, declared=_declared(selection, headers, judged))


def _unloadable(judged: ClassTensors, matrices: Sequence[str]) -> str | None:
    """The reason why transformers loads no checkpoint of the class whose `matrices` are codes, if it does not."""
    coded = [f"{judged.verdicts[name].module}{WEIGHT}" for name in matrices if name in judged.verdicts]
    for source, targets in judged.cutting:
        if not any(name.endswith(targets[0]) for name in coded):
            return (
                f"{judged.name} loads no FP8 checkpoint, whatever is quantized: it makes {' and '.join(targets)} of "
                f"{source}, and its quantizers take no such conversion; servers with a class of their own do not ask it"
            )
    return None


def _ask_class(config: Mapping[str, Any], headers: Mapping[str, StoredTensor]) -> tuple["ClassTensors | None", str]:
    """The verdicts of the model's class, and its name; or None, and why names decide."""
    try:
        judged = class_tensors(config, headers)
    except NoClassError as error:
        return None, f"names and shapes ({error})"
    return judged, judged.name


def _candidates(
    rules: Rules, config: Mapping[str, Any], headers: Mapping[str, StoredTensor], judged: "ClassTensors | None"
) -> dict[str, _Candidate]:
    """All matrices and stacks of experts among `headers`, by name."""
    names = NamedTensors(rules, config, headers)
    candidates: dict[str, _Candidate] = {}
    for name, header in headers.items():
        verdict = judged.verdicts.get(name) if judged else None
        if verdict is None:
            if (candidate := _by_name(name, header, names, rules.least_side)) is not None:
                candidates[name] = candidate
        elif verdict.reason is None:
            stack = Stack(verdict.parts, verdict.turned) if verdict.parts else None
            candidates[name] = _Candidate(None, stack, verdict.place)
        elif verdict.matrix and _is_matrix(name, header.shape, rules.least_side):
            candidates[name] = _Candidate(verdict.reason, None, verdict.place)
    return candidates


def _by_name(name: str, header: StoredTensor, names: NamedTensors, least_side: int) -> _Candidate | None:
    """Judge a tensor by its name and shape; None for one that is no matrix."""
    if not _is_matrix(name, header.shape, least_side):
        return None
    if len(header.shape) == 2 and name.endswith(WEIGHT):
        return _Candidate(names.matrix(name))
    if len(header.shape) != 3:
        return _Candidate("experts in a form that the rule has no modules for")
    parts = names.stack(name)
    if isinstance(parts, str):
        return _Candidate(parts)
    stem = name.removesuffix(WEIGHT).rpartition(".")[0]
    return _Candidate(
        None, Stack(tuple(f"{stem}.{index}.{part}" for index in range(header.shape[0]) for part in parts))
    )


def _is_matrix(name: str, shape: tuple[int, ...], least_side: int) -> bool:
    """Tell whether a tensor is one that servers multiply by, or a stack of such, by its shape and its name."""
    if len(shape) == 2 and name.endswith(WEIGHT):
        return True
    if len(shape) not in (2, 3) or name.endswith(("bias", "scale")):
        return False
    return "expert" in name or (len(shape) == 3 and min(shape[-2:]) >= max(least_side, 2))


class _Chooser:
    """Chooses among linear layers by the rule; `used`: the patterns of `--skip` that matched."""

    def __init__(self, rules: Rules, config: Mapping[str, Any], drafts: tuple[str, ...], skip: Sequence[str]):
        text = config.get("text_config")
        parts = [config, text] if isinstance(text, dict) else [config]
        types = {part["model_type"] for part in parts if isinstance(part.get("model_type"), str)}
        self.least_side = rules.least_side
        self.drafts = drafts
        self.skip = skip
        self.used = set[str]()
        self.entries = [entry for entry in rules.keep if not entry.model_types or types & {*entry.model_types}]

    def reason(self, name: str, header: StoredTensor, candidate: _Candidate) -> str | None:
        """The reason why a candidate is kept; None where it is quantized."""
        module = name.removesuffix(WEIGHT)
        matching = [pattern for pattern in self.skip if fnmatchcase(module, pattern)]
        self.used.update(matching)
        if header.dtype not in FLOAT_TYPES:
            return f"stored as {header.dtype}, which is not quantized"
        if candidate.reason is not None:
            return self._named_embedding(module, candidate) or candidate.reason
        if matching:
            return f"stays in BF16 (--skip {matching[0]})"
        for entry in self.entries:
            if entry.matches(module) or self._stands_there(entry, module, candidate):
                return entry.reason
        smallest = min(header.shape[-2:])
        if smallest < self.least_side:
            return f"a side of {smallest}, smaller than {self.least_side}"
        return None

    def _named_embedding(self, module: str, candidate: _Candidate) -> str | None:
        """The reason of the rule for what is called an embedding, a head or a convolution where no class knows it."""
        other_class = (candidate.reason or "").startswith("a ")
        if candidate.place is None or other_class:
            return kept_by_name(self.entries, module)
        return None

    def _stands_there(self, entry: Keep, module: str, candidate: _Candidate) -> bool:
        """Tell whether an entry keeps a module for its place."""
        by_draft = entry.mtp and module.startswith(self.drafts)
        by_tower = entry.towers and candidate.place == "tower"
        return by_draft or by_tower or (entry.outside and candidate.place == "outside")


def _parted(stacks: Mapping[str, Stack], unquantized: Mapping[str, str]) -> list[str]:
    """The stacks that would be cut although another stack of their experts is kept."""
    blocks = {expert_block(name) for name in unquantized if ".experts." in name}
    return [name for name in stacks if expert_block(name) in blocks]


def expert_block(name: str) -> str:
    """The name that vLLM has for the experts of which the tensor `name` holds all or one."""
    parts = name.removesuffix(WEIGHT).split(".")
    if "experts" in parts:
        return ".".join(parts[: parts.index("experts") + 1])
    return ".".join([*parts[:-1], "experts"])


def _declared(
    selection: Selection, headers: Mapping[str, StoredTensor], judged: "ClassTensors | None"
) -> frozenset[str]:
    """The modules that loaders must not take for FP8, by the names of files and of the class.

    Left out are embeddings, which are none: vLLM makes a linear layer of whatever is named.
    """
    written = {*selection.matrices, *selection.stacks}
    declared: set[str] = set()
    blocks = {expert_block(name) for name in written if ".experts." in name}
    for name, reason in selection.unquantized.items():
        if reason.partition(":")[0] == EMBEDDING.partition(":")[0]:
            continue
        module = name.removesuffix(WEIGHT)
        declared |= {module, selection.renamed.get(name, name).removesuffix(WEIGHT)}
        owner = module.rpartition(".")[0]
        if not name.endswith(WEIGHT) and "expert" in owner.rpartition(".")[2]:
            declared.add(owner)
        stacked = len(headers[name].shape) == 3 or not name.endswith(WEIGHT) or ".experts." in name
        if stacked and (block := expert_block(name)) not in blocks:
            declared |= {f"{block}.{part}" for part in _VLLM_EXPERT}
    for module, stored in judged.linears.items() if judged else ():
        if judged is not None and not written.intersection(stored):
            declared |= {module, judged.file_names[module]}
    return frozenset(declared)
