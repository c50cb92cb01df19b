"""Calibration of int8: ranges of the inputs of linear layers, and KV scales."""

import collections
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from types import EllipsisType
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transferry.build_model.model.transformer import Transformer
from transferry.export.rewrite.kv_scales import KVRanges, KVScales, fold_kv_scales, has_int8_cache
from transferry.export.torch_model import TorchDecoder
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.manifest import REMEDY
from transferry.runtime.bundle.specs import Variant
from transferry.runtime.decoding.batching import length_batches
from transferry.runtime.decoding.generation_options import GenerationOptions
from transferry.runtime.decoding.search import pad_sources, search
from transferry.runtime.errors import InputError
from transferry.runtime.io.arrays import open_arrays
from transferry.runtime.io.atomic import atomic_file
from transferry.runtime.io.documents import parse_document
from transferry.runtime.io.whole import read_bytes
from transferry.runtime.tokenizer.special_tokens import SpecialTokens

CALIBRATION = "calibration.npz"  # beside the graphs of an int8 variant
KINDS = "keys", "values"
Array = NDArray[np.float32]
BINS = 2048  # on either side of zero
# Largest squared errors of a range beside those of the best one, wider and narrower, and largest
# factor between KV scales. Of textbook's and tiny's bundles on other text (captions), the largest
# were 1.9, 17 and 1.7; with one input's range 4 times as wide or narrow 12.5 and 599.
WIDE, NARROW, APART = 8.0, 100.0, 3.0
NEED = "what this text needs; export with --calibrate and text like it"
CLIPS = 100  # ranges tried: equal steps up to the largest value
# Inputs of a layer that stay in float32: the widest, at most one in so many, where the next one has
# at most this share of the widest one's range. Of real all-MiniLM-L6-v2 the mean cosine is 0.9925
# without them, 0.9991 with 4 of a layer, 0.9992 with 8, 0.9993 with 16; with a share of 0.4 0.9974.
WIDEST, ONE_IN, SHARE = 8, 16, 0.5
BATCH = 32  # sentences searched together
BATCH_TOKENS = 2048  # of texts that are fed together
BATCH_LOGITS = 1 << 24  # of them: 64 MB
# Rows, and tokens per row, of the sweep over the vocabulary.
SWEPT_ROWS, SWEPT_LENGTH = 128, 64
SWEPT_WORK = 4e11  # most tokens times parameters of it: of a large model ten seconds


@dataclass(frozen=True)
class Activation:
    """Quantisation of a linear layer's input to uint8: round(x / scale) + zero_point.

    Attributes:
        scale: The step, representable in float32.
        zero_point: 0 where no input was negative, as after ReLU.
        largest: The largest absolute value seen.
        values: Number of values seen.
        wide: Numbers of the inputs that stay in float32; all else holds for the others.
    """

    scale: float
    zero_point: int
    largest: float
    values: int
    wide: tuple[int, ...] = ()


