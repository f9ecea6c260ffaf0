"""The first node of a distributed hash table, on loopback, as the command `hivemind-dht` starts it."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hivemind.dht import DHTNode

from etcd_cluster import free_port


class DhtTable:
    """It keeps its address when it is killed, but no records."""

    ttl = 2.0
    slack = 1.0

    def __init__(self, folder: Path) -> None:
        self._identity = str(folder / "identity")
        self._listen = f"/ip4/127.0.0.1/tcp/{free_port()}"
        self._loop = asyncio.new_event_loop()
        self._node: Any = None
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.start()
        self.url = f"dht://{self._listen}/p2p/{self._node.peer_id}"

    def start(self) -> None:
        self._node = self._run(DHTNode.create(host_maddrs=[self._listen], identity_path=self._identity))

    def kill(self) -> None:
        if self._node is not None:
            self._run(self._node.shutdown())
            self._node = None

    def forget(self) -> None:
        """Loses all records."""
        self.kill()
        self.start()

    def close(self) -> None:
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(timeout=20)
