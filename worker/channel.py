"""One length-prefixed framing over stream sockets, unix locally and TCP across nodes."""

import socket
import struct

from plait.worker.errors import RankError

_HEADER = struct.Struct("<Q")


class ChannelClosed(RankError):
    """The other end of a channel is gone."""


class Channel:
    """A connected stream socket that carries whole messages of any size."""

    def __init__(self, sock: socket.socket, *, peer: str) -> None:
        self._sock = sock
        self.peer = peer
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes, *, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the peer is gone.
            RankError: the peer did not take all of it within `timeout_s`.
        """
        self._set_timeout(timeout_s)
        try:
            self._sock.sendall(_HEADER.pack(len(data)) + data)
        except TimeoutError as exc:
            raise RankError(f"{self.peer} took no message within {timeout_s:g} s") from exc
        except OSError as exc:
            raise ChannelClosed(f"{self.peer} is gone: {exc}") from exc
        finally:
            self._set_timeout(None)

    def receive(self, *, timeout_s: float | None = None) -> bytes:
        """Wait for one message.

        Raises:
            ChannelClosed: the peer is gone.
            RankError: nothing came within `timeout_s`.
        """
        self._set_timeout(timeout_s)
        try:
            (size,) = _HEADER.unpack(self._read(_HEADER.size))
            return bytes(self._read(size))
        except TimeoutError as exc:
            raise RankError(f"{self.peer} did not answer within {timeout_s:g} s") from exc
        except OSError as exc:
            raise ChannelClosed(f"{self.peer} is gone: {exc}") from exc
        finally:
            self._set_timeout(None)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def _set_timeout(self, timeout_s: float | None) -> None:
        if self._sock.fileno() >= 0:
            self._sock.settimeout(timeout_s)

    def _read(self, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)
        done = 0
        while done < size:
            count = self._sock.recv_into(view[done:])
            if count == 0:
                raise ChannelClosed(f"{self.peer} closed the connection")
            done += count
        return buffer
