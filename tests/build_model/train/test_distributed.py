"""Two processes train what one would. As a script, this is one of them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.build_model.train import small
from tests.build_model.train.small import BYTES
from transferry.build_model.checkpoint import load_tensors
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.data import SentencePair, encode_pairs
from transferry.build_model.train.distributed import Process
from transferry.build_model.train.evaluation import Validation
from transferry.build_model.train.loop import Trainer
from transferry.build_model.train.metrics import Metrics
from transferry.build_model.train.train_config import TrainConfig
from transferry.runtime.errors import ProviderError

PAIRS = [SentencePair("x" * a + " y", "z" * b + " w") for a in range(1, 7) for b in range(1, 7)]
SHAPE = ModelConfig(**small.SHAPE, dropout=0.0, max_positions=40)


def train(folder: Path, process: Process, *, accumulation: int) -> bool:
    """Trains eight steps; returns whether this process was given marks."""
    config = TrainConfig(
        batch_tokens=40,
        accumulation=accumulation,
        max_steps=8,
        validate_every=4,
        save_every=3,
        average=1,
        warmup_steps=4,
        peak_learning_rate=0.1,
        clip_norm=1e9,
    )
    examples, _ = encode_pairs(PAIRS, BYTES, 32)
    held_out = Validation(examples[:4], [pair.target for pair in PAIRS[:4]])
    trainer = Trainer(folder, SHAPE, config, BYTES, examples, held_out, process)
    # AdamW would hide a gradient that is twice what it should be, and magnify rounding errors.
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters())  # type: ignore[assignment]
    return trainer.run(resume=False) is not None


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    process = Process.start("cpu")
    assert process == Process(0, 1, torch.device("cpu"))
    assert process.any(True)
    assert not process.any(False)
    process.wait()
    process.stop()


def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for available, kind in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda answer=available: answer)
        assert Process.start("auto").device == torch.device(kind)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProviderError, match=f"--device {device} needs a CUDA device.*finds none"):
        Process.start(device)


def run_two(folder: Path) -> None:
    """Runs this file as two processes, with the variables that torchrun would set.

    torchrun itself would import torch a third time, for nothing that is tested here.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="2")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            cwd=Path(__file__).parents[3],
            env={**os.environ, **variables, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        for process in processes:
            _, said = process.communicate()
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()


def test_two_processes_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_two(tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["votes"] == second["votes"] == [True, False, True]
    assert (first["marks"], second["marks"]) == (True, False)
    assert len(first["written"]) > 5
    assert second["written"] == []

    monkeypatch.setattr(Metrics, "draw", lambda self: None)
    train(tmp_path / "one", Process(0, 1, torch.device("cpu")), accumulation=4)
    one, two = (load_tensors(tmp_path / name / "model.safetensors")[0] for name in ("one", "two"))
    assert one.keys() == two.keys()
    torch.manual_seed(0)
    start = Transformer(SHAPE).embedding.weight
    assert (one["embedding.weight"] - start).abs().max() > 0.01
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5, msg=name)


def main() -> None:
    """Trains into sys.argv[1]/two, and writes its results to sys.argv[1]/RANK.json."""
    folder = Path(sys.argv[1])
    written: list[str] = []

    def note(event: str, given: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(given[1], str) and set(given[1]) & set("wax+"):
            written.append(str(given[0]))

    torch.set_num_threads(1)
    Metrics.draw = lambda self: None  # type: ignore[method-assign]
    process = Process.start("cpu")
    votes = [process.any(process.rank == 1), process.any(False), process.any(True)]
    sys.addaudithook(note)
    marks = train(folder / "two", process, accumulation=2)
    inside = [path for path in written if path.startswith(str(folder / "two"))]
    report = {"votes": votes, "marks": marks, "written": inside}
    (folder / f"{process.rank}.json").write_text(json.dumps(report))
    process.stop()


if __name__ == "__main__":
    main()
