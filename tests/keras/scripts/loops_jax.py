"""Loops written by hand for JAX, as in Keras's own guides."""

import jax

from jax import grad, jit, value_and_grad  # isort: skip (before Keras, as scripts do)
import keras  # isort: skip
import fits  # noqa: F401 (these scenes can be played here too)
import keeping  # noqa: F401
import numpy as np
import strange  # noqa: F401
from keras import layers
from scenes import compiled, mlp, play, scene, table, tell, train, train_rows

loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@scene
def stateless_loop():
    model, optimizer = mlp(layers.Dropout(0.3), layers.BatchNormalization()), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)

    def compute(trainable, others, x, y):
        out, others = model.stateless_call(trainable, others, x, training=True)
        return loss_of(y, out), (out, others)

    both = value_and_grad(compute, has_aux=True)

    @jit
    def step(state, x, y):
        trainable, others, slots = state
        (loss, (out, others)), grads = both(trainable, others, x, y)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return loss, (trainable, others, slots)

    x, y = table()
    state = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state = jax.tree.map(lambda v: v.value, state)
    for i in range(6):
        at = slice(i * 8, i * 8 + 8)
        loss, state = step(state, x[at], y[at])
        tell("loss", loss)
    np.savez("stateless.npz", *map(np.asarray, state[0]))


@scene
def updates_by_hand():
    model = mlp()
    x, y = table()
    weights = [v.value for v in model.trainable_variables]

    def loss(weights, x, y):
        out, _ = model.stateless_call(weights, [], x)
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(out), y[:, None], 1).mean()

    for i in range(4):
        at = slice(i * 11, i * 11 + 11)
        weights = jax.tree.map(lambda w, g: w - 0.3 * g, weights, grad(loss)(weights, x[at], y[at]))
        tell("loss", loss(weights, x, y))


@scene
def one_gradient_for_each_row():
    model = mlp()
    x, y = table(12)
    weights = [v.value for v in model.trainable_variables]

    def loss(weights, a, b):
        out, _ = model.stateless_call(weights, [], a[None])
        return loss_of(b[None], out)

    model(x)  # on own rows
    norms = jax.vmap(lambda a, b: sum((g**2).sum() for g in grad(loss)(weights, a, b)))(x, y)
    tell("norms", norms)


@scene
def other_derivatives():
    """Forward, of gradients, and of many sets of weights at once."""
    model = mlp()
    x, y = table(12)
    weights = [v.value for v in model.trainable_variables]

    def loss(weights, x):
        return loss_of(y, model.stateless_call(weights, [], x)[0])

    tell("gradient", grad(jit(loss))(weights, x)[0])
    tell("forward", jax.jvp(lambda s: loss(weights, s * x), (1.0,), (1.0,)))
    tell("curvature", jax.jvp(lambda w: grad(loss)(w, x), (weights,), (weights,))[1][0])
    tell("remade", grad(jax.checkpoint(loss))(weights, x)[0])
    tell("jacobian", jax.jacrev(lambda s: model(s * x).mean(0))(1.0))
    many = [jax.numpy.stack([w, 2 * w]) for w in weights]
    tell("ensemble", jax.vmap(loss, (0, None))(many, x))


def centred(params, inputs):
    """Rows meet here."""
    return params["scale"] * (inputs - inputs.mean(0))


@scene
def layer_of_jax():
    train(compiled(mlp(layers.JaxLayer(centred, params={"scale": jax.numpy.ones(8)}))), *table())
    train(compiled(mlp(layers.Activation(lambda x: centred({"scale": 2}, x)))), *table())


class Own(keras.Model):
    """compute_loss of its own."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def call(self, x):
        return self.net(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.max(loss_of(y, y_pred)) + keras.ops.std(y_pred)


@scene
def compute_loss():
    model = Own()
    model.compile(keras.optimizers.SGD(0.1))
    tell("history", model.fit(*table(), batch_size=16, epochs=2, verbose=0).history)
    for w in model.get_weights():
        tell("weights", w)


class Steps(keras.Model):
    """A train_step of its own, in which all state is handed around."""

    def losses_of(self, trainable, others, x, y, training=False):
        out, others = self.stateless_call(trainable, others, x, training=training)
        return self.compute_loss(x, y, out), (out, others)

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        x, y = data
        both = value_and_grad(self.losses_of, has_aux=True)
        (loss, (out, others)), grads = both(trainable, others, x, y, training=True)
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        logs, kept = {}, []
        for metric in self.metrics:
            its = metrics[len(kept):len(kept) + len(metric.variables)]
            told = (loss,) if metric.name == "loss" else (y, out)
            its = metric.stateless_update_state(its, *told)
            logs[metric.name] = metric.stateless_result(its)
            kept += its
        return logs, (trainable, others, slots, kept)


@scene
def train_step():
    inputs = layers.Input((6,))
    model = Steps(inputs, layers.Dense(3)(layers.Dropout(0.2)(layers.Dense(8, "relu")(inputs))))
    model.compile(keras.optimizers.Adam(0.01), loss_of, metrics=["accuracy"])
    train(model, *table())


class RowLosses(keras.Model):
    """A train_step that tells a loss for each row."""

    def losses_of(self, trainable, others, x, y):
        out, others = self.stateless_call(trainable, others, x, training=True)
        rows = keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
        return rows.sum(), (rows, others)

    def train_step(self, state, data):
        trainable, others, slots, metrics = state
        (_, (rows, others)), grads = value_and_grad(self.losses_of, has_aux=True)(trainable, others, *data)
        trainable, slots = self.optimizer.stateless_apply(slots, grads, trainable)
        return {"loss": rows}, (trainable, others, slots, metrics)


@scene
def loss_of_each_row():
    train_rows(RowLosses)


if __name__ == "__main__":
    play()
