"""Taking a model of a running server out of service for a while, by Triton's model control.

A paused block range gives back the memory of its process and of weights that nobody else maps. The KV cache belongs to
the server, so sessions stay and go on where they were.
"""

import time
from types import TracebackType

import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from corolla.errors import CorollaError, InvalidValueError

POLL_SECONDS = 0.1
READY = "READY"


class ModelControl:
    """Pauses and resumes the models of the server at a gRPC endpoint `host:port`.

    Every call may raise CorollaError with the server's message, and InvalidValueError for a model it does not have.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = grpc_client.InferenceServerClient(address)

    def __enter__(self) -> "ModelControl":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def pause(self, model: str, timeout: float) -> None:
        """Refuses new requests at once; waits up to `timeout` seconds until the last running one has ended.

        To Triton, a streamed request ends when its client closes the stream.
        """
        self._check(model)
        self._call("unload_model", model)
        deadline = time.monotonic() + timeout
        while self._states().get(model, "") == "UNLOADING":
            if time.monotonic() > deadline:
                raise CorollaError(
                    f"{model}: after {timeout:g} s requests still run or clients keep streams open; it takes no new "
                    "requests and pauses when the last has ended"
                )
            time.sleep(POLL_SECONDS)

    def resume(self, model: str) -> None:
        """Loads the model again, with the ensembles that need it."""
        self._check(model)
        if self._states()[model] != READY:
            self._call("load_model", model)

    def _check(self, model: str) -> None:
        states = self._states()
        if model not in states:
            raise InvalidValueError("model", model, ", ".join(sorted(states)))

    def _states(self) -> dict[str, str]:
        index = self._call("get_model_repository_index", as_json=True)
        return {entry["name"]: entry.get("state", "UNAVAILABLE") for entry in index.get("models", [])}

    def _call(self, method: str, *arguments: str, **options: bool) -> dict:
        try:
            reply: dict = getattr(self._client, method)(*arguments, **options)
        except InferenceServerException as error:
            raise CorollaError(f"{self._address}: {error.message()}") from error
        return reply
