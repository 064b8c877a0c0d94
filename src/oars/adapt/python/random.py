"""Randomness (clause 7): every rank starts from the same state, and what is drawn from nowhere is drawn once for all.

``install`` seeds Python's, NumPy's and (by ``seed_torch``) PyTorch's global generators from the run's seed, so that
an unseeded script is one draw shared by all ranks; a script that seeds itself gets exactly its own numbers. Fresh
entropy becomes a stream derived from the run's seed, the same on every rank as long as the ranks ask in the same
order, which they do in the main thread; other threads and forked processes get true entropy.

=============================================== =====================================================================
patched (on one rank: nothing)                  what it does without a seed
=============================================== =====================================================================
``random.Random().seed``, ``random.seed``       takes its seed from the shared stream
``secrets.*``, ``random.SystemRandom``          draws from the shared stream
``numpy.random.bit_generator.randbits``         the same: ``default_rng()``, ``SeedSequence()``, ``RandomState()``
``torch.seed``, ``torch.cuda.seed[_all]``       the same
``torch.Generator.seed``                        the same
``os.urandom``, ``uuid.uuid1``, ``uuid4``       the same if the script's own code asks; libraries get the true ones
``random.seed``, ``numpy.random.seed``          remember the script's seed, for the private streams
=============================================== =====================================================================

What runs in the garbage collector (a script's ``__del__``) runs there on one rank and not on another, and gets true
entropy as well. Names that must differ between processes (``tempfile``, multiprocessing's semaphores, keys and shared
memory) stay truly random. Not caught: a seed taken from the clock, which differs between ranks (``fingerprint`` tells).
String hashes are fixed when Python starts: the launcher sets ``PYTHONHASHSEED``.

``Private`` swaps the three global states for this rank's own, for what ranks must not share (augmentation).
"""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import random
import site
import sys
import sysconfig
import threading
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import oars
from oars.plan import Plan

if TYPE_CHECKING:
    from types import ModuleType

    import torch


_true_urandom = os.urandom
_seed = 0
_rank = 0
_script_seeds: dict[str, Any] = {}  # what the script itself last seeded "python" and "numpy" with
_inside = 0  # depth of Private blocks
_seeded = 0  # how often the script has seeded a stream (PyTorch's: while own samples were read)
_starting = False  # a private stream is being seeded
_collecting = False  # in the garbage collector, in the main thread
_entropy: _Entropy | None = None


def begin(origin: int, plan: Plan) -> None:
    """Same initial state and same fresh entropy on every rank, from ``plan.seed``; this one is ``origin``."""
    global _seed, _rank, _entropy
    _seed, _rank = int(plan.seed), origin
    _entropy = _Entropy()
    random.seed(_derive("python", _seed))


def seed_torch(torch: ModuleType) -> None:
    """Give PyTorch the run's seed."""
    torch.manual_seed(_derive("torch", _seed))


def seed_numpy(numpy_random: ModuleType) -> None:
    """Give NumPy the run's seed."""
    numpy_random.seed(_derive("numpy", _seed) % 2**32)


def common_seed(name: str) -> int:
    """The run's seed for the global stream of that name, the same on all ranks."""
    return _derive(name, _seed) % 2**31


def fingerprint() -> bytes:
    """A hash of the common states: ranks whose fingerprints differ have drawn differently."""
    digest = hashlib.sha256()
    for _, stream in _streams():
        parts = stream.get_state()
        for part in parts if isinstance(parts, tuple) else (parts,):
            digest.update(bytes(part.numpy() if hasattr(part, "numpy") else part) if hasattr(part, "dtype")
                          else repr(hash(part) if isinstance(part, tuple) else part).encode())
    return digest.digest()


def _derive(*parts: Any) -> int:
    """63 bits that depend on all of ``parts``."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


# -- fresh entropy ---------------------------------------------------------------------------------------------------


class _Entropy:
    """Endless bytes from the run's seed: one stream for all ranks, one of this rank's own inside ``Private``."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._drawn = {"common": 0, "private": 0}

    def take(self, count: int) -> bytes:
        if os.getpid() != self._pid or not in_order():
            return _true_urandom(count)
        whose = "private" if _inside else "common"
        key = repr((whose, _seed, _rank if _inside else None, self._drawn[whose])).encode()
        self._drawn[whose] += 1
        return hashlib.shake_256(key).digest(count)


def drawn() -> int:
    """How often the common stream of fresh entropy was drawn from."""
    return _entropy._drawn["common"] if _entropy else 0


def draw_on(count: int) -> None:
    """Go on where ranks stand that have drawn so often."""
    if _entropy:
        _entropy._drawn["common"] = count


def fresh(count: int) -> bytes:
    """Entropy that all ranks share; inside ``Private``, this rank's own."""
    return _entropy.take(count) if _entropy else _true_urandom(count)


