"""TLS certificates of a SuperLink and the keys that its sites prove themselves with.

One folder holds everything that a loopback deployment needs. For several hosts, the SuperLink gets `ca.crt`,
`superlink.crt`, `superlink.key` and the sites' public keys; a site gets `ca.crt` and its own private key; `ca.key`
stays where it was made.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wattgym.errors import UserError

_SITE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Credentials:
    """Where the certificates and keys of a federation lie.

    Attributes:
        folder: Private folder (mode 0700) that holds them.
    """

    folder: Path

    @property
    def ca_certificate(self) -> Path:
        """Certificate that clients trust."""
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        """Certificate that the SuperLink shows."""
        return self.folder / "superlink.crt"

    @property
    def key(self) -> Path:
        """The SuperLink's private key."""
        return self.folder / "superlink.key"

    def site_key(self, site: str) -> Path:
        """Private key of a site."""
        return self.folder / "sites" / site

    def site_public_key(self, site: str) -> Path:
        """Public key of a site, in OpenSSH's format."""
        return self.folder / "sites" / f"{site}.pub"

    def check(self, sites: Iterable[str], now: datetime | None = None) -> None:
        """Checks that everything is there and the certificates are valid now.

        Args:
            sites: Names of the sites.
            now: Time of the check; now if None.

        Raises:
            UserError: A file is missing or is no certificate, a certificate has expired or is not yet valid.
        """
        now = now or datetime.now(UTC)
        keys = [path(site) for site in sites for path in (self.site_key, self.site_public_key)]
        for path in (self.ca_certificate, self.certificate, self.key, *keys):
            if not path.is_file():
                raise UserError(f"{path}: no such file; `wattgym federated credentials` makes a complete folder")
        for path in (self.ca_certificate, self.certificate):
            try:
                certificate = x509.load_pem_x509_certificate(path.read_bytes())
            except (OSError, ValueError):
                raise UserError(f"{path}: not a certificate in PEM format") from None
            if certificate.not_valid_after_utc < now:
                raise UserError(
                    f"{path}: certificate expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; "
                    "`wattgym federated credentials` makes new ones"
                )
            if certificate.not_valid_before_utc > now:
                raise UserError(
                    f"{path}: certificate is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; "
                    "check this host's clock"
                )


def create(
    folder: Path, hosts: Sequence[str], sites: Sequence[str], valid: timedelta = timedelta(days=365)
) -> Credentials:
    """Makes a certificate authority, the SuperLink's certificate and a key pair for each site.

    Curve P-384 throughout: Flower takes keys of sites on NIST curves only.

    Args:
        folder: Folder to fill; it must be new or empty.
        hosts: Names and addresses under which clients reach the SuperLink.
        sites: Names of the sites.
        valid: How long the certificates last.

    Raises:
        UserError: The folder is not empty or cannot be written, or a site's name is no file name.
    """
    for site in sites:
        if not _SITE_NAME.fullmatch(site):
            raise UserError(
                f"site {site!r}: a name holds letters, digits, '.', '_' and '-' and begins with a letter or digit"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(folder.iterdir()):
            raise UserError(f"{folder}: not empty; credentials are made in a new folder and never overwritten")
        folder.chmod(0o700)
        (folder / "sites").mkdir(mode=0o700)
        made = Credentials(folder)
        _write_certificates(made, hosts, valid)
        for site in sites:
            key = ec.generate_private_key(ec.SECP384R1())
            _write_private(made.site_key(site), key, serialization.PrivateFormat.OpenSSH)
            public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
            made.site_public_key(site).write_bytes(public + b"\n")
    except OSError as error:
        raise UserError(f"{folder}: cannot write: {error.strerror or error}") from error
    return made


def _write_certificates(made: Credentials, hosts: Sequence[str], valid: timedelta) -> None:
    """Writes the authority and the SuperLink's certificate that it signs."""
    ca_key = ec.generate_private_key(ec.SECP384R1())
    key = ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "WattGym federation CA")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    begin = datetime.now(UTC) - timedelta(minutes=5)  # Clocks of other hosts may be a little behind.
    end = datetime.now(UTC) + valid
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())

    def builder(name: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(authority, critical=False)
        )

    ca = (
        builder(issuer, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True), critical=True)
        .sign(ca_key, hashes.SHA384())
    )
    server = (
        builder(subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(key_cert_sign=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    _write_private(made.folder / "ca.key", ca_key, serialization.PrivateFormat.PKCS8)
    _write_private(made.key, key, serialization.PrivateFormat.PKCS8)
    made.ca_certificate.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    made.certificate.write_bytes(server.public_bytes(serialization.Encoding.PEM))


def _usage(key_cert_sign: bool) -> x509.KeyUsage:
    """What a key may do: sign certificates, or take part in TLS."""
    return x509.KeyUsage(
        digital_signature=not key_cert_sign,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    """A host as certificates name it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_private(path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> None:
    """Writes a private key that only its owner can read, from the first byte."""
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as sink:
        sink.write(data)
