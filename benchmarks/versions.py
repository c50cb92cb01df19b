"""How fast is one version of onnxruntime beside another, with the same bundle and text?

    pip install --no-deps --target other onnxruntime==1.32.0
    python benchmarks/versions.py BUNDLE TEXT other [--variant cpu-int8] [--beam 4] [--rows 500]
        [--batch-rows 8] [--rounds 9]

On the CPU, each version in a process of its own, in interleaved rounds. The last line is JSON;
`ratio_of_times` is the installed version's median time over the other's, so above 1 the other is
faster, and `same` counts the rows with the same answer or vector, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bundles import SETTINGS, add_options, opened
from environment import environment
from rounds import compare, interleaved
from sentences import read_sentences


class Version:
    """A process that answers the texts on request."""

    def __init__(self, folder: Path | None) -> None:
        """Opens the bundle, with the onnxruntime of a folder or, by default, the installed one."""
        environ = os.environ if folder is None else os.environ | {"PYTHONPATH": str(folder)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--answer"],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.environment = self._ask()
        self.rows = self.run()  # also warms up

    def _ask(self) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def run(self) -> list[tuple[int, str]]:
        """Returns each row's tokens and a hash of its answer."""
        return [tuple(row) for row in self._ask()]

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def answer(arguments: argparse.Namespace) -> None:
    """Is the process: prints its environment, and then the rows for each line of stdin."""
    work = opened(arguments.bundle, read_sentences(arguments.text, arguments.rows), arguments)
    sys.stdin.readline()
    print(json.dumps(environment()), flush=True)
    for _ in sys.stdin:
        rows = [(tokens, hashlib.sha256(repr(row).encode()).hexdigest()) for tokens, row in work()]
        print(json.dumps(rows), flush=True)


def measure(arguments: argparse.Namespace) -> None:
    """Measures and prints."""
    sides = {
        "installed": Version(None),
        "other": Version(arguments.other.resolve()),
    }
    times = interleaved({name: side.run for name, side in sides.items()}, arguments.rounds)
    rows = {name: side.rows for name, side in sides.items()}
    tokens = {name: sum(count for count, _ in found) for name, found in rows.items()}
    found = compare(times, tokens, len(rows["installed"]), "installed")
    found["same"] = sum(
        one == two for one, two in zip(rows["installed"], rows["other"], strict=True)
    )
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    found |= {"rows": len(rows["installed"]), "rounds": arguments.rounds, **settings}
    found["environment"] = {name: side.environment for name, side in sides.items()}
    for side in sides.values():
        side.close()
    print(json.dumps(found))


def main() -> None:
    """Reads the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle")
    parser.add_argument("text", type=Path)
    parser.add_argument("other", type=Path, metavar="FOLDER")
    add_options(parser)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    (answer if arguments.answer else measure)(arguments)


if __name__ == "__main__":
    main()
