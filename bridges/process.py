"""One side of a benchmark in a process of its own."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from isojax.errors import IsoError

SECONDS = 1800
PATIENCE = 30  # s, for an orderly end
TAIL = 15  # lines of a log
CAUSE = " ERROR "  # in a line by which vLLM's core, a process of its own, says why it ended; its parent says only that


def run(name: str, module: list[Any], log: Path, **environment: str) -> None:
    """`python -m MODULE ARGUMENTS...`, all it says in `log`. Raises IsoError with the log's end where it failed."""
    command = [sys.executable, "-m", *map(str, module)]
    with log.open("wb") as f:
        try:
            done = subprocess.run(command, stdout=f, stderr=f, env=os.environ | environment, timeout=SECONDS)
            code, how = done.returncode, f"ended with code {done.returncode}"
        except subprocess.TimeoutExpired:
            code, how = -1, f"was ended after {SECONDS} s"
    if code:
        raise failed(name, how, log)


def failed(name: str, how: str, log: Path) -> IsoError:
    """What to raise, with the end of the log, and before it what a process behind it gave as the cause."""
    lines = log.read_text(errors="replace").splitlines()
    causes = [line for line in lines[:-TAIL] if CAUSE in line][-TAIL:]
    says = "says:\n" + "\n".join(causes) + "\nand ends" if causes else "ends"
    return IsoError(f"{name} {how}; its log {log} {says}:\n" + "\n".join(lines[-TAIL:]))


class Asked:
    """`python -m MODULE ARGUMENTS... FD`: asked by JSON lines on its standard input, it answers by lines on FD.

    What it says otherwise goes to `log`. Leaving the `with` block ends it, and every process that it has started.
    """

    def __init__(self, name: str, module: list[Any], log: Path, **environment: str):
        self.name, self.log = name, log
        ours, theirs = os.pipe()
        command = [sys.executable, "-m", *map(str, module), str(theirs)]
        with log.open("wb") as f:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=f,
                stderr=f,
                pass_fds=(theirs,),
                env=os.environ | environment,
                start_new_session=True,  # a group of its own: an engine's core is another process, and holds the GPU
            )
        os.close(theirs)
        self._answers, self._ended = ours, False

    def ask(self, *question: Any) -> Any:
        """The answer to one question. Raises: as `answer`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and `answer` says so
        return self.answer()

    def answer(self) -> Any:
        """The next line that it answers. Raises IsoError with the log's end where it ends or takes SECONDS instead."""
        begun, line = time.monotonic(), b""
        while not line.endswith(b"\n"):  # one line a question: nothing of another one follows
            if select.select([self._answers], [], [], min(1.0, SECONDS))[0]:
                if not (part := os.read(self._answers, 1 << 16)):
                    break
                line += part
            elif self._process.poll() is not None:  # what it has started may hold the descriptor open
                break
            elif time.monotonic() - begun > SECONDS:
                self._end(0)
                raise failed(self.name, f"was ended after {SECONDS} s", self.log)
        else:
            return json.loads(line)
        self._end(PATIENCE)
        raise failed(self.name, f"ended with code {self._process.returncode}", self.log)

    def _end(self, patience: float) -> None:
        """Wait so many seconds for its end; then end what is left of its group, once: later its number is another's."""
        if self._ended:
            return
        for after, kind in ((patience, signal.SIGTERM), (PATIENCE, signal.SIGKILL)):
            try:
                self._process.wait(after)
                break
            except subprocess.TimeoutExpired:
                self._signal(kind)
        self._process.wait()
        self._signal(signal.SIGKILL)
        self._ended = True

    def _signal(self, kind: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, kind)
        except ProcessLookupError:
            pass  # all have ended

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()  # nothing more is asked: it ends
        except BrokenPipeError:
            pass
        self._end(PATIENCE)
        os.close(self._answers)
