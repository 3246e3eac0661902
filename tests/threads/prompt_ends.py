"""Both ends of the control plane, as tests like them: what is sent goes at once, what comes is heard rank by rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hvd_async.runtime.interfaces import Gone
from hvd_async.runtime.protocol import Codec, Event
from hvd_async.runtime.transport import ZmqChannel, ZmqHub


class PromptChannel(ZmqChannel):
    """A rank's end, which sends each event at once, and not when it next listens."""

    def send(self, event: Event) -> None:
        super().send(event)
        self.flush()


class PromptHub(ZmqHub):
    """The coordinator's end."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._heard: deque[tuple[int, Event | Gone]] = deque()

    def hear(self, timeout: float | None) -> tuple[int, Event | Gone] | None:
        """``receive``, of one rank each time, where several have sent the same."""
        if not self._heard:
            heard: tuple[Sequence[int], Event | Gone] | None = self.receive(timeout)
            self._heard.extend((rank, heard[1]) for rank in (heard[0] if heard else ()))
        return self._heard.popleft() if self._heard else None
