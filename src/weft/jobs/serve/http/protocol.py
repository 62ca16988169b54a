"""Connections that say nothing, or for ever: uvicorn waits for a request's head as long as a client likes."""

from __future__ import annotations

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weft.comm.deadline import SERVE_HEAD

HEAD_BYTES = 1 << 16


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, which closes a connection whose next head does not come in time, or does not end.

    Between requests uvicorn's own limit holds; bodies are read by the routes, within limits of their own.
    """

    _head: TimerHandle | None = None
    _bytes = 0

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None:  # still no end of it
            self._bytes += len(data)
            if self._bytes > HEAD_BYTES:
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin()

    def on_headers_complete(self) -> Any:
        self._end()
        return super().on_headers_complete()

    def _begin(self) -> None:
        self._end()
        self._bytes = 0
        self._head = self.loop.call_later(SERVE_HEAD.seconds, self._late)

    def _late(self) -> None:
        self.transport.close()

    def _end(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
