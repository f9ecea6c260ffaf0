"""`corolla serve` with the real tritonserver: start, flags, supervision, recovery, and the end of it."""

import http.client
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from corolla.errors import EnvironmentProblemError, InvalidValueError
from corolla.server.endpoints import choose_endpoints
from corolla.server.options import ServerOptions
from corolla.server.run_directory import RunDirectory, remove_stale_run_directories
from servers import RunningServer
from toy_models import add_ensemble, add_model, write_backends
from waiting import wait_until

RECOVERY_SECONDS = 5.0
MODELS = ("first", "second", "third", "stream", "fragile")


@pytest.fixture
def backends(tmp_path: Path) -> Path:
    return write_backends(tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    add_model(folder, "first")
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("shared")
    repository = folder / "repository"
    for name in ("first", "second", "third"):
        add_model(repository, name)
    add_model(repository, "stream", kind="stream")
    add_model(repository, "fragile", die_once=str(folder / "die"))
    add_ensemble(repository, "both")
    with RunningServer(repository, backends=write_backends(folder)) as server:
        server.die_once = folder / "die"  # type: ignore[attr-defined]
        yield server


@pytest.fixture
def server(shared: RunningServer) -> RunningServer:
    """The server of this module with all its models up."""
    for model in MODELS:
        answer(shared, model)
    return shared


def request(seconds: float) -> list[grpc_client.InferInput]:
    tensor = grpc_client.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.full((1, 1), seconds, np.float32))
    return [tensor]


def infer(server: RunningServer, model: str, seconds: float = 0.0, output: str = "y", timeout: float = 30.0) -> int:
    """The process id of the stub that answered."""
    with grpc_client.InferenceServerClient(server.grpc) as client:
        return int(client.infer(model, request(seconds), client_timeout=timeout).as_numpy(output).item())


def stream(server: RunningServer, seconds: float, timeout: float) -> tuple[int, str | None]:
    """The number of responses of the model `stream` and the error that ended them."""
    answers: queue.Queue[tuple[grpc_client.InferResult, Exception | None]] = queue.Queue()
    responses = 0
    with grpc_client.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("stream", request(seconds), enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=timeout)
            if error is not None:
                return responses, str(error)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return responses, None
            responses += 1


def answer(server: RunningServer, model: str, timeout: float = 20.0) -> float:
    """Seconds until the model answers."""
    started = time.monotonic()
    while True:
        try:
            if model == "stream":
                assert stream(server, 0.1, timeout) == (1, None)
            else:
                infer(server, model)
            return time.monotonic() - started
        except InferenceServerException:
            assert time.monotonic() - started < timeout, server.log
            time.sleep(0.05)


def kill_stub(server: RunningServer, model: str) -> int:
    (pid,) = server.stub_pids(model)
    os.kill(pid, signal.SIGKILL)
    return pid


def recovered_seconds(server: RunningServer, model: str) -> float:
    """How long the last recovery of the model took by the server's own account."""
    line = [line for line in server.log.splitlines() if f"model {model} serves again" in line][-1]
    return float(line.split(", ")[1].split()[0])


