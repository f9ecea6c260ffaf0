"""The few calls of Triton's HTTP API that watching a server needs."""

import http.client
import json
from dataclasses import dataclass
from typing import Any

from corolla.errors import CorollaError
from corolla.server.endpoints import Endpoint


class TritonRequestError(CorollaError):
    """Triton answered with an error."""


@dataclass(frozen=True)
class TritonHttp:
    """A server's HTTP endpoint; for use by any thread. Every call may raise OSError when no server answers."""

    endpoint: Endpoint
    headers: dict[str, str]

    def is_live(self) -> bool:
        """Whether the server answers; it does so only once it has tried to load its models."""
        return self._succeeds("/v2/health/live")

    def is_ready(self) -> bool:
        """Whether all models are available, as far as Triton knows."""
        return self._succeeds("/v2/health/ready")

    def model_states(self) -> dict[str, str]:
        """READY, LOADING, UNLOADING or UNAVAILABLE per model; READY where any of its versions is."""
        states: dict[str, str] = {}
        for entry in self._call("POST", "/v2/repository/index"):
            if states.get(entry["name"]) != "READY":
                states[entry["name"]] = entry.get("state", "UNAVAILABLE")
        return states

    def is_decoupled(self, model: str) -> bool:
        """Whether the model may send several responses to one request."""
        config = self._call("GET", f"/v2/models/{model}/config")
        return bool(config.get("model_transaction_policy", {}).get("decoupled"))

    def unload(self, model: str, timeout: float) -> None:
        """Asks for the model to be unloaded; returns before its last request has ended. `timeout` in seconds."""
        self._call("POST", f"/v2/repository/models/{model}/unload", timeout)

    def load(self, model: str) -> None:
        """Loads the model, however long it takes."""
        self._call("POST", f"/v2/repository/models/{model}/load", None)

    def _call(self, method: str, path: str, timeout: float | None = 10.0) -> Any:
        status, body = self._request(method, path, timeout)
        if status != 200:
            raise TritonRequestError(_error_message(body) or f"{path}: status {status}")
        return json.loads(body) if body else None

    def _succeeds(self, path: str) -> bool:
        try:
            return self._request("GET", path, 10.0)[0] == 200
        except OSError:
            return False

    def _request(self, method: str, path: str, timeout: float | None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.endpoint.host, self.endpoint.port, timeout=timeout)
        try:
            connection.request(method, path, body=b"{}" if method == "POST" else None, headers=self.headers)
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{self.endpoint}: {error!r}") from error
        finally:
            connection.close()


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]).strip("; \n")
    except (ValueError, KeyError, TypeError):
        return ""
