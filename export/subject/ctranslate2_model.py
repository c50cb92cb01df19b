"""A model of CTranslate2: its own searches, and the logits that it gives for a given target.

CTranslate2 keeps its cache to itself. So a step of `CTranslate2Decoder` runs the target from its
start again, as a prefix that CTranslate2 must follow, and reads the logits beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from transferry.build_model.model.config import ModelConfig
from transferry.export.oracle.oracle import Oracle
from transferry.export.subject.session import ForeignGraph
from transferry.export.torch_model import TorchDecoder, TorchState
from transferry.runtime.decoding.decoder import StepOutput, Tensors
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.hypothesis import Hypothesis
from transferry.runtime.errors import InputError, UsageError
from transferry.runtime.proof.compare import Case
from transferry.runtime.proof.report import Claim
from transferry.runtime.tokenizer.byte_pair import SpecialTokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transferry.build_model.checkpoint import Checkpoint
    from transferry.runtime.ort.session import SessionOptions

WEIGHTS = "model.bin"
SIDES = ("source", "target")
# Its types of computation by precision; without one, the model is computed as it was saved.
TYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8_float32",
}
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds a model of CTranslate2."""
    return (folder / WEIGHTS).is_file() and not list(folder.glob("*.onnx"))


def import_ctranslate2() -> Any:
    """Imports the module.

    Raises:
        UsageError: It is not installed.
    """
    try:
        import ctranslate2
    except ImportError as error:
        raise UsageError(
            f"the audit of {WEIGHTS} needs ctranslate2 ({error}): pip install ctranslate2"
        ) from error
    return ctranslate2


@contextmanager
def _told(where: object) -> Iterator[None]:
    """Gives the errors of CTranslate2, which share no base class, the form of the project's."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise InputError(f"{where}: {' '.join(str(error).split())[:300]}") from error


@dataclass(frozen=True)
class CTranslate2Folder:
    """A folder that a converter of CTranslate2 wrote.

    Attributes:
        path: The folder.
        session: Threads.
        compute: Precision to compute in; None for that of the saved weights.
    """

    path: Path
    session: SessionOptions
    compute: str | None = None
    writer = "CTranslate2"
    # What a folder of graphs has, and this one has not.
    graphs: Sequence[Any] = ()

    def __post_init__(self) -> None:
        """Checks what can be before the long work.

        Raises:
            UsageError: CTranslate2 is not installed, or cannot compute so.
        """
        import_ctranslate2()
        if self.session.provider != "cpu":
            raise UsageError("a model of CTranslate2 is audited on the CPU; leave --provider out")
        if self.compute is not None and self.compute not in TYPES:
            raise UsageError(
                f"CTranslate2 computes in {', '.join(TYPES)}, not in {self.compute}; name one of "
                "them with --precision, or leave it out"
            )

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json of the folder; empty if there is none."""
        path = self.path / "config.json"
        if not path.is_file():
            return {}
        with _told(path):
            found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}

    def tokens(self, side: str) -> list[str]:
        """Returns the vocabulary of "source" or "target", by id.

        Raises:
            InputError: It is missing or damaged.
        """
        for stem in (f"{side}_vocabulary", "shared_vocabulary", "vocabulary"):
            if (path := self.path / f"{stem}.json").is_file():
                with _told(path):
                    return [str(token) for token in json.loads(path.read_text(encoding="utf-8"))]
            if (path := self.path / f"{stem}.txt").is_file():
                with _told(path):
                    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        raise InputError(
            f"{self.path}: expected vocabulary.json or shared_vocabulary.json beside {WEIGHTS}, "
            "found neither; convert the model again"
        )

    def load(self, kind: str) -> Any:
        """Opens the model as a "Translator", "Generator" or "Encoder".

        Raises:
            InputError: It is damaged, or a model of another kind.
        """
        module = import_ctranslate2()
        compute = "default" if self.compute is None else TYPES[self.compute]
        with _told(self.path):
            return getattr(module, kind)(
                str(self.path),
                "cpu",
                compute_type=compute,
                inter_threads=1,
                intra_threads=self.session.threads,
            )

    def claims(self, checkpoint: Checkpoint) -> list[Claim]:
        """Compares vocabulary and special tokens with the reference."""
        config, special = checkpoint.model.config, checkpoint.tokenizer.special
        tokens = self.tokens("target")
        size, wanted = len(tokens), config.vocabulary_size
        # A converter leaves out the token of padding, if that is the last.
        fits = size == wanted or (size == wanted - 1 and special.pad_id == size)
        problem = "" if fits else f"has {size} tokens, the reference {wanted}"
        found = [Claim("CTranslate2: vocabulary", problem)]
        end = self.config.get("eos_token")
        if config.decoder_layers and end is not None:
            ends = [tokens[each] for each in sorted(special.ends) if each < size]
            problem = "" if end in ends else f"says {end!r}, the reference has {', '.join(ends)}"
            found.append(Claim("CTranslate2: eos_token", problem))
        return found


