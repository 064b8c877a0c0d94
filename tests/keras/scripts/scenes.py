"""What the scripts of these tests share: scenes, a little data, small models. Nothing here knows of ranks.

Each scene is seeded alone. ``python fits.py dropout`` plays one.
"""

import runpy
import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers

_scenes = {}
_playing = ""


def scene(function):
    """Register a scene under its function's name."""
    _scenes[function.__name__] = function
    return function


def play():
    """Play the scenes; after each, print where NumPy's stream stands, for shuffles are part of the training."""
    global _playing
    for _playing in sys.argv[1:] or list(_scenes):
        print(f"== {_playing}")
        keras.utils.set_random_seed(7)
        _scenes[_playing]()
        print(f"stream {np.random.rand():.9g}", flush=True)


def example(name, *args):
    """Run a script of examples/keras."""
    before, path = sys.argv, str(Path(__file__).parents[3] / "examples" / "keras" / name)
    sys.argv = [path, *args]
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before


def table(n=50, d=6, classes=3, seed=1):
    """n rows of d numbers, and a class for each; does not touch the common stream."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)).astype("float32")
    return x, (x @ rng.normal(size=(d, classes))).argmax(1).astype("int32")


def mlp(*between, d=6, classes=3):
    """A small network for `table`."""
    return keras.Sequential([layers.Input((d,)), layers.Dense(8, activation="tanh"), *between, layers.Dense(classes)])


def compiled(model, **options):
    """The usual optimizer and loss."""
    given = {"optimizer": keras.optimizers.Adam(0.01), "metrics": ["accuracy"],
             "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options}
    model.compile(**given)
    return model


def tell(what, values):
    """Print numbers to seven digits."""
    if isinstance(values, dict):
        for name in sorted(values):
            tell(f"{what} {name}", values[name])
        return
    print(what, " ".join(f"{float(v):.7g}" for v in np.ravel(np.asarray(values, "float64"))))


def keep(*models):
    """Save all weights to a file named after the scene."""
    arrays = [np.asarray(w) for m in models for w in m.get_weights()]
    np.savez(f"{_playing}.npz", *arrays)


def train_rows(kind):
    """Fit a model of this class, whose train_step tells a loss for each row."""
    inputs = keras.layers.Input((6,))
    model = kind(inputs, keras.layers.Dense(3)(inputs))
    model.compile(keras.optimizers.SGD(0.01))
    train(model, *table(48))


def train(model, *data, **options):
    """Fit, tell the history, keep the weights."""
    rows = {"batch_size": 16} if isinstance(data[0], (np.ndarray, list, dict)) else {}
    history = model.fit(*data, **{**rows, "epochs": 2, "verbose": 0, **options})
    tell("history", history.history)
    keep(model)
    return history