def run_serve(repository: Path, backends: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`corolla serve` on free ports until it fails."""
    command = [Path(sys.prefix) / "bin" / "corolla", "serve", repository, f"--backends={backends}", *flags]
    ports = [f"--{service}-port=0" for service in ("http", "grpc", "metrics")]
    return subprocess.run([*command, *ports], capture_output=True, text=True, timeout=120)


class TestStart:
    def test_serves_on_all_addresses(self, server: RunningServer) -> None:
        for address, path in ((server.http, "/v2/health/ready"), (server.metrics, "/metrics")):
            connection = http.client.HTTPConnection(address, timeout=10)
            connection.request("GET", path)
            assert connection.getresponse().status == 200
            connection.close()
        assert infer(server, "first") in server.stub_pids("first")
        assert f"HTTP http://{server.http}, gRPC {server.grpc}, metrics http://{server.metrics}/metrics" in server.log

    def test_gives_models_the_run_directory(self, server: RunningServer) -> None:
        (pid,) = server.stub_pids("first")
        assert psutil.Process(pid).environ()["COROLLA_RUN_DIR"] == str(server.run_directory)
        assert server.run_directory.is_relative_to("/dev/shm")

    def test_names_the_error_of_every_model(self, tmp_path: Path, backends: Path, repository: Path) -> None:
        add_model(repository, "unhappy", fail="the weights are gone")
        add_model(repository, "typo")
        (repository / "typo" / "config.pbtxt").write_text("max_btch_size: 1")
        done = run_serve(repository, backends, f"--log-file={tmp_path / 'log'}")
        assert done.returncode == 1
        assert "unhappy: Internal: RuntimeError: the weights are gone" in done.stderr
        assert 'has no field named "max_btch_size"' in done.stderr
        assert "loading: unhappy" in (tmp_path / "log").read_text()
        assert "loading: unhappy" not in done.stderr

    def test_names_an_unknown_flag(self, backends: Path, repository: Path) -> None:
        done = run_serve(repository, backends, "--no")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].strip() == "unrecognized option '--no'"

    def test_serves_what_loads_if_asked_to(self, backends: Path, repository: Path) -> None:
        add_model(repository, "unhappy", fail="the weights are gone")
        with RunningServer(repository, "--exit-on-error=false", backends=backends) as server:
            assert "not available: unhappy" in server.log
            infer(server, "first")

    def test_forwards_flags(self, backends: Path, repository: Path) -> None:
        flags = ("--metrics-interval-ms", "500", "--exit-timeout-secs=7", "--http-restricted-api=health:key=secret")
        with RunningServer(repository, *flags, backends=backends) as server:
            command = psutil.Process(server.pid).cmdline()
        assert command[-4:] == [*flags]
        assert not [word for word in command if word.startswith("--exit-timeout-secs=2")]

    def test_uses_and_empties_a_named_run_directory(self, tmp_path: Path, backends: Path, repository: Path) -> None:
        folder = tmp_path / "run"
        with RunningServer(repository, f"--run-dir={folder}", backends=backends) as server:
            assert server.run_directory == folder
            refused = run_serve(repository, backends, f"--run-dir={folder}")
            assert refused.returncode == 1
            assert "in use by another server" in refused.stderr
        assert list(folder.iterdir()) == []


class TestOptions:
    def test_users_flags_replace_ours(self, repository: Path) -> None:
        flags = ("--load-model=first", "--http-address", "0.0.0.0", "--strict-model-config=false")
        words = ServerOptions(repository, flags=flags).tritonserver_flags(Path("b"), {"http": 1})
        assert words[-4:] == [*flags]
        assert not {"--load-model=*", "--http-address=127.0.0.1", "--disable-auto-complete-config"} & {*words}

    def test_restricted_api_key_is_sent(self, repository: Path) -> None:
        flags = ("--http-restricted-api=health,model-repository:admin-key=a=b",)
        assert ServerOptions(repository, flags=flags).http_headers() == {"admin-key": "a=b"}

    @pytest.mark.parametrize("flags", [("--allow-http=false",), ("--allow-http", "0")])
    def test_http_is_needed(self, repository: Path, flags: tuple[str, ...]) -> None:
        with pytest.raises(InvalidValueError, match="--allow-http"):
            ServerOptions(repository, flags=flags)

    def test_repository_must_exist(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidValueError, match=r"REPO: .*corolla init"):
            ServerOptions(tmp_path / "none")

    @pytest.mark.parametrize("service", ["http", "grpc", "metrics"])
    def test_taken_port_is_named(self, repository: Path, service: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, f"{service}_port": port}
            options = ServerOptions(repository, **ports)  # type: ignore[arg-type]
            named = rf"--{service}-port: port {port} on 127\.0\.0\.1.*{os.getpid()}"
            with pytest.raises(EnvironmentProblemError, match=named):
                choose_endpoints(options)

    def test_one_port_for_two_services_is_refused(self, repository: Path) -> None:
        free = choose_endpoints(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)).http.port
        with pytest.raises(InvalidValueError, match=f"--grpc-port: {free}"):
            choose_endpoints(ServerOptions(repository, http_port=free, grpc_port=free))

    def test_picks_different_free_ports(self, repository: Path) -> None:
        endpoints = choose_endpoints(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0))
        ports = {e.port for e in (endpoints.http, endpoints.grpc, endpoints.metrics) if e is not None}
        assert len(ports) == 3

    def test_service_that_is_off_has_no_endpoint(self, repository: Path) -> None:
        options = ServerOptions(repository, http_port=0, grpc_port=0, flags=("--allow-metrics=false",))
        assert choose_endpoints(options).metrics is None


class TestRecovery:
    def test_reloads_a_model_whose_stub_is_killed(self, server: RunningServer) -> None:
        killed = kill_stub(server, "first")
        assert answer(server, "first") < RECOVERY_SECONDS
        assert infer(server, "first") not in (0, killed)
        assert f"model first (first_0_0, process {killed}) was killed by SIGKILL" in server.log

    def test_ensemble_comes_back_with_its_models(self, server: RunningServer) -> None:
        for _ in range(3):
            kill_stub(server, "first")
            kill_stub(server, "second")
            assert answer(server, "both") < RECOVERY_SECONDS

    def test_spares_requests_of_other_models(self, server: RunningServer) -> None:
        answers: list[int] = []
        other = threading.Thread(target=lambda: answers.append(infer(server, "second", seconds=2)))
        other.start()
        time.sleep(0.3)
        kill_stub(server, "first")
        assert answer(server, "first") < RECOVERY_SECONDS
        other.join()
        assert answers == server.stub_pids("second")

    def test_all_stubs_at_once_with_requests_queued(self, server: RunningServer) -> None:
        outcomes: list[str] = []

        def ask(model: str) -> None:
            try:
                infer(server, model, seconds=1)
                outcomes.append("ok")
            except InferenceServerException as error:
                outcomes.append(str(error))

        clients = [threading.Thread(target=ask, args=(m,)) for m in ("first", "second", "third") for _ in range(3)]
        for client in clients:
            client.start()
        time.sleep(0.5)
        for model in MODELS:
            kill_stub(server, model)
        for model in MODELS:
            assert answer(server, model) < RECOVERY_SECONDS
        for client in clients:
            client.join(timeout=20)
            assert not client.is_alive()
        assert len(outcomes) == 9
        assert any("is not healthy" in outcome for outcome in outcomes)

    def test_stream_of_a_dead_stub_ends_with_an_error(self, server: RunningServer) -> None:
        outcomes: list[tuple[int, str | None]] = []
        client = threading.Thread(target=lambda: outcomes.append(stream(server, seconds=100, timeout=20)))
        client.start()
        time.sleep(1)
        kill_stub(server, "stream")
        killed = time.monotonic()
        client.join(timeout=20)
        assert time.monotonic() - killed < 2 * RECOVERY_SECONDS
        ((responses, error),) = outcomes
        assert responses > 0
        assert error is not None
        assert "UNAVAILABLE" in error
        assert stream(server, seconds=0.3, timeout=10) == (3, None)

    def test_idle_decoupled_model_costs_no_connection(self, server: RunningServer) -> None:
        kill_stub(server, "stream")
        before = server.log.count("closed")
        assert infer(server, "second", seconds=4) in server.stub_pids("second")
        assert server.log.count("closed") == before

    def test_stub_that_dies_while_loading_is_tried_again(self, server: RunningServer) -> None:
        server.die_once.touch()  # type: ignore[attr-defined]
        kill_stub(server, "fragile")
        assert answer(server, "fragile") < RECOVERY_SECONDS
        assert "model fragile: load failed" in server.log

    def test_leaves_an_unloaded_model_alone(self, server: RunningServer) -> None:
        with grpc_client.InferenceServerClient(server.grpc) as client:
            client.unload_model("third")
            time.sleep(2)
            assert not client.is_model_ready("third")
            client.load_model("third")
        infer(server, "third")

    def test_restarts_tritonserver_if_models_cannot_be_reloaded(self, backends: Path, repository: Path) -> None:
        with RunningServer(repository, "--model-control-mode=none", backends=backends) as server:
            first = server.pid
            kill_stub(server, "first")
            server.wait_until_ready(other_than=first)
            assert "has to be restarted: model first cannot be unloaded" in server.log
            infer(server, "first")


class TestEnd:
    def test_leaves_nothing_behind(self, backends: Path, repository: Path) -> None:
        add_model(repository, "stream", kind="stream")
        server = RunningServer(repository, backends=backends)
        regions = [stub.region for stub in server.stubs()]
        pids = [server.pid, *(stub.process.pid for stub in server.stubs())]
        directory = server.run_directory
        assert len(regions) == 2
        assert all(region.exists() for region in regions)
        assert server.stop() == 0
        assert not any(path.exists() for path in [*regions, directory])
        assert not any(psutil.pid_exists(pid) for pid in pids)

    def test_dead_stub_with_requests_does_not_hold_up_the_end(self, backends: Path, repository: Path) -> None:
        server = RunningServer(repository, backends=backends)
        client = threading.Thread(target=pytest.raises, args=(InferenceServerException, infer, server, "first", 3.0))
        client.start()
        time.sleep(0.5)
        region = server.stubs()[0].region
        kill_stub(server, "first")
        client.join()
        answer(server, "first")
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 10
        assert not region.exists()

    def test_killed_supervisor_takes_the_server_along(self, backends: Path, repository: Path) -> None:
        server = RunningServer(repository, backends=backends)
        directory, stubs = server.run_directory, server.stubs()
        processes = [psutil.Process(pid) for pid in [server.pid, *(stub.process.pid for stub in stubs)]]
        server.process.kill()
        _, alive = psutil.wait_procs(processes, timeout=15)
        assert alive == []
        wait_until(lambda: not directory.exists())
        assert not any(stub.region.exists() for stub in stubs)
        server.stop()

    def test_stubs_that_hang_are_ended_when_the_supervisor_is_killed(self, backends: Path, repository: Path) -> None:
        server = RunningServer(repository, backends=backends)
        stubs = [psutil.Process(stub.process.pid) for stub in server.stubs()]
        for stub in stubs:
            stub.suspend()
        server.process.kill()
        _, alive = psutil.wait_procs(stubs, timeout=15)
        assert alive == []
        server.stop()

    def test_stale_cleanup_spares_the_living(self) -> None:
        directory = RunDirectory()
        try:
            assert directory.path not in remove_stale_run_directories()
            assert directory.path.exists()
        finally:
            directory.remove()
        assert not directory.path.exists()

    def test_restarts_tritonserver_in_a_clean_run_directory(self, backends: Path, repository: Path) -> None:
        with RunningServer(repository, backends=backends) as server:
            (server.run_directory / "kv").mkdir()
            (server.run_directory / "kv" / "block").touch()
            killed, stubs, address = server.pid, server.stubs(), server.grpc
            os.kill(killed, signal.SIGKILL)
            server.wait_until_ready(other_than=killed)
            assert server.grpc == address
            assert not (server.run_directory / "kv").exists()
            assert not any(stub.region.exists() or stub.process.is_alive() for stub in stubs)
            infer(server, "first")
            assert "tritonserver was killed by SIGKILL; starting it again" in server.log

    def test_gives_up_on_a_tritonserver_that_keeps_dying(self, backends: Path, repository: Path) -> None:
        server = RunningServer(repository, backends=backends)
        killed = None
        for _ in range(6):
            server.wait_until_ready(other_than=killed)
            killed = server.pid
            os.kill(killed, signal.SIGKILL)
        assert server.process.wait(timeout=30) == 1
        server.stop()
        assert "5 times within 60 s" in server.log
