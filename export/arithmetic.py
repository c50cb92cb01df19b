"""torch in another precision, and with the rounding of an integer variant, without a copy.

A model of a billion parameters takes 4 GB in float32. A float64 copy would take 8 more, and every
side of a comparison one of its own. Here all sides of a large model share the trained weights, and
each product converts its weight as it is computed. Of a small one, whose functions cost more than
their products, each precision has a copy.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from transferry.build_model.model.transformer import Transformer

# A model is small that takes no more than this many bytes in float64: of 134 million parameters.
KEPT = 1 << 30
FLOAT64 = 8  # bytes
# By how many steps values are moved before they are rounded, or a function of the
# values, their scale, and the least and the largest integer, that returns integers.
Shift = float | Callable[[Tensor, Any, int, int], Tensor]
ULP = 2.0**-23  # the largest relative distance of two neighbours in float32


@dataclass(frozen=True)
class Rounded:
    """A weight stored in integers, and the rounding of its product's input.

    Attributes:
        integers: `[outputs, inputs]`, or in blocks `[outputs, blocks, inputs of a block]`.
        scales: Their scales, of a shape that can be broadcast.
        inputs: The number of inputs; blocks may be longer together.
        round_input: Rounds the input of a product `[..., inputs]`; values are moved first by that
            many steps, which shows what lies at the border of two integers.
        exact: Weights of the inputs `wide`, whose integers are 0 `[outputs, wide]` float32.
        offset: Number that kernels add to the integers of blocks, and subtract after summing.
    """

    integers: Tensor
    scales: Tensor
    inputs: int
    round_input: Callable[[Tensor, Any], Tensor]
    exact: Tensor | None = None
    wide: Sequence[int] = ()
    offset: int = 0

    def offset_sums(self, x: Tensor) -> Tensor:
        """Returns the sizes of the sums that kernels subtract `[..., outputs]`."""
        sizes = self.integers.shape[1:]
        padded = F.pad(x, (0, math.prod(sizes) - x.shape[-1])).reshape(*x.shape[:-1], *sizes)
        return F.linear(padded.sum(dim=-1).abs_(), self.scales[..., 0].abs() * self.offset)

    def weight(self, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
        """Returns the weight `[outputs, inputs]`, or some of its rows `[*rows, inputs]`."""
        integers, scales = self.integers, self.scales
        if rows is not None:
            integers, scales = integers[rows], scales[rows]
        values = integers.to(dtype).mul_(scales.to(dtype))  # of an LM head 500 MB, not twice
        lead = values.shape[: 1 if rows is None else rows.dim()]
        values = values.reshape(*lead, -1)[..., : self.inputs]
        if self.exact is not None and rows is None:
            values[:, list(self.wide)] = self.exact.to(dtype)
        return values


class Moved:
    """While entered, moves values by a `Shift` before they are rounded."""

    current: ClassVar[Any] = 0.0  # shift of the side that computes

    def __init__(self, shift: Shift) -> None:
        self.shift: Any = shift

    def __enter__(self) -> Self:
        Moved.current = self.shift
        if callable(self.shift):
            self.shift.begin()
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Weight(Tensor):
    """A weight of a copy, whose product rounds its input."""

    rounded: Rounded

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Computes a function of torch; its result is no such weight."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and isinstance(args[1], _Weight):
                x = args[1].rounded.round_input(args[0], Moved.current)
                args = (x, *args[1:])
            elif func is F.embedding and isinstance(args[1], _Weight):
                return args[1].rounded.weight(args[1].dtype, args[0])
            return func(*args, **(kwargs or {}))


def small(model: Transformer) -> bool:
    """Whether each precision of a model has a copy."""
    return FLOAT64 * sum(each.numel() for each in model.parameters()) <= KEPT


def copied(
    model: Transformer, dtype: torch.dtype, rounded: Mapping[str, Rounded] | None = None
) -> Transformer:
    """Returns a copy in another precision, some of whose weights, by name, are rounded."""
    found = copy.deepcopy(model)
    named = dict(found.named_parameters())
    weights = {id(named[name]): each for name, each in (rounded or {}).items()}
    if dtype == torch.float64:
        found.double()
    for module in found.modules():
        for name, parameter in module._parameters.items():
            if (each := weights.get(id(parameter))) is not None:
                weight = each.weight(dtype).as_subclass(_Weight)
                weight.rounded = each
                module._parameters[name] = weight  # type: ignore[assignment]
    return found


class Arithmetic(Moved, TorchFunctionMode):
    """While entered, computes a model of float32 weights in another precision.

    Every tensor in float32 that meets a function of torch is converted; so all results are in the
    precision, if the first ones are: the rows of an embedding.
    """

    def __init__(
        self,
        model: Transformer,
        dtype: torch.dtype,
        rounded: Mapping[str, Rounded] | None = None,
        shift: Shift = 0.0,
    ) -> None:
        """Takes the model, which must live as long, and the rest as `copied` and `Moved` do."""
        TorchFunctionMode.__init__(self)
        Moved.__init__(self, shift)
        self.dtype = dtype
        named = dict(model.named_parameters())
        self._rounded = {id(named[name]): each for name, each in (rounded or {}).items()}
        # Positions are a formula: in float64 they are computed, not widened.
        tables = model.tables() if dtype == torch.float64 else {}
        self._tables = {id(getattr(model, name)): table for name, table in tables.items()}
        self._release = model.release

    def __enter__(self) -> Self:
        Moved.__enter__(self)
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        TorchFunctionMode.__exit__(self, *error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight, *bias = args
            if (found := self._rounded.get(id(weight))) is not None:
                x, weight = found.round_input(x, self.shift), found.weight(self.dtype)
            bias = [each if each is None else each.to(self.dtype) for each in bias]
            output = func(x, weight.to(self.dtype), *bias, **kwargs)
            self._release()
            return output
        if func is F.embedding and (found := self._rounded.get(id(args[1]))) is not None:
            return found.weight(self.dtype, args[0])
        if func in (F.embedding, Tensor.__getitem__):  # of a large table few rows
            args = tuple(self._tables.get(id(each), each) for each in args)
            return self._converted(func(*args, **kwargs))
        if self.dtype == torch.float32 or func.__name__ == "__get__":  # such as x.shape
            return func(*args, **kwargs)
        if func is Tensor.new_zeros:  # of a whole embedding only the type is read
            return func(*args, **{"dtype": self.dtype, **kwargs})
        if kwargs:
            kwargs = {name: self._converted(value) for name, value in kwargs.items()}
        return func(*map(self._converted, args), **kwargs)

    def _converted(self, value: Any) -> Any:
        """Returns an argument with its tensors converted; lists and tuples are of one level."""
        if isinstance(value, Tensor):
            if value.dtype != torch.float32:
                return value
            table = self._tables.get(id(value))
            return value.to(self.dtype) if table is None else table
        # pytree.tree_map would do, at a third of the time of verifying a small int8 variant.
        if type(value) in (list, tuple):
            return type(value)(map(self._converted, value))
        return value


class Shaken(TorchFunctionMode):
    """While entered, moves inputs of products and LayerNorm by up to one last unit.

    A mean hangs on its largest input, a sum on a large bias, which may be added first or last:
    torch may by chance avoid their rounding.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (F.layer_norm, Tensor.matmul):
            x, *others = args
            return func(x + x * moves(x, self._generator, ULP), *others, **(kwargs or {}))
        if func is F.linear:
            x, weight, *others = args
            rounded = weight.rounded if isinstance(weight, _Weight) else None
            if rounded is not None:  # rounding after a move would undo it
                x, weight = rounded.round_input(x, Moved.current), weight.as_subclass(Tensor)
            output = func(x + x * moves(x, self._generator, ULP), weight, *others)
            for bias in others:
                if bias is not None:
                    output += bias * moves(output, self._generator, ULP)
            if rounded is not None and rounded.offset:
                output += rounded.offset_sums(x) * moves(output, self._generator, ULP)
            return output
        return func(*args, **(kwargs or {}))


