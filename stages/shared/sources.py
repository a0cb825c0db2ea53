"""Open the source checkpoint of a run, before calibration and again later, and list its GEMMs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from ...calibrate.checkpoint.weights import check_finite
from ...calibrate.input.silence import quiet_transformers
from ...calibrate.input.untrusted import foreign
from ...calibrate.model.adapter_base import adapter_remarks, with_adapters
from ...calibrate.model.caches import attention_indices
from ...calibrate.model.expert_modules import experts_of
from ...calibrate.model.expert_names import Conversions
from ...calibrate.model.gemms import (
    attention_modules,
    gemm_modules,
    multiplies_as_linear,
    other_matrix_modules,
    output_channel_axis,
    output_head,
    routers,
    vision_modules,
)
from ...calibrate.model.source import Source, meta_model, no_model, open_source
from ...calibrate.ranks.world import World
from ...core.errors import InputError
from ...core.reporter import SILENT, Reporter
from ...core.run import Run
from ...export.modules.support import unsupported
from ...options import ScaleOptions, SourceOptions, TokenizerChoice
from ...quantize.conversion.rules import state_modules
from ...quantize.reading.dequantized import fp8_source, recognize
from ...quantize.reading.inherited_scales import check_inherit
from ...quantize.reading.run_checkpoint import ADAPTERS
from ...quantize.scales.cache_scales import bf16_attentions
from ...quantize.scales.policy import ModelGemms, check_dynamic, check_layout, check_patterns, check_tail_length
from ...quantize.scales.servers import graph_refusal
from .adapters import adapters_of
from .model_files import source_path

#: Why GEMMs of experts stay that files have in one list with those of another module.
NUMBERED_OTHERWISE = "an expert that files number behind those of another module, for which config.json has no pattern"


def gemms_of(source: Source, options: ScaleOptions = ScaleOptions()) -> ModelGemms:
    """The GEMMs of the source model, found without its weights, and the reason why no graph can be made of
    it, if any.

    Raises InputError for a model that cannot be quantized, for an FP8 cache of layers without an index, and for
    patterns of `options` that match nothing or leave nothing.
    """
    model = meta_model(source)
    check_forward(source)
    check_stored(source, model)
    attending = attention_indices(source.text_config)
    layers = source.text_config.num_hidden_layers if attending is None else len(attending)
    if options.kv_cache != "off" and len(attention_modules(model)) != layers:
        raise InputError(
            f"--kv-cache {options.kv_cache}",
            f"{source.architecture} writes its cache where it cannot be told which layer it is, so that no scale has "
            "a place",
            "leave it out",
        )
    modules = gemm_modules(model)
    others = other_matrix_modules(model)
    vision = named_vision(source, model, options.vision)
    unknown = {name: module for name, module in (modules | vision).items() if not multiplies_as_linear(module)} | others
    fp8_weights = fp8_source(source)
    gemms = ModelGemms(
        (*modules, *others, *vision),
        output_head(model),
        {name: type(module).__name__ for name, module in unknown.items()},
        frozenset(name for name in modules if fp8_weights and _in_files(source, name) not in fp8_weights.weights),
        unsupported(model) or graph_refusal([rule.form for rule in options.form_rules], vision),
        frozenset(routers(model)),
        frozenset(
            name for name in (*modules, *others, *vision) if source.stored(f"{name}.weight") in source.fp32_in_files
        ),
        ({} if attending is None else state_modules(modules))
        | _numbered_otherwise(model, modules)
        | unstored(source, vision),
        {
            name: module.get_parameter("weight").shape[1 - output_channel_axis(module)]
            for name, module in modules.items()
        },
        frozenset(vision_modules(model)),
    )
    check_tail_length(options, source.max_positions)
    attentions = list(attention_modules(model).values())
    in_bf16 = bf16_attentions(options.kv_skip, attentions, source.text_config.to_dict())
    coded = [name for name in attentions if name not in in_bf16]
    chosen = check_patterns(options, gemms)
    conv1d = [name for name in modules if output_channel_axis(modules[name]) == 1]
    check_dynamic(options, gemms, chosen, conv1d)
    check_layout(options, gemms, chosen, conv1d, [*experts_of(model)])
    check_inherit(source, chosen, coded, options)
    return gemms


def _in_files(source: Source, module: str) -> str:
    """The tensor in the files that the weight of `module` is, or the first of those that are joined to it."""
    name = source.stored(f"{module}.weight")
    if name in source.joined:
        return source.joined[name].tensors[0]
    return name


def _numbered_otherwise(model: PreTrainedModel, modules: Collection[str]) -> dict[str, str]:
    """The GEMMs of experts among `modules` that files number behind those of another module -> why they stay."""
    behind = Conversions(model).numbered_behind_others()
    starts = tuple(f"{experts}." for experts in behind)
    return dict.fromkeys((name for name in modules if name.startswith(starts)), NUMBERED_OTHERWISE)


def named_vision(source: Source, model: PreTrainedModel, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules of `model` that text does not reach and `patterns` of `--vision` name; raises InputError for a
    pattern that matches none.
    """
    every = vision_modules(model)
    for pattern in patterns:
        if not every:
            raise InputError(
                f"--vision {pattern}", f"{source.architecture} has no part that text does not reach", "leave it out"
            )
        if not any(fnmatchcase(name, pattern) for name in every):
            raise InputError(
                f"--vision {pattern}", "matches no module that text does not reach", f"one is {next(iter(every))}"
            )
    return vision_modules(model, patterns)


