"""Where random streams stand, for the tape.

What is played does not run models nor read samples, so it does not draw what they drew. It does not have to, unless the
script itself then draws from the same stream: a shuffle, a batch made by hand, the next epoch's order. So after every
*region* that playing passes over it is remembered where each stream stood, and when the script draws before the next
region, that place is put on the tape: there the streams are set before the script draws. Most scripts need a few per
epoch.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from oars.adapt.replay.tape import put_bytes, tape

if TYPE_CHECKING:
    import torch

_WORDS = 624  # of a Mersenne twister


class Stream:
    """One stream; ``get`` and ``set`` are all of it.

    A *glance* is cheap and changes when the stream moves: the values of its ``cells``, which are numbers in the
    generator's own memory where they could be found, and else the stream itself.
    """

    def __init__(self, name: str) -> None:
        self.name = name.encode()
        self.cells: list[Any] = [self]
        self.base = b""  # where it stands when it is played
        self.start: Any = None  # a glance at the beginning of the last region
        self.mark: bytes | None = None  # where it stood at the end of the last region that moved it, if the script
        self.seen: Any = None  # has not drawn since; and a glance then

    @property
    def value(self) -> bytes:
        return self.get()

    def get(self) -> bytes:
        raise NotImplementedError

    def set(self, state: bytes) -> None:
        raise NotImplementedError

    def _count_at(self, place: int, low: int, high: int) -> bool:
        """Take two adjacent numbers in memory for a glance, if they are what they should be."""
        both = ctypes.c_uint64.from_address(place)
        found = both.value == low | high << 32
        if found:
            self.cells = [both]
        return found


class _Kept:
    """The number that ``random.gauss`` keeps for the next who asks."""

    @property
    def value(self) -> float | None:
        return random._inst.gauss_next  # type: ignore[attr-defined]


class _Python(Stream):
    """Python's global stream. Asking for all of it takes 9 µs, a glance 0.1."""

    def __init__(self) -> None:
        super().__init__("python")
        words = random.getstate()[1]
        place = id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]
        if self._count_at(place, words[-1], words[0]):
            self.cells.append(_Kept())

    def get(self) -> bytes:
        version, words, gauss = random.getstate()
        return np.array(words, "<u4").tobytes() + repr((version, gauss)).encode()

    def set(self, state: bytes) -> None:
        words = np.frombuffer(state[:2500], "<u4").tolist()
        version, _, gauss = state[2500:].decode()[1:-1].partition(", ")
        random.setstate((int(version), tuple(words), None if gauss == "None" else float(gauss)))


class _Numpy(Stream):
    """NumPy's global stream. Asking for all of it takes 35 µs."""

    def __init__(self) -> None:
        super().__init__("numpy")
        self._random: Any = sys.modules["numpy.random"]
        try:
            place = self._random.mtrand._rand._bit_generator.ctypes.state_address
        except AttributeError:
            return
        _, words, count, *_ = self._random.get_state()
        self._count_at(place + 623 * 4, int(words[623]), count)

    def get(self) -> bytes:
        _, words, count, has_gauss, gauss = self._random.get_state()
        return words.astype("<u4").tobytes() + repr((count, has_gauss, float(gauss))).encode()

    def set(self, state: bytes) -> None:
        count, has_gauss, gauss = state[2496:].decode()[1:-1].split(", ")
        words = np.frombuffer(state[:2496], "<u4")
        self._random.set_state(("MT19937", words, int(count), int(has_gauss), float(gauss)))


