"""A user that sends one streamed request after the other, and tells Locust about each."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gevent
from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import LocalRunner

from summary import Run, line
from timing import Timing

run = Run()
"""The run that goes on in this process."""
_users_done = 0


class StreamingUser(User):
    """Sends requests until it has sent `--requests-per-user`; when all users have, the run is over.

    `kind` names the requests in Locust's tables.
    """

    abstract = True
    wait_time = constant(0)
    kind: str

    def request(self, timing: Timing) -> None:
        """Sends one request and fills in the times of its responses, and the tokens. Raises what went wrong."""
        raise NotImplementedError

    @property
    def options(self) -> Any:
        """The parsed command line."""
        return self.environment.parsed_options

    @property
    def address(self) -> str:
        """host:port"""
        return str(self.host).removeprefix("http://").rstrip("/")

    def on_start(self) -> None:
        self._left = self.options.requests_per_user
        self.connections = ExitStack()

    def on_stop(self) -> None:
        self.connections.close()

    @task
    def measured_request(self) -> None:
        if not self._left:
            self._end()
        self._left -= 1
        run.began += 1
        timing = Timing()
        problem = None
        try:
            self.request(timing)
            assert timing.tokens, "the last response does not tell num_output_tokens"
        except Exception as error:  # whatever it is, it counts as a failure
            problem = error
        timing.request_ended()
        if problem is None:
            run.finished.append(timing)
            self._report("time to first token", timing.first_token)
            self._report("inter-token latency", timing.inter_token)
        else:
            run.failed += 1
        self._report("whole request", timing.whole, problem)

    def _report(self, name: str, seconds: float | None, problem: Exception | None = None) -> None:
        if seconds is not None:
            self.environment.events.request.fire(
                request_type=self.kind,
                name=name,
                response_time=seconds * 1e3,
                response_length=0,
                exception=problem,
                context={},
            )

    def _end(self) -> None:
        global _users_done
        _users_done += 1
        runner = self.environment.runner
        if _users_done == runner.target_user_count:
            gevent.spawn(_end_run, runner, quit_locust=self.options.headless)
        raise StopUser


def _end_run(runner: LocalRunner, quit_locust: bool) -> None:
    """Lets the users end by themselves first."""
    runner.user_greenlets.join()
    runner.quit() if quit_locust else runner.stop()


@events.init_command_line_parser.add_listener
def _add_options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("Load of a language model")
    group.add_argument("--max-tokens", type=int, default=64, help="New tokens per request (default: %(default)s)")
    group.add_argument(
        "--requests-per-user", type=int, default=100, help="A user ends after so many (default: %(default)s)"
    )
    group.add_argument("--summary", metavar="FILE", help="Write the summary to FILE, as JSON")


@events.init.add_listener
def _refuse_workers(environment: Environment, **_: Any) -> None:
    if not isinstance(environment.runner, LocalRunner):
        raise SystemExit("the summary is made in one process: run without --master, --worker and --processes")


@events.test_start.add_listener
def _begin(**_: Any) -> None:
    global _users_done
    run.reset()
    _users_done = 0


@events.test_stop.add_listener
def _sum_up(environment: Environment, **_: Any) -> None:
    summary = run.summary()
    print(line(summary), flush=True)
    if environment.parsed_options.summary:
        Path(environment.parsed_options.summary).write_text(json.dumps(summary, indent=1) + "\n")
