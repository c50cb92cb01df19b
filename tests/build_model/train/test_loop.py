"""Training learns, ends when told, and is the same whether or not it was cut short."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.build_model.train import small
from tests.build_model.train.small import BYTES, records
from tests.threads import torch_threads
from transferry.build_model import checkpoint
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.train import loop as train
from transferry.build_model.train.data import Example, SentencePair, encode_pairs
from transferry.build_model.train.distributed import Process
from transferry.build_model.train.evaluation import Evaluation, Validation
from transferry.build_model.train.loop import Trainer
from transferry.build_model.train.metrics import Metrics
from transferry.build_model.train.train_config import TrainConfig
from transferry.runtime.errors import InputError

DIGITS = ["null", "eins", "zwei", "drei", "vier", "fünf"]
PAIRS = [SentencePair(f"{a} {b}", f"{DIGITS[a]} {DIGITS[b]}") for a in range(6) for b in range(6)]
EXAMPLES, _ = encode_pairs(PAIRS, BYTES, 32)
HELD_OUT = Validation(EXAMPLES[::6], [pair.target for pair in PAIRS[::6]])

# Dropout shows whether a resumed run draws what an uninterrupted one would.
SHAPE: dict[str, Any] = dict(small.SHAPE, dropout=0.1, max_positions=32)
# Saves, validations and reports fall on different steps; an epoch has about five.
SETTINGS: dict[str, Any] = dict(
    batch_tokens=80,
    peak_learning_rate=1e-2,
    warmup_steps=4,
    max_steps=12,
    validate_every=5,
    save_every=3,
    average=2,
)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Reports often, and draws nothing: the picture has tests of its own."""
    # A shell ignores SIGINT for the jobs that it starts in the background.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    with torch_threads(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "REPORT_EVERY", 4)
        patch.setattr(Metrics, "draw", lambda self: None)
        yield
    signal.signal(signal.SIGINT, handler)


def trainer(
    folder: Path,
    *,
    shape: dict[str, Any] = SHAPE,
    examples: Sequence[Example] = EXAMPLES,
    **changes: Any,
) -> Trainer:
    return Trainer(
        folder,
        ModelConfig(**shape),
        TrainConfig(**{**SETTINGS, **changes}),
        BYTES,
        examples,
        HELD_OUT,
        Process(0, 1, torch.device("cpu")),
    )


def run(folder: Path, *, resume: bool = False, **changes: Any) -> Evaluation:
    marks = trainer(folder, **changes).run(resume=resume)
    assert marks is not None
    return marks


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def series(folder: Path, name: str) -> dict[float, float]:
    return {record["step"]: record[name] for record in records(folder) if name in record}


def saved_step(folder: Path) -> int:
    _, record = checkpoint.load_tensors(folder / "state.safetensors")
    step: int = json.loads(record["progress"])["step"]
    return step


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


class Crash(BaseException):
    """Stands for the end of the process: nothing catches it."""


