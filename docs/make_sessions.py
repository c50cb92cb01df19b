"""Runs the console blocks of the pages and writes what they print: `make sessions`.

A block of ```console has commands after "$ " and their output. All pages share one folder, in the
order below: the tutorial makes the run and the bundle that the others use.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / "tutorial.md", ROOT / "README.md", *sorted(ROOT.glob("docs/how-to/*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CURVES = ROOT / "docs" / "images" / "tutorial-curves.png"
SECONDS = 600  # a training of two minutes, on a busy machine


def sessions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each command of a page, and the lines that it printed."""
    for block in BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = part.splitlines()
            yield command, output


@functools.cache  # README.md has some commands of the tutorial
def run(command: str, folder: Path) -> list[str]:
    """Runs a shell command in a folder; returns the lines that it prints."""
    commands = folder / ".commands"
    if not commands.exists():
        commands.mkdir()
        for name, module in (("transferry", "-m transferry "), ("python", "")):
            script = commands / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
            script.chmod(0o755)
    settings = {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return [line.rstrip() for line in done.stdout.splitlines()]


def recorded(text: str, answer: Callable[[str], list[str]]) -> str:
    """Returns a page with what `answer` gives for each command."""

    def block(match: re.Match[str]) -> str:
        lines = []
        for command, _ in sessions(match[0]):
            lines += [f"$ {command}", *answer(command)]
        return "```console\n" + "".join(f"{line}\n" for line in lines) + "```"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            page.write_text(recorded(text, lambda line: run(line, Path(name))), encoding="utf-8")
        CURVES.write_bytes((Path(name) / "runs" / "demo" / "curves.png").read_bytes())
