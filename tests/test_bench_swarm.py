"""What `corolla bench swarm` is made of."""

import socket
import time
from threading import Thread

from corolla.bench.delay import delayed
from corolla.bench.swarm import DistanceResult, SessionsResult, SwarmReport, table


def echo(listener: socket.socket) -> None:
    """Sends one connection back what it sends."""
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(1 << 16):
            connection.sendall(data)


def test_both_ways_are_late_and_nothing_is_lost() -> None:
    content = bytes(range(256)) * 4000
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Thread(target=echo, args=(listener,), daemon=True).start()
        with delayed(f"127.0.0.1:{listener.getsockname()[1]}", 0.05) as address:
            host, port = address.split(":")
            with socket.create_connection((host, int(port))) as client:
                begun = time.monotonic()
                client.sendall(content)
                client.shutdown(socket.SHUT_WR)
                received = b"".join(iter(lambda: client.recv(1 << 16), b""))
                taken = time.monotonic() - begun
    assert received == content
    assert 0.1 <= taken < 2.0, "each chunk is late by as much, whatever is under way before it"


def test_time_of_a_token_is_compared_with_the_trips_of_the_shortest_way() -> None:
    far = DistanceResult(delay=0.05, token=0.176, near=0.01, one_way_trips=3.0)
    assert round(far.ratio, 6) == 1.1
    assert table(SwarmReport([SessionsResult(1, 10.0, 1.0), SessionsResult(8, 50.0, 5.0)], far)).splitlines() == [
        "| sessions | tok/s | ratio to one |",
        "| --- | --- | --- |",
        "| 1 | 10.0 | 1.00 |",
        "| 8 | 50.0 | 5.00 |",
        "",
        "| one way, ms | ms per token | ms without distance | one-way trips per token | ratio |",
        "| --- | --- | --- | --- | --- |",
        "| 50 | 176.0 | 10.0 | 3.00 | 1.10 |",
    ]
