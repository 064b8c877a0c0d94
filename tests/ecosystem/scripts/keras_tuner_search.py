"""keras-tuner: a random search over a small classifier, Keras on PyTorch."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import keras_tuner
import numpy as np

keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = x[:, :3].argmax(1)


def build(hp):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(hp.Int("units", 8, 32, 8), activation="relu"),
                              keras.layers.Dense(3)])
    model.compile(optimizer=keras.optimizers.Adam(hp.Choice("rate", [1e-2, 1e-3])), metrics=["accuracy"],
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


tuner = keras_tuner.RandomSearch(build, objective="val_loss", max_trials=3, seed=1, directory="tuner", overwrite=True,
                                 project_name="small")
tuner.search(x[:64], y[:64], epochs=2, batch_size=16, validation_data=(x[64:], y[64:]), verbose=0)
for trial in tuner.oracle.get_best_trials(3):
    print(trial.hyperparameters.values, round(trial.score, 5))
