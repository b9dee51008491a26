"""TLS of TCP listeners and of those who call them: the same files for gRPC and for the data port."""

from __future__ import annotations

import dataclasses
import ssl
from pathlib import Path

import grpc

from kvstore.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of one side.

    Attributes:
        ca: Signs the certificates of the other side; None: a client trusts what the system trusts, a daemon asks for
            no certificate.
        cert: This side's certificate, with its chain; None: a client that shows none.
        key: Its key.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC listener.

        Raises:
            ConfigError: a file cannot be read.
        """
        return grpc.ssl_server_credentials(
            [(_read(self.key), _read(self.cert))],
            root_certificates=_read(self.ca) if self.ca else None,
            require_client_auth=self.ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a gRPC channel.

        Raises:
            ConfigError: a file cannot be read.
        """
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca) if self.ca else None,
            private_key=_read(self.key) if self.key else None,
            certificate_chain=_read(self.cert) if self.cert else None,
        )

    def server_context(self) -> ssl.SSLContext:
        """For a listener of the data port.

        Raises:
            ConfigError: a file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """For connections to a data port; the certificate must be of the host that is called.

        Raises:
            ConfigError: a file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context)
        if self.ca is None:
            context.load_default_certs()
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(file) for file in (self.cert, self.key, self.ca) if file is not None)
            raise ConfigError(f"TLS files {files}: {error}") from error


def _read(file: Path | str | None) -> bytes:
    if file is None:
        raise ConfigError("TLS needs a certificate and its key: --tls-cert FILE and --tls-key FILE")
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS file {file}: {error.strerror}") from error
