"""A stand-in for a physics data set: collision events in the columns of HIGGS.

Events are made as nature does, one two-body decay after another, and then smeared as a detector does. The masses (the
high-level features) follow from the momenta that are seen (the low-level ones); only together do these tell signal from
background.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from oars.data import work
from oars.data.work import zipped

_PART = 10_000


# A particle is (energy, px, py, pz) in GeV; arrays hold one per event.

def higgs_like(out: Path, size: int, seed: int, workers: int) -> None:
    """HIGGS.csv.gz as published: label, 21 low-level features, 7 masses, all divided by their means."""
    out.mkdir(parents=True, exist_ok=True)
    tasks = [(seed, begin, min(_PART, size - begin)) for begin in range(0, size, _PART)]
    with open(out / "HIGGS.csv.gz", "wb") as file:  # gzip streams one after another are one
        for text in work.each(_events, tasks, min(workers, len(tasks)), work.Bar("colliding", size, "events")):
            file.write(text)
    print(f"{out}/HIGGS.csv.gz: {size:,} events")


def _events(task: tuple[int, int, int]) -> bytes:
    seed, begin, count = task
    rng = np.random.default_rng([seed, begin])
    signal = rng.random(count) < 0.53  # the share in the real file
    table = np.column_stack([signal, features(rng, signal)])
    text = "\n".join(",".join(f"{value:.18e}" for value in row) for row in table) + "\n"
    work.advance(count)
    return zipped(text.encode())


def features(rng: np.random.Generator, signal: np.ndarray) -> np.ndarray:
    """The 28 features of events: signal is gg → H (425) → W H± (325) → W W h (125) → lν jj bb, background is a pair of
    top quarks, t → W b twice. Both end in the same six particles."""
    n = len(signal)
    both = (_signal(rng, n), _background(rng, n))
    lepton, neutrino, *quarks = (np.where(signal[:, None], s, b) for s, b in zip(*both, strict=True))
    q1, q2, b1, b2 = (_seen(rng, quark, 0.1) for quark in quarks)
    jets = np.stack([b1, b2, q1, q2], 1)
    is_b = np.array([1, 1, 0, 0])
    order = np.argsort(-_pt(jets), 1)
    jets = np.take_along_axis(jets, order[..., None], 1)
    tagged = rng.random((n, 4)) < np.where(is_b[order] == 1, 0.65, 0.05)
    tag = np.where(tagged, np.array([2.173, 2.215, 2.548, 3.102]), 0.0)  # the values of the real file
    lepton = _seen(rng, lepton, 0.02)
    missing = neutrino[:, 1:3] + rng.normal(0, 8, (n, 2))
    met = np.hypot(*missing.T)
    columns = [_pt(lepton), _eta(lepton), _phi(lepton), met, np.arctan2(missing[:, 1], missing[:, 0])]
    for j in range(4):
        columns += [_pt(jets[:, j]), _eta(jets[:, j]), _phi(jets[:, j]), tag[:, j]]
    jj, bb, lv = q1 + q2, b1 + b2, lepton + _neutrino(lepton, missing)
    columns += [_mass(jj), _mass(jj + b1), _mass(lv), _mass(lv + b2), _mass(bb), _mass(bb + jj), _mass(bb + jj + lv)]
    out = np.column_stack(columns)
    scaled = [k for k in range(28) if k not in (1, 2, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 18, 19, 20)]
    out[:, scaled] /= np.array([48, 52, 75, 62, 48, 38, 82, 165, 81, 220, 110, 245, 360])  # GeV: typical values
    return out.astype(np.float32)


def _signal(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    heavy = _produced(rng, _peak(rng, n, 425, 10))
    w1, charged = _decay(rng, heavy, _peak(rng, n, 80.4, 2.1), _peak(rng, n, 325, 5))
    w2, light = _decay(rng, charged, _peak(rng, n, 80.4, 2.1), _peak(rng, n, 125, 1))
    b1, b2 = _decay(rng, light, 4.7, 4.7)
    return *_decay(rng, w1, 0.1, 0.0), *_decay(rng, w2, 0.1, 0.1), b1, b2


def _background(rng: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    pair = _produced(rng, 350 + rng.exponential(90, n))
    t1, t2 = _decay(rng, pair, _peak(rng, n, 173, 1.4), _peak(rng, n, 173, 1.4))
    w1, b1 = _decay(rng, t1, _peak(rng, n, 80.4, 2.1), 4.7)
    w2, b2 = _decay(rng, t2, _peak(rng, n, 80.4, 2.1), 4.7)
    return *_decay(rng, w1, 0.1, 0.0), *_decay(rng, w2, 0.1, 0.1), b1, b2


def _peak(rng: np.random.Generator, n: int, mass: float, width: float) -> np.ndarray:
    """Masses of a resonance: a Cauchy distribution without its far ends."""
    return mass + width / 2 * np.tan(np.pi * (rng.random(n) - 0.5) * 0.85)


def _produced(rng: np.random.Generator, mass: np.ndarray) -> np.ndarray:
    """A particle as the collision leaves it: mostly along the beam."""
    px, py = rng.normal(0, 25, (2, len(mass)))
    pz = rng.normal(0, 350, len(mass))
    return np.column_stack([np.sqrt(mass ** 2 + px ** 2 + py ** 2 + pz ** 2), px, py, pz])


def _decay(rng: np.random.Generator, parent: np.ndarray, m1: Any, m2: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two particles, back to back in any direction for the parent; then seen from outside."""
    mass = _mass(parent)
    m1, m2 = np.broadcast_to(m1, mass.shape), np.broadcast_to(m2, mass.shape)
    mass = np.maximum(mass, m1 + m2 + 1e-6)
    p = np.sqrt((mass ** 2 - (m1 + m2) ** 2) * (mass ** 2 - (m1 - m2) ** 2)) / (2 * mass)
    cos, phi = rng.uniform(-1, 1, len(p)), rng.uniform(-np.pi, np.pi, len(p))
    sin = np.sqrt(1 - cos ** 2)
    way = p[:, None] * np.column_stack([sin * np.cos(phi), sin * np.sin(phi), cos])
    first = _boost(np.column_stack([np.sqrt(p ** 2 + m1 ** 2), way]), parent)
    return first, parent - first