@dataclass(frozen=True)
class CTranslate2State:
    """Token ids of each row so far.

    Attributes:
        sources: The source, or the prompt of a decoder-only model.
        targets: The target; that of an encoder-decoder begins with the start token.
    """

    sources: Sequence[tuple[int, ...]]
    targets: Sequence[tuple[int, ...]]


class CTranslate2Decoder:
    """A translator or a generator of CTranslate2.

    Attributes:
        vocabulary_size: Number of its target tokens.
        precision: What it computes in.
        ordinary: A token that is not special.
    """

    shares_cache = False
    graphs: Sequence[ForeignGraph] = ()

    def __init__(
        self, folder: CTranslate2Folder, config: ModelConfig, special: SpecialTokens
    ) -> None:
        """Opens the model.

        Raises:
            InputError: It is damaged, or a model of another kind.
        """
        self.has_encoder = bool(config.encoder_layers)
        self._model = folder.load("Translator" if self.has_encoder else "Generator")
        self._source, self._target = (folder.tokens(side) for side in SIDES)
        self._ids = {token: number for number, token in enumerate(self._target)}
        self.vocabulary_size = min(len(self._target), config.vocabulary_size)
        self._special = special
        self._stops = [*special.ends, special.pad_id, special.bos_id]
        self.ordinary = next(each for each in count() if each not in self._stops)
        # Where it adds special tokens to the source itself, it is given none.
        self._adds = tuple(
            bool(folder.config.get(name)) for name in ("add_source_bos", "add_source_eos")
        )
        self.precision = _precision(self._model.compute_type)

    def options(self, options: GenerationOptions) -> GenerationOptions:
        """Returns a search that both sides can run: CTranslate2 has not all rules of ours."""
        names = ("beam", "n_best", "max_length", "min_length", "length_penalty", "scores")
        return GenerationOptions(**{name: getattr(options, name) for name in names})

    def answers(
        self, sources: Sequence[Sequence[int]], options: GenerationOptions
    ) -> list[list[Hypothesis]]:
        """Searches as CTranslate2 does, all sources in one batch.

        Raises:
            InputError: The search fails.
        """
        settings = {
            "beam_size": options.beam,
            "num_hypotheses": options.n_best,
            "max_batch_size": 0,
            "length_penalty": options.length_penalty,
            "return_scores": True,
            "return_end_token": True,
        }
        with _told("its own search"):
            if self.has_encoder:
                results = self._model.translate_batch(
                    self._sources(sources),
                    max_input_length=0,
                    max_decoding_length=options.max_length,
                    min_decoding_length=options.min_length,
                    **settings,
                )
                found = [
                    [[self._ids[token] for token in tokens] for tokens in result.hypotheses]
                    for result in results
                ]
            else:
                results = self._model.generate_batch(
                    [[self._target[token] for token in row] for row in sources],
                    max_length=options.max_length,
                    min_length=options.min_length,
                    include_prompt_in_result=False,
                    end_token=sorted(self._special.ends),
                    **settings,
                )
                found = [result.sequences_ids for result in results]
        return [
            [
                self._hypothesis(tokens, score, options.length_penalty)
                for tokens, score in zip(row, result.scores, strict=True)
            ]
            for row, result in zip(found, results, strict=True)
        ]

    def _hypothesis(self, tokens: Sequence[int], score: float, penalty: float) -> Hypothesis:
        total = score * len(tokens) ** penalty
        if tokens and tokens[-1] in self._special.ends:
            return Hypothesis(tuple(tokens[:-1]), total, score, "end", end=tokens[-1])
        return Hypothesis(tuple(tokens), total, score, "length")

    def start(self, source: Ids, mask: Mask) -> CTranslate2State:
        """Keeps the source; see `Decoder.start`."""
        rows = [tuple(row[there].tolist()) for row, there in zip(source, mask, strict=True)]
        return CTranslate2State(rows, [()] * len(rows))

    def step(
        self,
        tokens: Ids,
        state: CTranslate2State,
        *,
        top: int | None = None,
        normalise: bool = False,
    ) -> tuple[StepOutput, CTranslate2State]:
        """Runs the target from its start and returns all logits; see `Decoder.step`.

        Raises:
            InputError: CTranslate2 fails, or ends before the target does.
        """
        pairs = zip(state.targets, tokens.tolist(), strict=True)
        targets = [(*row, *new) for row, new in pairs]
        with _told("given targets"):
            read = self._translated if self.has_encoder else self._generated
            rows = read(state.sources, targets)
        new = tokens.shape[1]
        logits = np.stack([row[-new:, : self.vocabulary_size] for row in rows])
        return StepOutput(logits), replace(state, targets=targets)

    def _translated(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        length = len(targets[0])
        # One token more than was asked for: an end token that the search chose has no logits.
        given = [[*row[1:], self.ordinary] for row in targets]
        results = self._model.translate_batch(
            self._sources(sources),
            target_prefix=[[self._target[token] for token in row] for row in given],
            beam_size=1,
            max_batch_size=0,
            max_input_length=0,
            max_decoding_length=length,
            min_decoding_length=0,
            return_logits_vocab=True,
        )
        rows = [np.array([np.array(one) for one in result.logits[0]]) for result in results]
        if (shortest := min(map(len, rows))) < length:
            raise InputError(f"ends after {shortest} of {length} given tokens")
        return rows

    def _generated(
        self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> list[NDArray[np.float32]]:
        rows = [[*source, *target] for source, target in zip(sources, targets, strict=True)]
        logits = np.array(self._model.forward_batch(rows))
        return [found[: len(row)] for found, row in zip(logits, rows, strict=True)]

    def _sources(self, sources: Sequence[Sequence[int]]) -> list[list[str]]:
        special, (bos, eos) = self._special, self._adds
        rows = []
        for source in sources:
            row = list(source)
            if bos and row[:1] == [special.bos_id]:
                del row[0]
            if eos and row[-1:] == [special.eos_id]:
                del row[-1]
            rows.append([self._source[token] for token in row])
        return rows

    def select(self, state: CTranslate2State, rows: Ids) -> CTranslate2State:
        """Takes rows of the state; see `Decoder.select`."""
        return CTranslate2State(
            [state.sources[row] for row in rows], [state.targets[row] for row in rows]
        )

    def tensors(self, state: CTranslate2State) -> Tensors:
        """Returns nothing: CTranslate2 shows no cache."""
        return {}

    def fitting(self, case: Case) -> Case:
        """Returns a case of tokens that CTranslate2 can be given.

        A source of special tokens alone is none to CTranslate2, and a target begins with the start
        token.
        """
        source, target = (
            np.where(
                np.isin(tokens, self._stops) | (tokens >= self.vocabulary_size),
                self.ordinary,
                tokens,
            )
            for tokens in (case.source, case.target)
        )
        if self.has_encoder:
            target[:, :1] = self._special.bos_id
        return replace(case, source=source, target=target)

    def narrow(self, oracle: Oracle) -> None:
        """Fits all sides of an oracle to the tokens that CTranslate2 has.

        Logits of others are taken away. Rows are padded with an ordinary token: torch reads the
        padding of targets, as CTranslate2 must, which may lack the padding's own.
        """
        oracle.special = replace(oracle.special, pad_id=self.ordinary)
        if self.vocabulary_size < oracle.config.vocabulary_size:
            oracle.trained = oracle.reference = NarrowTorch(oracle.trained, self.vocabulary_size)
            oracle.exact = NarrowTorch(oracle.exact, self.vocabulary_size)


class CTranslate2Encoder:
    """An encoder of CTranslate2, which gives hidden states and no head."""

    graphs: Sequence[ForeignGraph] = ()
    gives = frozenset(["hidden"])

    def __init__(self, folder: CTranslate2Folder, config: ModelConfig) -> None:
        """Opens the model.

        Raises:
            InputError: It is damaged, or a model of another kind.
        """
        self._model = folder.load("Encoder")
        self.precision = _precision(self._model.compute_type)

    def encode(self, source: Ids, mask: Mask) -> Tensors:
        """Encodes rows without their padding; see `ObservableEncoder.encode`."""
        rows = [row[there].tolist() for row, there in zip(source, mask, strict=True)]
        with _told("the encoder"):
            found = np.array(self._model.forward_batch(rows).last_hidden_state)
        hidden = np.zeros((*source.shape, found.shape[-1]), np.float32)
        hidden[:, : found.shape[1]] = found[:, : source.shape[1]]
        return {"hidden": hidden}


def _precision(compute_type: str) -> str:
    """Returns the precision that a type of computation is judged by."""
    return compute_type.partition("_")[0]


class NarrowTorch(TorchDecoder):
    """torch without the logits of tokens that the audited model lacks.

    Such is the padding that a converter leaves out: scores are normalised over the others.
    """

    def __init__(self, decoder: TorchDecoder, vocabulary_size: int) -> None:
        """Shares the model of another decoder."""
        self.__dict__.update(decoder.__dict__)
        self.vocabulary_size = vocabulary_size

    def step(
        self, tokens: Ids, state: TorchState, *, top: int | None = None, normalise: bool = False
    ) -> tuple[StepOutput, TorchState]:
        """Returns the logits of the tokens that are left; see `Decoder.step`."""
        output, state = super().step(tokens, state, top=top, normalise=normalise)
        return StepOutput(output.all_logits[..., : self.vocabulary_size]), state
