"""The record of a resumed training equals an uninterrupted one's, and it becomes a picture."""

import json
from pathlib import Path

import matplotlib.image

from transferry.build_model.train.metrics import Metrics


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_lies_beyond_the_state_is_dropped(tmp_path: Path) -> None:
    before = Metrics(tmp_path, 0)
    for step in (50, 100, 150):
        before.add(step=step, train_loss=1.0)
    after = Metrics(tmp_path, 100)
    assert [record["step"] for record in records(tmp_path)] == [50, 100]
    after.add(step=150, train_loss=2.0)
    assert records(tmp_path)[-1] == {"step": 150, "train_loss": 2.0}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 160, "train_lo')  # half a line
    after = Metrics(tmp_path, 200)
    after.add(step=210, final_loss=1.0)
    assert records(tmp_path) == after.records
    Metrics(tmp_path, 210)  # an end that was not the last
    assert [record["step"] for record in records(tmp_path)] == [50, 100, 150]
    Metrics(tmp_path, 0)
    assert records(tmp_path) == []


def test_the_picture_shows_the_records(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, 0)
    pictures = []
    for step in (50, 100):
        metrics.add(step=step, train_loss=400 / step, learning_rate=1e-5 * step)
        metrics.add(step=step, valid_loss=300 / step, valid_bleu=step / 5)
        metrics.draw()
        content = (tmp_path / "curves.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        pictures.append(matplotlib.image.imread(tmp_path / "curves.png"))
    assert pictures[0].shape[:2] == (624, 960)
    pixels = (pictures[1][..., :3] * 255).round().astype(int).reshape(-1, 3)
    colours = {tuple(colour) for colour in pixels.tolist()}
    # Loss, BLEU, learning rate.
    assert {(0x25, 0x63, 0xA8), (0xB4, 0x69, 0x0E), (0x8A, 0x5A, 0x9E)} <= colours
    assert (pictures[0] != pictures[1]).any()
