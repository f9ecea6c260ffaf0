"""A node of hivemind's distributed hash table, in an event loop of its own: it may hang or die, its callers may not."""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from corolla.errors import EnvironmentProblemError
from corolla.peers.registry import RegistryAwayError

CALL_SECONDS = 10.0
"""How long a call may take, start of the node included."""
PEER_SECONDS = 2.0
"""How long another node may take to answer."""

T = TypeVar("T")


class DhtNode:
    """A client of the `peers`, or, with an address to `listen` at, a full member of the table.

    It is started by the first call. All calls raise RegistryAwayError when no other node answers.
    """

    def __init__(self, url: str, peers: Sequence[str], listen: str | None) -> None:
        """EnvironmentProblemError without hivemind."""
        try:
            from hivemind import dht, p2p
            from hivemind.dht.crypto import RSASignatureValidator
            from hivemind.utils.crypto import RSAPrivateKey
        except ImportError as error:
            raise EnvironmentProblemError(
                f"registry {url}: needs hivemind ({error}); install it with: pip install 'corolla[dht]'"
            ) from error
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        self._dht, self._p2p_module = dht, p2p
        self._url = url
        self._peers = peers
        self._listen = listen
        self._validator = RSASignatureValidator(RSAPrivateKey())
        self._p2p: Any = None
        self._node: Any = None
        self._loop = asyncio.new_event_loop()
        self._starting = asyncio.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dht", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> str:
        """What a subkey must contain to be changed by nobody else."""
        return str(self._validator.local_public_key.decode())

    def get(self, key: str) -> dict[str, str]:
        """The values of the subkeys that have not expired."""

        async def get() -> dict[str, str]:
            node = await self._joined()
            found = await node.get(key, latest=True)
            await self._check_joined()
            return {} if found is None else {subkey: entry.value for subkey, entry in found.value.items()}

        return self._run(get())

    def store(self, entries: Sequence[tuple[str, str, str]], expiration: float) -> None:
        """Stores (key, subkey, value)s until then."""

        async def store() -> None:
            node = await self._joined()
            keys, subkeys, values = zip(*entries, strict=True)
            stored = await node.store_many(
                list(keys), list(values), expiration, subkeys=list(subkeys), exclude_self=self._listen is None
            )
            await self._check_joined()
            if not all(stored.values()):
                await self._leave()
                raise RegistryAwayError(self._url, "no node took the record")

        self._run(store())

    def close(self) -> None:
        """Leaves the table; for good."""
        if self._loop.is_closed():
            return
        with suppress(RegistryAwayError):
            self._run(self._leave())
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(call, CALL_SECONDS), self._loop)
        try:
            return future.result()
        except TimeoutError as error:
            asyncio.run_coroutine_threadsafe(self._leave(), self._loop)
            raise RegistryAwayError(self._url, f"no answer within {CALL_SECONDS:g} s") from error

    async def _joined(self) -> Any:
        """The node, which knows others."""
        async with self._starting:
            if self._node is None:
                await self._start()
        return self._node

    async def _start(self) -> None:
        listening = {"host_maddrs": [self._listen]} if self._listen else {"no_listen": True, "dht_mode": "client"}
        try:
            self._p2p = await self._p2p_module.P2P.create(
                initial_peers=self._peers, nat_port_map=False, use_relay=False, **listening
            )
            self._node = await self._dht.DHTNode.create(
                self._p2p,
                initial_peers=self._peers,
                client_mode=self._listen is None,
                record_validator=self._validator,
                wait_timeout=PEER_SECONDS,
                cache_locally=False,
                cache_on_store=False,
                cache_nearest=0,
                blacklist_time=0,
            )
        except Exception as error:  # whatever hivemind and its daemon come up with
            await self._leave()
            raise RegistryAwayError(self._url, error) from error

    async def _check_joined(self) -> None:
        """The next call starts anew without others to ask; libp2p itself would not try again for long."""
        await asyncio.sleep(0)  # hivemind forgets those that did not answer in tasks of their own
        if not self._node.protocol.routing_table.uid_to_peer_id:
            await self._leave()
            raise RegistryAwayError(self._url, "no node answers")

    async def _leave(self) -> None:
        node, p2p, self._node, self._p2p = self._node, self._p2p, None, None
        if node is not None:
            await node.shutdown()
        if p2p is not None:
            await p2p.shutdown()


async def _cancel_all() -> None:
    """What hivemind has left running."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
