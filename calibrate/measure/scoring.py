"""Score logits: the loss of tokens, the divergence of one distribution from another, the agreement of likeliest tokens.

KL(p || q) = Σ p (log p - log q) over the vocabulary, in nats, includes differences that perplexity, which depends on
one token's probability, averages away. Top-1 agreement: both have the same likeliest token. Top-5 agreement: the share
of the five likeliest tokens of p that are among those of q, in any order. (The likeliest token of p alone is nearly
always among these five, 100.00 % on the demo.)

All take log-probabilities, so that each is computed once, and none needs torch but that of the tensors it is given: a
host without torch takes log-probabilities with NumPy.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

#: The number of likeliest tokens that are compared.
TOP = 5


def log_softmax(logits: "torch.Tensor") -> "torch.Tensor":
    """Log-probabilities of `logits` [..., vocabulary], in FP32."""
    return logits.float().log_softmax(-1)


def log_softmax_of_array(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Log-probabilities of each row of `logits` [rows, vocabulary], summed in FP64."""
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        shifted = logits - logits.max(axis=1, keepdims=True)
        total = np.exp(shifted, dtype=np.float64).sum(axis=1, keepdims=True)
        log_q: npt.NDArray[np.float32] = (shifted - np.log(total)).astype(np.float32)
    return log_q


def losses(log_q: "torch.Tensor", targets: "torch.Tensor") -> "torch.Tensor":
    """The loss in nats of the tokens `targets` [...] under `log_q` [..., vocabulary]."""
    return -log_q.gather(-1, targets[..., None])[..., 0]


def kl_terms(log_p: "torch.Tensor", log_q: "torch.Tensor") -> "torch.Tensor":
    """The terms of KL(p || q) [..., vocabulary], in nats."""
    return log_p.exp() * (log_p - log_q)


def divergences(log_p: "torch.Tensor", log_q: "torch.Tensor") -> "torch.Tensor":
    """KL(p || q) [...] in nats; a few rounding errors below zero where both are the same."""
    return kl_terms(log_p, log_q).sum(-1)


def same_likeliest(log_p: "torch.Tensor", log_q: "torch.Tensor") -> "torch.Tensor":
    """Tell of each row if the likeliest tokens are the same, bool [...]."""
    return log_p.argmax(-1) == log_q.argmax(-1)


def overlap(log_p: "torch.Tensor", log_q: "torch.Tensor") -> "torch.Tensor":
    """Compute the share of the likeliest tokens of p that are among those of q, for each row of two [tokens,
    vocabulary].
    """
    count = min(TOP, log_p.shape[-1])
    ours, theirs = (table.topk(count, sorted=False).indices for table in (log_p, log_q))
    return (ours[:, :, None] == theirs[:, None, :]).any(-1).float().mean(-1)
