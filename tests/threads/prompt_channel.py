"""A rank's connection to the coordinator that sends each event at once, and not when it next listens."""

from __future__ import annotations

from hvd_async.runtime.messages import Event
from hvd_async.runtime.transport import ZmqChannel


class PromptChannel(ZmqChannel):
    """Sends at once."""

    def send(self, event: Event) -> None:
        super().send(event)
        self.flush()
