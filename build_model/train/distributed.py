"""A training process: the only one, or one of several started by torchrun (torch's DDP)."""

import os
import re
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed

from transferry.runtime.errors import ProviderError, require


@dataclass(frozen=True)
class Process:
    """This process's place in the group.

    Attributes:
        rank: 0 to world - 1; only rank 0 validates, writes and prints.
        world: Number of processes.
        device: Device of this process.
    """

    rank: int
    world: int
    device: torch.device

    @classmethod
    def start(cls, device: str) -> Self:
        """Joins the group of torchrun's environment variables, if there is one.

        Raises:
            ProviderError: CUDA is requested and torch cannot use it.
        """
        expected = "cpu, cuda, cuda:N or auto"
        require(bool(re.fullmatch(r"cpu|auto|cuda(:\d{1,3})?", device)), "device", expected, device)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ProviderError(
                f"--device {device} needs a CUDA device that torch can use, and torch "
                f"{torch.__version__} finds none; check nvidia-smi, or use --device cpu"
            )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls(0, 1, torch.device(device))
        place = torch.device(device)
        if place.type == "cuda":
            place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(place)
        torch.distributed.init_process_group("nccl" if place.type == "cuda" else "gloo")
        return cls(int(os.environ["RANK"]), world, place)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process, so that all leave the loop at one step."""
        if self.world == 1:
            return flag
        votes = torch.tensor(int(flag), device=self.device)
        torch.distributed.all_reduce(votes)
        return bool(votes.item())

    def wait(self) -> None:
        """Waits for all processes."""
        if self.world > 1:
            torch.distributed.barrier()

    def stop(self) -> None:
        """Leaves the group."""
        if self.world > 1:
            torch.distributed.destroy_process_group()
