"""Runs the console blocks of the pages and writes their output: `make sessions`.

A block of ```console has commands after "$ " and their output. All pages share one folder, in the
order below: the tutorial makes the run and the bundle that the others use. Where Chromium is
installed, the pictures of a report that passed and of one that failed are taken anew too.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / "tutorial.md", *sorted(ROOT.glob("docs/how-to/*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
IMAGES = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 600  # a training of two minutes, on a busy machine


def sessions(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each command of a page, and the lines that it printed."""
    for block in BLOCK.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = part.splitlines()
            yield command, output


@functools.cache  # guides repeat some commands
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
    """Returns a page with the answer to each command."""

    def block(match: re.Match[str]) -> str:
        lines = []
        for command, _ in sessions(match[0]):
            lines += [f"$ {command}", *answer(command)]
        return "```console\n" + "".join(f"{line}\n" for line in lines) + "```"

    return BLOCK.sub(block, text)


def plant_fault(bundle: Path, copy: Path) -> None:
    """Copies a bundle with a weight of its last layer a quarter larger."""
    from transferry.export.subject.bundle_copy import BundleCopy
    from transferry.runtime.bundle.bundle import Bundle

    honest = Bundle.load(bundle)
    edited = BundleCopy(honest, honest.variant("portable"), copy)
    edited.edit("decoder.1.feed_forward.inner.weight", lambda weight: weight * 1.25)
    edited.seal()


def take_picture(browser: str, page: Path, height: int, picture: Path) -> None:
    """Takes a picture of the upper part of a page, 1,000 pixels wide."""
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
        *("--disable-background-networking", "--host-resolver-rules=MAP * 0.0.0.0"),
        *(f"--user-data-dir={page.parent / '.browser'}", "--blink-settings=preferredColorScheme=1"),
        *(f"--window-size=1000,{height}", f"--screenshot={picture}"),
    ]
    subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True, timeout=60)
    from PIL import Image  # of matplotlib

    Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)


def main() -> None:
    """Records all pages and takes the pictures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for page in PAGES:
            text = page.read_text(encoding="utf-8")
            page.write_text(recorded(text, lambda line: run(line, folder)), encoding="utf-8")
        shutil.copyfile(folder / "runs" / "demo" / "curves.png", IMAGES / "tutorial-curves.png")
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            print("no Chromium: docs/images/report.png and report-failed.png stay as they are")
            return
        plant_fault(folder / "bundles" / "demo", folder / "bundles" / "planted")
        verify = "transferry verify bundles/planted --variant portable --checkpoint runs/demo"
        run(f"{verify} --text test100.en --report failed.html --quiet", folder)
        take_picture(browser, folder / "parity.html", 1450, IMAGES / "report.png")
        take_picture(browser, folder / "failed.html", 1000, IMAGES / "report-failed.png")


if __name__ == "__main__":
    main()
