"""The training loop: AdamW over batches of bounded tokens, resumable to the same weights.

A step depends on the seed and its number only: the order of batches comes from (seed, epoch),
dropout from (seed, step, rank). So the saved state needs no random numbers, and a resumed training
ends with the weights of an uninterrupted one.
"""

import contextlib
import dataclasses
import json
import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from transferry.build_model import checkpoint
from transferry.build_model.allocator import freed_memory_kept
from transferry.build_model.checkpoint_folder import CONFIG, START_OVER, STATE, require_state
from transferry.build_model.model.config import ModelConfig
from transferry.build_model.model.transformer import Transformer
from transferry.build_model.train.data import (
    Batch,
    Example,
    Windows,
    collate,
    fingerprint,
    token_batches,
)
from transferry.build_model.train.distributed import Process
from transferry.build_model.train.evaluation import (
    Evaluation,
    Validation,
    cross_entropy,
    divergence,
    evaluate,
)
from transferry.build_model.train.metrics import Metrics
from transferry.build_model.train.train_config import TrainConfig, require_fitting
from transferry.build_model.train.vocabulary import MergeDropout
from transferry.runtime.errors import InputError
from transferry.runtime.stopping import SIGNALS
from transferry.runtime.tokenizer.byte_pair import Tokenizer

REPORT_EVERY = 50  # steps between training losses in metrics.jsonl, besides the first


@dataclass
class TrainerState:
    """Progress of a training, saved with the weights.

    Attributes:
        step: Optimiser steps done.
        epoch: Passes over the data done.
        group: Steps done in the current epoch.
        tokens: Target tokens seen.
        seconds: Time spent, interruptions excluded.
        loss: Training loss in nats, summed since the last report.
        loss_tokens: Target tokens behind `loss`.
        scores: `Evaluation.score` of each validation, by step.
    """

    step: int = 0
    epoch: int = 0
    group: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    loss_tokens: int = 0
    scores: dict[int, float] = field(default_factory=dict)

    @property
    def best(self) -> int:
        """Step with the best score, the earliest of equals."""
        return max(self.scores, key=lambda step: (self.scores[step], -step))


