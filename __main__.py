"""Entry point of the command line, `transferry` and `python -m transferry`."""

import os

from transferry.runtime.stopping import handle_signals, ignore_signals


def main() -> None:
    """Runs a command; nothing else is imported before signals are handled."""
    handle_signals()
    # Threads of torch spin for milliseconds while they wait for each other. Where other programs
    # run, that takes the core from the very thread that they wait for.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        from transferry.runtime.console.streams import guard_streams

        guard_streams()
        from transferry.cli import main as commands

        commands()
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()
