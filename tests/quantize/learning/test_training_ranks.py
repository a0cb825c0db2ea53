"""Two ranks that train a small model: a loss of one rank that is no number ends both."""

import json
from pathlib import Path

import pytest

from ...calibrate.ranks.test_world import start

#: A rank says how its training ends where token 63 gives NaN.
CHILD = """
import json, sys
from pathlib import Path
import torch
from fp8q.calibrate.ranks.world import joined_ranks
from fp8q.quantize.learning.training import Listener, LossIsNotFiniteError, Schedule, learn
from tests.quantize.learning.test_training import TEXT, build_models

teacher, student = build_models()
with joined_ranks() as world:
    windows = TEXT[0].copy()
    windows[8, 3] = 63  # in the share of one rank, at whichever step
    with torch.no_grad():
        for model in (teacher, student):
            model.get_input_embeddings().weight[63] = float("nan")
    listener = Listener(lambda steps: None, lambda ids: f", by rank {world.rank}")
    try:
        learn((teacher, student), (windows, TEXT[1]), Schedule(2, 4, 0.003, 0), Path(sys.argv[1]), listener, world)
    except LossIsNotFiniteError as error:
        print(json.dumps([str(error), [moment.step for moment in error.moments]]))
"""


@pytest.mark.slow
def test_ranks_end_together_at_a_loss_of_one(tmp_path: Path) -> None:
    ranks = start(2, "-c", CHILD, str(tmp_path))
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    (message, moments), other = (json.loads(out) for out, _ in said)
    assert other[0] == message
    assert message.startswith("the loss is nan at step ")
    assert message.endswith((" of 12, by rank 0", " of 12, by rank 1"))
    assert moments[0] == 0
