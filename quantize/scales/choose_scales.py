"""Choose the scale and precision of every tensor by its statistics and the options of scales.

Apart from `policy`, which a host without torch reads: the heads of a cache come from the model's configuration.
"""

from ...calibrate.measure.statistics import Statistics
from ...calibrate.model.gemms import attention_heads
from ...calibrate.model.source import Source
from ...options import BF16, BLOCK, ScaleOptions
from .activation_scales import activation_scales
from .cache_scales import attentions_of, bf16_attentions, kv_cache_scales
from .decisions import CACHE_PARTS, Scales
from .expert_scales import starved
from .policy import ModelGemms, module_forms, select


def choose_scales(source: Source, statistics: Statistics, gemms: ModelGemms, options: ScaleOptions) -> Scales:
    """Decide the scale and precision of every tensor in `gemms`; the weights' scales follow when they are written."""
    chosen, skipped = select(gemms, options.skip, options.only)
    parts = CACHE_PARTS[options.kv_cache]
    in_bf16 = bf16_attentions(options.kv_skip, attentions_of(statistics), source.config.get_text_config().to_dict())
    groups = statistics.record.groups.values()
    few = starved(statistics, options.min_expert_tokens)
    forms = module_forms(options, gemms, chosen, groups)
    coded = {module: form for module, form in forms.items() if form != BF16}
    activations, unfit = activation_scales(statistics, coded, options.clip, forms=coded, starved=few)
    if options.block_scale_grid == "power-of-two":
        activations = {
            module: scale.model_copy(update={"group_grid": "power-of-two"}) if scale.form == BLOCK else scale
            for module, scale in activations.items()
        }
    heads = attention_heads(source.text_config) if options.kv_scale == "head" else {}
    cache = kv_cache_scales(statistics, options.clip, parts, in_bf16, heads)
    alone = [module for module in chosen if module not in coded]
    return Scales.before_weights(activations, cache, in_bf16, skipped | unfit, alone)
