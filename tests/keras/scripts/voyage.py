"""A training for ranks to die in: fit with dropout and batch normalisation, then a loop of its own."""

import keras
import numpy as np
from keras import layers
from scenes import compiled, mlp, table, tell

keras.utils.set_random_seed(7)
x, y = table(64)
model = compiled(mlp(layers.Dropout(0.3), layers.BatchNormalization()))
history = model.fit(x, y, batch_size=16, epochs=4, verbose=0, validation_split=0.25)
tell("history", history.history)
tell("evaluate", model.evaluate(x, y, batch_size=16, verbose=0))
for i in range(4):
    tell("batch", model.train_on_batch(x[i * 16:i * 16 + 16], y[i * 16:i * 16 + 16]))
tell("predict", model.predict(x, batch_size=32, verbose=0)[::9])
tell("weights", np.concatenate([np.ravel(w) for w in model.get_weights()]))
