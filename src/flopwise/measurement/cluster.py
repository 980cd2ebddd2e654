"""The ranks of a job read by a Ray cluster: each rank is a task, and only what it comes down to is sent back."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, TypeVar

from flopwise.errors import UsageError

T = TypeVar("T")
#: A task whose machine is lost is run again so often. Source: Ray's own default for tasks.
RETRIES = 3
PATIENCE_S = 5.0  # for the answer of a cluster


def _answers(address: str) -> None:
    """Checks that something listens at HOST:PORT: Ray itself waits for minutes.

    Raises:
        UsageError: nothing does.
    """
    host, colon, port = address.rpartition(":")
    if not colon or "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"--ray {address}: no cluster answers there ({error})") from error


class Ray(Executor):
    """An executor of a Ray cluster. Its machines need flopwise, and the same files at the same paths."""

    def __init__(self, address: str) -> None:
        """Joins a cluster.

        Args:
            address: "HOST:PORT", "auto", or "local" for one on this machine.

        Raises:
            UsageError: Ray is not installed, or no cluster answers there.
        """
        try:
            import ray
        except ImportError as error:
            raise UsageError(
                "--ray: Ray is not installed: pip install 'flopwise[ray]'. Nothing was read"
            ) from error
        _answers(address)
        self._ray: Any = ray
        self._lost, self._raised = ray.exceptions.RayError, ray.exceptions.RayTaskError
        self._joined = not ray.is_initialized()
        try:
            if self._joined:
                ray.init(
                    address=None if address == "local" else address,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
        except Exception as error:  # Ray has no exception of its own for this
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"--ray {address}: no cluster answers there ({first})") from error

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Returns the future of a task of the cluster; its exception is a BrokenExecutor where the cluster lost it for good."""
        task = self._ray.remote(max_retries=RETRIES, num_cpus=1)(fn)
        future: Future[T] = Future()

        def settle(of: Future[T]) -> None:
            error = of.exception()
            if error is None:
                future.set_result(of.result())
            elif isinstance(error, self._lost) and not isinstance(error, self._raised):
                first = (str(error).splitlines() or [""])[0]
                future.set_exception(BrokenExecutor(f"{type(error).__name__}: {first}"))
            else:
                future.set_exception(error)

        task.remote(*args, **kwargs).future().add_done_callback(settle)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves the cluster, if it was joined here."""
        del wait, cancel_futures
        if self._joined and self._ray.is_initialized():
            self._ray.shutdown()
