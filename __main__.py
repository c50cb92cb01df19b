"""Entry point of the command line, `transferry` and `python -m transferry`."""

from transferry.runtime.stopping import handle_signals, ignore_signals


def main() -> None:
    """Runs a command; nothing else is imported before signals are handled."""
    handle_signals()
    try:
        from transferry.runtime.console.streams import guard_streams

        guard_streams()
        from transferry.cli import main as commands

        commands()
    finally:
        ignore_signals()


if __name__ == "__main__":
    main()
