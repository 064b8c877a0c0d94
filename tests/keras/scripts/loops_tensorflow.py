"""Loops written by hand for TensorFlow, as in Keras's own guides."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from scenes import compiled, keep, mlp, play, scene, table, tell, train

loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches(n=50, size=16):
    return tf.data.Dataset.from_tensor_slices(table(n)).shuffle(100, seed=3).batch(size)


@scene
def pipeline():
    model = compiled(mlp())
    train(model, batches().map(lambda x, y: (x * 2, y)).prefetch(2), validation_data=batches(20))
    tell("evaluate", model.evaluate(batches(), verbose=0))
    tell("predict", model.predict(batches(9), verbose=0))


@scene
def eager_loop():
    model, optimizer = mlp(layers.Dropout(0.3)), keras.optimizers.SGD(0.1, momentum=0.9)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    for x, y in batches():
        with tf.GradientTape() as tape:
            out = model(x, training=True)
            loss = loss_of(y, out) + 0.01 * tf.add_n([tf.nn.l2_loss(w) for w in model.trainable_weights])
        grads = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
        accuracy.update_state(y, out)
        tell("loss", loss)
        tell("norm", tf.linalg.global_norm(grads))
    tell("accuracy", accuracy.result())
    keep(model)


@scene
def compiled_loop_with_updates_by_hand():
    model = mlp(layers.BatchNormalization())

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), True))
        for w, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    for x, y in batches():
        tell("loss", step(x, y))
    keep(model)


@scene
def gradient_penalty():
    """A tape in a tape."""
    critic, optimizer = mlp(classes=1), keras.optimizers.RMSprop(0.01)
    for x, _ in batches():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                out = critic(x)
            slopes = inner.gradient(out, x)
            loss = tf.reduce_mean(out) + 10 * tf.reduce_mean((tf.norm(slopes, axis=1) - 1) ** 2)
        optimizer.apply(outer.gradient(loss, critic.trainable_weights), critic.trainable_weights)
        tell("loss", loss)
    keep(critic)


class Gan(keras.Model):
    """Two models, two optimizers, a train_step of its own."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = mlp(d=4, classes=6), mlp(classes=1)
        self.seeds = keras.random.SeedGenerator(5)
        self.tracker = keras.metrics.Mean(name="both")

    def compile(self):
        super().compile()
        self.first, self.second = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)

    def train_step(self, data):
        cross = keras.losses.BinaryCrossentropy(from_logits=True)
        noise = keras.random.normal((tf.shape(data)[0], 4), seed=self.seeds)
        with tf.GradientTape() as tape:
            fake, real = self.critic(self.generator(noise)), self.critic(data)
            loss = cross(tf.ones_like(real), real) + cross(tf.zeros_like(fake), fake)
        self.first.apply(tape.gradient(loss, self.critic.trainable_weights), self.critic.trainable_weights)
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(noise))
            other = cross(tf.ones_like(fake), fake)
        self.second.apply(tape.gradient(other, self.generator.trainable_weights), self.generator.trainable_weights)
        self.tracker.update_state(loss + other)
        return {"both": self.tracker.result(), "critic": loss}


@scene
def gan():
    model = Gan()
    model.compile()
    history = model.fit(table()[0], batch_size=16, epochs=2, verbose=0)
    tell("history", history.history)
    keep(model.generator, model.critic)


@scene
def without_keras():
    x, y = table()
    w = tf.Variable(tf.random.stateless_normal((6, 3), (1, 2)))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ w))
        w.assign_sub(0.5 * tape.gradient(loss, w))
        tell("loss", loss)
    checkpoint = tf.train.Checkpoint(w=w)
    path = checkpoint.save("checkpoint/w")
    w.assign(tf.zeros_like(w))
    checkpoint.restore(path)
    tell("w", np.asarray(w))


if __name__ == "__main__":
    play()
