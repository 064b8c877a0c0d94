"""Keras trainings on made data: ``fit``, a loop by hand, a model that tells of every row. Knows nothing of ranks."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(7)
rng = np.random.default_rng(7)
x = rng.normal(size=(240, 20)).astype("float32")
y = (x[:, :10].mean(1) > x[:, 10:].mean(1)).astype("int32")
model = keras.Sequential([layers.Input((20,)), layers.Dense(48, activation="relu"), layers.Dense(2)])
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

    return step, tf.function(step)


def jax_step():
    import jax

    def loss(weights, others, x, y):
        return loss_of(y, model.stateless_call(weights, others, x)[0])

    def by(grad):
        def step(x, y):
            weights, others = model.trainable_variables, [v.value for v in model.non_trainable_variables]
            for v, g in zip(weights, grad([v.value for v in weights], others, x, y), strict=True):
                v.assign(v.value - 0.1 * g)

        return step

    return by(jax.grad(loss)), by(jax.jit(jax.grad(loss)))


def torch_step():
    import torch

    def step(x, y):
        model.zero_grad()
        loss_of(torch.from_numpy(y), model(torch.from_numpy(x))).backward()
        with torch.no_grad():
            for v in model.trainable_variables:
                v.value.sub_(0.1 * v.value.grad)

    return step, step


model.compile(keras.optimizers.SGD(0.1, momentum=0.3), loss_of, metrics=["accuracy"])
checkpoint = keras.callbacks.ModelCheckpoint("best.weights.h5", save_weights_only=True)
model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0, validation_data=(x, y),
          callbacks=[Tell(), checkpoint])
saved = model.get_weights()
model.load_weights("best.weights.h5")
print("saved what it had:", all((a == b).all() for a, b in zip(saved, model.get_weights(), strict=True)))
steps = globals()[f"{keras.backend.backend()}_step"]()  # one as it is, one compiled
for i in range(0, 240, 20):
    steps[i // 20 % 2](x[i : i + 20], y[i : i + 20])
line = keras.Sequential([layers.Input((20,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
line.compile(keras.optimizers.SGD(0.1), lambda y, told: keras.ops.mean(y * told))
line.fit(x, y[:, None].astype("float32"), batch_size=24, epochs=2, verbose=0)
whole = (x * y[:, None]).mean(0) * 20  # its gradients do not depend on weights: each row counts once, whoever learns it
print(f"off {np.abs(line.get_weights()[0][:, 0] + 0.1 * whole).max():.6f}")
told, right = model.evaluate(x, y, batch_size=64, verbose=0)
print(f"right {right:.4f}, loss {told:.6f}")
