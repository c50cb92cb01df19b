"""A list as what a search takes its sentences from."""

from transferry.runtime.outputs import Request


class Listed:
    """A supply of requests, in their order."""

    def __init__(self, requests: list[Request[int]]) -> None:
        self.requests = requests

    def take(self, most: int) -> list[Request[int]]:
        taken, self.requests = self.requests[:most], self.requests[most:]
        return taken
