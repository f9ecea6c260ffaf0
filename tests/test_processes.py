"""A process is told apart from all others that ever have its number."""

import os
import subprocess
import sys

import pytest

from corolla.processes import ProcessIdentity


def test_this_process_is_alive_and_the_same_every_time() -> None:
    identity = ProcessIdentity.current()
    assert identity == ProcessIdentity.of(os.getpid())
    assert identity.is_alive()
    assert ProcessIdentity.parse(str(identity)) == identity


def test_number_that_is_used_again_is_another_process() -> None:
    identity = ProcessIdentity.current()
    assert not ProcessIdentity(identity.pid, identity.started - 1).is_alive()


def test_forked_process_knows_itself() -> None:
    ProcessIdentity.current()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, str(ProcessIdentity.current()).encode())
        os._exit(0)
    told = ProcessIdentity.parse(os.read(reader, 100).decode())
    os.waitpid(child, 0)
    assert told.pid == child


def test_dead_process_is_dead_even_while_nobody_has_collected_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(process.pid)
    assert identity.is_alive()
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive()
    process.wait()
    assert not identity.is_alive()
    with pytest.raises(ProcessLookupError):
        ProcessIdentity.of(process.pid)
