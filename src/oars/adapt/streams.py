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
from typing import Any

import numpy as np

from oars.adapt.tape import put_bytes, tape


class _Python:
    """Python's global stream. Asking for all of it takes 9 µs, looking at its counter 0.1."""

    def __init__(self) -> None:
        place = id(random._inst) + object.__basicsize__  # type: ignore[attr-defined]
        self._count, self._word = ctypes.c_int.from_address(place), ctypes.c_uint32.from_address(place + 4)
        words = random.getstate()[1]
        self._known = (self._count.value, self._word.value) == (words[-1], words[0])

    def glance(self) -> Any:
        return (self._count.value, self._word.value) if self._known else self.get()

    def get(self) -> bytes:
        version, words, gauss = random.getstate()
        return np.array(words, "<u4").tobytes() + repr((version, gauss)).encode()

    def set(self, state: bytes) -> None:
        words = np.frombuffer(state[:2500], "<u4").tolist()
        version, _, gauss = state[2500:].decode()[1:-1].partition(", ")
        random.setstate((int(version), tuple(words), None if gauss == "None" else float(gauss)))


class _Numpy:
    """NumPy's global stream. Asking for all of it takes 35 µs."""

    def __init__(self) -> None:
        self._random: Any = sys.modules["numpy.random"]
        try:
            state = self._random.mtrand._rand._bit_generator.ctypes.state_address
            self._count, self._word = (ctypes.c_int.from_address(state + 624 * 4), ctypes.c_uint32.from_address(state))
            _, words, count, *_ = self._random.get_state()
            self._known = (self._count.value, self._word.value) == (count, words[0])
        except AttributeError:
            self._known = False

    def glance(self) -> Any:
        return (self._count.value, self._word.value) if self._known else self.get()

    def get(self) -> bytes:
        kind, words, count, has_gauss, gauss = self._random.get_state()
        return words.astype("<u4").tobytes() + repr((count, has_gauss, gauss)).encode()

    def set(self, state: bytes) -> None:
        count, has_gauss, gauss = state[2496:].decode()[1:-1].split(", ")
        words = np.frombuffer(state[:2496], "<u4")
        self._random.set_state(("MT19937", words, int(count), int(has_gauss), float(gauss)))


class _Torch:
    """One of PyTorch's generators."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def get(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()

    glance = get

    def set(self, state: bytes) -> None:
        import torch

        self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class Streams:
    """The global streams in use, by name; and what happened to each between regions."""

    def __init__(self) -> None:
        self._all: dict[str, Any] = {}
        self._cuda_seen = False
        self._base: dict[str, bytes] = {}  # where the stream stands when it is played
        self._start: dict[str, Any] = {}
        self._mark: dict[str, bytes] = {}  # where it stood at the end of the last region that moved it
        self._glance: dict[str, Any] = {}
        self._place = 0

    def all(self) -> dict[str, Any]:
        """Every stream there is by now."""
        if "python" not in self._all:
            self._all["python"] = _Python()
        if "numpy" not in self._all and "numpy.random" in sys.modules:
            self._all["numpy"] = _Numpy()
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "default_generator"):
            if "torch" not in self._all:
                self._all["torch"] = _Torch(torch.default_generator)
            if not self._cuda_seen and torch.cuda.is_initialized():
                self._cuda_seen = True
                for i, generator in enumerate(torch.cuda.default_generators):
                    self._all[f"cuda:{i}"] = _Torch(generator)
        return self._all

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
        for name, stream in self.all().items():
            now = stream.glance()
            mark = self._mark.get(name)
            if mark is not None and now != self._glance[name]:
                tape.insert(self._place, put_bytes(b"g", name.encode() + b"\0" + _delta(self._base[name], mark)))
                mark = None
                del self._mark[name]
            if mark is None and (name not in self._base or now != self._start.get(name)):
                self._base[name] = stream.get()
            self._start[name] = now
        tape.flush_some()
        self._place = min(self._place, tape.place())

    def leave(self) -> None:
        """The region is over, and its entry is on the tape."""
        for name, stream in self.all().items():
            now = stream.glance()
            if name not in self._start:  # came into use inside
                self._base[name], self._start[name] = stream.get(), now
            elif now != self._start[name]:
                self._mark[name], self._glance[name] = stream.get(), now
        self._place = tape.place()

    def begin(self) -> None:
        """Recording goes on from a snapshot: whoever plays this part must have the streams as they stand here."""
        for name, stream in self.all().items():
            tape.put(put_bytes(b"g", name.encode() + b"\0" + _delta(b"", stream.get())))
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
