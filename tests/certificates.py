"""Certificates for tests, created by openssl."""

import subprocess
from pathlib import Path


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """Write a self-signed certificate for a name and 127.0.0.1; return its file, and that of its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-keyout", key, "-out", cert, "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return cert, key
