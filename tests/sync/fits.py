"""A Keras training on made data, ``fit`` first and then a loop by hand. Knows nothing of ranks."""

import argparse

import keras
import numpy as np
from keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--momentum", type=float, default=0.0)
parser.add_argument("--norm", action="store_true", help="with BatchNormalization and dropout")
parser.add_argument("--loop", action="store_true", help="a loop by hand behind it")
args = parser.parse_args()

keras.utils.set_random_seed(7)
rng = np.random.default_rng(7)
x = rng.normal(size=(240, 20)).astype("float32")
y = (x[:, :10].mean(1) > x[:, 10:].mean(1)).astype("int32")
more = [layers.BatchNormalization(), layers.Dropout(0.1)] if args.norm else []
model = keras.Sequential([layers.Input((20,)), layers.Dense(48, activation="relu"), *more, layers.Dense(2)])
model.set_weights([rng.normal(size=w.shape, scale=0.2).astype("float32") if w.ndim > 1 else w
                   for w in model.get_weights()])  # the same on every backend
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Tell(keras.callbacks.Callback):
    """One line for each epoch."""

    def on_epoch_end(self, epoch, logs=None):
        steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        print(f"epoch {epoch}: {steps} steps, train {logs['loss']:.6f}, loss {logs['val_loss']:.6f}", flush=True)


def tensorflow_step():
    import tensorflow as tf

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        for w, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
            w.assign_sub(0.1 * g)

    return step


def jax_step():
    import jax

    def loss(weights, others, x, y):
        return loss_of(y, model.stateless_call(weights, others, x)[0])

    def step(x, y):
        weights, others = model.trainable_variables, [v.value for v in model.non_trainable_variables]
        grads = jax.grad(loss)([v.value for v in weights], others, x, y)
        for v, g in zip(weights, grads, strict=True):
            v.assign(v.value - 0.1 * g)

    return step


model.compile(keras.optimizers.SGD(0.1, momentum=args.momentum), loss_of, metrics=["accuracy"])
checkpoint = keras.callbacks.ModelCheckpoint("best.weights.h5", save_weights_only=True)
model.fit(x, y, batch_size=20, epochs=args.epochs, shuffle=False, verbose=0, validation_data=(x, y),
          callbacks=[Tell(), checkpoint])
saved = model.get_weights()
model.load_weights("best.weights.h5")
print("saved what it had:", all((a == b).all() for a, b in zip(saved, model.get_weights(), strict=True)))
if args.loop:
    step = {"tensorflow": tensorflow_step, "jax": jax_step}[keras.backend.backend()]()
    for i in range(0, 240, 20):
        step(x[i : i + 20], y[i : i + 20])
told, right = model.evaluate(x, y, batch_size=64, verbose=0)
print(f"right {right:.4f}, loss {told:.6f}")
