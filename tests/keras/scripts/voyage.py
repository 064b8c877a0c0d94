"""A training for ranks to die in: fit with dropout and batch normalisation, then a loop of one's own."""

import keras
import numpy as np
from keras import layers
from scenes import compiled, mlp, table, tell

keras.utils.set_random_seed(7)
x, y = table(64)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def tensorflow_loop(model, optimizer):
    """Two models of one step, so that half of it is done when the other half is lost."""
    import tensorflow as tf

    other, seen = mlp(layers.Dropout(0.2)), keras.metrics.Mean()

    @tf.function
    def step(a, b):
        for part in (model, other):
            with tf.GradientTape() as tape:
                loss = loss_of(b, part(a, training=True))
            for w, g in zip(part.trainable_variables, tape.gradient(loss, part.trainable_variables), strict=True):
                w.assign_sub(0.05 * g)
            seen.update_state(loss)
        return loss

    def read(a, b):
        """As if from a file, so that each rank does its own."""
        return tf.ensure_shape(tf.numpy_function(lambda v: v, [a], tf.float32, False), [6]), b

    for a, b in tf.data.Dataset.from_tensor_slices((x, y)).map(read, 2).batch(8).prefetch(2):
        tell("loss", step(a, b))
    tell("seen", seen.result())
    return other


def jax_loop(model, optimizer):
    import jax

    def compute(trainable, others, a, b):
        out, others = model.stateless_call(trainable, others, a, training=True)
        return loss_of(b, out), others

    def step(state, batch):
        trainable, others, slots = state
        (loss, others), grads = jax.value_and_grad(compute, has_aux=True)(trainable, others, *batch)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return (trainable, others, slots), loss

    optimizer.build(model.trainable_variables)
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = jax.tree.map(lambda v: v.value, variables)
    pairs = x.reshape(8, 8, 6), y.reshape(8, 8)
    for i, run in enumerate([jax.jit(step)] * 4 + [step] * 2):  # compiled, and not
        state, loss = run(state, (pairs[0][i], pairs[1][i]))
        tell("loss", loss)
    state, losses = jax.jit(lambda *given: jax.lax.scan(step, *given))(state, (pairs[0][6:], pairs[1][6:]))
    tell("losses", losses)
    for variable, value in zip(jax.tree.leaves(variables[:2]), jax.tree.leaves(state[:2]), strict=True):
        variable.assign(value)
    return model


def torch_loop(model, optimizer):
    import torch

    stepper = torch.optim.SGD(model.parameters(), 0.05)
    for i in range(8):
        loss = loss_of(torch.from_numpy(y[i * 8:i * 8 + 8]), model(torch.from_numpy(x[i * 8:i * 8 + 8]), training=True))
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        tell("loss", loss.detach())
    return model


model = compiled(mlp(layers.Dropout(0.3), layers.BatchNormalization()))
history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, validation_split=0.25)
tell("history", history.history)
tell("evaluate", model.evaluate(x, y, batch_size=16, verbose=0))
for i in range(2):
    tell("batch", model.train_on_batch(x[i * 16:i * 16 + 16], y[i * 16:i * 16 + 16]))
tell("predict", model.predict(x, batch_size=32, verbose=0)[::9])
other = globals()[f"{keras.backend.backend()}_loop"](model, keras.optimizers.Adam(0.01))
for part in (model, other):
    tell("weights", np.concatenate([np.ravel(keras.ops.convert_to_numpy(w)) for w in part.weights]))
