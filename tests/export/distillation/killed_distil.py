"""Kills a distillation in each phase, one after the other, and lets the last attempt finish.

A program of its own, since it forks for each kill, which a process with threads must not.
Usage: python -m tests.export.distillation.killed_distil TEACHER SOURCE TARGET OUT
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.runtime.jobs.killed_job import forked
from transferry.build_model.train.loop import Trainer
from transferry.build_model.train.metrics import Metrics
from transferry.export.distillation import distil as distillation
from transferry.runtime.jobs.journal import Journal

# The smallest student that is one.
STUDENT: dict[str, Any] = dict(
    preset="tiny",
    **dict(d_model=16, heads=2, d_ff=16, encoder_layers=1, decoder_layers=1, dropout=0.1),
    **dict(max_steps=5, validate_every=3, save_every=1, valid_sentences=4, batch_tokens=400),
    **dict(chunk_rows=10, device="cpu", quiet=True),
)


def die(*arguments: Any, **named: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose call of that number, from 1, kills the process before it does a thing."""
    calls = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return (die if calls == number else function)(*arguments, **named)

    return counted


# Where to die: an owner of a function, its name, and the number of the call.
DEATHS = (
    (Journal, "append", 1),
    (Journal, "append", 3),
    (distillation, "distilled", 1),
    (distillation, "_write", 2),
    (Trainer, "_step", 2),
    (Trainer, "_step", 3),
)


def main(teacher: str, source: str, target: str, out: str) -> None:
    run = Path(out)

    def attempt(owner: Any = None, name: str = "", number: int = 0) -> None:
        Metrics.draw = lambda self: None  # type: ignore[method-assign]
        if owner is not None:
            setattr(owner, name, at_call(number, getattr(owner, name)))
        distillation.distil(teacher, run, source=source, target=target, **STUDENT)

    for place in DEATHS:
        status = forked(lambda place=place: attempt(*place))  # type: ignore[misc]
        assert status == signal.SIGKILL, (place, status)
        assert not (run / "model.safetensors").exists()
        chunks = run / "distilled" / "answers.jsonl.job" / "journal.jsonl"
        saved = len(chunks.read_bytes().splitlines()) if chunks.exists() else -1
        there = [(run / "distilled" / f"{x}.jsonl").exists() for x in ("answers", "pairs")]
        print(place[1], saved, *there, (run / "state.safetensors").exists(), flush=True)
    assert forked(attempt) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
