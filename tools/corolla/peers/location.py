"""The URL of a registry: which engine, where, and its options."""

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from corolla.errors import InvalidValueError

SQLITE, ETCD, DHT = "sqlite", "etcd", "dht"
OPTIONS = {SQLITE: (), ETCD: ("ca", "cert", "key"), DHT: ("listen",)}
"""The options of each engine, given as ?name=value&name=value."""
FORMS = "sqlite:///path/of/a/file, etcd://host:port,host:port or dht:///ip4/.../p2p/..., as docs/registry.md says"


@dataclass(frozen=True)
class RegistryLocation:
    """`host` and `path` are as in the URL, `path` with its first /; `text` is the URL itself."""

    text: str
    engine: str
    host: str
    path: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "RegistryLocation":
        """InvalidValueError for what is not the URL of a registry."""
        parts = urlsplit(text)
        if parts.scheme not in OPTIONS or parts.fragment:
            raise InvalidValueError("registry", text, FORMS)
        allowed = OPTIONS[parts.scheme]
        try:
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError as error:
            raise InvalidValueError("registry", text, f"options as name=value, joined by & ({error})") from error
        for name, value in options.items():
            if name not in allowed or not value:
                known = f"with a value: {', '.join(allowed)}" if allowed else f"none with {parts.scheme}://"
                raise InvalidValueError(f"registry: option {name}", value, known)
        return cls(text, parts.scheme, parts.netloc, parts.path, options)
