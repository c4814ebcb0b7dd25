"""An engine in a process of its own, which runs only while it is asked something.

Commands and answers are JSON, one a line. Between two commands the process is stopped, so that
threads which spin while they are idle take nothing from the other side.
"""

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Side:
    """One engine. Commands: `open` (an empty cache), `run` (a load), and what else it offers."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # see close
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self.facts = self._answer()
        self._signal(signal.SIGSTOP)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Raises RuntimeError with the end of its log when the process has died."""
        assert self._process.stdin
        self._signal(signal.SIGCONT)
        print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        user, system = fields.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            tail = self._log.read()[-2000:]
            raise RuntimeError(f"{self._process.args!r} ended with {status}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)
