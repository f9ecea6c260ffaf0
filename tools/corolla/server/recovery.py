"""Bringing a model back whose stub has died.

tritonserver 2.51 never notices that a stub is dead: the model stays READY, requests go to the dead stub and fail
after about 1 s with `Stub process ... is not healthy`. `load` alone does nothing, as the model is loaded. What was
measured with the real server (2 cores, models that import only numpy unless said otherwise):

- `unload` returns within 5 ms, whatever is in flight; the old model object lives on in the background until its last
  request ends. `load` may follow at once and starts a new stub beside it: 0.1 to 0.3 s, 1.1 s with `import torch`
  (4 to 5 s if tritonserver completes configurations, since it then starts every stub twice: hence
  `--disable-auto-complete-config`). Detection adds 0.1 to 0.15 s.
- Between the two, requests for the model fail at once with NOT_FOUND; other models are not held up.
- An ensemble is unloaded with the first of its models and comes back by itself with the `load` of that model, also
  when several of its models are reloaded at the same time. It costs nothing more; it need not be named.
- A request being executed by the dead stub fails 1 to 1.5 s after the death, the batches queued behind it one by one,
  1 s each, recovery or not. So does a request that reached it through an ensemble or BLS.
- Responses that the dead stub still owed (open decoupled streams; requests whose `execute` returned None) never come:
  Triton waits for them for ever, and so do clients without a deadline. Nothing in Triton ends them. Therefore, for a
  decoupled model, the connections of the clients that were there when it died are shut down once it is certain that
  something hangs: they see UNAVAILABLE (HTTP: a truncated answer) about 3 s after the death. BLS calls to a decoupled
  model from another model cannot be ended that way: have them time out.
- The old model object of a stub that died with requests, or was sent one before the unload, is never freed (1 MiB of
  /dev/shm, a zombie process) and makes tritonserver's own shutdown hang until --exit-timeout-secs.
- Several models at once: the calls overlap, Triton loads four at a time (--model-load-thread-count). Seven models were
  back after 0.3 to 0.9 s, the one that needs 2 s to load after 2.3 s.
- With two instances, one dead, the live one answers its share, also what it has begun when the model is unloaded.
- A stub that dies while it loads: the load fails after 1 to 1.5 s with a plain error, at any later time it may be tried
  again, other models load meanwhile.
- The rolling alternative, `load` with a changed configuration (one more parameter), takes as long as unload and load
  together (0.31 to 0.36 s; 1.2 s with torch), sends requests to the dead stub meanwhile, each costing 1 s and one more
  object that is never freed, and leaves a changed configuration behind. So unload and load it is.
"""

import logging
import threading
import time
from collections.abc import Collection
from itertools import chain, repeat

from corolla.errors import CorollaError
from corolla.server.connections import ClientConnections
from corolla.server.processes import zombie_exit
from corolla.server.stubs import Death
from corolla.server.triton_http import TritonHttp, TritonRequestError

_UNLOAD_TIMEOUT_SECONDS = 20.0
_LOAD_PAUSES_SECONDS = (0.2, 1.0, 3.0, 10.0, 30.0)
"""The last one again and again."""
_FREED_WITHIN_SECONDS = 2.5
"""A model object without requests is freed 1 s after the unload, a second instance 1 s later."""

_LOG = logging.getLogger("corolla.server")


class RecoveryFailedError(CorollaError):
    """The model cannot be brought back by reloading it."""


class Recovery:
    """The recovery of one model after one death of its stub: `unload`, then `load` and `end_hanging_streams` at once.

    Any of the steps may raise OSError when tritonserver ends.
    """

    def __init__(self, http: TritonHttp, server_pid: int, ports: Collection[int], death: Death) -> None:
        """Make it as soon as the death is known: it notes whose responses may be lost."""
        self._http = http
        self._death = death
        self._model = death.stub.model
        self._clients = ClientConnections(server_pid, ports) if http.is_decoupled(self._model) else None

    def unload(self) -> None:
        """Takes the model out of service; RecoveryFailedError when that cannot be done."""
        try:
            self._http.unload(self._model, _UNLOAD_TIMEOUT_SECONDS)
        except (TimeoutError, TritonRequestError) as error:
            raise RecoveryFailedError(f"model {self._model} cannot be unloaded: {error}") from error

    def load(self, stopping: threading.Event) -> None:
        """Loads the model, however often it takes."""
        for pause in chain(_LOAD_PAUSES_SECONDS, repeat(_LOAD_PAUSES_SECONDS[-1])):
            try:
                self._http.load(self._model)
                break
            except TritonRequestError as error:
                _LOG.error("model %s: %s; trying again in %.1f s", self._model, error, pause)
            if stopping.wait(pause):
                return
        seconds = time.monotonic() - self._death.time
        _LOG.info("model %s serves again, %.2f s after the death of its stub", self._model, seconds)

    def end_hanging_streams(self, stopping: threading.Event) -> None:
        """Disconnects the clients of a decoupled model if responses are owed to any of them; takes some seconds.

        RecoveryFailedError when this process may not do so.
        """
        if self._clients is None:
            return
        deadline = time.monotonic() + _FREED_WITHIN_SECONDS
        while time.monotonic() < deadline and not stopping.wait(0.1):
            if zombie_exit(self._death.stub.process.pid) is None:
                return
        try:
            closed = self._clients.close()
        except PermissionError as error:
            raise RecoveryFailedError(
                f"responses of model {self._model} hang and their clients cannot be disconnected ({error}; in a "
                "container, the capability SYS_PTRACE permits it)"
            ) from error
        _LOG.warning("model %s: closed %d connections, as the dead stub owed responses", self._model, closed)
