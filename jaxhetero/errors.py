"""The exceptions a user of jaxhetero can meet.

Every message says who (rank or reducer, host), what, where (stage, op, round) and what to do about it.
An error inside a compiled program reaches Python as ``jax.errors.JaxRuntimeError``, because XLA owns that path;
its message starts with the name of the class here, for example ``jaxhetero.WorkerLost: rank 3 (host b) ...``.
"""

from __future__ import annotations

import re


class JaxheteroError(RuntimeError):
    """Base class of every exception raised by this package."""


class ConfigError(JaxheteroError, ValueError):
    """A setting is missing, malformed, or contradicts another one."""


class NotInitializedError(JaxheteroError):
    """A collective was used before ``jaxhetero.initialize()`` or after ``shutdown()``."""


class AddressInUse(JaxheteroError):
    """The address to listen on is taken by another process, or is not an address of this host."""


class StartTimeout(JaxheteroError):
    """The workers and reducers did not all come together within ``start_timeout_ms``."""


class AuthenticationError(JaxheteroError):
    """The job tokens of two processes differ."""


class VersionMismatch(JaxheteroError):
    """Two processes of one job run different versions of jaxhetero, or describe different jobs."""


class MismatchError(JaxheteroError):
    """Workers called one collective with different shapes, dtypes, tree structures or operations."""


class WorkerLost(JaxheteroError):
    """A worker process ended or became unreachable in the middle of the job."""


class ReducerLost(JaxheteroError):
    """A reducer process ended or became unreachable in the middle of the job."""


class RoundTimeout(JaxheteroError):
    """A round made no progress for ``timeout_ms``; the message names who is late."""


class ProtocolError(JaxheteroError):
    """A peer sent something that is not a valid frame of this protocol."""


class InternalError(JaxheteroError):
    """A failure of the operating system or of jaxhetero itself."""


_BY_NAME: dict[str, type[JaxheteroError]] = {kind.__name__: kind for kind in JaxheteroError.__subclasses__()}


def from_status(name: str, message: str) -> JaxheteroError:
    """The exception for a native status: ``name`` is one of the classes here, as in ``xla_ffi/base/status.h``."""
    return _BY_NAME.get(name, InternalError)(message)


def from_message(text: str) -> JaxheteroError:
    """The exception that a failed program's message names, ``... jaxhetero.WorkerLost: rank 3 ...``."""
    found = re.search(r"jaxhetero\.(\w+): (.*)", text, re.DOTALL)
    return from_status(found[1], found[2]) if found else InternalError(text)
