"""A service in its own process, for tests, notebooks and toy scale. It can be killed and started again."""

from __future__ import annotations

import atexit
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from unirl.config.errors import RewardUnreachableError

SERVING = b"serving "


class RunningService:
    """Runs `python -m reward_service` with a config in a `with` block. The service ends when this process ends."""

    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self._config = {**config, "server": {"port": 0, **config.get("server", {})}}
        self._environment = os.environ | dict(environment or {})
        self._folder = tempfile.TemporaryDirectory(prefix="reward-service-")
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def start(self, within_s: float = 120.0) -> RunningService:
        """Waits until every scorer is loaded. A second start uses the same port.

        Raises:
            RewardError: the service ended or took too long; the message contains the end of its log.
        """
        file = Path(self._folder.name, "service.yaml")
        file.write_text(yaml.safe_dump(self._config))
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "reward_service", str(file), "--with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
            )
        atexit.register(self.kill)
        self.url = self._await_url(within_s)
        self._config["server"]["port"] = int(self.url.rpartition(":")[2])
        return self

    def _await_url(self, within_s: float) -> str:
        assert self._process is not None and self._process.stdout is not None
        end = time.monotonic() + within_s
        line = b""
        while not line.startswith(SERVING) and (left := end - time.monotonic()) > 0:
            if select.select([self._process.stdout], [], [], left)[0]:
                line = self._process.stdout.readline(10_000)
                if not line:
                    break
        if not line.startswith(SERVING):
            self.kill()
            raise RewardUnreachableError(
                f"the reward service did not start: {self.log.read_text(errors='replace')[-2000:]}"
            )
        return line.split()[-1].decode()

    @property
    def log(self) -> Path:
        """The file with its standard error output."""
        return Path(self._folder.name, "log")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Ends the service by SIGKILL, as when a machine fails."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """Ends the service by SIGTERM. Returns its exit status."""
        return self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> int:
        atexit.unregister(self.kill)
        if self._process is None:
            return 0
        self._process.send_signal(how)
        status = self._process.wait(30)
        assert self._process.stdout is not None and self._process.stdin is not None
        self._process.stdout.close()
        self._process.stdin.close()
        self._process = None
        return status

    def __enter__(self) -> RunningService:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()
