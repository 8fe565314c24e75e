"""Tensors and json in one safetensors file with a checksum: artifacts, cache shards and training states.

Files are written completely or not at all, and refused if a single bit changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from halopose.data.files import write_bytes
from halopose.data.storage.address import Address, Place
from halopose.errors import HaloposeError

_BLANK = "0" * 64
_LONGEST = 100_000_000  # largest header in bytes, as in safetensors
# Checksum and json are one metadata entry, because the order of several entries is not fixed.
_SEAL = re.compile(rb'"halopose":"([0-9a-f]{64})')


def write_tensors(path: Place | str, tensors: Mapping[str, Tensor], content: Any) -> None:
    """Write a file atomically; equal tensors and content give identical bytes."""
    write_bytes(path, sealed(tensors, content))


def sealed(tensors: Mapping[str, Tensor], content: Any) -> bytes:
    """Return the bytes that ``write_tensors`` writes."""
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    body = json.dumps(content, sort_keys=True)
    data = save(plain, metadata={"halopose": _BLANK + body})
    # The checksum is computed with zeros in its place, so that it can be stored in the header.
    seal = hashlib.sha256(data).hexdigest().encode()
    begin = data.index(_BLANK.encode())
    return b"".join([data[:begin], seal, data[begin + len(seal) :]])


def read_content(path: Place | str) -> Any:
    """Read the json content of a file without verifying the checksum; None for a file of another program.

    Of a remote file only the header is downloaded.
    """
    if isinstance(path, Address):
        return _content_at(path)
    try:
        with safe_open(path, framework="np") as file:
            body = (file.metadata() or {}).get("halopose", "")[len(_BLANK) :]
            return json.loads(body) if body else None
    except (SafetensorError, OSError, ValueError):
        raise HaloposeError(f"{path} is damaged") from None


def _content_at(address: Address) -> Any:
    """Read the json content of a remote file from its header: 8 bytes of length, then json."""
    try:
        length = int.from_bytes(address.part(0, 8), "little")
        header = json.loads(address.part(8, 8 + min(length, _LONGEST)))
        body = header.get("__metadata__", {}).get("halopose", "")[len(_BLANK) :]
        return json.loads(body) if body else None
    except (OSError, ValueError, AttributeError):
        raise HaloposeError(f"{address} is damaged") from None


def check_seal(path: Place | str) -> None:
    """Raise a HaloposeError unless the checksum of the file is correct."""
    try:
        data = (path.local() if isinstance(path, Address) else Path(path)).read_bytes()
    except OSError as error:
        raise HaloposeError(f"cannot read {path}: {error.strerror or error}") from None
    header = data[: 8 + int.from_bytes(data[:8], "little")] if len(data) >= 8 else b""
    found = _SEAL.search(header)
    if found is None:
        raise HaloposeError(f"{path} is damaged: it has no checksum")
    digest = hashlib.sha256(data[: found.start(1)])
    digest.update(_BLANK.encode())
    digest.update(memoryview(data)[found.end(1) :])
    if digest.hexdigest().encode() != found.group(1):
        raise HaloposeError(f"{path} is damaged: its checksum does not match")
