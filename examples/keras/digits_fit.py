"""A small convolutional network on digits, by ``fit``: oars run -n 2 examples/keras/digits_fit.py

KERAS_BACKEND chooses TensorFlow, JAX or PyTorch.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import keras  # noqa: E402
from digits import draw  # noqa: E402
from keras import layers  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=4000)
args = parser.parse_args()

keras.utils.set_random_seed(1)
images, labels = draw(args.samples)
model = keras.Sequential([
    layers.Input((28, 28, 1)),
    layers.Conv2D(16, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(), layers.MaxPooling2D(),
    layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(),
    layers.Flatten(), layers.Dropout(0.3), layers.Dense(10),
])
model.compile(keras.optimizers.Adam(1e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True),
              metrics=["accuracy"])
history = model.fit(images[..., None], labels, batch_size=64, epochs=args.epochs, validation_split=0.1, verbose=0)
for epoch in range(args.epochs):
    print(f"epoch {epoch}: " + ", ".join(f"{name} {values[epoch]:.4f}" for name, values in history.history.items()))
