"""An encoder alone, in torch: what the graph of an encoder-only bundle is held against."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transferry.build_model.transformer import Transformer


class TorchEncoder:
    """Runs the model in its own precision: float32 as trained, float64 as the oracle."""

    def __init__(self, model: Transformer) -> None:
        self.model = model.eval()

    @torch.inference_mode()
    def encode(
        self, source: NDArray[np.int64], mask: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.floating[Any]]]:
        """Returns "hidden" [rows, source, d_model] and "logits" [rows, source, vocabulary]."""
        device = self.model.embedding.weight.device
        tokens, mask_tensor = torch.from_numpy(source).to(device), torch.from_numpy(mask).to(device)
        hidden = self.model.encode(tokens, mask_tensor)
        outputs = {"hidden": hidden, "logits": self.model.logits(hidden)}
        return {name: tensor.cpu().numpy() for name, tensor in outputs.items()}
