"""At which value a check says `watch`, and at which `bad`: each number here once, with its reason."""

from dataclasses import dataclass

from .findings import MOST_DB_LOST, MOST_JUMP, MOST_SATURATION, MOST_UNDERFLOW, OUTLIER_RATIO


@dataclass(frozen=True)
class Limit:
    """Above `watch` a value is to be watched, above `bad` it is bad."""

    watch: float
    bad: float


#: Of FP16: its largest number, its smallest normal one, and half its smallest one, which rounds to zero.
FP16_MAX, FP16_NORMAL, FP16_ZERO = 65504.0, 2.0**-14, 2.0**-25
#: Beyond this a square no longer fits FP32, in which every norm sums squares.
SQUARE_OVERFLOWS = 2.0**64
#: From FP32's largest number below 1 - x = 1: a softmax row whose largest logit leads by more is one-hot in FP32.
ONE_HOT_NATS = 16.6

#: The largest magnitude of a norm's input. A model that computes in BF16 has room to 3.4e38, but whoever serves it in
#: FP16 has not; in FP16 itself two octaves of room are asked for, since other text reaches further.
NORM_INPUT = Limit(FP16_MAX, SQUARE_OVERFLOWS)
NORM_INPUT_FP16 = Limit(FP16_MAX / 4, FP16_MAX)
#: The largest attention logit. BF16 keeps 8 bits, so from 128 on half a step is 0.5 nats, and an attention weight is
#: off by up to e^0.5 = 1.65; from 1024 on by e^4 = 55, which is another token's weight. (That logits grow so before a
#: model breaks: Dehghani et al. 2023, arXiv 2302.05442, section 2; Wortsman et al. 2023, arXiv 2309.14322.)
ATTENTION_LOGIT = Limit(128.0, 1024.0)
#: 1 / inverse_scale, so that larger is worse: kernels that keep the reciprocal in FP16 lose bits of it below its
#: smallest normal number, and have zero in the end.
SCALE = Limit(1 / FP16_NORMAL, 1 / FP16_ZERO)
#: The share of values that saturate, as `fp8q inspect` has it; ten times that is more than any clip method here
#: accepts on the text it was chosen on (`percentile` by default leaves 1e-4).
SATURATION = Limit(MOST_SATURATION, 10 * MOST_SATURATION)
#: dB below the best scale there is: 1 dB is `fp8q inspect`'s limit, 6 dB are four times the best scale's squared error.
DB_LOST = Limit(MOST_DB_LOST, 6.0)
#: The share of non-zero values that become zero, as `fp8q inspect` has it; where half of them do, the median is gone.
UNDERFLOW = Limit(MOST_UNDERFLOW, 0.5)
#: How many times one text's, or one token's, amax is what is usual. E4M3's normal numbers reach from 448 down to 2^-6,
#: 14.8 octaves; a tensor whose amax is a hundredth (6.6 octaves) of what its scale is made for keeps 8 octaves of them
#: for its own values, about what lies between its amax and a sixteenth of its rms.
JUMP = Limit(MOST_JUMP, 100.0)
OUTLIER_TOKEN = Limit(OUTLIER_RATIO, 100.0)
#: The relative error of one product, ‖y_fp8 - y‖ / ‖y‖ for the same input, biases left out. Rounding to E4M3 errs by at
#: most 1/17 and by 2.6 % rms, so two factors err by 3.7 % where terms do not cancel, which is what healthy models have;
#: the limits are twice and four times that.
PRODUCT_ERROR = Limit(0.075, 0.15)
#: The relative error of a layer's hidden states, the median token's. Products err by 3.7 % each, and the residual sum
#: averages them: healthy models end below 6 %, the one of them whose heads have a size of 8 at 12 % (docs/doctor.md).
#: 15 % is as much as 16 products' errors without that; an error of a quarter is a cosine of 0.97.
HIDDEN_ERROR = Limit(0.15, 0.25)
#: FP8 may loop where BF16 does not, and the other way round, by chance, since greedy text parts at near ties: one-sided
#: sign test over the prompts in which one of them loops.
CHANCE = 0.05