def _boost(particle: np.ndarray, frame: np.ndarray) -> np.ndarray:
    beta = frame[:, 1:] / frame[:, :1]
    gamma = 1 / np.sqrt(np.maximum(1e-12, 1 - (beta ** 2).sum(1)))
    along = (beta * particle[:, 1:]).sum(1)
    energy = gamma * (particle[:, 0] + along)
    factor = gamma ** 2 / (gamma + 1) * along + gamma * particle[:, 0]
    return np.column_stack([energy, particle[:, 1:] + factor[:, None] * beta])


def _seen(rng: np.random.Generator, particle: np.ndarray, error: float) -> np.ndarray:
    """What a detector makes of a particle."""
    return particle * rng.normal(1, error, (len(particle), 1)).clip(0.2, 2)


def _pt(p: np.ndarray) -> np.ndarray:
    return np.hypot(p[..., 1], p[..., 2])


def _eta(p: np.ndarray) -> np.ndarray:
    return np.arcsinh(p[..., 3] / np.maximum(_pt(p), 1e-9)).clip(-5, 5)


def _phi(p: np.ndarray) -> np.ndarray:
    return np.arctan2(p[..., 2], p[..., 1])


def _mass(p: np.ndarray) -> np.ndarray:
    return np.sqrt(np.maximum(p[:, 0] ** 2 - (p[:, 1:] ** 2).sum(1), 0))


def _neutrino(lepton: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """A neutrino leaves only a lack of momentum across the beam; along it, it is what makes a W with the lepton."""
    pt2 = (missing ** 2).sum(1)
    mu = 80.4 ** 2 / 2 + (lepton[:, 1:3] * missing).sum(1)
    a = mu * lepton[:, 3] / _pt(lepton) ** 2
    root = a ** 2 - (lepton[:, 0] ** 2 * pt2 - mu ** 2) / _pt(lepton) ** 2
    pz = a - np.sign(a) * np.sqrt(np.maximum(root, 0))
    return np.column_stack([np.sqrt(pt2 + pz ** 2), missing, pz])
