"""The simpler simple recurrent unit (SSRU) in place of a decoder's self-attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transferry.build_model.model.shape import TransformerConfig


class CellState(NamedTuple):
    """State that an SSRU carries from one position to the next, of fixed size.

    Attributes:
        cell: c_t of the last position, [batch, 1, 1, d_model]; of rank 4 as keys and values are.
    """

    cell: Tensor

    def continued(self, forget: Tensor, given: Tensor, longest: int) -> tuple[Tensor, CellState]:
        """Computes c_t [batch, length, d_model] from this state on, and the last; see `scanned`."""
        kept, cells = scanned(forget, given, longest)
        cells = cells + kept * self.cell[:, 0]
        return cells, CellState(cells[:, -1:, None])


class SSRU(nn.Module):
    """Kim et al. (2019), "From Research to Production and Back", section 3.2.

    f_t = sigmoid(W_f x_t + b_f), c_t = f_t * c_(t-1) + (1 - f_t) * W x_t, o_t = relu(c_t).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.max_positions = config.max_positions
        self.forget = nn.Linear(config.d_model, config.d_model)
        self.input = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, past: CellState) -> tuple[Tensor, CellState]:
        """Reads new positions x [batch, length, d_model]; returns o, and the state after them."""
        # In the state's precision: under autocast the products have fewer bits than a sum needs.
        forget = torch.sigmoid(self.forget(x)).to(past.cell.dtype)
        given = (1 - forget) * self.input(x)
        cells, present = past.continued(forget, given, self.max_positions)
        return F.relu(cells), present


def scanned(forget: Tensor, given: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Solves c_t = forget_t * c_(t-1) + given_t for all t at once, from c_0 = 0.

    Prefix sums by doubling (Hillis and Steele 1986) over the associative composition of such maps
    (Blelloch 1990, section 1.4.1). Only products of factors below 1 and sums occur, so nothing
    overflows or cancels, as quotients of cumulative products in log space do.

    Args:
        forget: [batch, length, width], from 0 to 1.
        given: [batch, length, width]
        longest: Largest length; read where a traced graph leaves the length open.

    Returns:
        The product of forget up to each t, and c_t, [batch, length, width] each.
    """
    length, shift = forget.shape[1], 1
    places = torch.arange(length, device=forget.device)
    while shift < (length if isinstance(length, int) else longest):
        earlier = (places - shift).clamp(min=0)
        there = (places >= shift)[:, None]
        given = torch.where(there, given + forget * given.index_select(1, earlier), given)
        forget = torch.where(there, forget * forget.index_select(1, earlier), forget)
        shift *= 2
    return forget, given
