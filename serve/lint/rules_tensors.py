"""Rules R112 to R114: the tensors, profiles and warm-up requests that `config.pbtxt` declares."""

from collections.abc import Iterator, Mapping, Sequence

from ...core.errors import InputError
from ...core.findings import Broken
from ...export.engine.profiles import BLOCK, size_of
from ..triton.engine_model import DESCRIPTION, EngineModel, declared, import_schema
from ..triton.repository import INPUTS, OUTPUTS
from .folder import ModelFolder, why
from .rules import model_rule
from .rules_config import AGAIN

Tensor = tuple[str, list[int]]


def engine_of(model: ModelFolder) -> EngineModel | None:
    """Return the description of a plain engine whose tensors all have a type of Triton's."""
    description = model.engine if model.is_engine else None
    if isinstance(description, EngineModel) and not description.untyped:
        return description
    return None


@model_rule("R112", "tensors")
def tensors(model: ModelFolder) -> Broken:
    """The inputs and outputs that are declared are those of the engine (engine.json has the graph's), or those that
    fp8q's Python model reads and sends: by name, type and dimensions, and every one. TensorRT's backend refuses a model
    where one is missing or differs; a type that the Python model does not take fails each request.
    """
    if model.is_engine and isinstance(model.engine, InputError):
        file = model.folder / DESCRIPTION
        yield model.place(file), f"{why(model.engine, file)}; {AGAIN}"
    elif model.is_engine and isinstance(model.engine, EngineModel) and model.engine.untyped:
        name = model.engine.untyped[0]
        kind = model.engine.tensors[name].type
        yield model.place(), f"{name} is {kind}, for which Triton has no type; calibrate with --kv-cache off"
    for field, wanted in _wanted(model):
        declared_tensors = _config_tensors(model, field)
        for name in wanted:
            if name not in declared_tensors:
                yield model.place(), f"the {field} {name} is not declared; {AGAIN}"
            elif (actual := _shown(declared_tensors[name])) != (expected := _shown(wanted[name])):
                yield model.place(), f"the {field} {name} is {actual}, and should be {expected}; {AGAIN}"
        for name in declared_tensors:
            if name not in wanted:
                yield model.place(), f"the {field} {name} is none of the model's; {AGAIN}"


def _wanted(model: ModelFolder) -> Iterator[tuple[str, dict[str, Tensor]]]:
    if model.is_text:
        yield "input", {name: (kind, [length]) for name, (kind, length, _) in INPUTS.items()}
        yield "output", {name: (kind, [length]) for name, (kind, length) in OUTPUTS.items()}
    elif (engine := engine_of(model)) is not None:
        for wanted in ("input", "output"):
            yield wanted, {name: (kind, dims) for field, name, kind, dims in declared(engine) if field == wanted}


def _config_tensors(model: ModelFolder, field: str) -> dict[str, Tensor]:
    return {entry.name: (_type(entry.data_type), list(entry.dims)) for entry in getattr(model.config, field)}


def _type(number: int) -> str:
    kinds = import_schema()[0].DataType
    if number in kinds.values():
        return str(kinds.Name(number))
    return str(number)


def _shown(tensor: Tensor) -> str:
    return f"{tensor[0]} [{', '.join(map(str, tensor[1]))}]"


@model_rule("R113", "profiles", scope="engine")
def profile_batches(model: ModelFolder) -> Broken:
    """A plain engine uses every optimization profile, by its number, and declares no larger batch than all of them
    take, and not 0 where its dimensions leave the batch out. Where no profile is named Triton uses the first alone; one
    that is not there keeps the model from loading.
    """
    assert model.config is not None, "`model_rule` leaves out what does not parse"
    if (engine := engine_of(model)) is None:
        return
    indices = [str(index) for index in range(len(engine.profiles))]
    used = {name for group in model.config.instance_group for name in group.profile}
    for index, profile in zip(indices, engine.profiles, strict=True):
        if index not in used and (used or index != "0"):
            yield model.place(), f"the profile {index} ({profile.name}) is not used; name it in instance_group"
    for name in sorted(used.difference(indices)):
        yield model.place(), f"the profile {name} is none of the engine's ({', '.join(indices)}); take it out"
    if not engine.batched and model.config.max_batch_size:
        yield (
            model.place(),
            (
                f"max_batch_size is {model.config.max_batch_size}, and the cache has no axis of its own for the batch; "
                "set 0"
            ),
        )
    elif engine.batched and not 1 <= model.config.max_batch_size <= engine.max_batch:
        yield (
            model.place(),
            (
                f"max_batch_size is {model.config.max_batch_size}, and the engine takes 1 to {engine.max_batch} rows; "
                f"set {engine.max_batch}"
            ),
        )


@model_rule("R114", "warm-up")
def warm_up(model: ModelFolder) -> Broken:
    """A warm-up request holds every input that is not optional, of its type, within max_batch_size and, of a plain
    engine, within the dimensions of a profile. A server does not begin to serve a model whose warm-up fails.
    """
    assert model.config is not None, "`model_rule` leaves out what does not parse"
    engine = engine_of(model)
    inputs = {entry.name: entry for entry in model.config.input}
    for request in model.config.model_warmup:
        what = f"the warm-up {request.name}"
        if request.batch_size > max(1, model.config.max_batch_size):
            yield model.place(), f"{what} has {request.batch_size} rows, more than max_batch_size; give it fewer"
        for name, entry in inputs.items():
            if name not in request.inputs and not entry.optional:
                yield model.place(), f"{what} has no {name}; give it one"
            elif name in request.inputs and request.inputs[name].data_type != entry.data_type:
                kinds = [_type(tensor.data_type) for tensor in (request.inputs[name], entry)]
                yield model.place(), f"{what} has {name} as {kinds[0]}, and it is {kinds[1]}; give it that type"
        for name in request.inputs:
            if name not in inputs:
                yield model.place(), f"{what} has {name}, which is no input; take it out"
        if engine is not None and not _fits(engine, {name: list(request.inputs[name].dims) for name in request.inputs}):
            yield model.place(), f"{what} has dimensions that no profile takes; {AGAIN}"


def _fits(engine: EngineModel, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Tell whether inputs of these dimensions (as `EngineModel.dims` has them) belong together, and a profile takes
    them.
    """
    sizes: dict[str, int] = {}
    computed: list[tuple[str, int]] = []
    for name in shapes.keys() & engine.inputs.keys():
        dims = engine.dims(name)
        if len(dims) != len(shapes[name]):
            return False
        for dim, size in zip(dims, shapes[name], strict=True):
            if isinstance(dim, str) and not dim.isidentifier():
                computed.append((dim, size))
            elif dim != size and (isinstance(dim, int) or sizes.setdefault(dim, size) != size):
                return False
    for dim, size in computed:  # the past's length is told by the mask alone
        unknown = [word for word in dim.replace(" ", "").split("+") if word not in sizes]
        if len(unknown) == 1 and unknown[0].isidentifier():
            sizes[unknown[0]] = size - sum(sizes.get(word, 0) for word in dim.replace(" ", "").split("+"))
    sizes.setdefault("batch", 1)
    sizes["blocks"], rest = divmod(sizes.get("capacity", 0), BLOCK)
    if any(size_of(name, dim, sizes) != size for dim, size in computed) or (rest and not engine.batched):
        return False
    return any(
        all(least <= sizes.get(word, least) <= most for word, (least, _, most) in profile.ranges.items())
        for profile in engine.profiles
    )
