"""Storage services and servers: requests with retries, and their errors as those of the operating system.

fsspec is the one interface that all of them have, with packages that their users know and the credentials that these
find. It is imported when a URL occurs. Arrow's own file systems cannot abort an upload or write on a condition, and do
not read hf:// and https://.
"""

from __future__ import annotations

import errno
import logging
import re
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from batchgen.config.urls import HTTPS, shown_url
from batchgen.errors import BatchgenError, UsageError, first_line

_T = TypeVar("_T")

_SERVICES: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "s3": ("s3fs", {"fixed_upload_size": True}),  # some services want parts of one size
    "gs": ("gcsfs", {}),
    "az": ("adlfs", {"anon": False}),  # else it looks for no credentials
    "hf": ("huggingface_hub", {}),
    # Proxies as other programs find them, and bytes as they are stored.
    HTTPS: ("aiohttp", {"client_kwargs": {"trust_env": True, "headers": {"Accept-Encoding": "identity"}}}),
}
"""Scheme -> the package that reads it, and the options of its file system."""
WAITS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each further try of a request that failed, in addition to the tries of the services' own packages."""
CHANGED: Final = "another program has written it meanwhile"
_CAUSES: Final = (
    (errno.EACCES, r"certificate.?verify.?failed", "its certificate is not trusted; name its issuer by SSL_CERT_FILE"),
    (errno.EACCES, r"offline.?mode", "HF_HUB_OFFLINE forbids it; unset it"),
    (errno.ENOSPC, r"quota|storage.?full|no space|HTTP507", "the storage is full, or its quota is used up"),
    (errno.EACCES, r"expired", "the credentials have expired; renew them"),
    (errno.EEXIST, r"precondition|conditionnotmet|FileExistsError|HTTP412", CHANGED),
    (errno.ENOENT, r"nosuchbucket|container.?not.?found", "there is no such bucket; check the name"),
    (errno.EACCES, r"credential", "no credentials were found, or they are not valid; set them"),
    (errno.EACCES, r"HTTP40[13]|PermissionError", "no access; check the credentials, and what they allow"),
    (errno.ENOENT, r"HTTP404|FileNotFoundError", "there is no such file; check the name"),
)
"""(errno, pattern of what an error says, words): the first that matches is the cause."""
_PASSING: Final = frozenset({408, 425, 429})
"""Statuses of refused requests that a later try may pass; so may all from 500 on but 501."""


class RemoteState(NamedTuple):
    """What a service says of a file or a folder."""

    size: int | None
    """Bytes; None if the server does not say."""
    etag: str
    """Text that differs between contents of one name; empty if the server has none."""
    is_folder: bool = False


def request(url: str, action: Callable[[Any, str], _T]) -> _T:
    """The result of `action(file system, path of the URL in it)`, tried again if the network or the service fails.

    Raises:
        OSError: it names the URL and says the cause and a remedy in plain words; it has an `errno`.
        UsageError: the package of the service is not installed.
    """
    scheme, _, path = url.partition("://")
    for wait in (*WAITS, None):
        try:
            return action(_file_system(scheme), url if scheme == HTTPS else path)
        except BatchgenError:
            raise
        except Exception as error:
            problem = _problem(url, error)
            if wait is None or problem.errno != errno.EIO:
                raise problem from error
            time.sleep(wait)
    raise AssertionError


@cache
def _file_system(scheme: str) -> Any:
    package, options = _SERVICES[scheme]
    try:
        import fsspec

        logging.getLogger(package).addHandler(logging.NullHandler())  # what fails is said by `request`
        return fsspec.filesystem(scheme, skip_instance_cache=True, **options)
    except ImportError:
        raise UsageError(
            f"{scheme}:// needs the package {package}, which is not installed: pip install 'batchgen[remote]', or "
            f"pip install {package}"
        ) from None


def _problem(url: str, error: Exception) -> OSError:
    """The error of a file system as one of the operating system."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        if getattr(cause, "filename", None) == shown_url(url):
            break  # the error of an earlier request, which is being handled
        chain.append(cause)
    if url.startswith(HTTPS) and len(chain) > 1:
        del chain[0]  # fsspec says of every failure that there is no such file
    statuses = list(map(_status_of, chain))
    text = " ".join(f"{type(each).__name__} {each} HTTP{code}" for each, code in zip(chain, statuses, strict=True))
    # Names of files are not what an error says, and a query may be a signature.
    rest = url.partition("://")[2]
    text = re.sub(
        "|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in (url, rest, rest.partition("/")[2])), "", text
    )
    status = next(filter(None, statuses), 500)
    for code, said, words in () if status in _PASSING else _CAUSES:
        if re.search(said, text, re.IGNORECASE):
            return OSError(code, words, shown_url(url))
    what = re.sub(r"\?\S+", "", first_line(chain[-1]))
    if (status < 500 and status not in _PASSING) or status == 501:
        return OSError(errno.EINVAL, f"the service refused it: {what}", shown_url(url))
    return OSError(errno.EIO, f"the network or the service failed: {what}", shown_url(url))


def fresh(service: Any) -> Any:
    """A file system without what it remembers of its listings."""
    service.invalidate_cache()
    return service


def _status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of any of the packages holds."""
    response = getattr(error, "response", None)
    found = [getattr(each, name, None) for each in (error, response) for name in ("status", "status_code", "code")]
    if isinstance(response, Mapping):
        found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((value for value in found if isinstance(value, int) and 400 <= value < 600), None)


def state_of(url: str) -> RemoteState:
    """What a service says of a file or a folder now.

    Raises:
        OSError: there is none, or as `request`.
    """
    try:
        found = request(url, lambda service, path: fresh(service).info(path))
    except OSError as problem:
        if problem.errno in (errno.EACCES, errno.EINVAL) and url.startswith("s3://"):
            # The answer to HEAD has no words.
            request(url, lambda service, path: service.cat_file(path, start=0, end=1))
        raise
    if found["type"] == "directory":
        return RemoteState(None, "", is_folder=True)
    names = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "last_modified", "mtime")
    etag = next((str(found[name]) for name in names if found.get(name)), "")
    return RemoteState(found.get("size"), etag)


def gives_ranges(url: str, size: int) -> bool:
    """Whether parts of a file of `size` bytes can be read: not every server at https:// gives them.

    Raises:
        OSError: as `request`.
    """

    def second_byte(service: Any, path: str) -> bool:
        with service.open(path, block_size=1 << 16, cache_type="none", size=size) as file:
            file.seek(1)
            try:
                return len(file.read(1)) == 1
            except ValueError:  # the server begins to send the whole
                return False

    return not url.startswith(HTTPS) or size < 2 or request(url, second_byte)


def files_below(url: str) -> list[str] | None:
    """URLs of the files that match a pattern, or below a folder at any depth, sorted; None for the URL of a file.

    Raises:
        OSError: as `request`; a folder that is missing is a file that is.
    """
    if url.startswith(HTTPS):
        return None
    url = url.rstrip("/")
    pattern = re.search(r"[*?[]", url)
    if not pattern and not state_of(url).is_folder:
        return None

    found = request(url, lambda service, path: (service.glob if pattern else fresh(service).find)(path, detail=True))
    scheme = url.partition("://")[0]
    files = (name.lstrip("/") for name, info in found.items() if info["type"] == "file")
    return sorted(f"{scheme}://{name}" for name in files if not name.endswith("/"))
