"""Opens, closes and describes sessions. An open that has to wait answers later and holds up nobody."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from threading import Semaphore

import numpy as np

from corolla.errors import CorollaError, InvalidValueError, OverloadedError
from corolla.kv.session import OpenRequest
from corolla.kv.table import CacheFullError
from corolla.serving.adapter import FINAL, answered, error_response, response, scalar
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel
from corolla.serving.reaper import Reaper
from corolla.serving.sessions import SessionsService, required

MAX_WAITING = 256


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args):
        table = Host(ServedModel.from_arguments(args)).session_table()
        self._service = SessionsService(table)
        self._reaper = Reaper(table)
        self._places = Semaphore(MAX_WAITING)
        self._waiting = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="open")

    def execute(self, requests):
        return [self._answer_or_defer(request) for request in requests]

    def finalize(self):
        self._reaper.stop()
        self._waiting.shutdown(wait=False, cancel_futures=True)

    def _answer_or_defer(self, request):
        operation = answered(lambda: scalar(request, "operation"))
        if operation != "open":
            return answered(lambda: self._answer(request))
        sender = request.get_response_sender()
        opening = answered(lambda: _read_open(request))
        if not isinstance(opening, OpenRequest):
            return opening
        try:
            self._service.table.check(opening)
            return _reply(self._service.open(replace(opening, timeout=0.0), sender.is_cancelled))
        except CacheFullError as error:
            if not opening.timeout:
                return error_response(error)
        except CorollaError as error:
            return error_response(error)
        if not self._places.acquire(blocking=False):
            return error_response(OverloadedError(f"{MAX_WAITING} requests wait already; retry later"))
        self._waiting.submit(self._open, opening, sender)
        return None

    def _open(self, opening, sender):
        answer = answered(lambda: _reply(self._service.open(opening, sender.is_cancelled)))
        self._places.release()
        sender.send(answer, flags=FINAL)

    def _answer(self, request):
        operation = scalar(request, "operation")
        session_id = scalar(request, "session_id")
        if operation == "stat":
            return _reply(self._service.stat(session_id))
        if operation == "close":
            required("session_id", session_id, operation)
            return _reply(self._service.close(session_id))
        raise InvalidValueError("operation", operation, "open, close, stat")


def _read_open(request):
    max_length = scalar(request, "max_length")
    required("max_length", max_length, "open")
    optional = {name: scalar(request, name) for name in ("timeout", "priority", "idle_timeout")}
    return OpenRequest(max_length, **{name: value for name, value in optional.items() if value is not None})


def _reply(reply):
    outputs = asdict(reply)
    session_id = np.array([outputs.pop("session_id").encode()], dtype=object)
    return response(session_id=session_id, **{name: np.array([value], np.int64) for name, value in outputs.items()})
