"""Token ids to hidden states."""

from corolla.serving.starting import started

# isort: split
from corolla.model.ends import Embedding
from corolla.serving.adapter import answered, response, tensor
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args):
        host = Host(ServedModel.from_arguments(args))
        self._embed = Embedding(host.parts)
        started()

    def execute(self, requests):
        return [answered(lambda request=request: self._answer(request)) for request in requests]

    def _answer(self, request):
        return response(hidden_states=self._embed(tensor(request, "input_ids")))
