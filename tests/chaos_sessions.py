"""Opens, steps and ends sessions in random ways from many client processes, some of which are killed.

python tests/chaos_sessions.py model_repository --sessions 2000 --clients 16
"""

import argparse
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc_client
from tqdm import tqdm

from chaos_stubs import wait_until
from corolla.client import CorollaClient
from corolla.errors import CorollaError
from servers import RunningServer

POSITIONS = 24
KINDS = 8
IDLE_SECONDS = 5.0
"""Longer than any step, so that only sessions that were left expire."""
TOLERANCE = 1e-3
"""Between a step in a batch with others and a plain forward alone, in float32."""
ENDS = ("close", "expire", "cancel", "killed")


@dataclass(frozen=True)
class Storm:
    """What the clients do: `inputs` [kinds, positions, H] stepped through chain or ranges give `outputs`."""

    address: str
    inputs: np.ndarray
    outputs: np.ndarray


def prepare(address: str, seed: int) -> Storm:
    """Random inputs, and what plain forwards make of them."""
    client = grpc_client.InferenceServerClient(address)
    hidden = int(client.get_model_metadata("chain").inputs[0].shape[-1])
    inputs = np.random.default_rng(seed).normal(size=(KINDS, POSITIONS, hidden)).astype(np.float32)
    return Storm(address, inputs, _run(client, "chain", inputs))


def client_process(storm: Storm, seed: int, reports: Connection) -> None:
    """Lives session after session, each ended in a random way, and reports each; ends by being killed."""
    chosen = random.Random(seed)
    with CorollaClient(storm.address) as sessions:
        client = grpc_client.InferenceServerClient(storm.address)
        while True:
            end = chosen.choices(ENDS, weights=(10, 3, 3, 1))[0]
            reports.send(("session", end, _live_one(storm, client, sessions, chosen, end)))
            if end == "killed":
                signal.pause()


def _live_one(
    storm: Storm, client: grpc_client.InferenceServerClient, sessions: CorollaClient, chosen: random.Random, end: str
) -> str:
    """One session; returns what was wrong, or an empty text."""
    if end == "cancel":
        return _cancel_while_waiting(storm.address)
    idle_timeout = IDLE_SECONDS if end in ("expire", "killed") else 30.0
    try:
        reply = sessions.sessions(
            "open", max_length=chosen.randint(POSITIONS, 200), timeout=60.0, idle_timeout=idle_timeout
        )
    except CorollaError as error:
        return f"open: {error}"
    kind, position, session_id = chosen.randrange(KINDS), 0, reply["session_id"]
    stop = chosen.randint(1, POSITIONS)
    while position < stop:
        new = min(chosen.choice((1, 1, 1, 4)), stop - position)
        model = chosen.choice(("chain", "ranges"))
        part = slice(position, position + new)
        output = _run(client, model, storm.inputs[kind : kind + 1, part], session_id, position)
        error = float(np.abs(output - storm.outputs[kind, part]).max())
        if error > TOLERANCE:
            return f"{session_id} at {position}: output differs by {error}: foreign data?"
        position += new
    if end == "close":
        sessions.sessions("close", session_id=session_id)
    return ""


def _cancel_while_waiting(address: str) -> str:
    """Asks for much room and loses patience; a session that came all the same is left to expire."""
    client = grpc_client.InferenceServerClient(address)
    values: dict[str, tuple[str, list[object]]] = {
        "operation": ("BYTES", [b"open"]),
        "max_length": ("INT32", [1000]),
        "timeout": ("FP32", [30.0]),
        "idle_timeout": ("FP32", [IDLE_SECONDS]),
    }
    inputs = [_tensor(name, datatype, value) for name, (datatype, value) in values.items()]
    call = client.async_infer("sessions", inputs, lambda result, error: None)
    time.sleep(0.01)
    call.cancel()
    client.close()
    return ""


def _run(
    client: grpc_client.InferenceServerClient,
    model: str,
    hidden_states: np.ndarray,
    session_id: str = "",
    start: int = 0,
) -> np.ndarray:
    inputs = [grpc_client.InferInput("hidden_states", list(hidden_states.shape), "FP32")]
    inputs[0].set_data_from_numpy(np.ascontiguousarray(hidden_states))
    if session_id:
        inputs += [
            _tensor("session_id", "BYTES", [[session_id.encode()]]),
            _tensor("start_position", "INT32", [[start]]),
        ]
    output: np.ndarray = client.infer(model, inputs).as_numpy("output_hidden_states")
    return output


def _tensor(name: str, datatype: str, values: list[object]) -> grpc_client.InferInput:
    array = np.array(values, {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32}[datatype])
    tensor = grpc_client.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    return tensor


def run_storm(address: str, sessions: int, clients: int, seed: int) -> dict[str, int]:
    """Runs until so many sessions have ended; returns how many ended in each way.

    Asserts that no session saw another's data and that all pages come back.
    """
    storm = prepare(address, seed)
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, multiprocessing.process.BaseProcess] = {}
    ended = dict.fromkeys(ENDS, 0)
    problems: list[str] = []

    def start() -> None:
        nonlocal seed
        seed += 1
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=client_process, args=(storm, seed, theirs), daemon=True)
        process.start()
        processes[ours] = process

    try:
        for _ in range(clients):
            start()
        with tqdm(total=sessions, desc="sessions ended", file=sys.stderr) as progress:
            while sum(ended.values()) < sessions:
                for reports in wait(list(processes), timeout=120):
                    _, end, problem = reports.recv()
                    ended[end] += 1
                    progress.update()
                    if problem:
                        problems.append(problem)
                    if end == "killed":
                        os.kill(processes.pop(reports).pid or 0, signal.SIGKILL)
                        start()
    finally:
        for process in processes.values():
            process.kill()
    assert not problems, problems[:5]
    with CorollaClient(address) as client:
        wait_until(lambda: client.sessions("stat")["open_sessions"] == 0, timeout=90.0)
        status = client.sessions("stat")
    assert status["free_tokens"] == status["total_tokens"], status
    assert status["waiting"] == 0, status
    return ended


def main() -> None:
    """Runs the long form and prints what it saw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with RunningServer(options.repository) as server:
        ended = run_storm(server.grpc, options.sessions, options.clients, options.seed)
    print(f"{sum(ended.values())} sessions ended ({ended}); no foreign data, all tokens free again")


if __name__ == "__main__":
    main()