def unstored(source: Source, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Map the linear layers among `modules` whose weights are made of other stored tensors to the reason why they stay
    in BF16.
    """
    stored = source.weights().names()
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    reason = "stored in another form than it computes in, so that its codes have no place"
    return {name: reason for name in linear if source.stored(f"{name}.weight") not in stored}


def check_stored(source: Source, model: PreTrainedModel) -> None:
    """Raise InputError where transformers computes a weight from other stored tensors, so its codes could not replace
    it.
    """
    stored = source.weights().names()
    tied = model.all_tied_weights_keys
    for name in gemm_modules(model):
        if f"{name}.weight" not in tied and source.stored(f"{name}.weight") not in stored:
            raise InputError(
                source.name,
                f"{source.architecture} stores no {name}.weight, which transformers makes of other tensors when it "
                "loads them, so that its codes have no place",
                "give a checkpoint that stores it, or use `fp8q convert`",
            )


def check_forward(source: Source) -> None:
    """Raise InputError when the model does not run as config.json has it: two tokens without weights, with the
    attention and cache of calibration. A model that reads values in its forward pass (OPT's mask) is not checked.
    """
    model = meta_model(source)
    with foreign(lambda error: no_model(source, error)), quiet_transformers(), torch.inference_mode():
        try:
            model(input_ids=torch.zeros((1, 2), dtype=torch.int64, device="meta"), use_cache=True)
        except (RuntimeError, NotImplementedError) as error:
            if "meta tensor" not in str(error):
                raise


def opened(
    model: str, options: SourceOptions = SourceOptions(), report: Reporter = SILENT, fingerprinted: bool = True
) -> Source:
    """Open the source model, which may be an FP8 checkpoint, whose codes are then dequantized, with the adapters of
    `options`.

    `fingerprinted`: read all weights to compute the fingerprint.
    """
    source = open_source(model, options.revision, options.trust_remote_code, report, fingerprinted, recognize)
    source = replace(source, tokenizer=options.tokenizer or "file")
    if not options.adapter:
        return source
    source = with_adapters(source, options.adapter, options.adapter_mode)
    for remark in adapter_remarks(source):
        report.note(remark)
    return source


def opened_as(model: str, identity: Mapping[str, str], report: Reporter = SILENT) -> Source:
    """Open the checkpoint `model`, with the adapter that the run's record says is merged into it, and its tokenizer."""
    merged = identity.get("adapter")
    if merged is not None and not Path(merged).is_dir():
        raise InputError(merged, "the adapter that was merged is no longer there", "put it back, or calibrate again")
    tokenizer: TokenizerChoice = "file" if identity.get("tokenizer") == "file" else "auto"  # older runs say nothing
    adapter = (Path(merged),) if merged is not None else ()
    return opened(model, SourceOptions(adapter=adapter, tokenizer=tokenizer), report)


def source_of(run: Run) -> Source:
    """Open the source checkpoint of the run again.

    Raises InputError when it is missing or changed.
    """
    model = run.record().model
    path = source_path(run)
    source = opened_as(path, model)
    if source.fingerprint != model["fingerprint"]:
        raise InputError(
            path,
            f"is no longer the model that {run.root} was made of (its fingerprint differs)",
            "restore it, or calibrate again into another directory",
        )
    if not (names := adapters_of(run)):
        return source
    return with_adapters(source, [run.model / ADAPTERS / name for name in names], "beside")


def check_model(run: Run, before: Mapping[str, str], source: Source) -> None:
    """Raise InputError when the directory of `run` holds a run of another model than `source`, by its record
    `before`.
    """
    if before and before["fingerprint"] != source.fingerprint:
        raise InputError(
            run.root,
            f"is a run of another model ({before['name']}, fingerprint {before['fingerprint'][:12]}, not "
            f"{source.fingerprint[:12]})",
            "name another directory with --out",
        )


def check_same(source: Source, world: World) -> None:
    """Raise InputError, on rank 0, when a machine holds another model. One rank of each has read its weights."""
    for member, theirs in zip(world.members, world.gathered({"fingerprint": source.identity})):
        fingerprint = theirs["fingerprint"]
        if world.rank == 0 and fingerprint not in ("", source.identity):
            raise InputError(
                member["name"],
                f"{source.name} there is another model (fingerprint {fingerprint[:12]}, not {source.identity[:12]})",
                "give all machines the same files",
            )


def check_weights(run: Run, source: Source, report: Reporter) -> None:
    """Raise InputError for NaN or Inf in a weight, unless the run has measured just this model before."""
    measured = run.record().stages.get("measure")
    if measured is None or measured.inputs["model"] != source.fingerprint:
        check_finite(source.weights(), report)
