"""Calls the user's function, and tries the module that it returns against the protocol."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from transferry.build_model.checkpoint import Checkpoint
from transferry.build_model.model.attention import KeyValues
from transferry.build_model.own.model import OwnModel, digest, shape_of
from transferry.build_model.own.tokenizer import read_tokenizer
from transferry.runtime.bundle.card import UNKNOWN
from transferry.runtime.bundle.head import HeadSettings
from transferry.runtime.errors import TransferryError, UsageError
from transferry.runtime.tokenizer.byte_pair import AnyTokenizer

LENGTHS = (7, 4, 1)  # tokens of the sources that are tried, padded to one batch
TARGET, FIRST = 5, 2  # target tokens, and those of the first of two calls
CLOSE = 1e-9  # of the largest number, in float64
PROTOCOL = "; docs/how-to/export-a-module.md lists the methods"
LEAST = LENGTHS[0] + TARGET
LONGEST = 4096  # tokens that are tried at once


def load_own(
    function: Callable[[], Any], name: str, tokenizer: Path | AnyTokenizer | None
) -> Checkpoint:
    """Returns a module of the user's own as a checkpoint; for the tokenizer see `read_tokenizer`.

    Raises:
        UsageError: The function fails, or the module breaks the protocol.
        InputError: The tokenizer cannot be read.
    """
    if tokenizer is None:
        raise UsageError(f"{name} is a module: give its vocabulary with --tokenizer")
    # A kernel of nn.TransformerEncoderLayer for inference alone, which the exporter cannot trace.
    torch.backends.mha.set_fastpath_enabled(False)
    with _told(f"{name} failed"):
        module: Any = function()
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    scripted = isinstance(module, torch.jit.ScriptModule)
    if scripted or not isinstance(module, nn.Module) or not list(module.parameters()):
        found = type(module).__name__
        raise UsageError(f"{name}: expected a torch.nn.Module with weights, found {found}")
    module = module.eval().float().cpu().requires_grad_(False)
    _require_attributes(module, name)
    decodes, encodes = hasattr(module, "decode"), hasattr(module, "encode")
    alone = "decoder-only" if decodes else "encoder-only"
    architecture = "encoder-decoder" if decodes and encodes else alone
    if isinstance(tokenizer, Path):
        given = getattr(module, "special_tokens", None)
        tokenizer = read_tokenizer(tokenizer, architecture, given)
    trial = _Trial(copy.deepcopy(module).double(), name, tokenizer)
    with _told(f"{name}, in float64", PROTOCOL), torch.inference_mode():
        width, outputs = trial.shapes(architecture)
    config = shape_of(module, tokenizer.vocabulary_size, width, outputs)
    model = OwnModel(module, config)
    with _told(f"{name}, in float64", PROTOCOL), torch.inference_mode():
        trial.behaves(OwnModel(trial.module, config))
    return Checkpoint(
        model,
        None,
        tokenizer,
        getattr(module, "generation", {}),
        digest(model.state_dict()),
        _head(module, outputs, name),
        UNKNOWN.stating(name=name.partition(":")[2]),
    )


@contextmanager
def _told(what: str, remedy: str = "") -> Iterator[None]:
    """Turns an error of the user's code into one line."""
    try:
        yield
    except TransferryError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise UsageError(f"{what}: {type(error).__name__}: {reason}{remedy}") from error


def _require_attributes(module: Any, name: str) -> None:
    longest, cache = getattr(module, "max_positions", None), getattr(module, "cache", None)
    if type(longest) is not int or longest < LEAST:
        raise UsageError(
            f"{name}: expected max_positions, the longest text in tokens, of at least {LEAST}, "
            f"found {longest!r}; set it"
        )
    if hasattr(module, "encode") and not (hasattr(module, "decode") and hasattr(module, "cross")):
        raise UsageError(f"{name}: expected encode, cross and decode together; add the others")
    sizes = cache if isinstance(cache, tuple | list) else ()
    sound = len(sizes) == 3 and all(type(size) is int and size > 0 for size in sizes)
    if hasattr(module, "decode") and not sound:
        raise UsageError(
            f"{name}: expected cache = (layers, heads, width) of keys and values, found {cache!r}; "
            "set it"
        )


def _head(module: Any, outputs: Sequence[int], name: str) -> HeadSettings | None:
    if not outputs:
        return None
    labels = tuple(map(str, getattr(module, "labels", ())))
    if labels and len(labels) != outputs[-1]:
        found = f"{outputs[-1]} scores for {len(labels)} labels"
        raise UsageError(f"{name}: expected as many labels as head has scores, found {found}")
    if len(outputs) == 2 and not labels:
        return HeadSettings("embed")
    named = labels or tuple(f"LABEL_{number}" for number in range(outputs[-1]))
    return HeadSettings("tag" if len(outputs) == 3 else "classify", named, "softmax")


