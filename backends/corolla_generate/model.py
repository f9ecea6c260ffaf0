"""Text to streamed text."""

from corolla.serving.starting import started

# isort: split
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from corolla.generate.engine import EngineLimits, GenerateEngine
from corolla.generate.local_blocks import SharedBlocks
from corolla.generate.request import parse_request
from corolla.model.ends import Embedding, Head
from corolla.peers.environment import registry_url
from corolla.serving.adapter import FINAL, error_response, make_counter, scalar, step_blocks, strings
from corolla.serving.hosted_blocks import HostedBlocks
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel
from corolla.serving.route_metrics import report_routes
from corolla.serving.senders import SenderThread

LISTS = {"stop_words", "bad_words"}


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args):
        """Opens the model in a thread that ends: this one would else keep OpenMP threads that nobody uses."""
        self._senders = SenderThread()
        with ThreadPoolExecutor(1) as opener:
            self._engine, self._metrics = opener.submit(_open, ServedModel.from_arguments(args)).result()
        started()

    def execute(self, requests):
        for request in requests:
            self._start(request, request.get_response_sender())

    def finalize(self):
        self._engine.stop()
        for reports in self._metrics:
            reports.stop()

    def _start(self, request, sender):
        try:
            generation = parse_request(_inputs(request))
            self._engine.start(generation, self._senders.stream(sender, streaming=generation.stream))
        except Exception as error:
            sender.send(error_response(error), flags=FINAL)


def _open(model):
    host = Host(model)
    table = host.session_table()
    run_ranges = partial(step_blocks, "ranges")
    blocks = HostedBlocks(host, table) if model.blocks else None
    local = SharedBlocks(blocks, model.blocks, run_ranges, model.max_short_tokens) if blocks else None
    swarm = _open_swarm(model, host, local)
    engine = GenerateEngine(
        checkpoint=host.checkpoint,
        embedding=Embedding(host.parts),
        head=Head(host.parts).compile(),
        blocks=blocks,
        table=table,
        log=host.token_log(),
        run_ranges=run_ranges,
        limits=EngineLimits(model.max_short_tokens, model.batch_channel_capacity),
        swarm=swarm,
    )
    torch.set_num_threads(1)  # for what is left to PyTorch in a step, waking a thread takes longer than the work
    reports = [blocks and blocks.count_rows(model.name, make_counter)]
    reports += [swarm and report_routes(swarm.context.counters, make_counter)]
    return engine, [report for report in reports if report]


def _open_swarm(model, host, local):
    url = registry_url(model.registry)
    if not url:
        return None
    from corolla.remote.opening import open_swarm  # gRPC, which a server by itself does without

    return open_swarm(url, model, host.checkpoint.config.num_hidden_layers, local)


def _inputs(request):
    names = [tensor.name() for tensor in request.inputs()]
    return {name: (strings if name in LISTS else scalar)(request, name) for name in names}
