"""TLS: the server's certificate and key, whom a client trusts, and what a failed connection says of either."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from dbench.errors import OptionError
from dbench.options import ServiceOptions
from dbench.serve.address import AddressFault

CERTIFICATE = "a file with the server's certificate in PEM"
KEY = "a file with the certificate's private key in PEM, without a passphrase"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One way in which the two sides of a connection do not fit together, by what gRPC says of it."""

    is_secure: bool
    """The side that dials speaks TLS."""
    markers: tuple[str, ...]
    meaning: str
    is_certain: bool = True
    """Dialling again would not change it."""


MISMATCHES = (
    Mismatch(True, ("WRONG_VERSION_NUMBER",), "it does not speak TLS; leave tls_ca out, or start it with --tls-cert"),
    Mismatch(
        True, ("Hostname Verification Check failed",), "its certificate is for other names; dial it by one of those"
    ),
    Mismatch(True, ("certificate has expired",), "its certificate has expired"),
    Mismatch(True, ("CERTIFICATE_VERIFY_FAILED",), "its certificate is not among those of tls_ca, nor signed by one"),
    Mismatch(
        False,
        ("failed to connect", "Socket closed"),
        "it hangs up at once; a server that speaks TLS does so: give --tls-ca, the file with its certificate",
        is_certain=False,
    ),
)
"""The first whose markers are all there is meant."""


def is_secure(service: ServiceOptions) -> bool:
    """The server's port speaks TLS."""
    return service.tls_cert is not None and service.tls_key is not None


def tls_fault(service: ServiceOptions) -> AddressFault | None:
    """What stands against the server's certificate and key, or None; also where it has neither."""
    cert, key = service.tls_cert, service.tls_key
    if cert is None and key is None:
        return None
    if cert is None:
        return AddressFault("tls_cert", "nothing", f"{CERTIFICATE} beside tls_key, or neither of the two")
    if key is None:
        return AddressFault("tls_key", "nothing", f"{KEY} beside tls_cert, or neither of the two")
    if fault := _certificates_fault(cert):
        return AddressFault("tls_cert", fault, CERTIFICATE)
    try:
        _load_pair(cert, key)
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error) or "KEY_TYPE_MISMATCH" in str(error):
            return AddressFault("tls_key", f"{key!r}, the key of another certificate", f"that of tls_cert {cert!r}")
        return AddressFault("tls_key", f"{key!r}, which holds no such key", KEY)
    except OSError as error:
        return AddressFault("tls_key", f"{key!r} ({error.strerror or error})", KEY)
    return None


def server_credentials(service: ServiceOptions) -> grpc.ServerCredentials:
    """Raises OptionError for files that cannot be used."""
    if fault := tls_fault(service):
        raise OptionError(fault.line)
    assert service.tls_cert is not None
    assert service.tls_key is not None
    pair = (Path(service.tls_key).read_bytes(), Path(service.tls_cert).read_bytes())
    return grpc.ssl_server_credentials([pair])


def channel_credentials(tls_ca: str) -> grpc.ChannelCredentials:
    """Trust in the certificates of a file. Raises OptionError for one that holds none."""
    if fault := _certificates_fault(tls_ca):
        raise OptionError(f"tls_ca: got {fault}, wanted a file with the certificates to trust in PEM")
    return grpc.ssl_channel_credentials(Path(tls_ca).read_bytes())


def mismatch(details: str, *, is_secure: bool) -> Mismatch | None:
    """What the details of a failed connection mean, as far as they tell; `is_secure`: the side that dials."""
    for known in MISMATCHES:
        if known.is_secure == is_secure and all(marker in details for marker in known.markers):
            return known
    return None


def _load_pair(cert: str, key: str) -> None:
    """Raises OSError, of which ssl.SSLError is one, for files that cannot be used; gRPC says nothing of the kind."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key, password=b"")  # no passphrase, instead of asking for one at the terminal


def _certificates_fault(path: str) -> str:
    """What a file is instead of one with certificates, for 'got ...'; empty for a good one."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        return f"{path!r}, which holds no certificate"
    except OSError as error:
        return f"{path!r} ({error.strerror or error})"
    return ""
