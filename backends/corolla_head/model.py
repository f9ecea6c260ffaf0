"""Hidden states to logits."""

from corolla.serving.starting import started

# isort: split
from corolla.model.ends import Head
from corolla.serving.adapter import answered, response, tensor
from corolla.serving.hosting import Host
from corolla.serving.parameters import ServedModel


class TritonPythonModel:
    """Triton's interface of a Python model."""

    def initialize(self, args):
        host = Host(ServedModel.from_arguments(args))
        self._head = Head(host.parts)
        started()

    def execute(self, requests):
        return [answered(lambda request=request: self._answer(request)) for request in requests]

    def _answer(self, request):
        return response(logits=self._head(tensor(request, "hidden_states")))
