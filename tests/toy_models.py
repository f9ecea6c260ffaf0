"""Trivial models for tests of the server itself: a python-based backend and the repository that uses it."""

from pathlib import Path

BACKEND = '''
import json
import os
import signal
import threading
import time

import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    """Sleeps `x` seconds (streams: sends a response every 0.1 s that long) and returns its process id."""

    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.kind = parameters["kind"]["string_value"]
        flag = parameters.get("die_once", {}).get("string_value")
        if flag and os.path.exists(flag):
            os.remove(flag)
            os.kill(os.getpid(), signal.SIGKILL)
        if "fail" in parameters:
            raise RuntimeError(parameters["fail"]["string_value"])

    def execute(self, requests):
        seconds = [float(pb.get_input_tensor_by_name(r, "x").as_numpy().flat[0]) for r in requests]
        if self.kind == "stream":
            for request, duration in zip(requests, seconds):
                threading.Thread(target=self.stream, args=(request.get_response_sender(), duration)).start()
            return None
        time.sleep(max(seconds))
        return [self.response() for _ in requests]

    def stream(self, sender, seconds):
        for _ in range(int(seconds * 10)):
            time.sleep(0.1)
            sender.send(self.response())
        sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def response(self):
        return pb.InferenceResponse([pb.Tensor("y", np.full((1, 1), os.getpid(), np.int32))])
'''

_CONFIG = """
backend: "toy"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_INT32 dims: [1] }
instance_group { count: 1 kind: KIND_CPU }
"""

_ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [1] }
output { name: "y" data_type: TYPE_INT32 dims: [1] }
output { name: "z" data_type: TYPE_INT32 dims: [1] }
ensemble_scheduling {
  step {
    model_name: "first" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
  }
  step {
    model_name: "second" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "z" }
  }
}
"""


def write_backends(folder: Path) -> Path:
    """Writes the backend `toy` below `folder`; returns the folder of backends."""
    (folder / "backends" / "toy").mkdir(parents=True)
    (folder / "backends" / "toy" / "model.py").write_text(BACKEND)
    return folder / "backends"


def add_model(repository: Path, name: str, kind: str = "unary", **parameters: str) -> None:
    """Adds a model of the backend `toy`; its parameters as in the backend's `initialize`."""
    (repository / name / "1").mkdir(parents=True)
    entries = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
        for key, value in {"kind": kind, **parameters}.items()
    )
    policy = "model_transaction_policy { decoupled: true }\n" if kind == "stream" else ""
    (repository / name / "config.pbtxt").write_text(_CONFIG + policy + entries)


def add_ensemble(repository: Path, name: str) -> None:
    """Adds an ensemble of the models `first` and `second`, whose outputs are y and z."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(_ENSEMBLE)