def crash(patch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    """Ends the process just before a function is called for the nth time."""
    calls = count(1)
    function = getattr(owner, name)

    def until(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise Crash
        return function(*args, **kwargs)

    patch.setattr(owner, name, until)


def assert_same_training(folder: Path, other: Path) -> None:
    assert records(folder) == records(other)
    assert weights(folder) == weights(other)
    names = [
        sorted(path.name for path in run.rglob("*") if path.is_file()) for run in (folder, other)
    ]
    assert names[0] == names[1]


def test_what_a_run_leaves(whole: Path) -> None:
    files = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    best = max((score, -step) for step, score in series(whole, "valid_bleu").items())
    kept = {10, 12, -int(best[1])}
    assert files == {
        "config.json",
        "tokenizer.json",
        "ranks.tiktoken",
        "metrics.jsonl",
        "state.safetensors",
        "model.safetensors",
        *(f"checkpoints/{step:08d}.safetensors" for step in kept),
    }
    assert series(whole, "train_loss").keys() == {1, 4, 8, 12}
    assert series(whole, "valid_loss").keys() == {5, 10, 12}
    assert series(whole, "final_loss").keys() == {12}
    config = TrainConfig(**SETTINGS)
    rates = series(whole, "learning_rate")
    assert rates == {step: config.learning_rate(step) for step in (1, 4, 8, 12)}
    assert checkpoint.load_config(whole) == (ModelConfig(**SHAPE), config)


def test_the_marks_are_those_of_the_written_weights(whole: Path) -> None:
    loaded = checkpoint.load_checkpoint(whole)
    judge = trainer(whole)
    judge.model.load_state_dict(loaded.model.state_dict())
    assert round(judge._evaluate().loss, 6) == series(whole, "final_loss")[12]


def test_the_loss_falls(tmp_path: Path) -> None:
    run(tmp_path / "run", max_steps=150, validate_every=50, label_smoothing=0.0)
    losses = list(series(tmp_path / "run", "valid_loss").values())
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < 0.7
    training = list(series(tmp_path / "run", "train_loss").values())
    assert training[0] > 4.0
    assert training[-1] < 1.0


def test_the_seed_decides_everything(whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    run(tmp_path / "same")
    assert_same_training(tmp_path / "same", whole)
    run(tmp_path / "other", seed=1)
    assert weights(tmp_path / "other") != weights(whole)


def test_each_step_draws_its_own_dropout(tmp_path: Path) -> None:
    made, seeds = trainer(tmp_path / "run", max_steps=6), set[int]()

    def seen(model: torch.nn.Module, given: object) -> None:
        if model.training:
            seeds.add(torch.initial_seed())

    made.model.register_forward_pre_hook(seen)
    made.run(resume=False)
    assert len(seeds) == 6


# Every call after step 3, whose state can be resumed.
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        *((Trainer, "_step", call) for call in range(4, 13)),
        *((checkpoint, "save_tensors", call) for call in range(2, 12)),
        *((Metrics, "add", call) for call in range(2, 9)),
    ],
)
def test_a_crash_and_resume_change_nothing(
    whole: Path, tmp_path: Path, owner: object, name: str, call: int
) -> None:
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        crash(patch, owner, name, call)
        with pytest.raises(Crash):
            run(folder)
    assert len(records(folder)) < len(records(whole))
    run(folder, resume=True)
    assert_same_training(folder, whole)


def test_weights_that_a_crash_left_are_dropped(tmp_path: Path) -> None:
    """Before the last of three validations drops those of the second; the first is the best."""
    with pytest.MonkeyPatch.context() as patch:
        score(patch, 30.0, 10.0, 20.0, 20.0, 30.0)
        crash(patch, Trainer, "_drop_weights", 3)
        with pytest.raises(Crash):
            run(tmp_path, average=1)
    assert len([*tmp_path.glob("checkpoints/*")]) == 3
    run(tmp_path, average=1, resume=True)
    assert len([*tmp_path.glob("checkpoints/*")]) == 2


def interrupt(patch: pytest.MonkeyPatch, number: int, *, step: int, times: int = 1) -> None:
    """Sends this process a signal in the middle of a step."""
    function = Trainer._step

    def interrupted(self: Trainer, *args: Any) -> tuple[float, int]:
        if self.progress.step == step - 1:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return function(self, *args)

    patch.setattr(Trainer, "_step", interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_resume_changes_nothing(
    whole: Path, tmp_path: Path, number: int
) -> None:
    folder, handler = tmp_path / "run", signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, number, step=7)
        with pytest.raises(KeyboardInterrupt):
            run(folder)
    assert signal.getsignal(number) is handler
    assert saved_step(folder) == 7
    assert not (folder / "model.safetensors").exists()
    run(folder, resume=True)
    assert_same_training(folder, whole)


@pytest.mark.parametrize("call", [0, 1])
def test_a_validation_that_is_interrupted_is_made_up_for(
    whole: Path, tmp_path: Path, call: int
) -> None:
    """It may take minutes, which a signal does not wait for."""
    folder, calls = tmp_path / "run", list[int]()
    evaluate = Trainer._evaluate

    def interrupted(self: Trainer) -> Any:
        calls.append(self.progress.step)
        if len(calls) == call + 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(folder)
    assert len(calls) == call + 1, "it did not go on to the end"
    assert saved_step(folder) == calls[-1]
    run(folder, resume=True)
    assert_same_training(folder, whole)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, signal.SIGINT, step=7, times=2)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run")
    assert saved_step(tmp_path / "run") == 6


