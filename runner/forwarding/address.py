"""Addresses of tracking stores: which are accepted, and whether one answers. No MLflow here."""

from __future__ import annotations

import fcntl
import os
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from runner.contracts import Fault, UserError

Result = TypeVar("Result")

ALLOWED = (
    "null (mlflow.db in the launch folder), sqlite:///FILE.db, http(s)://HOST:PORT, "
    "postgresql://, mysql://, mssql://, databricks"
)
_REMOTE = ("http", "https", "postgresql", "mysql", "mssql", "databricks")


def uri_fault(given: object, problem: str, next_step: str) -> UserError:
    """The error for a store that cannot be used."""
    text = f"{given} ({problem})" if problem else str(given)
    return UserError(Fault(key="tracking.uri", given=text, allowed=ALLOWED, next_step=next_step))


def resolve_uri(uri: str | None, launch: Path) -> str:
    """The address in full; relative sqlite paths count from the absolute folder `launch`.

    Raises UserError for an address that MLflow refuses or that would not outlive the process.
    """
    if uri is None:
        return _sqlite_uri("sqlite", launch / "mlflow.db", "")
    scheme = uri.partition(":")[0].partition("+")[0]
    if scheme == "sqlite":
        driver, mark, rest = uri.partition(":///")
        name, question, options = rest.partition("?")
        if mark and name and name != ":memory:":
            return _sqlite_uri(driver, launch / name, question + options)
    elif scheme in _REMOTE and ("://" in uri or scheme == "databricks"):
        return uri
    raise uri_fault(
        repr(uri), "it names no file and no server", "type tracking.uri=sqlite:///mlflow.db"
    )


def _sqlite_uri(driver: str, path: Path, options: str) -> str:
    # SQLAlchemy ends the path at a question mark, and 2.1 decodes per cent signs where 2.0 did not.
    if set("?%") & set(str(path)):
        raise uri_fault(
            f"sqlite:///{path}",
            "the path holds a question mark or a per cent sign",
            "start the command in another folder, or type tracking.uri=sqlite:////FOLDER/mlflow.db",
        )
    return f"{driver}:///{path}{options}"


def sqlite_path(uri: str) -> Path | None:
    """The file of a resolved sqlite address, or None for any other store."""
    if not uri.startswith("sqlite"):
        return None
    return Path(uri.partition(":///")[2].partition("?")[0])


def probe(uri: str, seconds: float) -> None:
    """Find out quickly whether the store can be written: a lock on the file, or a connection.

    Raises OSError or sqlite3.Error with the reason. MLflow's own calls would try for minutes.
    """
    path = sqlite_path(uri)
    if path is None:
        probe_server(uri, seconds)
    else:
        _probe_file(path, seconds)


def probe_server(uri: str, seconds: float) -> None:
    """Connect to the server of an http(s) address, or to the proxy on the way there.

    Does nothing for another kind of store. Raises OSError with the reason.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        return
    proxy = None if proxy_bypass(parts.hostname) else getproxies().get(parts.scheme)
    if proxy is not None:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=seconds).close()
    except OSError as error:
        raise ConnectionError(f"{parts.hostname}:{port} does not answer: {error}") from error


def _probe_file(path: Path, seconds: float) -> None:
    connection = sqlite3.connect(path, timeout=seconds, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    finally:
        connection.close()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other launchers out while one makes the tables of a database file in `folder`.

    MLflow's own lock does not cover all of that: two at once fail on duplicate columns. The lock
    is on the folder itself and leaves nothing behind; a file system without such locks has none.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises; TimeoutError when it takes longer.

    It goes on in a daemon thread then: MLflow takes its time limits from the environment only,
    and a server that accepts connections but never answers would hold the caller for minutes.
    """
    found: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, daemon=True, name="tracking-check")
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]
