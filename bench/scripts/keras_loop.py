"""A Keras model in a loop by hand, on PyTorch."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras  # noqa: E402
import torch  # noqa: E402
from keras import layers  # noqa: E402
from stopwatch import tick  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

keras.utils.set_random_seed(0)
model = keras.Sequential([layers.Input((784,)), layers.Dense(256, activation="relu"), layers.Dense(128, "relu"),
                          layers.Dense(10)])
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = keras.optimizers.Adam(learning_rate=1e-3)
metric = keras.metrics.SparseCategoricalAccuracy()
loader = DataLoader(TensorDataset(torch.rand(3200, 784), torch.randint(0, 10, (3200,))), batch_size=32, shuffle=True)

while True:
    for inputs, targets in loader:
        tick()
        logits = model(inputs, training=True)
        loss = loss_fn(targets, logits)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in model.trainable_weights], model.trainable_weights)
        metric.update_state(targets, logits)
    print(f"accuracy {float(metric.result()):.4f}")
    metric.reset_state()