def test_to_resume_what_has_ended_changes_nothing(tmp_path: Path, whole: Path) -> None:
    run(tmp_path / "run")
    run(tmp_path / "run", resume=True)
    assert_same_training(tmp_path / "run", whole)


def test_a_resumed_training_may_go_further(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, max_steps=3)
    run(folder, max_steps=6, resume=True)
    assert saved_step(folder) == 6
    assert checkpoint.load_config(folder)[1].max_steps == 6
    assert [r["step"] for r in records(folder) if "final_loss" in r] == [6]


def test_other_text_is_not_resumed_on(tmp_path: Path) -> None:
    run(tmp_path, max_steps=5)
    other = trainer(tmp_path, examples=EXAMPLES[:-1])
    with pytest.raises(InputError, match="from training on other text"):
        other.run(resume=True)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"state\.safetensors is missing.*nothing to resume"):
        run(tmp_path, resume=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("other", [{"d_ff": 48}, {"encoder_layers": 2}])
def test_the_state_of_another_model_is_refused(tmp_path: Path, other: dict[str, int]) -> None:
    folder = tmp_path / "run"
    run(folder, max_steps=3)
    with pytest.raises(InputError, match=r"state\.safetensors does not fit .*config\.json"):
        trainer(folder, shape={**SHAPE, **other}).run(resume=True)
    assert checkpoint.load_config(folder)[0] == ModelConfig(**SHAPE)


def test_a_new_training_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, max_steps=3)
    with pytest.MonkeyPatch.context() as patch:
        crash(patch, Trainer, "_step", 2)
        with pytest.raises(Crash):
            run(folder, seed=1)
    assert not list(folder.rglob("*.safetensors"))
    with pytest.raises(InputError, match="nothing to resume"):
        run(folder, seed=1, resume=True)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"file/run: cannot be written"):
        run(tmp_path / "file" / "run")


def one_step(
    folder: Path, group: list[list[int]], *, precision: str = "auto"
) -> dict[str, torch.Tensor]:
    """The change that one step of plain gradient descent makes."""
    settings: dict[str, Any] = dict(
        accumulation=len(group), clip_norm=1e9, warmup_steps=1, peak_learning_rate=1.0
    )
    made = trainer(folder, shape={**SHAPE, "dropout": 0.0}, precision=precision, **settings)
    # Adam divides a gradient by its own size, and so makes much of rounding errors.
    made.optimizer = torch.optim.SGD(made.model.parameters())  # type: ignore[assignment]
    before = {name: tensor.clone() for name, tensor in made.model.state_dict().items()}
    made._step(made.model, group)
    return {name: tensor - before[name] for name, tensor in made.model.state_dict().items()}


def test_accumulated_batches_are_one_large_batch(tmp_path: Path) -> None:
    # The first two targets are the longest: the halves differ in tokens and in padding.
    indices = [0, 1, 8, 9, 16, 30]
    at_once = one_step(tmp_path, [indices])
    in_parts = one_step(tmp_path, [indices[:2], indices[2:]])
    assert max(change.abs().max().item() for change in at_once.values()) > 0.01
    for name, change in at_once.items():
        torch.testing.assert_close(in_parts[name], change, rtol=0, atol=1e-6)


def test_precision(tmp_path: Path) -> None:
    steps = {}
    for precision in ("auto", "float32", "bfloat16"):
        changes = one_step(tmp_path, [[0, 1, 2]], precision=precision).values()
        assert {change.dtype for change in changes} == {torch.float32}
        steps[precision] = torch.cat([change.flatten() for change in changes])
    assert torch.equal(steps["auto"], steps["float32"])
    error = (steps["bfloat16"] - steps["float32"]).norm() / steps["float32"].norm()
    assert 1e-4 < error.item() < 0.1


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_an_epoch_sees_every_example(tmp_path: Path, accumulation: int) -> None:
    groups = trainer(tmp_path, accumulation=accumulation)._groups(epoch=1)
    assert {len(group) for group in groups} == {accumulation}
    seen = [index for group in groups for batch in group for index in batch]
    assert set(seen) == set(range(len(EXAMPLES)))
    if accumulation == 1:
        assert len(seen) == len(EXAMPLES)


