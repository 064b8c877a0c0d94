"""A Keras model, trained by ``fit``; the backend is that of ``KERAS_BACKEND``."""

import keras
import numpy as np
from keras import layers
from stopwatch import tick

keras.utils.set_random_seed(0)
x, y = np.random.rand(2560, 28, 28, 1).astype("float32"), np.random.randint(0, 10, 2560)
model = keras.Sequential([
    layers.Input((28, 28, 1)), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(),
    layers.Conv2D(64, 3, activation="relu"), layers.MaxPooling2D(), layers.Flatten(), layers.Dropout(0.5),
    layers.Dense(10, activation="softmax")])
model.compile(loss="sparse_categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
model.fit(x, y, batch_size=128, epochs=1000, verbose=0,
          callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: tick())])
