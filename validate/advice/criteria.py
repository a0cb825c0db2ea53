"""The register of what `fp8q inspect` and `fp8q doctor` judge: each value, and from where on it matters.

Both commands take name, text and limit of a check from here. `inspect` lists what exceeds `watch` in the statistics;
`doctor` gives a verdict for each check, of the scales in the checkpoint and of the running model. Each number stands
here once, with its reason.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """Above `watch` a value is worth a look, above `bad` it is bad."""

    watch: float
    bad: float = math.inf


@dataclass(frozen=True)
class Criterion:
    """A check: its name, what its value is with its unit, its limit, and why there may be no value (`nothing`)."""

    check: str
    what: str
    limit: Limit
    nothing: str = "nothing to measure"


#: FP16's largest number, its smallest normal one, and half its smallest one, which rounds to zero.
FP16_MAX = 65504.0
FP16_NORMAL = 2.0**-14
FP16_ZERO = 2.0**-25
#: Beyond this a square no longer fits FP32, in which every norm sums squares.
SQUARE_OVERFLOWS = 2.0**64
#: From FP32's largest number below 1 - x = 1: a softmax row whose largest logit leads by more is one-hot in FP32.
ONE_HOT_NATS = 16.6

# Of the statistics and the scales.

#: A thousandth is ten times what `percentile` leaves by default (1e-4). A hundredth is more than any clip method here
#: accepts on the text it was chosen on.
SATURATION = Criterion("saturation", "share of values beyond the clip", Limit(1e-3, 1e-2))
#: 6 dB are four times the best scale's squared error.
DB_LOST = Criterion("scale", "dB of signal to noise below the best scale", Limit(1.0, 6.0))
#: From here on an error is below BF16's own rounding of the values, by half a unit of 8 bits: no better scale is seen.
LOSSLESS_DB = 60.0


def db_below_best(sqnr_db: float | None, best_db: float | None) -> float:
    """dB of signal to noise that a scale loses to the best one; None is no noise at all, and noise below BF16's own
    rounding loses nothing.
    """
    if sqnr_db is None or sqnr_db >= LOSSLESS_DB:
        return 0.0
    if best_db is None:
        return math.inf
    return max(best_db - sqnr_db, 0.0)


#: Of values that crowd around zero (what down_proj reads) 6 % underflow at the best scale there is, and a scale at
#: which a quarter does loses no 0.1 dB; where half of them do, the median is gone.
UNDERFLOW = Criterion("underflow", "share of non-zero values that become zero", Limit(0.25, 0.5))
#: 1 / inverse_scale, so that larger is worse: kernels that keep the reciprocal in FP16 lose bits of it below its
#: smallest normal number, and have zero in the end.
INVERSE_SCALE = Criterion("inverse_scale", "1 / scale", Limit(1 / FP16_NORMAL, 1 / FP16_ZERO))
#: E4M3's normal numbers reach from 448 down to 2^-6, 14.8 octaves. A tensor whose amax is a hundredth (6.6 octaves) of
#: the amax that its scale is made for keeps 8 octaves for its own values, about the distance between its amax and a
#: sixteenth of its rms.
AMAX_JUMPS = Criterion(
    "amax_jumps", "amax over the batch before's", Limit(10.0, 100.0),
    "the calibration text was one batch; two are needed",
)  # fmt: skip
#: `inspect` alone: a channel whose amax exceeds ten times the median channel's is an outlier, and an amax that grows by
#: a tenth in the last quarter of the batches has not converged.
OUTLIER_CHANNELS = Criterion("outlier_channels", "largest channel over the median", Limit(10.0))
AMAX_GROWTH = Criterion("amax_growth", "amax over that of the first three quarters", Limit(1.1))
#: Any scale that a server takes in the place of a measured one is worth a look.
CACHE_SERVED = Criterion("cache_served", "places at which servers read another cache than was measured", Limit(0.0))

# Of the running model.

#: A model that computes in BF16 has room to 3.4e38, but whoever serves it in FP16 has not.
NORM_INPUTS = Criterion(
    "norm_inputs", "largest magnitude that a norm reads", Limit(FP16_MAX, SQUARE_OVERFLOWS),
    "the model has no norm of its own",
)  # fmt: skip
#: In FP16 itself two octaves of room are asked for, since other text reaches further.
NORM_INPUTS_FP16 = Limit(FP16_MAX / 4, FP16_MAX)
#: BF16 keeps 8 bits, so from 128 on half a step is 0.5 nats, and an attention weight is off by up to e^0.5 = 1.65; from
#: 1024 on by e^4 = 55, which is another token's weight. (That logits grow so before a model breaks: Dehghani et al.
#: 2023, arXiv 2302.05442, section 2; Wortsman et al. 2023, arXiv 2309.14322.)
ATTENTION_LOGITS = Criterion(
    "attention_logits", "largest attention logit, in nats", Limit(128.0, 1024.0),
    "its attention does not go through transformers' interface",
)  # fmt: skip
#: As for `AMAX_JUMPS`, token by token.
CACHE_TOKENS = Criterion(
    "cache_tokens", "a token's amax over the median token's", Limit(10.0, 100.0), "nothing was written to a cache"
)
#: ‖y_fp8 - y‖ / ‖y‖ for the same input, biases left out. Rounding to E4M3 errs by at most 1/17 and by 2.6 % rms, so two
#: factors err by 3.7 % where terms do not cancel, which is what healthy models have; the limits are twice and four
#: times that.
GEMM_ERRORS = Criterion(
    "product_errors", "relative error of the GEMM by itself", Limit(0.075, 0.15), "no GEMM runs in FP8"
)
#: GEMMs err by 3.7 % each, and the residual sum averages them: healthy models end below 6 %, the one of them whose
#: heads have a size of 8 at 12 % (docs/decisions/0019). 15 % is as much as 16 GEMMs' errors without that; an error of a
#: quarter is a cosine of 0.97.
HIDDEN_STATES = Criterion(
    "hidden_states", "relative error of the layer's hidden states, the median token's", Limit(0.15, 0.25),
    "the model is no chain of layers",
)  # fmt: skip
#: The limit is `CHANCE`: FP8 may loop where BF16 does not, and the other way round, by chance, since greedy text parts
#: at near ties. A one-sided sign test over the prompts in which one of them loops.
LOOPS = Criterion("loops", "prompts after which FP8 alone loops", Limit(0.0), "the model has too few positions")
CHANCE = 0.05
#: The prompts that BF16 and FP8 continue, the tokens of each, and the tokens of each answer.
PROMPTS = 16
PROMPT = 32
ANSWER = 96
#: The checks that need the model.
OF_THE_MODEL = (NORM_INPUTS, ATTENTION_LOGITS, CACHE_TOKENS, GEMM_ERRORS, HIDDEN_STATES, LOOPS)

# Of a training log (`training_checks`).

#: A number that is not finite ends a training.
NOT_FINITE = Criterion("not_finite", "values that are NaN or infinite", Limit(0.0, 0.0))
#: Of a gradient whose distribution is like a weight's, E5M2 loses 0.3 % of the energy by rounding and E4M3 0.07 %. A
#: hundredth is three times the former, and at a tenth the step is as noisy as with a ninth of the batch's other noise.
ENERGY_LOST = Criterion("energy_lost", "share of the energy that rounding loses", Limit(0.01, 0.1))
#: A scale by history holds an amax up to itself; a margin of one octave twice that, of three octaves eight times.
TRAINING_JUMPS = Criterion(
    "training_jumps", "amax over the history's", Limit(2.0, 8.0), "fewer records than a history has"
)
#: Gradients fall by one or two orders of magnitude while a model learns.
VANISHING = Criterion(
    "inverse_scale", "the first gradient's amax over the last one's", Limit(1e3, 1e6),
    "no gradient was recorded twice",
)  # fmt: skip
#: Norms vary by half from batch to batch; clipping at 1, the custom, begins to matter well below five times the median.
GRADIENT_NORM = Criterion(
    "gradient_norm", "gradient norm over the median of the records before", Limit(5.0, 50.0),
    "fewer records than are needed for a median",
)  # fmt: skip
#: The loss is the median of five records; a batch's own differs by a tenth.
LOSS = Criterion("loss", "loss over the lowest before it", Limit(1.2, 2.0), "no loss was given to watch.step()")
