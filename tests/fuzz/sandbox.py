"""Runs commands in processes of their own, forked from one that has imported everything.

python sandbox.py    reads a JSON line {"folder", "arguments"} for each command
"""

import json
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

# Reads a run as `export` does, or a reference as `verify` does, which then work for seconds.
LOAD = "load"
# A command that needs more has been made to hang, or to eat memory. Seconds are of the processor,
# and on a slow machine three times those of the imports, which take 4 on a quiet one.
SECONDS = 10
MEMORY = 1 << 30  # bytes, beside what imports take


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code, negative for a signal.
        seconds: Processor time.
        limit: The most that passes.
        memory: Bytes that it had beside the imports, at the most.
        stderr: What it said.
    """

    code: int
    seconds: float
    limit: int
    memory: int
    stderr: str


class Sandbox:
    """The process from which commands are forked."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True, encoding="utf-8")

    def run(self, folder: Path, *arguments: str) -> Ended:
        """Runs a command in a folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"folder": str(folder), "arguments": arguments})
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


def serve() -> None:
    """Forks a process for each line of stdin."""
    import onnx
    import onnxruntime
    import tiktoken
    import torch
    import torch._dynamo
    import transformers

    from transferry.build_model.importing.huggingface import importer
    from transferry.export import bundle, verify
    from transferry.runtime.engine import engine
    from transferry.runtime.jobs import job

    # Else each `import` would take a second to import all this anew.
    lazy = (transformers.AutoTokenizer, transformers.BertTokenizer, transformers.MarianTokenizer)
    assert all((onnx, onnxruntime, tiktoken, torch, bundle, verify, engine, job, importer, *lazy))
    imported = resource.getrusage(resource.RUSAGE_SELF)
    limit = max(SECONDS, round(3 * (imported.ru_utime + imported.ru_stime)))
    for line in sys.stdin:
        said = Path(json.loads(line)["folder"], ".stderr")
        child = os.fork()
        if not child:
            command(json.loads(line), said, limit)
        _, status, usage = os.wait4(child, 0)
        ended: dict[str, Any] = {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": usage.ru_utime + usage.ru_stime,
            "limit": limit,
            "memory": max(0, usage.ru_maxrss - imported.ru_maxrss) << 10,
            "stderr": said.read_text(errors="replace"),
        }
        said.unlink()
        print(json.dumps(ended), flush=True)


def command(asked: dict[str, Any], said: Path, limit: int) -> None:
    """Becomes a command."""
    from transferry.__main__ import main
    from transferry.build_model.checkpoint import load_checkpoint, load_samples
    from transferry.runtime.bundle.bundle import Bundle
    from transferry.runtime.errors import TransferryError
    from transferry.runtime.proof.recorded import Reference
    from transferry.runtime.tables import printable

    os.chdir(asked["folder"])
    null = os.open(os.devnull, os.O_RDWR)
    for number, stream in ((0, null), (1, null), (2, os.open(said, os.O_CREAT | os.O_WRONLY))):
        os.dup2(stream, number)
    resource.setrlimit(resource.RLIMIT_CPU, (2 * limit, 2 * limit))
    # A wait takes no processor time.
    signal.alarm(20 * limit)
    sys.argv = ["transferry", *asked["arguments"]]
    code: Any = 70
    try:
        if asked["arguments"][0] == LOAD:
            folder = Path(asked["arguments"][1])
            if folder.name == "bundle":
                opened = Bundle.load(folder)
                Reference.of(opened, opened.variant())
            else:
                load_checkpoint(folder)
                load_samples(folder)
        else:
            main()
        code = 0
    except TransferryError as error:
        print(printable(str(error)), file=sys.stderr)
        code = error.exit_code
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()
