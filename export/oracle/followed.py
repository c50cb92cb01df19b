"""int8 judged on the graph's own integers: what its products read takes the place of torch's.

Between two roundings an int8 variant computes in float32, but where a value lies at the border of
two integers, float32 rounding decides which one it becomes, and all that follows moves by a step.
So the graphs show the integers that their products read, and those of the cache. torch, in float32
and float64, goes on with these instead of its own, and each must be where the unrounded value lies:
within half a step and the limit of float32 rounding. Nothing is excused by a border that was
crossed before, and the outputs must be as exact as in float32.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import Tensor

from transferry.export.oracle.oracle import SHAKES, Oracle
from transferry.export.torch_model import moved_heads
from transferry.export.trace.editing import KERNELS
from transferry.runtime.bundle.bundle import Bundle
from transferry.runtime.bundle.specs import GraphSpec
from transferry.runtime.decoding.batching import UNIT, blocks, widened
from transferry.runtime.decoding.decoder import StepOutput, Tensors
from transferry.runtime.ort.encoder import PASS_TOKENS, EncoderModel
from transferry.runtime.ort.external_files import watched_graph
from transferry.runtime.ort.graph_runner import GraphRunner
from transferry.runtime.ort.open_model import ServedModel, model_class
from transferry.runtime.ort.session import SessionOptions, open_session
from transferry.runtime.precision import FLOAT32
from transferry.runtime.proof.compare import (
    Case,
    Comparison,
    Tolerance,
    Truth,
    are_near,
    compare,
    limited,
    nearby,
    observe,
    truth,
)
from transferry.runtime.proof.units import LEAST, SHARED

QUANTISERS = ("QuantizeLinear", "DynamicQuantizeLinear")
# Kernels with products, of the package transferry-kernels.
PRODUCTS = ("Linear", "LinearNorm", "FeedForward", "LinearToHeads")
SAMPLED = 64  # positions that tell which of a graph's values a product reads
KNOWN = 2.0**-4  # of a step: a value of the last case that is nearer is the same one
# The worst error so far, torch's own and the budget, in steps; where.
NOTHING = (0.0, 0.0, 1.0, "")

Arrays = dict[str, NDArray[Any]]
# Mask of a batch, and its blocks of rows with their columns.
Cut = tuple[NDArray[np.bool_], list[tuple[slice, int]]]


def _rounded(node: onnx.NodeProto) -> Iterator[tuple[str, str]]:
    """Yields the names of integers that a node rounds to and of their unrounded values.

    A kernel computes them where a graph names outputs for them after its own one.
    """
    if node.op_type in QUANTISERS:
        yield node.output[0], node.input[0]
    if node.domain != KERNELS or node.op_type not in PRODUCTS:
        return
    integers, hidden, inner = (
        f"{node.output[0]}.{name}" for name in ("integers", "hidden", "inner")
    )
    node.output.append(integers)
    yield integers, node.input[0]
    if node.op_type == "FeedForward":
        node.output.extend((hidden, inner))
        yield inner, hidden


class _ShownRunner(GraphRunner):
    """A graph that keeps the integers which its operators write, and their unrounded values."""

    def __init__(self, bundle: Bundle, graph: GraphSpec, options: SessionOptions) -> None:
        super().__init__(bundle, graph, options)
        content, files = watched_graph(bundle, graph)
        model = onnx.load_model_from_string(content)
        given = {value.name for value in model.graph.output}
        # Unrounded values, by the names of their integers.
        self.rounded = dict(chain.from_iterable(map(_rounded, model.graph.node)))
        names = dict.fromkeys([*self.rounded, *self.rounded.values()])
        self.shown = [name for name in names if name not in given]
        model.graph.output.extend(map(helper.make_empty_tensor_value_info, self.shown))
        changed = model.SerializeToString(), files
        self.session = open_session(bundle.graph(graph), options, *changed)
        self.written: dict[str, list[NDArray[Any]]] = {}

    def run(self, *inputs: Any, **more: Any) -> list[Any]:
        return super().run(*inputs, **more)[len(self.shown) :]

    def run_bound(self, binding: Any, *copies: Any, **waits: Any) -> None:
        super().run_bound(binding, *copies, **waits)
        found = binding.get_outputs()[binding.before :]
        for name, value in zip(self.shown, found, strict=False):
            self.written.setdefault(name, []).append(value.numpy().copy())

    def _bound(self, inputs: Any, host: Any, in_place: Any) -> Any:
        binding = super()._bound(inputs, host, in_place)
        binding.before = len(host) + sum(map(len, in_place.values()))
        for name in self.shown:
            binding.bind_output(name, "cpu")
        return binding


@dataclass(frozen=True)
class _Call:
    """The integers of one call of a model, by the names of values of its graphs.

    Attributes:
        products: What products read `[positions, width]`, not less their zero point.
        rounded: What was rounded to that, likewise.
        cached: New keys and values, times their scales `[rows, heads, length, d_head]`.
        mask: True where a position has a meaning `[rows, length]`; None for all.
        prompt: Whether it computes keys and values alone.
    """

    products: Arrays
    rounded: Arrays
    cached: Arrays
    mask: NDArray[np.bool_] | None = None
    prompt: bool = False

    def kept(self, value: Tensor) -> Tensor | None:
        """Returns where a value `[..., width]` has a meaning `[...]`; None for everywhere."""
        if self.mask is None or value.dim() == 2 or self.mask.all():
            return None
        there = torch.from_numpy(self.mask)
        return (there if value.dim() == 3 else there[:, None]).expand(value.shape[:-1])


class ShownModel:
    """A variant that records the integers of its calls.

    Attributes:
        calls: The calls so far.
        names: What each product read last, by its place among those of a first or later call.
    """

    def __init__(self, bundle: Bundle, model: ServedModel) -> None:
        self._runners: list[_ShownRunner] = []
        kind: Any = model_class(model.variant)
        self._model: Any = kind(bundle, model.variant, model.options, self._opened)
        self.calls: list[_Call] = []
        self.names: dict[tuple[bool, int], str] = {}
        if isinstance(self._model, EncoderModel):
            self.encode = self._encode
            return
        self._model.shares_prompts = False  # each row is read whole, with the same bits
        self.select, self.tensors = self._model.select, self._model.tensors

    def _opened(self, *given: Any) -> _ShownRunner:
        self._runners.append(_ShownRunner(*given))
        return self._runners[-1]

    def _encode(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> Tensors:
        found: Tensors = self._model.encode(source, mask)
        self.calls.append(_Call(*self._read(mask), {}, mask))
        return found

    def start(self, source: NDArray[np.int64], mask: NDArray[np.bool_]) -> Any:
        state = self._model.start(source, mask)
        prompt = 0 if self._model.has_encoder else source.shape[1]
        cached = self._cached(state, "cross", prompt)
        self.calls.append(_Call(*self._read(mask), cached, mask, prompt > 0))
        return state

    def step(self, tokens: NDArray[np.int64], state: Any) -> tuple[StepOutput, Any]:
        output, state = self._model.step(tokens, state)
        cached = self._cached(state, "past", tokens.shape[1])
        self.calls.append(_Call(*self._read(np.ones(tokens.shape, np.bool_)), cached))
        return output, state

    def _cached(self, state: Any, role: str, new: int) -> Arrays:
        """Returns keys and values of a role, and of the last columns of the past."""
        found = {}
        for name, tensor in self._model.tensors(state).items():
            past = name.startswith("past")
            if not name.endswith(".cell") and (new if past else role == "cross"):
                found[name] = tensor[:, :, -new if past else 0 :]
        return found

    def _read(self, mask: NDArray[np.bool_]) -> tuple[Arrays, Arrays]:
        """Takes the inputs of products in a call over rows, and their unrounded values."""
        products, rounded, (rows, length) = {}, {}, mask.shape
        cuts = [(grid, [*blocks(grid, PASS_TOKENS["cpu"])]) for grid in (mask, widened(mask, UNIT))]
        for runner in self._runners:
            found = {}
            for name, parts in runner.written.items():
                width = parts[0].shape[-1]
                if len(parts) == length > 1 and all(len(part) == rows for part in parts):
                    values = np.stack(parts, axis=1)  # a recurrent decoder reads token by token
                elif (placed := _placed(parts, cuts)) is not None:
                    values = placed[:, :length]
                else:
                    lines = [part.reshape(-1, width) for part in parts]
                    # One position a row, as a head reads: equal where its function saturates.
                    heads = [[len(mask[part]) for part, _ in cut] for _, cut in cuts]
                    pooled = [*map(len, lines)] in heads
                    values = np.concatenate(lines) if pooled else _of_distances(lines)
                found[name] = values.reshape(-1, width)
            for name, source in runner.rounded.items():
                if name in found and source in found:
                    key = f"{runner.graph.file}: {name}"
                    products[key], rounded[key] = found[name], found[source]
            runner.written.clear()
        return products, rounded


def _placed(parts: Sequence[NDArray[Any]], cuts: Iterable[Cut]) -> NDArray[Any] | None:
    """Puts blocks of rows, or of their tokens alone, into one array `[rows, length, width]`.

    Returns None for values that are not of such blocks.
    """
    width = parts[0].shape[-1]
    for mask, cut in cuts:
        whole = np.zeros((*mask.shape, width), parts[0].dtype)
        for there in (np.ones_like(mask), mask):
            masks = [there[rows, :columns] for rows, columns in cut]
            if [each.sum() * width for each in masks] != [part.size for part in parts]:
                continue
            for part, (rows, columns), each in zip(parts, cut, masks, strict=True):
                whole[rows, :columns][each] = part.reshape(-1, width)
            return whole
    return None


def _of_distances(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Joins `[positions, width]`; shorter rows read the middle of embeddings of distances."""
    widest = max(parts, key=len)
    starts = [(len(widest) - len(part)) // 2 for part in parts]
    middles = [widest[start : start + len(p)] for start, p in zip(starts, parts, strict=True)]
    return widest if all(map(np.array_equal, parts, middles)) else np.concatenate(parts)


def _signed(written: NDArray[Any], like: Tensor, least: int, places: Any) -> Tensor:
    """Returns integers at some positions, less their zero point, of the shape of a value."""
    chosen = torch.from_numpy(written).flatten(0, -2)[places]
    offset = least if written.dtype == np.uint8 else 0
    return (chosen.to(like.dtype) + offset).reshape(like.shape)


@dataclass(frozen=True)
class _Site:
    """A place where torch rounds.

    Attributes:
        name: The value of the graph with these integers; empty without any.
        integers: Of the graph, of torch where a position has no meaning.
        steps: The unrounded value in float32, in steps, of each time that it was computed.
    """

    name: str
    integers: Tensor
    steps: list[Tensor]


class Followed:
    """Rounds to the integers of a graph: first in float32, then the same case in float64."""

    def __init__(self, model: ShownModel, reference: Any) -> None:
        self._calls, self._call, self._names = model.calls, -1, model.names
        for call in self._calls:
            for name, tensor in call.cached.items():
                call.cached[name] = np.rint(tensor / reference.scale(name))
        self.sites: dict[tuple[int, int], _Site] = {}
        self._site = self._left = 0
        self.worst = NOTHING

    def begin(self) -> None:
        """Goes on to the next call; after the last one to the first."""
        self._call, self._site = (self._call + 1) % len(self._calls), 0
        # Products after the last keys and values of a prompt reach nothing.
        call = self._calls[self._call]
        self._left = len(call.cached) if call.prompt else 1 << 62

    def __call__(self, x: Tensor, scale: Any, least: int, most: int) -> Tensor:
        """Returns integers for the values of a site; see `arithmetic.Shift`."""
        key, steps = (self._call, self._site), x / scale
        self._site += 1
        single, new = steps.dtype == torch.float32, key not in self.sites
        if new:
            self.sites[key] = _Site(*self._nearest(steps, scale, least, most), [])
        site = self.sites[key]
        if self._left > 0 and (new or not single):
            self._judge(site, steps, scale, least, most)
        if single:
            site.steps.append(steps)
        self._left -= steps.dim() == 4
        return site.integers.to(steps.dtype, copy=True)

    def _nearest(self, steps: Tensor, scale: Any, least: int, most: int) -> tuple[str, Tensor]:
        """Returns the integers of the graph that are nearest to a value, and their name."""
        call = self._calls[self._call]
        own, kept = steps.round().clamp_(least, most), call.kept(steps)
        if kept is not None and not kept.any():
            return "", own
        among = call.cached if steps.dim() == 4 else call.products
        # A graph reads the same value in each call of its kind; else the nearest one.
        known, best = (self._call > 0, self._site), ("", own, torch.inf)
        names = [name for name, written in among.items() if written.size == steps.numel()]
        places = torch.arange(own[..., 0].numel()) if kept is None else kept.flatten().nonzero()
        few = places.flatten()[:: max(1, len(places) // SAMPLED)]
        sample, unrounded = (value.flatten(0, -2)[few] for value in (own, steps))

        def distance(name: str) -> float:
            # Two values may have the same integers in one case, and others in the next.
            given, wanted = call.rounded.get(name), sample
            if given is None:
                shown = _signed(among[name], sample, least, few)
            else:
                shown = torch.from_numpy(given).reshape(steps.shape).flatten(0, -2)[few] / scale
                shown, wanted = shown.clamp_(least, most), unrounded.clamp(least, most)
            return float((shown - wanted).abs().mean())

        def ordered() -> Iterator[str]:
            last = self._names.get(known)
            yield from (name for name in names if name == last and distance(name) <= KNOWN)
            yield from sorted(names, key=distance)

        for name in ordered():
            found = _signed(among[name], own, least, slice(None))
            distances = (found - own).abs_()
            apart = (distances if kept is None else distances[kept]).max().item()
            if apart < best[2]:
                best = name, found, apart
            if apart <= 1:  # a value at a border
                break
        self._names[known] = best[0]
        return best[0], best[1] if kept is None else torch.where(kept[..., None], best[1], own)

    def _judge(self, site: _Site, steps: Tensor, scale: Any, least: int, most: int) -> None:
        """Compares the integers of a site, and the graph's unrounded value, with torch's.

        With those in float64, once the site has some in float32; else as `nearby` does.
        """
        call = self._calls[self._call]
        kept = call.kept(steps)
        if kept is not None and not kept.any():
            return

        def there(value: Tensor) -> Tensor:
            return value if kept is None else value[kept]

        exact = there(steps)
        within = exact.clamp(least, most)
        beyond = (within - there(site.integers)).abs_().amax(dim=-1).sub_(0.5)
        if not site.name:
            beyond.fill_(torch.inf)
        if site.name in call.rounded:
            given = there(torch.from_numpy(call.rounded[site.name]).reshape(steps.shape))
            given = (given.to(exact.dtype) / scale).clamp_(least, most)
            beyond = beyond.maximum(given.sub_(within).abs_().amax(dim=-1))
        # At least of one step: a value that is 0 throughout would have a limit of 0.
        own = LEAST * exact.abs().amax(dim=-1).clamp_(min=1)
        for single in site.steps:
            own = own.maximum((there(single) - exact).abs_().amax(dim=-1))
        if site.steps:
            own = own.maximum(own.max().minimum(SHARED * own.median()))
        budget = Tolerance.factor * own
        ratio = beyond.flatten() / budget.flatten()
        place = int(ratio.argmax())
        error, limit = beyond.flatten()[place].item(), budget.flatten()[place].item()
        if not error / limit <= self.worst[0] / self.worst[2]:
            self.worst = error, own.flatten()[place].item(), limit, site.name


class _Held:
    """Rounds a head's inputs to the integers of a case, however its hidden state is moved.

    A value moved across the border of two integers would count as torch's error, though torch
    follows the graph. The first pass, not moved, finds the integers among those of the case.
    """

    def __init__(self, integers: Sequence[Tensor]) -> None:
        self._integers, self._own = integers, list[Tensor]()
        self._first, self._site = -1, 0

    def begin(self) -> None:
        self._site = 0

    def __call__(self, x: Tensor, scale: Any, least: int, most: int) -> Tensor:
        """Returns integers for the values of a site; see `arithmetic.Shift`."""
        if self._first < 0:
            self._own.append((x / scale).round_().clamp_(least, most))
            return self._own[-1].clone()
        self._site += 1
        return self._integers[self._first + self._site - 1].to(x.dtype, copy=True)

    def find(self) -> None:
        """Finds the integers that are nearest to those of the first pass."""

        def apart(first: int) -> float:
            pairs = zip(self._own, self._integers[first:], strict=False)
            return sum(
                (own - each).abs().sum().item() if own.shape == each.shape else math.inf
                for own, each in pairs
            )

        self._first = min(range(len(self._integers) - len(self._own) + 1), key=apart)


def followed(oracle: Oracle, model: ShownModel, case: Case) -> tuple[Tensors, list[Comparison]]:
    """Compares every tensor of a case as in float32, torch following the graph's integers.

    Returns:
        The tensors of the model, and their comparisons; the first one is of the integers.
    """
    model.calls.clear()
    found = observe(model, case)
    following = Followed(model, oracle.reference)
    with oracle.reference.rounding(following):
        sides = [oracle.observe(oracle.reference, case)]
    if not case.measured and not oracle.config.has_head:  # see `Oracle.compared`
        items = _compared(following, case, nearby(case, sides[0]), found)
        if are_near(items):
            return found, items
    items = _judged(oracle, following, case, sides, found)
    if any(item.fault for item in items):
        with oracle.reference.rounding(following):
            sides += oracle.shaken(partial(oracle.observe, case=case), SHAKES)
        items = _judged(oracle, following, case, sides, found)
    return found, items


def _judged(
    oracle: Oracle, following: Followed, case: Case, sides: Sequence[Tensors], found: Tensors
) -> list[Comparison]:
    """Compares a case with float64, given the tensors of torch in float32."""
    following.worst = NOTHING
    with oracle.exact.rounding(following):
        sides = [oracle.observe(oracle.exact, case), *sides]
    least = 0.0
    if oracle.config.has_head:
        held = _Held([site.integers for site in following.sites.values()])
        with oracle.exact.rounding(held):
            oracle.exact.encoder.head(sides[0]["hidden"], case.mask)
        held.find()
        rounding = partial(oracle.exact.rounding, held)
        moved, least = moved_heads(oracle.exact.encoder, case.mask, *sides, held=rounding)
        sides += moved
    expected = truth(case, *sides, least=least)
    return _compared(following, case, expected, found)


def _compared(following: Followed, case: Case, expected: Truth, found: Tensors) -> list[Comparison]:
    *numbers, where = following.worst
    integers = limited(case.name, f"integers of {where or 'a product'}", case.stage, *numbers)
    return [integers, *compare(case, expected, found, Tolerance.of(FLOAT32.name))]
