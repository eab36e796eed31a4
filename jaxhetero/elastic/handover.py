"""How a worker that comes gets the state: from all others at once, each of whom sends a stripe of it.

The first of them also says where the job is, and what the leaves are. Behind its stripe, each sends a checksum of every
leaf that it has, and of its place: if those differ, the job's workers have gone apart, and nobody comes. All goes over
one channel between each two.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxhetero._compat import keys
from jaxhetero.errors import MismatchError, from_status

if TYPE_CHECKING:
    from jaxhetero._native import Communicator, Transfer

_CHANNEL = 1 << 30
_POLL_MS = 100
_SIZE_BYTES = 8


class _Unpickler(pickle.Unpickler):
    """Takes numbers, texts, and Python's containers of them: nothing that could run code here."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function."""
        raise MismatchError(
            f"elastic.gate: the place of the others has a {module}.{name}; it may have numbers, strings, bytes, lists, "
            "tuples, dicts and None"
        )


def read_head(head: bytes | bytearray) -> Any:
    """What the first donor says before the state; ``MismatchError`` for an object that is not plain."""
    return _Unpickler(io.BytesIO(head)).load()


class Handover:
    """One exchange, in one view. A loss makes another view, and another exchange.

    Args:
      communicator: this worker's.
      rank: its own.
      view: the number of the view.
      members: the ranks of the view.
      joining: those of them who get the state; the others give it.
    """

    def __init__(
        self, communicator: Communicator, rank: int, view: int, members: Sequence[int], joining: Sequence[int]
    ) -> None:
        self._communicator = communicator
        self._rank = rank
        self._view = view
        self._joining = joining
        self._donors = [member for member in members if member not in joining]

    def give(self, state: Any, place: Any) -> None:
        """Send a stripe of the state to each who comes.

        Raises:
          WorkerLost: one of them was lost meanwhile.
        """
        arrays = [np.asarray(_plain(leaf), order="C") for leaf in jax.tree.leaves(state)]
        stripe = self._stripe([_bytes_of(array) for array in arrays], self._rank)
        transfers = []
        for joiner in self._joining:
            if self._rank == self._donors[0]:
                head = pickle.dumps((place, [(array.shape, str(array.dtype)) for array in arrays]))
                size = len(head).to_bytes(_SIZE_BYTES, "little")
                transfers.append(self._send(joiner, [size], "the size of the place in the data"))
                transfers.append(self._send(joiner, [head], "the place in the data"))
            transfers.append(self._send(joiner, stripe, "a stripe of the state"))
        sums = _checksums(arrays, place)
        transfers += [self._send(joiner, [sums], "the checksums of the state") for joiner in self._joining]
        for transfer in transfers:
            _finish(transfer)

    def take(self, state: Any, place: Any) -> tuple[Any, Any]:
        """Receive state and place, of the same structure as those given.

        Raises:
          MismatchError: the others' leaves have other shapes or dtypes; or leaves or places differ between them.
          WorkerLost: one of the donors was lost meanwhile.
        """
        size = bytearray(_SIZE_BYTES)
        _finish(self._receive(self._donors[0], [size], "the size of the place in the data"))
        head = bytearray(int.from_bytes(size, "little"))
        _finish(self._receive(self._donors[0], [head], "the place in the data"))
        place, kinds = read_head(head)
        leaves = jax.tree_util.tree_leaves_with_path(state)
        own = [_kind(_plain(leaf)) for _, leaf in leaves]
        if (told := [(shape, str(dtype)) for shape, dtype in own]) != kinds:
            names = [jax.tree_util.keystr(path) for path, _ in leaves]
            raise MismatchError(f"elastic.gate: {_difference(names, told, kinds)}; give the same state on all workers")
        arrays = [np.empty(shape, dtype) for shape, dtype in own]
        pieces = [_bytes_of(array) for array in arrays]
        transfers = [
            self._receive(donor, self._stripe(pieces, donor), "a stripe of the state") for donor in self._donors
        ]
        sums = {donor: np.empty(len(arrays) + 1, np.uint32) for donor in self._donors}
        transfers += [self._receive(donor, [sums[donor]], "the checksums of the state") for donor in self._donors]
        for transfer in transfers:
            _finish(transfer)
        whats = [f"leaf {jax.tree_util.keystr(path) or 'state'} has other bits" for path, _ in leaves]
        for what, *of_donors in zip([*whats, "the place is another one"], *sums.values(), strict=True):
            _check_same(what, dict(zip(sums, of_donors, strict=True)))
        received = [_like(leaf, array) for (_, leaf), array in zip(leaves, arrays, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(state), received), place

    def _stripe(self, pieces: Sequence[np.ndarray], donor: int) -> list[np.ndarray]:
        """The part of all bytes that this donor sends."""
        total, index, count = sum(piece.size for piece in pieces), self._donors.index(donor), len(self._donors)
        return list(_slices(pieces, total * index // count, total * (index + 1) // count))

    def _send(self, peer: int, buffers: list[Any], text: str) -> Transfer:
        return self._communicator.post_send(peer, _CHANNEL, buffers, self._view, text)

    def _receive(self, peer: int, buffers: list[Any], text: str) -> Transfer:
        return self._communicator.post_receive(peer, _CHANNEL, buffers, self._view, text)


def _slices(pieces: Sequence[np.ndarray], begin: int, end: int) -> Iterator[np.ndarray]:
    """The bytes from ``begin`` to ``end`` of all pieces, one behind the other."""
    offset = 0
    for piece in pieces:
        first, last = max(begin - offset, 0), min(end - offset, piece.size)
        if first < last:
            yield piece[first:last]
        offset += piece.size


def _finish(transfer: Transfer) -> None:
    while (status := transfer.wait(_POLL_MS)) is None:
        pass
    if status[0] != "ok":
        raise from_status(*status)


def _checksums(arrays: Sequence[np.ndarray], place: Any) -> np.ndarray:
    of_place = zlib.crc32(repr(_in_order(place)).encode())
    return np.array([*(zlib.crc32(_bytes_of(array).data) for array in arrays), of_place], np.uint32)


def _in_order(place: Any) -> Any:
    """The same text for equal places: sets have another order in each process, and dicts may have."""
    if isinstance(place, dict):
        return sorted(((repr(_in_order(key)), _in_order(value)) for key, value in place.items()), key=itemgetter(0))
    if isinstance(place, (set, frozenset)):
        return sorted(repr(_in_order(item)) for item in place)
    return [_in_order(item) for item in place] if isinstance(place, (list, tuple)) else place


def _check_same(what: str, sums: dict[int, int]) -> None:
    by_sum: dict[int, list[str]] = {}
    for rank, checksum in sums.items():
        by_sum.setdefault(int(checksum), []).append(str(rank))
    if len(by_sum) > 1:
        sides = " than ".join(f"on rank {', '.join(ranks)}" for ranks in by_sum.values())
        raise MismatchError(f"elastic.gate: {what} {sides}; this worker cannot join them")


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _kind(leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    return np.shape(leaf), np.dtype(leaf.dtype) if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _plain(leaf: Any) -> Any:
    """What of it has bytes."""
    return keys.words_of(leaf) if keys.is_key(leaf) else leaf


def _difference(names: Sequence[str], own: Sequence[Any], others: Sequence[Any]) -> str:
    if len(own) != len(others):
        return f"the state has {len(own)} leaves here, and {len(others)} on the other workers"
    name, mine, theirs = next(each for each in zip(names, own, others, strict=True) if each[1] != each[2])
    return f"leaf {name or 'state'} is {mine[1]}{list(mine[0])} here, and {theirs[1]}{list(theirs[0])} elsewhere"


def _like(leaf: Any, array: np.ndarray) -> Any:
    """What was received as the program has it, so that it compiles nothing for it."""
    if keys.is_key(leaf):
        return jax.random.wrap_key_data(_like(keys.words_of(leaf), array), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(array, leaf.sharding if leaf.committed else None)
    return array if isinstance(leaf, np.ndarray) else type(leaf)(array.item())
