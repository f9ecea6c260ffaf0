"""Opens, closes and describes sessions. What has to wait answers later and holds up nobody."""

from corolla.serving.starting import started

# isort: split
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
        host = Host(ServedModel.from_arguments(args))
        table = host.session_table()
        self._service = SessionsService(table, host.adapters(table))
        self._service.adapters.load_first(host.model.adapters)
        self._reaper = Reaper(table)
        self._places = Semaphore(MAX_WAITING)
        self._waiting = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="open")
        started()

    def execute(self, requests):
        return [self._answer_or_defer(request) for request in requests]

    def finalize(self):
        self._reaper.stop()
        self._waiting.shutdown(wait=False, cancel_futures=True)

    def _answer_or_defer(self, request):
        operation = answered(lambda: scalar(request, "operation"))
        if operation == "load_adapter":
            return self._defer_call(request, self._service.load_adapter, "adapter", "source")
        if operation == "dial":
            return self._defer_call(request, self._service.dial, "address")
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
        return self._defer(sender, lambda: self._service.open(opening, sender.is_cancelled))

    def _defer_call(self, request, call, *names):
        """Fetching and preparing an adapter may take long, and so may an address that does not answer."""
        fields = answered(lambda: _read(request, *names))
        if not isinstance(fields, list):
            return fields
        return self._defer(request.get_response_sender(), lambda: call(*fields))

    def _defer(self, sender, call):
        if not self._places.acquire(blocking=False):
            return error_response(OverloadedError(f"{MAX_WAITING} requests wait already; retry later"))
        self._waiting.submit(self._answer_later, call, sender)
        return None

    def _answer_later(self, call, sender):
        answer = answered(lambda: _reply(call()))
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
        if operation == "list_adapters":
            return _reply(self._service.list_adapters())
        if operation == "unload_adapter":
            return _reply(self._service.unload_adapter(*_read(request, "adapter")))
        allowed = "open, close, stat, load_adapter, unload_adapter, list_adapters, dial"
        raise InvalidValueError("operation", operation, allowed)


def _read_open(request):
    max_length = scalar(request, "max_length")
    required("max_length", max_length, "open")
    optional = {name: scalar(request, name) for name in ("timeout", "priority", "idle_timeout", "adapter")}
    return OpenRequest(max_length, **{name: value for name, value in optional.items() if value is not None})


def _read(request, *names):
    values = [scalar(request, name) for name in names]
    for name, value in zip(names, values, strict=True):
        required(name, value, scalar(request, "operation"))
    return values


def _reply(reply):
    return response(**{name: _array(value) for name, value in asdict(reply).items()})


def _array(value):
    return np.array([value.encode()], dtype=object) if isinstance(value, str) else np.array([value], np.int64)