@dataclass(eq=False)
class Trainer:
    """Trains one model into one folder."""

    folder: Path
    model_config: ModelConfig
    config: TrainConfig
    tokenizer: Tokenizer
    examples: Sequence[Example]
    validation: Validation
    process: Process

    def __post_init__(self) -> None:
        model_config, config = self.model_config, self.config
        self.progress = TrainerState()
        self.fingerprint = fingerprint([*self.examples, *self.validation.examples])
        self.interrupted = False
        self._say: Callable[[str], None] = lambda line: None
        self._show: Callable[..., None] = lambda *state: None
        self._train_loss = ""
        require_fitting(model_config, config)
        self.longest = min(model_config.max_positions, config.batch_tokens)
        dropped = config.bpe_dropout
        self.merge_dropout = MergeDropout(self.tokenizer, dropped) if dropped else None
        torch.manual_seed(config.seed)
        self.model = Transformer(model_config).to(self.process.device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.peak_learning_rate,
            betas=(0.9, 0.98),
            eps=1e-9,
            fused=True,
        )

    def run(
        self,
        *,
        resume: bool,
        begun: Callable[[], None] = lambda: None,
        say: Callable[[str], None] | None = None,
        show: Callable[..., None] | None = None,
    ) -> Evaluation | None:
        """Trains to the end set in the config and writes CHECKPOINT/model.safetensors.

        Args:
            resume: Continue from CHECKPOINT/state.safetensors.
            begun: Called by process 0 once nothing is left to refuse.
            say: Called by process 0 with a line for the user: the resumed step, each validation.
            show: Called by process 0 with the phase, the steps done, the steps in total (None
                where the time or the loss ends the training) and a note.

        Returns:
            Validation scores of the written weights; None in processes of rank > 0.

        Raises:
            InputError: There is nothing to resume, the state is another model's, or the folder is
                not writable.
            KeyboardInterrupt: After SIGINT or SIGTERM; the state is saved.
        """
        leader = self.process.rank == 0
        if leader:
            self._say, self._show = say or self._say, show or self._show
        if resume:
            self._restore()
            self._say(self._resumed())
        elif leader:
            self._clear()
            self.tokenizer.save(self.folder)
        if leader:
            begun()
            checkpoint.save_config(self.folder, self.model.config, self.config)
        self.process.wait()
        metrics = None
        if leader:
            metrics = Metrics(self.folder, self.progress.step, self.progress.scores)
        with self._signals(), freed_memory_kept():
            self._loop(metrics)
            if self.progress.step not in self.progress.scores:
                self._validate(metrics)
        evaluation = self._finish(metrics) if metrics else None
        self.process.wait()
        return evaluation

    def _loop(self, metrics: Metrics | None) -> None:
        progress, config = self.progress, self.config
        forward = self.model if self.process.world == 1 else DistributedDataParallel(self.model)
        started = time.monotonic() - progress.seconds
        window_tokens, window_started = 0, time.monotonic()
        self.model.train()
        if self._is_due() and progress.step not in progress.scores:  # it was interrupted
            self._validate(metrics)
        while True:
            groups = self._groups(progress.epoch)
            for group in groups[progress.group :]:
                if self._ended():
                    return
                loss, tokens = self._step(forward, group)
                progress.loss += loss
                progress.loss_tokens += tokens
                window_tokens += tokens
                progress.seconds = time.monotonic() - started
                self._show_step()
                if metrics and (progress.step == 1 or progress.step % REPORT_EVERY == 0):
                    speed = window_tokens / (time.monotonic() - window_started)
                    train_loss = progress.loss / progress.loss_tokens
                    self._train_loss = f"loss {train_loss:.3f}"
                    metrics.add(
                        step=progress.step,
                        epoch=progress.epoch,
                        train_loss=round(train_loss, 6),
                        learning_rate=config.learning_rate(progress.step),
                        tokens=progress.tokens,
                        tokens_per_second=round(speed, 1),
                        seconds=round(progress.seconds, 1),
                    )
                    progress.loss, progress.loss_tokens = 0.0, 0
                    window_tokens, window_started = 0, time.monotonic()
                if progress.group == len(groups):
                    progress.epoch, progress.group = progress.epoch + 1, 0
                if self._is_due():
                    self._validate(metrics)
                    window_tokens, window_started = 0, time.monotonic()
                interrupted = self.process.any(self.interrupted)
                if interrupted or progress.step % config.save_every == 0:
                    self._save_state()
                if interrupted:
                    raise KeyboardInterrupt

    def _is_due(self) -> bool:
        """Whether a validation follows the last step."""
        step, every = self.progress.step, self.config.validate_every
        return step > 0 and (step % every == 0 if every else self.progress.group == 0)

    def _groups(self, epoch: int) -> list[list[list[int]]]:
        """Steps of an epoch, each with `accumulation * world` batches of example indices."""
        if isinstance(self.examples, Windows):
            self.examples = self.examples.epoch(self.config.seed, epoch)
        batches = token_batches(
            self.examples, self.config.batch_tokens, seed=self.config.seed, epoch=epoch
        )
        size = self.config.accumulation * self.process.world
        # The first batches fill up the last step, so that every process has its share.
        padded = [batches[i % len(batches)] for i in range(-(-len(batches) // size) * size)]
        return [padded[start : start + size] for start in range(0, len(padded), size)]

    def _ended(self) -> bool:
        progress, config = self.progress, self.config
        waited = sum(step > progress.best for step in progress.scores)
        reached = (
            0 < config.max_steps <= progress.step
            or 0 < 60 * config.max_minutes <= progress.seconds
            or 0 < config.patience <= waited
        )
        return self.process.any(reached)

    def _step(self, forward: torch.nn.Module, group: list[list[int]]) -> tuple[float, int]:
        """Makes one optimiser step; returns the summed loss and the number of target tokens."""
        progress, config, process = self.progress, self.config, self.process
        progress.step, progress.group = progress.step + 1, progress.group + 1
        entropy = np.random.SeedSequence([config.seed, progress.step, process.rank])
        torch.manual_seed(int(entropy.generate_state(1)[0]))
        for settings in self.optimizer.param_groups:
            settings["lr"] = config.learning_rate(progress.step)

        pad_id = self.tokenizer.special.pad_id
        examples = {index: self._example(index) for batch in group for index in batch}
        tokens = sum(examples[index].target_tokens(pad_id) for batch in group for index in batch)
        mine = group[process.rank :: process.world]
        total = 0.0
        for number, indices in enumerate(mine):
            batch = collate([examples[index] for index in indices], pad_id, process.device)
            waits = isinstance(forward, DistributedDataParallel) and number < len(mine) - 1
            with forward.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                loss = self._loss(forward, batch)
                # DDP averages over processes; the factor `world` turns that into the sum.
                (loss * (process.world / tokens)).backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        progress.tokens += tokens
        # An estimate from this process's share; gathering the others is not worth the time.
        return total * process.world, tokens

    def _example(self, index: int) -> Example:
        """Returns a training example, encoded anew for this step where merges are dropped.

        A side that would become longer than the model's positions stays as it is. Batches are
        grouped by the lengths without dropout, so they may exceed `batch_tokens` a little.
        """
        example, dropout = self.examples[index], self.merge_dropout
        if dropout is None:
            return example
        # Of the example and not the rank: every process counts the tokens of all.
        entropy = np.random.SeedSequence([self.config.seed, self.progress.step, index])
        draw = random.Random(int(entropy.generate_state(1, np.uint64)[0]))
        special, encode = self.tokenizer.special, dropout.encode
        source = special.wrap(encode(self.tokenizer.decode(example.source), draw))
        target = [*encode(self.tokenizer.decode(example.target), draw), special.eos_id]
        if len(source) > self.longest:
            source = example.source
        if len(target) > self.longest:
            target = example.target
        return Example(source, target, [special.bos_id, *target[:-1]])

    def _loss(self, forward: torch.nn.Module, batch: Batch) -> Tensor:
        device = self.process.device.type
        precision = self.config.precision
        half = precision == "bfloat16" or (precision == "auto" and device == "cuda")
        with torch.autocast(device, torch.bfloat16, enabled=half):
            if alpha := self.config.r_drop:
                batch = Batch(*(torch.cat([tensor, tensor]) for tensor in batch))
            logits = forward(batch.source, batch.source_mask, batch.target_input)
        target, pad_id = batch.target_output, self.tokenizer.special.pad_id
        loss = cross_entropy(logits, target, pad_id, self.config.label_smoothing)
        if not alpha:
            return loss
        # Half of eq. 4 of the paper, so that clip_norm means the same as without R-Drop.
        first, second = logits.chunk(2)
        apart = divergence(first, second, target.chunk(2)[0], pad_id)
        return (loss + alpha * apart) / 2

    def _evaluate(self) -> Evaluation:
        return evaluate(
            self.model,
            self.validation.examples,
            self.validation.references,
            self.tokenizer,
            batch_tokens=self.config.batch_tokens,
            sentences=self.config.valid_sentences,
            check=self._check_interrupted,
        )

    def _show_step(self, doing: str = "") -> None:
        progress, config = self.progress, self.config
        limit, spent = config.max_minutes, progress.seconds / 60
        minutes = f"{spent:.1f} of {limit:g} min" if limit else ""
        notes = (f"epoch {progress.epoch}", self._train_loss, minutes, doing)
        note = ", ".join(filter(None, notes))
        left = 60 * max(limit - spent, 0.0) if limit else math.inf
        self._show("training", progress.step, config.max_steps or None, note, left)

    def _resumed(self) -> str:
        """Describes the progress of the interrupted training and the end of this one."""
        progress, config = self.progress, self.config
        of = f" of {config.max_steps:,}" if config.max_steps else ""
        limit = f" of {config.max_minutes:g}" if config.max_minutes else ""
        best = f"; best validation at step {progress.best:,}" if progress.scores else ""
        return (
            f"{self.folder}: continuing after step {progress.step:,}{of}, in epoch "
            f"{progress.epoch}, after {progress.seconds / 60:.1f}{limit} minutes{best}"
        )

    def _check_interrupted(self) -> None:
        self._show_step("validating")
        # Where others wait for this process, it leaves together with them, after the validation.
        if self.interrupted and self.process.world == 1:
            raise KeyboardInterrupt

    def _weights(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"{step:08d}.safetensors"

    def _validate(self, metrics: Metrics | None) -> None:
        """Validates in process 0, broadcasts the score and keeps the weights for averaging."""
        progress = self.progress
        score = torch.zeros(1, device=self.process.device)
        if metrics:
            try:
                evaluation = self._evaluate()
            except KeyboardInterrupt:
                self._save_state()  # without a score: the resumed training validates first
                raise
            score[0] = evaluation.score
            self._report(metrics, evaluation, "valid")
            checkpoint.save_tensors(self._weights(progress.step), self.model.state_dict())
            self._say(
                f"step {progress.step}, epoch {progress.epoch}: {evaluation}, "
                f"{progress.seconds / 60:.1f} min"
            )
        if self.process.world > 1:
            torch.distributed.broadcast(score, 0)
        progress.scores[progress.step] = score.item()
        self._save_state()
        if metrics:
            self._drop_weights()

    def _drop_weights(self) -> None:
        """Removes weights that no average needs, after the state is saved, which names the rest."""
        scores = self.progress.scores
        for step in scores.keys() - {self.progress.best, *sorted(scores)[-self.config.average :]}:
            self._weights(step).unlink(missing_ok=True)

    def _save_state(self) -> None:
        if self.process.rank:
            return
        tensors = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            for kind, tensor in self.optimizer.state[parameter].items():
                tensors[f"optimizer/{name}/{kind}"] = tensor
        record = {
            "progress": json.dumps(dataclasses.asdict(self.progress)),
            "data": self.fingerprint,
        }
        checkpoint.save_tensors(self.folder / STATE, tensors, record)

    def _clear(self) -> None:
        """Creates the folder and removes the weights of an earlier training."""
        checkpoints = self.folder / "checkpoints"
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            for path in (
                self.folder / STATE,
                self.folder / checkpoint.WEIGHTS,
                *checkpoints.glob("*.safetensors"),
            ):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.folder}: cannot be written: {error.strerror}; choose another folder"
            ) from error

    def _restore(self) -> None:
        require_state(self.folder)
        path = self.folder / STATE
        tensors, record = checkpoint.load_tensors(path)
        if record.get("data") != self.fingerprint:
            raise InputError(
                f"{path} is from training on other text; give the files that the training began "
                f"with, or {START_OVER}"
            )
        try:
            self.progress = msgspec.convert(
                json.loads(record["progress"]), TrainerState, str_keys=True
            )
            self.model.load_state_dict({name: tensors[name] for name in self.model.state_dict()})
            parameters = dict(self.model.named_parameters())
            for key, tensor in tensors.items():
                if key.startswith("optimizer/"):
                    _, name, kind = key.split("/")
                    moments = self.optimizer.state[parameters[name]]
                    moments[kind] = tensor.to(self.process.device)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            lines = str(error).splitlines()  # of load_state_dict, the first is a heading
            reason = lines[1].strip() if lines[1:] else error
            raise InputError(
                f"{path} does not fit {self.folder / CONFIG}: {reason}; {START_OVER}"
            ) from error

    def _finish(self, metrics: Metrics) -> Evaluation:
        """Writes the averaged or the best single checkpoint as the model, whichever is better."""
        self._drop_weights()  # after a kill that came before it
        progress = self.progress
        last = sorted(progress.scores)[-self.config.average :]
        candidates = {
            f"the average of steps {', '.join(map(str, last))}": [self._weights(s) for s in last],
            f"step {progress.best}": [self._weights(progress.best)],
        }
        results = {}
        for name, paths in candidates.items():
            weights = checkpoint.average(paths)
            self.model.load_state_dict(weights)
            results[name] = (self._evaluate(), weights)
        chosen = max(results, key=lambda name: results[name][0].score)
        evaluation, weights = results[chosen]
        checkpoint.save_tensors(self.folder / checkpoint.WEIGHTS, weights, {"weights": chosen})
        self._report(metrics, evaluation, "final")
        return evaluation

    def _report(self, metrics: Metrics, evaluation: Evaluation, prefix: str) -> None:
        progress, scores = self.progress, evaluation.record(prefix)
        seconds = round(progress.seconds, 1)
        metrics.add(step=progress.step, epoch=progress.epoch, **scores, seconds=seconds)
        metrics.draw()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """On SIGINT or SIGTERM finishes the step and saves; a second signal ends at once."""
        before = {int(number): signal.getsignal(number) for number in SIGNALS}

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                handler = before[number]
                if not callable(handler):
                    raise KeyboardInterrupt
                handler(number, frame)
            self.interrupted = True

        try:
            for number, handler in before.items():
                if handler is not signal.SIG_IGN:
                    signal.signal(number, interrupt)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
