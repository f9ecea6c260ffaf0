"""Hidden states through the blocks of this server and on to the next one; several clients' steps run together."""

from corolla.serving.starting import started

# isort: split
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from corolla.serving.adapter import (
    FINAL,
    array,
    integers,
    make_counter,
    response,
    scalar,
    span_error_response,
    step_blocks,
    strings,
    wants,
)
from corolla.serving.hosted_blocks import HostedBlocks
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel
from corolla.serving.span import SpanService
from corolla.serving.span_metrics import report_span
from corolla.serving.span_request import SpanShape, read_step

READERS = {
    "session_id": strings,
    "start_position": integers,
    "step_id": scalar,
    "hidden_states": array,
    "encoding": scalar,
    "shape": integers,
    "blocks": integers,
    "next": scalar,
    "timeout": scalar,
}


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args):
        """Opens the blocks in a thread that ends: this one would else keep OpenMP threads that nobody uses."""
        with ThreadPoolExecutor(1) as opener:
            opened = opener.submit(_open, ServedModel.from_arguments(args))
            self._service, self._shape, self._metrics = opened.result()
        started()

    def execute(self, requests):
        for request in requests:
            self._start(request, request.get_response_sender())

    def finalize(self):
        self._service.stop()
        for reports in self._metrics:
            reports.stop()

    def _start(self, request, sender):
        try:
            step = read_step({name: read(request, name) for name, read in READERS.items()}, self._shape)
            whole = wants(request, "hidden_states")
            respond = partial(_respond, sender, whole)
            self._service.start(step, respond, pushed=not whole, is_cancelled=sender.is_cancelled)
        except Exception as error:
            sender.send(span_error_response(error), flags=FINAL)


def _open(model):
    host = Host(model)
    table = host.session_table()
    blocks = HostedBlocks(host, table)
    service = SpanService(blocks, table, partial(step_blocks, "ranges"), model.max_short_tokens)
    reports = [blocks.count_rows(model.name, make_counter), report_span(service.counts, make_counter)]
    torch.set_num_threads(1)  # for what is left to PyTorch in a step, waking a thread takes longer than the work
    shape = SpanShape(model.blocks, host.checkpoint.config.hidden_size)
    return service, shape, [report for report in reports if report is not None]


def _respond(sender, whole, outcome):
    sender.send(span_error_response(outcome) if isinstance(outcome, Exception) else _reply(outcome, whole), flags=FINAL)


def _reply(output, whole):
    states = output.states
    hidden_states = {
        "hidden_states": states.data,
        "encoding": np.array([states.encoding.encode()], dtype=object),
        "shape": np.array(states.shape, np.int32),
    }
    return response(
        **(hidden_states if whole else {}),
        pushed=np.array([output.pushed]),
        free_tokens=np.array([output.free_tokens], np.int64),
        seconds=np.array([output.seconds], np.float32),
        duplicate=np.array([output.duplicate]),
    )
