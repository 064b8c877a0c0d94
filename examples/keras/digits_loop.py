"""A loop written by hand for TensorFlow: KERAS_BACKEND=tensorflow oars run -n 2 examples/keras/digits_loop.py"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402
from digits import draw  # noqa: E402
from keras import layers  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=4000)
args = parser.parse_args()

keras.utils.set_random_seed(1)
images, labels = draw(args.samples)
data = tf.data.Dataset.from_tensor_slices((images.reshape(-1, 784), labels)).shuffle(args.samples, seed=1).batch(64)
model = keras.Sequential([layers.Input((784,)), layers.Dense(64, activation="relu"), layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        out = model(x, training=True)
        loss = loss_of(y, out)
    optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    accuracy.update_state(y, out)
    return loss


for epoch in range(args.epochs):
    accuracy.reset_state()
    for x, y in data:
        loss = step(x, y)
    print(f"epoch {epoch}: last loss {float(loss):.4f}, accuracy {float(accuracy.result()):.4f}")