class _Torch(Stream):
    """One of PyTorch's generators. Asking for all of it takes 2 µs, which a step does four times."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        super().__init__(name)
        self._get_state, self._set_state = generator.get_state, generator.set_state
        self._size = generator.get_state().numel()
        if name == "torch" and hasattr(generator, "_cdata"):
            self._look_inside(generator)

    def _look_inside(self, generator: Any) -> None:
        """A glance at the generator's own memory: how many of its 624 words are used, the first of them, and behind
        them the normal number it may have kept for the next who asks."""
        state = np.frombuffer(self.get(), "<u8", count=3 + _WORDS)  # seed, two numbers in one, words used, words
        head = ctypes.string_at(generator._cdata, 256)
        place = head.find(state[:2].tobytes()[:12])
        if place < 0:
            return
        place += generator._cdata + 16
        if ctypes.string_at(place, 4 + 4 * _WORDS) != state[2:].astype("<u4").tobytes():
            return
        self.cells = [ctypes.c_uint64.from_address(place + i) for i in (0, *range(8 + 4 * _WORDS, 32 + 4 * _WORDS, 8))]

    def get(self) -> bytes:
        state = self._get_state()
        return ctypes.string_at(state.data_ptr(), self._size)

    def set(self, state: bytes) -> None:
        self._set_state(sys.modules["torch"].frombuffer(bytearray(state), dtype=sys.modules["torch"].uint8))


class Streams:
    """The global streams in use, and what happens to them between regions."""

    def __init__(self) -> None:
        self._all: dict[str, Stream] = {}
        self._list: list[tuple[Stream, slice]] = []  # each with where its cells are among all of them
        self._cells: list[Any] = []
        self._entered: list[Any] = []  # glances at the beginning of the last region
        self._left: list[Any] = []  # and at its end
        self._looked = 0
        self._place = 0
        self.begun = False  # up to the first step everything is done for real when it is played: nothing is relative

    def all(self) -> dict[str, Stream]:
        """Every stream there is by now."""
        found = self._all
        if "python" not in found:
            found["python"] = _Python()
        if "numpy" not in found and "numpy.random" in sys.modules:
            found["numpy"] = _Numpy()
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "default_generator"):
            if "torch" not in found:
                found["torch"] = _Torch("torch", torch.default_generator)
            if "cuda:0" not in found and torch.cuda.is_initialized():
                for i, generator in enumerate(torch.cuda.default_generators):
                    found[f"cuda:{i}"] = _Torch(f"cuda:{i}", generator)
        self._list, self._cells = [], []
        for stream in found.values():
            self._list.append((stream, slice(len(self._cells), len(self._cells) + len(stream.cells))))
            self._cells += stream.cells
        return found

    def states(self) -> dict[str, bytes]:
        """Where all of them stand."""
        return {name: stream.get() for name, stream in self.all().items()}

    def restore(self, states: dict[str, bytes]) -> None:
        """Set them; those that are not in use here are left out."""
        every = self.all()
        for name, state in states.items():
            if name in every:
                every[name].set(state)

    # -- recording

    def enter(self) -> None:
        """A region begins: what the script drew since the last one must be drawn again when this is played."""
        self._looked += 1
        if self._looked & 63 == 1:  # a stream may have come into use
            self.all()
        now = [cell.value for cell in self._cells]
        if now != self._left:
            self._drawn(now)
        self._entered = now
        tape.flush_some()
        if self._place > tape.place():
            self._place = tape.place()

    def leave(self) -> None:
        """The region is over, and its entry is on the tape."""
        now = [cell.value for cell in self._cells]
        if now != self._entered:
            for s, cells in self._list:
                if now[cells] != self._entered[cells]:
                    s.mark, s.seen = s.get(), now[cells]
        self._left = now
        self._place = tape.place()

    def _drawn(self, now: list) -> None:
        """The script has drawn from some stream since the last region, or a stream is new."""
        for s, cells in self._list:
            glance = now[cells]
            if s.start is None and self._looked > 1:  # it came into use somewhere in a region
                s.mark, s.seen, s.start = s.get(), glance, glance
            if s.mark is not None and glance != s.seen:
                delta = _delta(s.base if self.begun else b"", s.mark)
                tape.insert(self._place, put_bytes(b"g", s.name + b"\0" + delta))
                s.mark = None
            if s.mark is None and glance != s.start:
                s.base = s.get()
            s.start = glance

    def begin(self) -> None:
        """At the first step, and after a resume: what follows is played with the streams as they stand here."""
        self.begun = True
        for s in self.all().values():
            tape.put(put_bytes(b"g", s.name + b"\0" + _delta(b"", s.get())))
            s.start, s.mark, s.base = [cell.value for cell in s.cells], None, s.get()
        self._left = [cell.value for cell in self._cells]
        self._place = tape.place()

    # -- playing

    def play(self) -> None:
        """Set the streams as they stood here, if the script is going to draw from them."""
        while tape.peek() == "g":
            tape.take("g")
            name, _, delta = tape.take_bytes().partition(b"\0")
            stream = self.all().get(name.decode())
            if stream is not None:
                stream.set(_applied(delta, stream.get()))


def _delta(old: bytes, new: bytes) -> bytes:
    """``new``, given ``old``: mostly a counter has moved."""
    if len(old) == len(new):
        a, b = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
        where = np.flatnonzero(a != b)
        if len(where) < 256:
            return b"d" + where.astype("<u2").tobytes() + b[where].tobytes()
    return b"z" + zlib.compress(new, 1)


def _applied(delta: bytes, old: bytes) -> bytes:
    if delta[:1] == b"z":
        return zlib.decompress(delta[1:])
    count = len(delta[1:]) // 3
    where, what = np.frombuffer(delta[1 : 1 + 2 * count], "<u2"), np.frombuffer(delta[1 + 2 * count :], np.uint8)
    state = np.frombuffer(old, np.uint8).copy()
    state[where] = what
    return state.tobytes()


streams = Streams()
