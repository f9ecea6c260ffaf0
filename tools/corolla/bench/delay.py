"""A way to a server on which everything takes longer."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

CHUNK = 1 << 16


@contextmanager
def delayed(address: str, seconds: float) -> Iterator[str]:
    """An address through which a server on this machine is reached; whatever goes there or back is late by `seconds`.

    Like the way over a long line, and unlike a slow one: everything under way travels at the same time.
    """
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="delay", daemon=True)
    thread.start()

    async def serve() -> asyncio.Server:
        return await asyncio.start_server(lambda *streams: _connect(address, seconds, *streams), "127.0.0.1", 0)

    server = asyncio.run_coroutine_threadsafe(serve(), loop).result()
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _connect(address: str, seconds: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    host, _, port = address.rpartition(":")
    their_reader, their_writer = await asyncio.open_connection(host, int(port))
    await asyncio.gather(_carry(reader, their_writer, seconds), _carry(their_reader, writer, seconds))
    for each in (writer, their_writer):
        each.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await reader.read(CHUNK):
            loop.call_later(seconds, writer.write, data)
        await asyncio.sleep(seconds)
        writer.write_eof()
    except OSError:
        writer.close()
