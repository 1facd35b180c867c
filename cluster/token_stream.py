"""Tokens from replicas to ingresses: one persistent connection per pair, one frame per step.

The replica dials the ingress, proves the secret that came with the request, and then only writes.
Frames are length-prefixed msgpack. A slow ingress loses its requests; it never stalls a step.
"""

import asyncio
import hmac
import logging
import math
import secrets
import struct
import time
from collections.abc import Callable, Sequence

import msgspec

from plait.cluster.request import TokenChunk

logger = logging.getLogger(__name__)
_HEADER = struct.Struct("<Q")
_MAX_HELLO_BYTES = 4096
_MAX_BUFFERED_BYTES = 8 << 20  # of one ingress, before it counts as too slow


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where an ingress takes tokens, and the secret that lets a replica bring them."""

    host: str
    port: int
    secret: str


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a connection."""

    secret: str
    replica: str


_encoder = msgspec.msgpack.Encoder()
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_chunks_decoder = msgspec.msgpack.Decoder(list[TokenChunk])


class TokenReceiver:
    """The ingress's end: sorts chunks by request into queues."""

    def __init__(self) -> None:
        self._secret = secrets.token_urlsafe(32)
        self._queues: dict[str, asyncio.Queue[TokenChunk]] = {}
        self._server: asyncio.Server | None = None
        self._num_connected = 0
        self._last_frame_s = -math.inf

    @property
    def silence_s(self) -> float:
        """Seconds since tokens came from any replica, infinite while none is connected."""
        return time.monotonic() - self._last_frame_s if self._num_connected else math.inf

    async def start(self, host: str) -> Address:
        """Listen on `host`, on a free port."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return Address(host=host, port=port, secret=self._secret)

    def open(self, request_id: str) -> asyncio.Queue[TokenChunk]:
        """The queue of a request's chunks; close it when the request has ended."""
        queue: asyncio.Queue[TokenChunk] = asyncio.Queue()
        self._queues[request_id] = queue
        return queue

    def close(self, request_id: str) -> None:
        self._queues.pop(request_id, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica = "a stranger"
        try:
            hello = _hello_decoder.decode(await _read_frame(reader, limit=_MAX_HELLO_BYTES))
            if not hmac.compare_digest(hello.secret.encode(), self._secret.encode()):
                logger.warning("a connection for tokens came without the secret")
                return
            replica = hello.replica
            self._num_connected += 1
            try:
                while True:
                    self._sort(_chunks_decoder.decode(await _read_frame(reader)))
            finally:
                self._num_connected -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            logger.info("token connection of %s closed", replica)
        except msgspec.DecodeError as exc:
            logger.warning("token connection of %s dropped: %s", replica, exc)
        finally:
            writer.close()

    def _sort(self, chunks: list[TokenChunk]) -> None:
        self._last_frame_s = time.monotonic()
        for chunk in chunks:
            queue = self._queues.get(chunk.request_id)
            if queue is not None:
                queue.put_nowait(chunk)


class TokenSender:
    """The replica's end: one connection per ingress, dialled when its first request comes."""

    def __init__(self, replica: str, *, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called with the id of every request whose ingress is gone or too slow."""
        self._replica = replica
        self._on_lost = on_lost
        self._links: dict[Address, _Link] = {}
        self._address_of: dict[str, Address] = {}

    async def open(self, request_id: str, address: Address) -> None:
        """Bind a request to its ingress, dialling it if need be.

        Raises:
            ConnectionError: the ingress does not answer.
        """
        link = self._links.get(address)
        if link is None or link.is_closing:
            link = self._links[address] = _Link(address)
        await link.dial(self._replica)
        self._address_of[request_id] = address

    def close(self, request_id: str) -> None:
        self._address_of.pop(request_id, None)

    def send(self, chunks: Sequence[TokenChunk]) -> None:
        """Write one frame per ingress that has a request among `chunks`."""
        by_address: dict[Address, list[TokenChunk]] = {}
        for chunk in chunks:
            address = self._address_of.get(chunk.request_id)
            if address is not None:
                by_address.setdefault(address, []).append(chunk)
        for address, frame in by_address.items():
            link = self._links.get(address)
            if link is None or not link.write(_encoder.encode(frame)):
                self._lose(address)

    def _lose(self, address: Address) -> None:
        logger.warning("ingress %s:%s takes no tokens any more", address.host, address.port)
        self._links.pop(address, None)
        for request_id in [r for r, a in self._address_of.items() if a == address]:
            del self._address_of[request_id]
            self._on_lost(request_id)


class _Link:
    """A connection to one ingress."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._writer: asyncio.StreamWriter | None = None
        self._dialling = asyncio.Lock()

    @property
    def is_closing(self) -> bool:
        return self._writer is not None and self._writer.is_closing()

    async def dial(self, replica: str) -> None:
        async with self._dialling:
            if self._writer is None:
                address = self._address
                _, self._writer = await asyncio.open_connection(address.host, address.port)
                hello = Hello(secret=address.secret, replica=replica)
                self.write(_encoder.encode(hello))

    def write(self, data: bytes) -> bool:
        """Queue a frame; False if the other end is gone or takes in too little."""
        writer = self._writer
        if writer is None or writer.is_closing():
            return False
        if writer.transport.get_write_buffer_size() > _MAX_BUFFERED_BYTES:
            writer.transport.abort()
            return False
        writer.write(_HEADER.pack(len(data)) + data)
        return True


async def _read_frame(reader: asyncio.StreamReader, *, limit: int | None = None) -> bytes:
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if limit is not None and size > limit:
        raise msgspec.DecodeError(f"a first frame of {size} bytes")
    return await reader.readexactly(size)
