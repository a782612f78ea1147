"""Certificates that are made for a test, by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

THIS_MACHINE = "DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True, slots=True)
class Pair:
    """Files of a certificate and its key."""

    cert: str
    key: str

    @property
    def options(self) -> dict[str, Any]:
        """Of a server."""
        return {"tls_cert": self.cert, "tls_key": self.key}


def self_signed(folder: Path, name: str = "server", names: str = THIS_MACHINE) -> Pair:
    """A certificate for these names that vouches for itself."""
    pair = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    _openssl("req", "-x509", *_new_key(pair.key), "-out", pair.cert, *_subject(name), *_names(names))
    return pair


def signed_by(authority: Pair, folder: Path, name: str = "leaf", names: str = THIS_MACHINE) -> Pair:
    """A certificate for these names that another one vouches for."""
    pair, request = Pair(str(folder / f"{name}.pem"), str(folder / f"{name}.key")), str(folder / f"{name}.csr")
    _openssl("req", *_new_key(pair.key), "-out", request, *_subject(name), *_names(names))
    ways = ("-CA", authority.cert, "-CAkey", authority.key, "-copy_extensions", "copy")
    _openssl("x509", "-req", "-in", request, *ways, "-out", pair.cert, "-days", "30")
    return pair


def with_passphrase(pair: Pair, folder: Path) -> str:
    """The file of its key, encrypted."""
    path = str(folder / "encrypted.key")
    _openssl("ec", "-in", pair.key, "-aes256", "-passout", "pass:sesame", "-out", path)
    return path


def _new_key(path: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path)


def _subject(name: str) -> tuple[str, ...]:
    return ("-subj", f"/CN={name}")


def _names(names: str) -> tuple[str, ...]:
    return ("-addext", f"subjectAltName={names}")


def _openssl(*arguments: str) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificates with the openssl command, which is not there")
    subprocess.run(("openssl", *arguments), check=True, capture_output=True)