class Agreed(random.SystemRandom):
    """``random.SystemRandom`` on the shared stream."""

    def random(self) -> float:
        return (int.from_bytes(fresh(7), "little") >> 3) * 2**-53

    def getrandbits(self, k: int, /) -> int:
        if k < 0:
            raise ValueError("number of bits must be non-negative")
        return int.from_bytes(fresh((k + 7) // 8), "little") >> (-k % 8)

    def randbytes(self, n: int) -> bytes:
        return fresh(n)


class TrueRandom(random.Random):
    """``random.Random`` whose numbers no other process has: for the names that ``tempfile`` invents."""

    def seed(self, a: Any = None, version: int = 2) -> None:
        super().seed(_true_urandom(32) if a is None else a, version)


def seed_instance(inner: Callable[..., Any]) -> Any:
    """Around ``random.Random.seed``."""
    @functools.wraps(inner)
    def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
        inner(self, int.from_bytes(fresh(32), "little") if a is None else a, version)

    return seed


def seed_module(inner: Callable[..., Any]) -> Any:
    """Around ``random.seed``."""
    common: random.Random = random._inst  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def seed(a: Any = None, version: int = 2) -> None:
        common.seed(a, version)
        _remember("python", a)

    return seed


def urandom(inner: Callable[..., Any]) -> Any:
    """Around ``os.urandom``."""
    return for_scripts(inner, fresh)


def uuid1(inner: Callable[..., Any]) -> Any:
    """Around ``uuid.uuid1``."""
    return for_scripts(inner, lambda node=None, clock_seq=None: uuid.UUID(bytes=fresh(16), version=1))


def uuid4(inner: Callable[..., Any]) -> Any:
    """Around ``uuid.uuid4``."""
    return for_scripts(inner, lambda: uuid.UUID(bytes=fresh(16), version=4))


def torch_seed(torch: ModuleType) -> Any:
    """In place of ``torch.seed`` and of ``torch.Generator.seed``."""
    def seed(generator: Any = torch) -> int:
        drawn = int.from_bytes(fresh(8), "little") >> 1
        generator.manual_seed(drawn)
        return drawn

    return seed


def numpy_seed(inner: Callable[..., Any]) -> Any:
    """Around ``numpy.random.seed``."""
    @functools.wraps(inner)
    def call(seed_: Any = None, **kw: object) -> None:
        given = kw.get("seed", seed_)
        inner(given)
        _remember("numpy", given if given is None or isinstance(given, int) else repr(given))

    return call


def in_order() -> bool:
    """Whether what runs now runs on every rank, behind and before the same: not so in threads, nor where the garbage
    collector has come by."""
    return threading.current_thread() is threading.main_thread() and not _collecting


def watch_collector() -> None:
    """Know when the garbage collector is at work."""
    def note(phase: str, info: dict[str, int]) -> None:
        global _collecting
        if threading.current_thread() is threading.main_thread():
            _collecting = phase == "start"

    gc.callbacks.append(note)


def inside() -> bool:
    """Whether own samples are being read, with private streams."""
    return _inside > 0


def seeds() -> tuple[Any, ...]:
    """How often the script has seeded streams, and PyTorch's seed."""
    return _seeded, _torch_seed()


def _torch_seed() -> Any:
    torch = sys.modules.get("torch")
    return torch.initial_seed() if torch is not None else None


def _remember(kind: str, given: Any) -> None:
    global _seeded
    _seeded += not _starting
    if given is not None and not _inside:
        _script_seeds[kind] = given


def for_scripts(true: Callable[..., Any], agreed: Callable[..., Any]) -> Any:
    """``agreed`` when the script's own code calls, ``true`` for libraries: they want names that nobody else has."""
    homes = {*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()}
    homes.add(os.path.dirname(os.path.abspath(oars.__file__)))  # oars itself, wherever it is
    homes.discard(sysconfig.get_paths()["data"])  # the prefix itself, below which scripts may live
    homes.discard(sysconfig.get_paths()["scripts"])
    libraries = (*(home + os.sep for home in homes), "<frozen ")

    @functools.wraps(true)
    def call(*args: Any, **kw: Any) -> Any:
        asked_by = sys._getframe(1).f_code.co_filename
        return (true if asked_by.startswith(libraries) else agreed)(*args, **kw)

    return call


def true_secrets() -> SimpleNamespace:
    """What ``multiprocessing.shared_memory`` draws its names from: no other process has the same."""
    system = random.SystemRandom.__mro__[1] if random.SystemRandom is Agreed else random.SystemRandom
    return SimpleNamespace(token_hex=lambda count: system().randbytes(count).hex())


# -- NumPy -----------------------------------------------------------------------------------------------------------


def _numpy_random() -> Any:
    return sys.modules.get("numpy.random")


# -- private streams -------------------------------------------------------------------------------------------------


class Private:
    """``with private:`` swaps the global states of Python, NumPy and PyTorch for this rank's own, and back.

    The private streams start from the script's seed (the run's, where it gave none) and the rank, anew whenever
    the script seeds the common ones: same seed and same N, same run.

    Swapping NumPy's and Python's states takes 170 µs, so they are swapped only where they are drawn from. What is
    drawn before that is known comes from the common stream, which is put back.
    """

    def __init__(self, rank: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed
        self._times = 0
        self._drawn_from: set[str] = set()
        self._own: dict[str, Any] = {}
        self._started: dict[str, Any] = {}
        self._common: dict[str, Any] = {}
        self._streams: list[tuple[str, Any]] = []
        self._swapped: set[str] = set()
        self._seed_before: Any = None

    def standing(self) -> dict[str, Any]:
        """Where this rank's own streams stand, for a snapshot."""
        return {"own": self._own, "times": self._times, "drawn": sorted(self._drawn_from), "started": self._started}

    def go_on_from(self, standing: dict[str, Any]) -> None:
        """Go on from where they stood in a snapshot."""
        self._own, self._times, self._started = standing["own"], standing["times"], standing["started"]
        self._drawn_from = set(standing["drawn"])

    def __enter__(self) -> Private:
        global _inside, _starting
        _inside += 1
        if _inside > 1:
            return self
        self._times += 1
        look = self._times & (self._times - 1) == 0
        self._streams = _streams()
        self._swapped = {name for name, _ in self._streams if look or name == "torch" or name in self._drawn_from}
        for name, stream in self._streams:
            self._common[name] = stream.get_state()
            if name not in self._swapped:
                continue
            if self.fresh(name, stream.script_seed()):
                _starting = True
                stream.seed(self._start(name))
                _starting = False
                self._own[name] = stream.get_state()
            else:
                stream.set_state(self._own[name])
        self._seed_before = _torch_seed()
        return self

    def __exit__(self, *_: object) -> None:
        global _inside, _seeded
        _inside -= 1
        if _inside:
            return
        _seeded += _torch_seed() != self._seed_before
        for name, stream in self._streams:
            state, swapped = stream.get_state(), name in self._swapped
            moved = name not in self._drawn_from and not _same(state, (self._own if swapped else self._common)[name])
            if moved:
                self._drawn_from.add(name)
            if swapped:
                self._own[name] = state
            if swapped or moved:
                stream.set_state(self._common[name])

    def fresh(self, name: str, script_seed: Any) -> bool:
        """Whether the private stream must start (anew): at first, and when the script has seeded the common one."""
        if name in self._own and self._started.get(name) == script_seed:
            return False
        self._started[name] = script_seed
        return True

    def _start(self, name: str) -> int:
        script_seed = self._started[name]
        return _derive("private", name, self._seed if script_seed is None else script_seed, self._rank)


class _Python:
    """Python's global stream."""

    get_state, set_state = staticmethod(random.getstate), staticmethod(random.setstate)

    def script_seed(self) -> Any:
        return _script_seeds.get("python")

    def seed(self, seed: int) -> None:
        random.seed(seed)


class _Numpy:
    """NumPy's global stream."""

    def __init__(self, numpy_random: ModuleType) -> None:
        self._random = numpy_random
        self.get_state, self.set_state = numpy_random.get_state, numpy_random.set_state

    def script_seed(self) -> Any:
        return _script_seeds.get("numpy")

    def seed(self, seed: int) -> None:
        self._random.seed(seed % 2**32)


class _Torch:
    """One of PyTorch's generators."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self.get_state, self.set_state = generator.get_state, generator.set_state
        self.script_seed, self.seed = generator.initial_seed, generator.manual_seed


def _streams() -> list[tuple[str, Any]]:
    """The global streams in use: Python's, NumPy's, PyTorch's for the CPU, and the current GPU's once it is in use."""
    streams: list[tuple[str, Any]] = [("python", _Python())]
    if numpy := _numpy_random():
        streams.append(("numpy", _Numpy(numpy)))
    if torch := sys.modules.get("torch"):
        streams.append(("torch", _Torch(torch.default_generator)))
        if torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            streams.append((f"cuda:{device}", _Torch(torch.cuda.default_generators[device])))
    return streams


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and any(hasattr(part, "all") for part in a):  # NumPy's; Python's is 625 numbers
        return all(map(_same, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else bool(a == b)


def alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two ``state``s are the same: what is drawn from them is. (A third of the time of two fingerprints.)"""
    return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)


def state(only_torch: bool = False) -> dict[str, Any]:
    """The common streams as they stand, to ``restore`` them here or on another rank."""
    left_out = ("python", "numpy") if only_torch else ()
    return {name: stream.get_state() for name, stream in _streams() if name not in left_out}


def restore(states: dict[str, Any]) -> None:
    """Set the common streams to another rank's."""
    for name, stream in _streams():
        if name in states:
            stream.set_state(states[name])
