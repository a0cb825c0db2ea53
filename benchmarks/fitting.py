"""Train a small model for a benchmark. Run by the others, and not by itself."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch


def fit(model: Any, draw: Callable[[torch.Generator], Mapping[str, torch.Tensor]], steps: int, rate: float) -> None:
    """Train `model` for so many `steps` on the inputs with labels that `draw` gives, up to the learning rate `rate`.

    Prints the loss in nats a token to standard error.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        loss = model(**draw(generator)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: loss {float(loss.detach()):.4f}", file=sys.stderr, flush=True)
    model.eval()