def test_the_clip_bounds_the_gradient(tmp_path: Path) -> None:
    made = trainer(tmp_path, clip_norm=0.25, warmup_steps=1, peak_learning_rate=1.0)
    made.optimizer = torch.optim.SGD(made.model.parameters())  # type: ignore[assignment]
    before = torch.cat([p.detach().flatten().clone() for p in made.model.parameters()])
    made._step(made.model, [[0, 1, 2]])
    after = torch.cat([p.detach().flatten() for p in made.model.parameters()])
    assert (after - before).norm().item() == pytest.approx(0.25, rel=1e-4)


def score(patch: pytest.MonkeyPatch, *bleus: float) -> None:
    """Makes the validations give these scores, one after another."""
    marks: Callable[[], float] = iter(bleus).__next__
    patch.setattr(Trainer, "_evaluate", lambda self: Evaluation(1.0, marks()))


def test_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score(monkeypatch, 10.0, 20.0, 20.0, 15.0, 1.0, 1.0)
    run(tmp_path / "run", validate_every=1, patience=2)
    scores = series(tmp_path / "run", "valid_bleu")
    assert scores == {1: 10.0, 2: 20.0, 3: 20.0, 4: 15.0}


def test_minutes_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=count(0, 1).__next__)
    monkeypatch.setattr(train, "time", clock)
    run(tmp_path / "run", max_steps=0, max_minutes=0.25, validate_every=1000)
    assert 5 <= saved_step(tmp_path / "run") <= 15


@pytest.mark.parametrize(
    ("of_average", "of_best", "chosen"),
    [(5.0, 30.0, "step 4"), (40.0, 30.0, "the average of steps 8, 10")],
)
def test_the_last_and_the_best_are_kept_and_the_better_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_average: float,
    of_best: float,
    chosen: str,
) -> None:
    score(monkeypatch, 10.0, 30.0, 11.0, 12.0, 13.0, of_average, of_best)
    folder = tmp_path / "run"
    marks = run(folder, max_steps=10, validate_every=2, average=2)
    assert marks.bleu == max(of_average, of_best)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    # The best score came second, at step 4.
    assert kept == ["00000004.safetensors", "00000008.safetensors", "00000010.safetensors"]
    written, metadata = checkpoint.load_tensors(folder / "model.safetensors")
    assert metadata == {"weights": chosen}
    steps = (8, 10) if of_average > of_best else (4,)
    expected = checkpoint.average(
        [folder / "checkpoints" / f"{step:08d}.safetensors" for step in steps]
    )
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


def test_an_epoch_ends_in_a_validation(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", validate_every=0, accumulation=2, max_steps=7)
    an_epoch = len(made._groups(0))
    assert 2 <= an_epoch <= 3
    made.run(resume=False)
    steps = {*range(an_epoch, 8, an_epoch), 7}
    assert series(tmp_path / "run", "valid_bleu").keys() == steps


def test_a_training_prints_nothing_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path / "run", max_steps=2).run(resume=False)
    assert capsys.readouterr() == ("", "")


def test_a_training_shows_its_steps_and_says_how_it_resumes(tmp_path: Path) -> None:
    said: list[str] = []
    shown: list[tuple[Any, ...]] = []
    told: dict[str, Any] = {"say": said.append, "show": lambda *state: shown.append(state)}
    trainer(tmp_path / "run", max_steps=4).run(resume=False, **told)
    assert all("validation loss" in line for line in said)
    trained = [state[1] for state in shown if "validating" not in state[3]]
    assert trained == [1, 2, 3, 4]
    assert {state[2] for state in shown} == {4}
    note = shown[-1][3].removesuffix(", validating")
    assert re.fullmatch(r"epoch [01], loss \d\.\d{3}", note)
    assert any(state[3].endswith("validating") for state in shown)
    said.clear()
    trainer(tmp_path / "run", max_steps=6, max_minutes=9).run(resume=True, **told)
    assert re.search(r", 0\.\d of 9 min", shown[-1][3])
    assert said[0].startswith(f"{tmp_path / 'run'}: continuing after step 4 of 6, in epoch ")
    assert re.search(r", after 0\.\d of 9 minutes; best validation at step \d$", said[0])
