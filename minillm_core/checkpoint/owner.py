"""Who trains in a folder: a process told apart from a later one with the same number."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from minillm_core.text import plain

__all__ = ["Owner"]

TICK = 0.02  # seconds; the clock that the start of a process is told by ticks 100 times a second


class Owner(BaseModel):
    """A process on a host, as lock.json holds it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    host: str = Field(max_length=300)
    pid: int = Field(gt=0, lt=1 << 31)
    started: float = Field(allow_inf_nan=False)  # seconds since 1970
    uptime: float = Field(allow_inf_nan=False)  # the same in seconds since the host was started
    since: str = Field(max_length=40)  # when it took the folder

    @classmethod
    def this(cls) -> Owner:
        """This process, now."""
        pid = os.getpid()
        started, uptime = _start(pid)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(host=socket.gethostname(), pid=pid, started=started, uptime=uptime, since=since)

    @classmethod
    def parse(cls, data: bytes) -> Owner | None:
        """The owner that lock.json names; None if it names none."""
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            return None

    def encode(self) -> bytes:
        """What lock.json holds."""
        return self.model_dump_json(indent=1).encode() + b"\n"

    @property
    def here(self) -> bool:
        """It is, or was, a process of this host."""
        return self.host == socket.gethostname()

    def alive(self) -> bool:
        """Whether the process still runs; asked on its own host.

        Setting the system's clock moves one of the two starts, which one depends on the system; a
        process that took over the number agrees with neither.
        """
        import psutil

        try:
            if psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE:
                return False
            started, uptime = _start(self.pid)
        except psutil.NoSuchProcess:
            return False
        except psutil.Error:
            return True  # it is there, and nobody may look at it
        return abs(started - self.started) < TICK or abs(uptime - self.uptime) < TICK

    def __str__(self) -> str:
        return f"process {self.pid} on {plain(self.host, 80)} since {plain(self.since)}"


def _start(pid: int) -> tuple[float, float]:
    import psutil

    started = psutil.Process(pid).create_time()
    return started, started - psutil.boot_time()
