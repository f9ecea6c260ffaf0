"""A block range: hidden states to hidden states, with or without sessions. `chain` is one over all blocks."""

from corolla.serving.starting import started

# isort: split
from corolla.errors import CorollaError
from corolla.serving.adapter import answered, error_response, integers, make_counter, response, strings, tensor
from corolla.serving.blocks import BlocksRequest
from corolla.serving.hosted_blocks import HostedBlocks
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args):
        model = ServedModel.from_arguments(args)
        host = Host(model)
        self._blocks = HostedBlocks(host, host.session_table())
        self._metrics = self._blocks.count_rows(model.name, make_counter)
        started()

    def execute(self, requests):
        """Reads all requests, runs the readable ones as one batch where they fit together, answers in order."""
        read = [answered(lambda request=request: _read(request)) for request in requests]
        results = iter(self._blocks.current.run([item for item in read if isinstance(item, BlocksRequest)]))
        return [_respond(next(results)) if isinstance(item, BlocksRequest) else item for item in read]

    def finalize(self):
        if self._metrics:
            self._metrics.stop()


def _read(request):
    return BlocksRequest(
        hidden_states=tensor(request, "hidden_states"),
        session_ids=strings(request, "session_id"),
        starts=integers(request, "start_position"),
        hypo_ids=integers(request, "hypo_ids"),
        adapters=strings(request, "adapter"),
    )


def _respond(result):
    if isinstance(result, CorollaError):
        return error_response(result)
    return response(output_hidden_states=result)