@dataclass
class _Trial:
    """A module in float64 with inputs of three lengths."""

    module: Any
    name: str
    tokenizer: AnyTokenizer

    def __post_init__(self) -> None:
        size = self.tokenizer.vocabulary_size
        drawn = torch.Generator().manual_seed(0)
        self.mask = torch.arange(LENGTHS[0]) < torch.tensor(LENGTHS)[:, None]
        ids = torch.randint(size, self.mask.shape, generator=drawn)
        self.source = ids.masked_fill(~self.mask, self.tokenizer.special.pad_id)
        self.target = torch.randint(size, (len(LENGTHS), TARGET), generator=drawn)

    def require_shape(self, part: str, found: Any, *expected: int | None) -> list[int]:
        """Returns the shape of a tensor in float64; refuses another; None is any size."""
        if not isinstance(found, Tensor):
            raise UsageError(f"{self.name}: {part} must be a tensor, found {type(found).__name__}")
        shape = list(found.shape)
        if len(shape) != len(expected) or any(
            size not in (None, own) for size, own in zip(expected, shape, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in expected)
            raise UsageError(
                f"{self.name}: expected {part} of shape [{wanted}], found {shape}, for "
                f"{len(LENGTHS)} rows, {LENGTHS[0]} source and {TARGET} target "
                f"tokens and a vocabulary of {self.tokenizer.vocabulary_size}"
            )
        if found.dtype != torch.float64:
            raise UsageError(
                f"{self.name}: expected {part} in float64 of the module in float64, found "
                f"{found.dtype}; make tensors of the type of a weight, or register them as buffers"
            )
        return shape

    def require_cache(self, part: str, found: Any, length: int) -> None:
        """Refuses a cache of another form than (keys, values) for each layer."""
        layers, heads, width = self.module.cache
        pairs = list(found) if isinstance(found, list | tuple) else []
        if len(pairs) != layers or any(
            not isinstance(each, list | tuple) or len(each) != 2 for each in pairs
        ):
            raise UsageError(
                f"{self.name}: expected {part} as (keys, values) of each of {layers} layers, found "
                f"{type(found).__name__} of {len(pairs)}; return the cache as a value"
            )
        for number, both in enumerate(pairs):
            if both[0] is both[1]:
                self._refuse(
                    f"keys and values of layer {number} in {part} are one tensor",
                    "return a half as each: tensor.chunk(2, dim=-1)",
                )
            for kind, tensor in zip(("keys", "values"), both, strict=True):
                what = f"{part}, {kind} of layer {number},"
                self.require_shape(what, tensor, len(LENGTHS), heads, length, width)

    def shapes(self, architecture: str) -> tuple[int, list[int]]:
        """Checks all shapes; returns the width of hidden states, and the shape of the head."""
        rows, length, size = len(LENGTHS), LENGTHS[0], self.tokenizer.vocabulary_size
        width, outputs = 0, list[int]()
        if architecture != "decoder-only":
            encode = self.module if architecture == "encoder-only" else self.module.encode
            hidden = encode(self.source, self.mask)
            what = "the output of encode" if architecture != "encoder-only" else "hidden states"
            width = self.require_shape(what, hidden, rows, length, None)[2]
        if architecture == "encoder-only":
            if hasattr(self.module, "head"):
                scores = self.module.head(hidden, self.mask)
                each = (length,) if getattr(scores, "ndim", 0) == 3 else ()
                outputs = self.require_shape("the output of head", scores, rows, *each, None)
            if hasattr(self.module, "logits"):
                self.require_shape("logits", self.module.logits(hidden), rows, length, size)
            return width, outputs
        cross = self.module.cross(hidden) if architecture == "encoder-decoder" else []
        if cross:
            self.require_cache("cross", cross, length)
        layers, heads, d_head = self.module.cache
        mask = self.mask if cross else self.mask[:, :0]
        nothing = torch.zeros(rows, heads, 0, d_head, dtype=torch.float64)
        decoded = self.module.decode(self.target, mask, cross, [(nothing, nothing)] * layers)
        if not isinstance(decoded, tuple) or len(decoded) != 2:
            raise UsageError(f"{self.name}: expected decode to return logits and the present cache")
        self.require_shape("logits", decoded[0], rows, TARGET, size)
        self.require_cache("present", decoded[1], TARGET)
        return width, outputs

    def behaves(self, model: OwnModel) -> None:
        """Checks repetition, independence of rows and padding, the cache, and the longest text."""
        decoder = bool(model.config.decoder_layers)
        run = self._decoded if decoder else self._encoded
        whole = run(model, [*range(len(LENGTHS))])
        again = run(model, [*range(len(LENGTHS))])
        for name, found in again.items():
            if found.isnan().any():
                self._refuse(f"{name} is NaN", "let each token see itself, padding too")
            if not torch.equal(found, whole[name]):
                self._refuse(
                    f"{name} differs between two runs on the same input", "turn dropout off in eval"
                )
        for row in range(len(LENGTHS)):
            for name, alone in run(model, [row]).items():
                self._require_close(
                    f"{name} of a row alone, without padding",
                    alone,
                    whole[name][row : row + 1, ..., : alone.shape[-2], :]
                    if alone.ndim > 2
                    else whole[name][row : row + 1],
                    "keep rows apart, and mask the padding",
                )
        if decoder:
            self._stepwise(model)
        self._longest(model)

    def _encoded(self, model: OwnModel, rows: Sequence[int]) -> Mapping[str, Tensor]:
        most = max(LENGTHS[row] for row in rows)
        mask = self.mask[rows, :most]
        found = model.answers(self.source[rows, :most], mask)
        # Numbers at padding mean nothing.
        padding = ~mask[..., None]
        return {
            name: each.masked_fill(padding, 0) if each.ndim > 2 else each
            for name, each in found.items()
        }

    def _decoded(self, model: OwnModel, rows: Sequence[int]) -> Mapping[str, Tensor]:
        most = max(LENGTHS[row] for row in rows)
        source, mask = self.source[rows, :most], self.mask[rows, :most]
        past, cross = model.empty_past(len(rows)), list[KeyValues]()
        if model.encoder:
            cross = model.cross(model.encode(source, mask))
        else:  # the last row has no past but padding
            source, mask = source[:, 1:], mask[:, 1:]
            if most > 1:
                _, past = model.decode(source, mask[:, :0], [], past)
        kept = [tensor.clone() for both in (*cross, *past) for tensor in both]
        logits, _ = model.decode(self.target[rows], mask, cross, past)
        changed = (tensor for both in (*cross, *past) for tensor in both)
        if not all(torch.equal(*both) for both in zip(kept, changed, strict=True)):
            self._refuse("decode writes into its past or cross", "return a new present (torch.cat)")
        return {"logits": logits}

    def _stepwise(self, model: OwnModel) -> None:
        """Compares tokens fed at once with tokens fed in two calls."""
        mask, past = self.mask, model.empty_past(len(LENGTHS))
        cross = model.cross(model.encode(self.source, mask)) if model.encoder else []
        mask = mask if model.encoder else mask[:, :0]
        whole, _ = model.decode(self.target, mask, cross, past)
        first, past = model.decode(self.target[:, :FIRST], mask, cross, past)
        remedy = "let a token see itself, the past and no later token, at its own position"
        self._require_close("logits of the first tokens alone", first, whole[:, :FIRST], remedy)
        if not model.encoder:
            mask = torch.ones(len(LENGTHS), first.shape[1], dtype=torch.bool)
        second, present = model.decode(self.target[:, FIRST:], mask, cross, past)
        self.require_cache("present (past included)", present, TARGET)
        self._require_close("logits of a second call", second, whole[:, FIRST:], remedy)

    def _longest(self, model: OwnModel) -> None:
        longest = min(model.config.max_positions, LONGEST)
        ids = torch.zeros(1, longest, dtype=torch.int64)
        with _told(f"{self.name}, on {longest} tokens, within its max_positions"):
            mask = torch.ones_like(ids).bool()
            cross = []
            if model.config.encoder_layers:
                encoded = model.encode(ids, mask)
                cross = model.cross(encoded) if model.decoder else []
            if model.decoder:
                mask = mask if cross else mask[:, :0]
                model.decode(ids, mask, cross, model.empty_past(1))

    def _require_close(self, what: str, found: Tensor, wanted: Tensor, remedy: str) -> None:
        unit = float(wanted.abs().max()) if wanted.numel() else 1.0
        error = float((found - wanted).abs().max()) if found.numel() else 0.0
        if not error <= CLOSE * max(unit, 1e-30):  # NaN too
            self._refuse(f"{what} differ by {error / max(unit, 1e-30):.1e} of the largest", remedy)

    def _refuse(self, problem: str, remedy: str) -> None:
        raise UsageError(f"{self.name}: {problem}, in float64; {remedy}")
