"""Two ranks with half of a small model each learn what one process does, killed or not; they begin anew together, and
end together at NaN.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fp8q.quantize.learning.linear import SMALLER, learned_layers
from fp8q.quantize.learning.training import Listener, Schedule, learn

from ...calibrate.ranks.test_world import start
from .test_training import TEXT, TOO_LARGE, build_models, codes, train

#: Steps that are too large, and gradients in BF16.
ANEW = replace(TOO_LARGE, gradients="bf16")
#: A rank says how its trainings end: from beginning to end, killed at step 8 and taken up, in steps that are too large,
#: and with a token of NaN.
CHILD = """
import json, sys
from pathlib import Path
import torch
from fp8q.calibrate.ranks.world import joined_ranks
from fp8q.quantize.learning.linear import learned_layers
from fp8q.quantize.learning.sharded_model import shard_model
from fp8q.quantize.learning.training import Listener, LossIsNotFiniteError, Schedule, learn
from fp8q.validate.accuracy.nonfinite import culprit
from tests.quantize.learning.test_training import TEXT, build_models, codes
from tests.quantize.learning.test_training_shards import ANEW

class Killed(BaseException):
    pass

def train(world, folder, advance=lambda steps: None, nan=False, schedule=Schedule(2, 4, 0.003, 0), count=24):
    teacher, student = build_models(learn_scales=True)
    windows = TEXT[0][:count].copy()
    if nan:
        windows[8, 3] = 63
        with torch.no_grad():
            student.get_input_embeddings().weight[63] = float("nan")
    for model in (teacher, student):
        shard_model(model, world)
    def blame(ids):
        first = culprit(student, lambda: student(input_ids=ids, use_cache=False), 24)
        return f", by {first.module}" if first else ""
    moments, message, anew = None, None, []
    try:
        listener = Listener(advance, blame, anew=anew.append)
        moments = learn((teacher, student), (windows, TEXT[1]), schedule, folder, listener, world)
    except LossIsNotFiniteError as error:
        moments, message = error.moments, str(error)
    except Killed:
        return None
    return {
        "learned": {name: layer.weight.to_local().numel() for name, layer in learned_layers(student).items()},
        "all": [sum(each.to_local().numel() for each in model.parameters()) for model in (teacher, student)],
        "codes": {name: each.hex() for name, each in codes(student).items()},
        "scales": {name: layer.learned()[1].tolist() for name, layer in learned_layers(student).items()},
        "moments": [(moment.step, moment.kl) for moment in moments],
        "message": message,
        "anew": anew,
    }

taken = []
def die(steps):
    taken.append(steps)
    if sum(taken) == 8:
        raise Killed

folder = Path(sys.argv[1])
with joined_ranks() as world:
    whole = train(world, folder / "whole")
    train(world, folder / "killed", die)
    again = train(world, folder / "killed")
    large = train(world, folder / "large", schedule=ANEW, count=16)
    bad = train(world, folder / "bad", nan=True)
print(json.dumps({"whole": whole, "again": again, "large": large, "bad": bad}))
"""


@pytest.mark.slow
def test_two_ranks_of_half_the_model_each_learn_the_codes_of_one_process(tmp_path: Path) -> None:
    ranks = start(2, "-c", CHILD, str(tmp_path))
    said = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    models = build_models(learn_scales=True)
    moments = train(models, tmp_path / "alone", schedule=Schedule(2, 4, 0.003, 0))
    assert first == second
    assert first["again"] == first["whole"]
    _hold_whole(first["whole"], models, [(moment.step, moment.kl) for moment in moments])
    models, anew = build_models(learn_scales=True), list[float]()
    listener = Listener(lambda steps: None, lambda ids: "", anew=anew.append)
    moments = learn(models, (TEXT[0][:16], TEXT[1]), ANEW, tmp_path / "large", listener)
    assert first["large"]["anew"] == anew == [pytest.approx(ANEW.learning_rate / SMALLER)]
    # Steps that are too large before the restart carry the last bits far: 0.6 % of the loss with AVX2 alone.
    _hold_whole(first["large"], models, [(moment.step, moment.kl) for moment in moments], kl=0.02, codes_differ=0.02)
    assert re.fullmatch(r"the loss is nan at step \d+ of 12, by model.embed_tokens", first["bad"]["message"])
    assert first["bad"]["moments"] == first["whole"]["moments"][: len(first["bad"]["moments"])]


def _hold_whole(
    found: dict[str, Any],
    models: tuple[PreTrainedModel, PreTrainedModel],
    moments: list[tuple[int, float]],
    kl: float = 1e-4,
    codes_differ: float = 1e-3,
) -> None:
    """Hold what a rank has and learned to what one process did: gradients are sums in another order.

    `kl` is the relative difference allowed of each moment's divergence, `codes_differ` the share of codes.
    """
    teacher, student = models
    layers = learned_layers(student)
    assert found["learned"] == {name: layer.weight.numel() // 2 for name, layer in layers.items()}
    assert found["all"] == [sum(each.numel() for each in model.parameters()) // 2 for model in (teacher, student)]
    assert [step for step, _ in found["moments"]] == [step for step, _ in moments]
    assert [each for _, each in found["moments"]] == pytest.approx([each for _, each in moments], rel=kl)
    for name, layer in layers.items():
        scale = layer.learned()[1]
        assert not torch.equal(scale, layer.scale[:, 0])
        assert found["scales"][name] == pytest.approx(scale.tolist(), rel=2**-7)  # a BF16 number or the one beside
    wanted, had = (b"".join(each[name] for name in sorted(each)) for each in (codes(student), _bytes(found["codes"])))
    assert len(wanted) == len(had)
    assert sum(a != b for a, b in zip(wanted, had, strict=True)) < codes_differ * len(wanted)


def _bytes(codes_in_hex: dict[str, str]) -> dict[str, bytes]:
    return {name: bytes.fromhex(each) for name, each in codes_in_hex.items()}
