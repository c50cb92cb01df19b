"""Batches that memory has no room for: the same answers, or an error that names the cause."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.commands import python
from tests.runtime.engine.searches import SEARCHES
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.decoding.decoder import StepOutput
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.ort.portable_decoder import PortableDecoder, PortableState
from transferry.runtime.ort.session import SessionOptions


class Scarce(PortableDecoder):
    """Has memory for so many rows at a time, and runs out of it in the middle of a batch."""

    def __init__(self, bundle: Bundle, most: int) -> None:
        super().__init__(bundle, bundle.variant(), SessionOptions())
        self.most, self.failures = most, 0

    def step(
        self, tokens: NDArray[np.int64], state: PortableState, **wanted: Any
    ) -> tuple[StepOutput, PortableState]:
        if len(tokens) > self.most and state.past[0].shape()[2] == 3:
            self.failures += 1
            raise MemoryError(f"no room for {len(tokens)} rows")
        return super().step(tokens, state, **wanted)


@pytest.mark.parametrize("most", [4, 13])
@SEARCHES
def test_where_memory_runs_out_the_answers_are_the_same(
    engine: Engine, texts: list[str], options: GenerationOptions, most: int
) -> None:
    scarce = Scarce(engine.bundle, most)
    halving = Engine.of(engine.bundle, scarce, replicas=2, batches=BatchOptions(rows=64, window=30))
    assert list(halving.generate(texts, options)) == list(engine.generate(texts, options))
    assert scarce.failures > 0


def test_where_onnxruntime_has_no_more_memory_the_answers_are_the_same(
    bundle_folder: Path, texts: list[str]
) -> None:
    """A process in which onnxruntime may not have the memory of a large batch, and reports it."""
    script = f"""
import json, sys
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as native
from transferry.runtime.ort import session
from transferry.runtime.decoding.batching import BatchOptions
from transferry.runtime.engine.engine import Engine
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.engine.worker_pool import WorkQueue

rows, limit = map(int, sys.argv[1:])
if limit:
    kind, place = native.OrtAllocatorType.ORT_ARENA_ALLOCATOR, native.OrtMemType.DEFAULT
    arena = native.OrtArenaCfg({{"max_mem": limit, "arena_extend_strategy": 1}})
    onnxruntime.create_and_register_allocator(native.OrtMemoryInfo("Cpu", kind, 0, place), arena)
    session._share_arena = lambda: None  # this one is shared

back, put_back = [], WorkQueue.put_back

def told(queue, items):
    back.append(len(items))
    put_back(queue, items)

WorkQueue.put_back = told
texts = json.load(sys.stdin)
texts = [f"{{number}} {{text}}" for number in range(10) for text in texts]
batches = BatchOptions(rows=rows, tokens=1 << 24)
engine = Engine({str(bundle_folder)!r}, replicas=2, batches=batches)
results = engine.generate(texts, GenerationOptions(max_length=4))
print(json.dumps([back, [repr(result.hypotheses) for result in results]]))
"""

    def answered(rows: int, limit: int) -> tuple[list[int], list[str]]:
        done = python("-c", script, rows, limit, input=json.dumps(texts))
        back, hypotheses = json.loads(done.stdout)
        return back, hypotheses

    never, expected = answered(32, 0)
    back, found = answered(1000, 10_000_000)
    assert (never, found) == ([], expected)
    assert len(back) > 0, "memory ran out"
