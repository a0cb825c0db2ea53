"""Two ranks that train a small model: steps too large are made smaller on both, and a NaN of one ends both."""

import json
from pathlib import Path

import pytest

from fp8q.quantize.learning.linear import SMALLER
from fp8q.quantize.learning.training import Listener, learn

from ...calibrate.ranks.test_world import start
from .test_training import TEXT, TOO_LARGE, build_models, codes

#: A rank says how two trainings end: that whose steps are too large, and that where token 63 gives NaN.
CHILD = """
import json, sys
from pathlib import Path
import torch
from fp8q.calibrate.ranks.world import joined_ranks
from fp8q.quantize.learning.training import Listener, LossIsNotFiniteError, Schedule, learn
from tests.quantize.learning.test_training import TEXT, TOO_LARGE, build_models, codes

with joined_ranks() as world:
    teacher, student = build_models()
    anew = []
    listener = Listener(lambda steps: None, lambda ids: "", anew=anew.append)
    windows, folder = (TEXT[0][:16], TEXT[1]), Path(sys.argv[1])
    moments = learn((teacher, student), windows, TOO_LARGE, folder / "large", listener, world)
    learned = {name: each.hex() for name, each in codes(student).items()}
    print(json.dumps([anew, [(moment.step, moment.kl) for moment in moments], learned]))
    teacher, student = build_models()
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
def test_ranks_begin_anew_as_one_process_does_and_end_together_at_a_loss_of_one(tmp_path: Path) -> None:
    ranks = start(2, "-c", CHILD, str(tmp_path))
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    (large, bad), (other_large, other_bad) = (map(json.loads, out.splitlines()) for out, _ in said)
    models, anew = build_models(), list[float]()
    listener = Listener(lambda steps: None, lambda ids: "", anew=anew.append)
    alone = learn(models, (TEXT[0][:16], TEXT[1]), TOO_LARGE, tmp_path / "alone", listener)
    assert large[0] == other_large[0] == anew == [pytest.approx(TOO_LARGE.learning_rate / SMALLER)]
    assert [step for step, _ in large[1]] == [moment.step for moment in alone]
    assert [kl for _, kl in large[1]] == pytest.approx([moment.kl for moment in alone], rel=1e-4)
    wanted = b"".join(codes(models[1]).values())
    found = b"".join(bytes.fromhex(each) for each in large[2].values())  # rank 0's, which are written
    assert len(found) == len(wanted)
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) < 1e-3 * len(wanted)
    message, moments = bad
    assert other_bad[0] == message
    assert message.startswith("the loss is nan at step ")
    assert message.endswith((" of 12, by rank 0", " of 12, by rank 1"))
    assert moments[0] == 0