def moves(like: Tensor, generator: torch.Generator, most: float = 1.0) -> Tensor:
    """Returns random numbers of up to `most`, either sign, of a tensor's shape."""
    return torch.rand(like.shape, generator=generator).mul_(2 * most).sub_(most).to(like.device)


def round_to(x: Tensor, scale: Tensor | float, shift: Shift, least: int, most: int) -> Tensor:
    """Rounds to multiples of a scale, ties to even, between `least` and `most` of them."""
    if callable(shift):
        return shift(x, scale, least, most).mul_(scale)
    # In place: each copy of a long case is as large as its activations.
    return (x / scale).add_(shift).round_().clamp_(least, most).mul_(scale)


def round_blocks(x: Tensor, shift: Shift, block: int, most: int = 127) -> Tensor:
    """Rounds each block of the last dimension to `most` steps of its largest value.

    Args:
        x: `[..., inputs]`; the last block may be shorter.
        shift: As for `round_to`.
        block: Length of a block.
        most: Steps of the largest absolute value.
    """
    blocks = math.ceil(x.shape[-1] / block)
    padded = F.pad(x, (0, blocks * block - x.shape[-1]))
    padded = padded.reshape(*x.shape[:-1], blocks, block)
    scale = padded.abs().amax(dim=-1, keepdim=True) / most
    scale = torch.where(scale > 0, scale, 1.0)
    return round_to(padded, scale, shift, -most, most).flatten(-2)[..., : x.shape[-1]]
