"""Scores of distributions over a few tokens, worked by hand."""

import math

import numpy as np
import pytest
import torch

from fp8q.calibrate.measure.scoring import (
    divergences,
    kl_terms,
    log_softmax,
    log_softmax_of_array,
    losses,
    overlap,
    same_likeliest,
)

#: Probabilities 1/2, 1/4, 1/4 and 1/4, 1/4, 1/2, from logits that add up to anything.
P = log_softmax(torch.tensor([[2.0, 1.0, 1.0]]) * math.log(2))
Q = log_softmax(torch.tensor([[5.0, 5.0, 6.0]]) * math.log(2))


def test_the_loss_of_a_token_is_minus_the_logarithm_of_its_probability() -> None:
    assert losses(P, torch.tensor([0])).tolist() == pytest.approx([math.log(2)])
    assert losses(Q, torch.tensor([0])).tolist() == pytest.approx([math.log(4)])
    assert losses(P[None].expand(2, 3, 3), torch.tensor([[0, 1, 2], [2, 1, 0]])).shape == (2, 3)


def test_kl_weighs_the_difference_of_logarithms_by_the_first() -> None:
    """1/2 log 2 + 1/4 log 1 + 1/4 log 1/2 = 1/4 log 2."""
    terms = [math.log(2) / 2, 0.0, -math.log(2) / 4]
    assert kl_terms(P, Q)[0].tolist() == pytest.approx(terms, abs=1e-7)
    assert divergences(P, Q).tolist() == pytest.approx([math.log(2) / 4])
    assert divergences(P, P).tolist() == [0.0]


def test_logits_in_bf16_are_scored_in_fp32() -> None:
    assert log_softmax(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)).dtype == torch.float32


def test_numpy_takes_the_same_logarithms_and_keeps_nan() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 300)).astype(np.float32)
    np.testing.assert_allclose(log_softmax_of_array(logits), log_softmax(torch.from_numpy(logits)), atol=2e-6)
    logits[2, 7] = np.nan
    assert np.isnan(log_softmax_of_array(logits)).all(axis=1).tolist() == [False, False, True, False]


def test_likeliest_tokens_are_compared_whatever_their_order() -> None:
    assert same_likeliest(P, Q).tolist() == [False]
    assert same_likeliest(P, P).tolist() == [True]
    ranked, turned = torch.arange(6.0)[None], torch.arange(6.0).flip(0)[None]
    assert overlap(ranked, turned).tolist() == pytest.approx([4 / 5])


def test_the_five_likeliest_are_all_there_are_in_a_smaller_vocabulary() -> None:
    assert overlap(torch.tensor([[3.0, 2, 1]]), torch.tensor([[1.0, 2, 3]])).tolist() == [1]
