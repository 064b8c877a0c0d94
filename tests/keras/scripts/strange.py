"""Models that do what those of Keras do not: change gradients, compare all rows with a number, count their calls."""

import keras
import numpy as np
from keras import layers, ops
from scenes import compiled, mlp, scene, table, tell, train


def gradient(change):
    """What gives its rows back, and changes the gradient on its way."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.custom_gradient(lambda x: (tf.identity(x), change))
    if keras.backend.backend() == "torch":
        def hooked(x):
            y = x * 1
            if y.requires_grad:
                y.register_hook(change)
            return y

        return hooked
    import jax

    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, g: (change(g),))
    return same


clipped = gradient(lambda g: ops.clip(g, -0.002, 0.002))
CHANGES = {
    "clipped": clipped,
    "shortened": gradient(lambda g: g / (1 + 10 * ops.norm(g))),
    "centred": gradient(lambda g: g - ops.mean(g, 0)),
    "turned": gradient(lambda g: -g),
}


class Between(layers.Layer):
    """A change of gradients between layers."""

    def __init__(self, change, **kwargs):
        super().__init__(**kwargs)
        self.change = change

    def call(self, x):
        return self.change(x)


class Clipped(layers.Layer):
    """Clips the gradient of its weights, of which a rank has a part."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x):
        return ops.matmul(x, clipped(ops.convert_to_tensor(self.kernel)))


@scene
def gradients_of_ones_own():
    for name, change in CHANGES.items():
        print(name)
        train(compiled(mlp(Between(change, name=f"{name}_between")), optimizer=keras.optimizers.SGD(0.5)),
              *table(48), epochs=1)
    train(compiled(mlp(Clipped()), optimizer=keras.optimizers.SGD(0.5)), *table(48), epochs=1)


class Twice(keras.Model):
    """Two models, and what clips between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(classes=6), mlp()


@scene
def a_clipping_between_models():
    both, sgd = Twice(), keras.optimizers.SGD(0.5)
    x, y = table(48)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    weights = both.first.trainable_variables + both.second.trainable_variables
    if keras.backend.backend() == "torch":
        for at in range(0, 48, 16):
            loss = loss_of(y[at : at + 16], both.second(clipped(both.first(x[at : at + 16]))))
            both.zero_grad()
            loss.backward()
            sgd.apply([v.value.grad for v in weights], weights)
            tell("loss", loss.item())
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, both.second(clipped(both.first(x))))
            sgd.apply(tape.gradient(loss, weights), weights)
            return loss

        for way in (step, tf.function(step)):
            for at in range(0, 48, 16):
                tell("loss", way(x[at : at + 16], y[at : at + 16]))
    else:
        import jax

        def loss(values, x, y):
            parts = values[: len(weights) // 2], values[len(weights) // 2 :]
            hidden, _ = both.first.stateless_call(parts[0], [], x)
            return loss_of(y, both.second.stateless_call(parts[1], [], clipped(hidden))[0])

        values = [v.value for v in weights]
        for both_of in (jax.value_and_grad(loss), jax.jit(jax.value_and_grad(loss))):
            for at in range(0, 48, 16):
                told, grads = both_of(values, x[at : at + 16], y[at : at + 16])
                values = [v - 0.5 * g for v, g in zip(values, grads, strict=True)]
                tell("loss", told)
        for v, value in zip(weights, values, strict=True):
            v.assign(value)
    np.savez("between.npz", *[ops.convert_to_numpy(v) for v in weights])


class Bounded(keras.Model):
    """Looks whether any row is large."""

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(3)

    def call(self, x):
        return self.last(ops.where(ops.max(x) > 2.5, x / 2.5, x))


class Counting(Bounded):
    """Remembers that it was called, in all ways that there are."""

    def __init__(self):
        super().__init__()
        self.lines, self.counts, self.draws = [], {"calls": 0}, np.random.default_rng(3)
        self.number = None
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            self.number = tf.Variable(0)

    def call(self, x):
        self.lines.append("called")
        self.counts["calls"] += 1
        self.draws.normal()
        if self.number is not None:
            self.number.assign_add(1)
        return self.last(x)


@scene
def a_look_at_all_rows():
    train(compiled(Bounded()), *table(48), shuffle=False)


@scene
def a_model_that_counts():
    model = compiled(Counting())
    train(model, *table(48), epochs=3)
    print(model.lines, model.counts, model.draws.normal(), model.number if model.number is None else int(model.number))
