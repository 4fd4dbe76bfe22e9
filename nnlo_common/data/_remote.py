"""Names with ``protocol://``: what opens them, and which files a pattern of them matches."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from nnlo_common.base._errors import ConfigurationError, MissingExtraError

__all__ = [
    "check_protocols",
    "importable",
    "is_remote",
    "is_remote_pattern",
    "open_remote",
    "remote_matches",
    "remote_state",
]

#: What opens names with ``protocol://``: the package, and the extra of nnlo that has it.
_OPENERS = {
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
    "root": ("fsspec-xrootd", "xrootd"),
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
}
# "?" begins the query of an address.
_PATTERN = frozenset("*[")
# What libraries call the mark or the time by which a file is told from what it was before, in small letters
# and without "-" and "_".
_MARKS = ("etag", "contentmd5", "digest", "md5hash", "crc32c", "lastmodified", "modified", "updated", "mtime")
_COPIED = "or copy it first by stage_to= and copy_command= (--cache and --copy-command)"


def importable(package: str) -> bool:
    """Return whether a package can be imported.

    Example:
        >>> importable("json"), importable("no_such_package")
        (True, False)
    """
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def is_remote(path: str) -> bool:
    """Return whether a library opens the file, not the operating system.

    Example:
        >>> is_remote("s3://bucket/a.parquet"), is_remote("/data/a.parquet")
        (True, False)
    """
    return "://" in path


def is_remote_pattern(path: str) -> bool:
    """Return whether a name stands for all remote files that it matches.

    Example:
        >>> is_remote_pattern("s3://bucket/*.parquet"), is_remote_pattern("https://host/a.root?v=2")
        (True, False)
    """
    return is_remote(path) and bool(_PATTERN & set(path))


def check_protocols(path: str, what: str) -> None:
    """Refuse a remote name that nothing here opens.

    Args:
        path: with one protocol, or a chain such as ``simplecache::s3://``.
        what: is wanted, for the error.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigurationError: no package is known that opens such names.
    """
    for protocol in path.partition("://")[0].split("::"):
        opener = _OPENERS.get(protocol)
        if not importable("fsspec"):
            raise MissingExtraError(what, "fsspec", "http" if opener is None else opener[1])
        import fsspec

        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            if opener is not None:
                raise MissingExtraError(what, *opener) from None
            told = " ".join(str(error).split())[:200]
            raise ConfigurationError(f"{path} cannot be read ({told}); do so, {_COPIED}") from None
        except ValueError:  # fsspec knows no such protocol
            raise ConfigurationError(
                f"{path}: nothing here opens names with {protocol}://; correct the name, {_COPIED}"
            ) from None


def open_remote(path: str) -> Any:
    """Open a remote file for reading."""
    import fsspec

    return fsspec.open(path).open()


def remote_matches(pattern: str) -> Sequence[str]:
    """Return the names of the remote files that a pattern matches, sorted.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigurationError: nothing here opens such names, or the other side does not list its files.
    """
    check_protocols(pattern, f"listing {pattern}")
    import fsspec

    chain, link, last = pattern.rpartition("::")
    try:
        files, path = fsspec.core.url_to_fs(last)
        names = [files.unstrip_protocol(name) for name in files.glob(path)]
        if not names and files.exists(path):  # such a character is part of its name
            names = [last]
    except Exception as error:  # each library has its own
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigurationError(
            f"{pattern}: its files cannot be listed ({type(error).__name__}: {told}); correct the name, look "
            "whether you may read them, or name each file"
        ) from None
    return sorted(chain + link + name for name in names)


def remote_state(path: str) -> Any:
    """Return what differs once a remote file has changed; None: nothing tells."""
    try:
        import fsspec

        files, place = fsspec.core.url_to_fs(path)
        info = files.info(place)
    except Exception:  # each library has its own
        return None
    known = {name.lower().replace("-", "").replace("_", ""): value for name, value in info.items()}
    marks = [(name, str(known[name])) for name in _MARKS if known.get(name)]
    return [*marks, info.get("size")] if marks and info.get("type") == "file" else None
