"""Closing the connections of tritonserver's clients from outside, for requests that it can never answer."""

import ctypes
import os
import socket
from collections.abc import Collection
from typing import Any

import psutil

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_PIDFD_GETFD = 438  # the same on every architecture; in the kernel since 5.6


class ClientConnections:
    """The TCP connections that clients had to some ports of a process at one moment, this process's own left out."""

    def __init__(self, pid: int, ports: Collection[int]) -> None:
        self._pid = pid
        self._ports = ports
        own = {connection.laddr for connection in psutil.Process().net_connections("tcp")}
        self._peers = {connection.raddr for connection in self._established() if connection.raddr not in own}

    def close(self) -> int:
        """Ends those that are still there; their clients see them closed by the server. Returns their number.

        Raises PermissionError where this process may not reach into the other (containers: capability SYS_PTRACE).
        """
        closed = 0
        process = os.pidfd_open(self._pid)
        try:
            for connection in self._established():
                if connection.raddr in self._peers:
                    _shut_down(process, connection.fd)
                    closed += 1
        finally:
            os.close(process)
        return closed

    def _established(self) -> list[Any]:
        return [
            connection
            for connection in psutil.Process(self._pid).net_connections("tcp")
            if connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port in self._ports
        ]


def _shut_down(process: int, descriptor: int) -> None:
    """Shuts down the socket that is `descriptor` in the process of a pidfd: a copy of it acts on the same socket."""
    copy = _LIBC.syscall(_SYS_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    with socket.socket(fileno=copy) as connection:
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has just been closed anyway
