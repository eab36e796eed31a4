"""The exceptions a user of jaxhetero can meet.

Every message says who (rank or reducer, host), what, where (stage, op, round) and what to do about it.

An error inside a compiled program reaches Python as ``jax.errors.JaxRuntimeError``, because XLA raises it. Its message
has the name of the class here, for example ``jaxhetero.WorkerLost: rank 3 (host b) ...``.

Example:
  A wrong setting or call raises the class itself, which is also a ``ValueError``:

  >>> from jaxhetero.errors import ConfigError
  >>> try:
  ...     jaxhetero.psum(jnp.ones(3), wire_dtype=jnp.int16, name="gradients")
  ... except ConfigError as error:
  ...     print(error)
  gradients: wire_dtype is int16; it can be bfloat16, float16, int8, int4 or float8_e4m3fn
"""

from __future__ import annotations

import re


class JaxheteroError(RuntimeError):
    """Base class of every exception raised by this package."""


class ConfigError(JaxheteroError, ValueError):
    """A setting is missing, malformed, or contradicts another one."""


class NotInitializedError(JaxheteroError):
    """A collective was used before ``jaxhetero.initialize()``, after ``shutdown()``, or in a forked child."""


class AddressInUse(JaxheteroError):
    """The address to listen on belongs to another process, or is not an address of this host."""


class StartTimeout(JaxheteroError):
    """The workers and reducers did not all come together within ``start_timeout_ms``."""


class AuthenticationError(JaxheteroError):
    """The job tokens of two processes differ."""


class VersionMismatch(JaxheteroError):
    """Two processes of one job run different versions of jaxhetero, or describe different jobs."""


class MismatchError(JaxheteroError):
    """Workers called one collective with different shapes, dtypes, tree structures or operations, or one sent another
    message than the other waits for."""


class WorkerLost(JaxheteroError):
    """A worker process ended or became unreachable in the middle of the job."""


class ReducerLost(JaxheteroError):
    """A reducer process ended or became unreachable in the middle of the job."""


class RoundTimeout(JaxheteroError):
    """A round, or a message between workers, made no progress for ``timeout_ms``; the text names who is late."""


class ProtocolError(JaxheteroError):
    """A peer sent bytes that are not a valid frame of this protocol."""


class InternalError(JaxheteroError):
    """A failure of the operating system or of jaxhetero itself."""


_BY_NAME: dict[str, type[JaxheteroError]] = {kind.__name__: kind for kind in JaxheteroError.__subclasses__()}


def from_status(name: str, message: str) -> JaxheteroError:
    """The exception for a native status.

    Args:
      name: a class of this module, by the name in ``xla_ffi/base/status.h``. Another name gives ``InternalError``.
      message: the exception's text.

    Example:
      >>> from jaxhetero.errors import from_status
      >>> from_status("ReducerLost", "reducer 1 (host b) closed the connection")
      ReducerLost('reducer 1 (host b) closed the connection')
    """
    return _BY_NAME.get(name, InternalError)(message)


def from_message(text: str) -> JaxheteroError:
    """The exception that the message of a failed program names.

    Args:
      text: the text of a ``jax.errors.JaxRuntimeError``.

    Returns:
      An exception of the class that ``text`` names, with the rest of the text; ``InternalError`` where it names none.

    Example:
      >>> from jaxhetero.errors import from_message
      >>> from_message("INTERNAL: jaxhetero.WorkerLost: rank 3 (host b) closed the connection")
      WorkerLost('rank 3 (host b) closed the connection')
    """
    found = re.search(r"jaxhetero\.(\w+): (.*)", text, re.DOTALL)
    return from_status(found[1], found[2]) if found else InternalError(text)