@dataclass(frozen=True)
class Calibration:
    """The measurements for an int8 variant.

    Attributes:
        activations: Quantisation of the inputs of linear layers by the weight's name, in a model
            with the KV scales folded in.
        kv_scales: KV scales by the attention's name; empty without a decoder, or where the cache
            stays in float32.
    """

    activations: Mapping[str, Activation]
    kv_scales: Mapping[str, KVScales]

    def save(self, path: Path) -> None:
        """Writes the measurements; the same ones give the same bytes."""
        index = {name: asdict(each) for name, each in self.activations.items()}
        arrays = {"activations": np.frombuffer(json.dumps(index).encode(), np.uint8)}
        for name, scales in self.kv_scales.items():
            for kind in KINDS:
                arrays[f"{name}/{kind}"] = getattr(scales, kind).numpy()
        with atomic_file(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def of(cls, bundle: Bundle, variant: Variant) -> Self:
        """Reads the calibration of an int8 variant; raises InputError as `load` does."""
        name = PurePosixPath(variant.reference).with_name(CALIBRATION).as_posix()
        return cls.parse(bundle.files.read(name), str(bundle.folder / name))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a file of `save`; raises InputError if it is missing or damaged."""
        return cls.parse(read_bytes(path), str(path))

    @classmethod
    def parse(cls, content: bytes, origin: str) -> Self:
        """Parses a file of `save`; raises InputError if it is damaged."""
        with open_arrays(content, origin, "the calibration of a variant", REMEDY) as file:
            kind = dict[str, Activation]
            activations = parse_document(file["activations"].tobytes(), kind, origin, REMEDY)
            names = [name.removesuffix("/keys") for name in file.files if name.endswith("/keys")]
            scales = {
                name: KVScales(*(torch.from_numpy(file[f"{name}/{kind}"]) for kind in KINDS))
                for name in names
            }
            return cls(activations, scales)


class Histogram:
    """Counts of values in a fixed number of bins around zero, whose width is a power of two.

    A value beyond the last bin joins the bins in groups of 2, 4, 8 ... The counts then equal those
    of wide bins from the start: they do not depend on the order of the values.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(2 * BINS, np.int64)
        self.top = 0.0  # end of the last bin: a power of two, or 0 while all values are 0
        self.least = self.most = 0.0

    def add(self, values: Array) -> None:
        """Adds values of any shape; raises InputError for one that is not finite."""
        least, most = float(values.min(initial=0)), float(values.max(initial=0))
        largest = max(most, -least)
        if not math.isfinite(largest):
            raise InputError(
                "expected finite inputs of the linear layers, found NaN or infinity: "
                "the model cannot be calibrated; does it pass verify?"
            )
        self.least, self.most = min(self.least, least), max(self.most, most)
        top = math.ldexp(1.0, math.frexp(largest)[1]) if largest else 0.0
        if top > self.top:
            joined = min(int(top / self.top), BINS) if self.top else BINS
            counts = self.counts.reshape(-1, joined).sum(axis=1)
            self.counts = np.pad(counts, BINS - len(counts) // 2)
            self.top = top
        places = values.ravel().astype(np.float64) * (BINS / self.top if self.top else 0)
        # Truncated towards zero, so that x and -x lie in bins of equal sizes.
        numbers = places.astype(np.int64) + np.where(places < 0, BINS - 1, BINS)
        self.counts += np.bincount(numbers, minlength=2 * BINS)

    def activation(self) -> Activation:
        """Returns the quantisation with the least squared error of rounding and clipping.

        See Nagel et al. 2021, A White Paper on Neural Network Quantization, section 3.1, and for
        calibration by histograms Wu et al. 2020, Integer Quantization for Deep Learning Inference.
        """
        values, largest = int(self.counts.sum()), max(self.most, -self.least)
        if not largest:
            return Activation(1.0, 0, 0.0, values)
        # Both ends together, then either alone. The widest first: min takes it among equal errors.
        shares = np.arange(CLIPS, 0, -1) / CLIPS
        ends = min(
            ((self.least * share, self.most * share) for share in shares), key=self._error_of
        )
        for clipped in ((1, 0), (0, 1)):
            tried = (np.where(clipped, np.multiply(ends, share), ends) for share in shares)
            ends = min(map(tuple, tried), key=self._error_of)
        return Activation(*_steps(*ends), largest, values)

    def _error_of(self, ends: tuple[float, float]) -> float:
        return self.error(*_steps(*ends))

    def error(self, step: float, zero_point: int) -> float:
        """Returns the squared error of rounding to 256 steps, and of clipping beyond them."""
        centres = (np.arange(-BINS, BINS) + 0.5) * (self.top / BINS)
        rounded = np.clip(np.rint(centres / step), -zero_point, 255 - zero_point) * step
        return float((self.counts * (rounded - centres) ** 2).sum())


def _steps(least: float, most: float) -> tuple[float, int]:
    """Returns the step in float32, and the zero point, of 256 integers for a range around zero."""
    step = float(np.float32((most - least) / 255))
    return step, round(-least / step)


class LinearObserver(TorchFunctionMode):
    """Reports every product with a parameter of the model, wherever it is computed."""

    def __init__(self, model: Transformer, report: Callable[[str, Tensor, Tensor], None]) -> None:
        """Takes the callback for the parameter's name, the input and the output."""
        super().__init__()
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.report = report
        self._release = model.release

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes a function of torch and reports it if it is F.linear."""
        output = func(*args, **(kwargs or {}))
        if func is F.linear and (name := self.names.get(id(args[1]))) is not None:
            self.report(name, args[0], output)
            self._release()
        return output


Text = tuple[Sequence[int], Sequence[int]]  # source and target
Counted = Tensor | EllipsisType  # a mask `[rows, length]`, or all


@torch.inference_mode()
def calibrate(
    model: Transformer, special: SpecialTokens, sentences: Sequence[Sequence[int]], max_length: int
) -> Calibration:
    """Runs the model over sentences, an encoder-decoder over its own greedy answers too.

    A sentence is the token ids of a source for an encoder, or of a whole text.

    Returns:
        KV scales, and the quantisation of the input of every linear layer; a tied LM head has the
        name of the embedding.

    Raises:
        InputError: There is no sentence, one has no tokens, or an activation is not finite.
    """
    if not sentences or not all(sentences):
        raise InputError(
            f"expected at least one sentence to calibrate with and tokens in each, found "
            f"{len(sentences)} sentences, {sum(not sentence for sentence in sentences)} of them "
            "empty: give sentences like those that will be run"
        )
    decoder = TorchDecoder(model)
    options = GenerationOptions(max_length=max_length)
    # Sorted, so that their order decides no batch.
    sentences = sorted(sentences, key=lambda sentence: (len(sentence), list(sentence)))
    texts: list[Text] = [(sentence if model.encoder else (), sentence) for sentence in sentences]
    for first in range(0, len(sentences) if model.encoder and model.decoder else 0, BATCH):
        batch = sentences[first : first + BATCH]
        found = search(decoder, batch, options, special)
        for row, hypotheses in enumerate(found, start=first):
            # As fed by the search: without the last token of an answer that reached max_length.
            target = [special.bos_id, *hypotheses[0].tokens[: max_length - 1]]
            texts[row] = sentences[row], target
    ranges = KVRanges(model)
    # The largest keys and values of all tokens count, and answers hold few of the tokens.
    _run(
        model,
        [*texts, *vocabulary_texts(model)],
        lambda name, _, output, counted: ranges.add(name, output[counted]),
    )
    scales = ranges.scales() if has_int8_cache(model.config) else {}
    # Scaled values change the inputs of the output projections of attention.
    folded = fold_kv_scales(model, scales)
    wide = _wide_inputs(folded, texts)
    inputs = _histograms(folded, texts, wide)
    return Calibration(
        {name: replace(seen.activation(), wide=wide[name]) for name, seen in inputs.items()}, scales
    )


def _wide_inputs(model: Transformer, texts: Sequence[Text]) -> dict[str, tuple[int, ...]]:
    """Returns the inputs of each layer that stay in float32."""
    widths: dict[str, Array] = {}

    def widen(name: str, x: Array) -> None:
        sizes = np.abs(x).reshape(-1, x.shape[-1]).max(axis=0, initial=0)
        widths[name] = np.maximum(sizes, widths.get(name, sizes))

    _run_inputs(model, texts, widen)
    # The lookup of a tied embedding reads the integers of the LM head, which hold every input.
    return {name: _wide(each) for name, each in widths.items()} | {"embedding.weight": ()}


def _wide(sizes: Array) -> tuple[int, ...]:
    """Returns the inputs that stay in float32, given the largest absolute value of each."""
    count, order = min(WIDEST, len(sizes) // ONE_IN), np.argsort(-sizes, kind="stable")
    if not sizes[order[count]] <= SHARE * sizes[order[0]]:
        return ()
    return tuple(sorted(order[:count].tolist()))


def _histograms(
    model: Transformer, texts: Sequence[Text], wide: Mapping[str, Sequence[int]]
) -> dict[str, Histogram]:
    """Returns the histograms of the inputs of each layer, wide ones excepted."""
    found = collections.defaultdict[str, Histogram](Histogram)

    def add(name: str, x: Array) -> None:
        found[name].add(np.delete(x, wide[name], axis=-1) if wide.get(name) else x)

    _run_inputs(model, texts, add)
    return found


def _run_inputs(
    model: Transformer, texts: Sequence[Text], report: Callable[[str, Array], None]
) -> None:
    """Reports the inputs of each layer `[..., inputs]`; see `_run`."""
    _run(model, texts, lambda name, x, _, counted: report(name, x[counted].detach().cpu().numpy()))


@torch.inference_mode()
def misfit(model: Transformer, calibration: Calibration, texts: Sequence[Text]) -> str:
    """Describes the first stored range that does not fit texts; empty if all do.

    The input of a layer fits if rounding and clipping it as stored costs at most `WIDE` times the
    squared error of the best range, or `NARROW` times where the stored one is less than half as
    wide; KV scales, if each is within a factor of `APART` of the measured one. Tokens in random
    order stand for texts that are absent.
    """
    texts, swept = texts or list(vocabulary_texts(model)), list(vocabulary_texts(model))
    ranges = KVRanges(model)
    if calibration.kv_scales:
        _run(
            model,
            [*texts, *swept],
            lambda name, _, output, counted: ranges.add(name, output[counted]),
        )
    for name, measured in ranges.scales().items():
        for kind in KINDS:
            factors = getattr(calibration.kv_scales[name], kind) / getattr(measured, kind)
            place = int(torch.maximum(factors, 1 / factors).argmax())
            factor = float(factors.flatten()[place])
            if not 1 / APART <= factor <= APART:
                return f"{name}: the scale of {kind}, channel {place}, is {factor:.2g} times {NEED}"
    wide = {name: each.wide for name, each in calibration.activations.items()}
    inputs = _histograms(fold_kv_scales(model, calibration.kv_scales), texts, wide)
    for name, seen in inputs.items():
        if (stored := calibration.activations.get(name)) is None:
            return f"{name}: there is no range of inputs"
        best = seen.activation()
        lost, least = (seen.error(each.scale, each.zero_point) for each in (stored, best))
        wider = stored.scale / best.scale
        if not (0.5 < wider < 1 or lost <= least * (WIDE if wider >= 1 else NARROW)):
            if not 0.9 < wider < 1.1:
                return f"{name}: the range of inputs is {wider:.2g} times {NEED}"
            given, needed = (
                " to ".join(f"{(end - each.zero_point) * each.scale:.2g}" for end in (0, 255))
                for each in (stored, best)
            )
            return f"{name}: the range of inputs is {given}, not {needed}: {NEED}"
    return ""


def vocabulary_texts(model: Transformer) -> Iterator[Text]:
    """Yields texts of tokens in random order; of a small vocabulary each token once."""
    length = min(SWEPT_LENGTH, model.config.max_positions)
    tokens = np.random.default_rng(0).permutation(model.config.vocabulary_size)
    parameters = sum(each.numel() for each in model.parameters())
    rows = max(1, min(SWEPT_ROWS, int(SWEPT_WORK / parameters / length)))
    for first in range(0, min(rows * length, len(tokens)), length):
        ids = tokens[first : first + length].tolist()
        source = [token % model.config.source_vocabulary for token in ids]
        yield source if model.encoder else (), ids


def _run(
    model: Transformer,
    texts: Sequence[Text],
    report: Callable[[str, Tensor, Tensor, Counted], None],
) -> None:
    """Feeds texts in batches, and reports each product with the tokens that count: no padding."""
    device, both = model.embedding.weight.device, bool(model.encoder and model.decoder)
    counted: Counted = ...

    def observed(name: str, x: Tensor, output: Tensor) -> None:
        # A head may read one vector of a text, in which nothing is padding.
        report(name, x, output, counted if x.dim() == 3 else ...)

    with LinearObserver(model, observed):
        for batch in _batches(model, texts):
            (source, source_mask), (target, mask) = (
                map(torch.from_numpy, pad_sources(list(side), 0))
                for side in zip(*batch, strict=True)
            )
            counted = ... if both else (mask if model.decoder else source_mask).to(device)
            model(source.to(device), source_mask.to(device), target.to(device))


def _batches(model: Transformer, texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Texts of similar length; of an encoder-decoder of equal lengths, and so without padding."""
    groups = collections.defaultdict[tuple[int, int] | None, list[Text]](list)
    for text in texts:
        lengths = len(text[0]), len(text[1])
        groups[lengths if model.encoder and model.decoder else None].append(text)
    tokens = max(1, min(BATCH_TOKENS, BATCH_LOGITS // model.config.vocabulary_size))
    for members in groups.values():
        longest = [max(map(len, text)) for text in members]
        for rows in length_batches(longest, BATCH, tokens):
            yield [members[row] for row in rows]
