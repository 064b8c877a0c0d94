"""Loops written by hand for TensorFlow, as in Keras's own guides."""

import sys
import tempfile

import fits  # noqa: F401 (these scenes can be played here too)
import keeping  # noqa: F401
import keras
import numpy as np
import strange  # noqa: F401
import tensorflow as tf
from keras import layers
from scenes import compiled, example, keep, mlp, play, scene, table, tell, train, train_rows

loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches(n=50, size=16):
    return tf.data.Dataset.from_tensor_slices(table(n)).shuffle(100, seed=3).batch(size)


@scene
def one_row_first():
    """The first trace of a function has one row, which is not cut; it comes first of all scenes."""
    model = mlp()

    @tf.function
    def total(x):
        return tf.reduce_sum(model(x))

    for n in (1, 6):
        tell("total", total(table(n)[0]))


class Served(tf.Module):
    """A function that has run on own rows, and is saved."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @tf.function(input_signature=[tf.TensorSpec([None, 6], tf.float32)])
    def answer(self, x):
        return self.model(x)


@scene
def served():
    x, y = tf.constant(table(9)[0]), table(9)[1]
    served = Served(mlp())
    tell("before", served.answer(x))
    tf.saved_model.save(served, "served")
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(served.model, folder)
        loaded, model = tf.saved_model.load("served"), tf.saved_model.load(folder)
    tell("loaded", loaded.answer(x))
    tell("loaded", model.signatures["serving_default"](x)["output_0"])
    tell("after", served.answer(x))
    concrete = tf.function(lambda x: served.model(x)).get_concrete_function(x)
    print(sorted({op.type for op in concrete.graph.get_operations()}))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, served.model(x))
        for w, g in zip(served.model.weights, tape.gradient(loss, served.model.trainable_weights), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    for _ in range(2):
        tell("loss", step.get_concrete_function(x, y)(x, y))
    tell("loss", step(x, y))


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


class Unnamed(keras.Model):
    """Weights that Keras does not know, and that all have one name."""

    def __init__(self):
        super().__init__()
        shapes = (6, 8), (8,), (8, 5), (5,), (5, 3), (3,)
        self.own = [tf.Variable(tf.random.stateless_normal(shape, (1, i))) for i, shape in enumerate(shapes)]

    def call(self, x):
        for w, b in zip(self.own[::2], self.own[1::2], strict=True):
            x = tf.tanh(x @ w + b)
        return x


@scene
def weights_without_names():
    model = Unnamed()
    for x, y in batches(32):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x))
        for w, g in zip(model.own, tape.gradient(loss, model.own), strict=True):
            tell("norm", tf.norm(g))
            w.assign_sub(0.1 * g)


class Quick(keras.Model):
    """As in TensorFlow's quickstart: its call does not ask whether it trains."""

    def __init__(self):
        super().__init__()
        self.inner = mlp(layers.BatchNormalization())

    def call(self, x):
        return self.inner(x)


@scene
def compiled_loop_with_updates_by_hand():
    model = Quick()

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
def words_for_numbers():
    """Strings cannot be joined."""
    model = keras.Sequential([layers.Input((), dtype="int64"), layers.StringLookup(vocabulary=["a", "b"], invert=True)])
    print(model(np.arange(5) % 3).numpy(), model.predict(np.arange(7) % 3, verbose=0))


@scene
def mirrored():
    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = compiled(mlp())
    train(model, batches(size=16 * strategy.num_replicas_in_sync))


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


class RowLosses(keras.Model):
    """A train_step that tells a loss for each row."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


@scene
def loss_of_each_row():
    train_rows(RowLosses)


class Told(layers.Layer):
    def call(self, x):
        print("called")
        return tf.nn.relu(x)


@scene
def print_in_a_call():
    train(compiled(mlp(Told())), *table())


@scene
def functions_in_functions():
    """A model that is built in the first step, two functions of one step, of which both send messages; tf.gradients."""
    critic, actor = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(3)]), mlp(layers.Dropout(0.3))

    @tf.function
    def of_critic(x, y):
        loss = loss_of(y, critic(x))
        for w, g in zip(critic.trainable_variables, tf.gradients(loss, critic.trainable_variables), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    @tf.function
    def of_actor(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, actor(x, training=True))
        for w, g in zip(actor.trainable_variables, tape.gradient(loss, actor.trainable_variables), strict=True):
            w.assign_sub(0.1 * g)
        return loss

    @tf.function
    def both(x, y):
        return of_critic(x, y), of_actor(x, y)

    for x, y in batches():
        tell("losses", both(x, y))
    keep(critic, actor)


@scene
def loops_in_a_graph():
    """A loop and a branch that gradients go through, around a model; and a loop of steps, in which it is cut."""
    model = keras.Sequential([layers.Input((6,)), layers.Dense(6, "tanh")])

    def learn(tape, loss):
        for w, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
            w.assign_sub(0.1 * g)

    @tf.function
    def step(x, times):
        with tf.GradientTape() as tape:
            for _ in tf.range(times):
                x = model(x)
            loss = tf.reduce_mean(x**2) if times > 1 else tf.reduce_mean(model(x))
        learn(tape, loss)
        return loss

    @tf.function
    def steps(x, times):
        loss = 0.0
        for _ in tf.range(times):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            learn(tape, loss)
        return loss

    x = tf.constant(table()[0][:16], tf.float32)
    for times in (1, 2):
        tell("losses", (step(x, tf.constant(times)), steps(x, tf.constant(2))))
    keep(model)


class Centred(layers.Layer):
    """Its rows meet."""

    def call(self, x):
        return x - tf.reduce_mean(x, axis=0, keepdims=True)


@scene
def whole_beside_cut():
    """An embedding of a model that runs whole beside one that is cut; a tape that is asked twice."""
    x, y = table()
    words = (np.abs(x[:, :4]) * 4).astype("int32") % 7
    cut = mlp()
    whole = keras.Sequential([layers.Embedding(7, 4), layers.GlobalAveragePooling1D(), Centred(), layers.Dense(3)])
    for _ in range(2):
        with tf.GradientTape(persistent=True) as tape:
            out = cut(x)
            losses = loss_of(y, out), tf.reduce_sum(out**2)
        tell("norms", [tf.linalg.global_norm(tape.gradient(loss, cut.trainable_weights)) for loss in losses])
    train(compiled(whole), words, y)


@scene
def one_output_by_another():
    """As Grad-CAM has it, on several rows."""
    x, _ = table()
    inputs = layers.Input((6,))
    hidden = layers.Dense(4, "tanh")(inputs)
    model = keras.Model(inputs, [hidden, layers.Dense(3)(hidden)])
    with tf.GradientTape() as tape:
        within, out = model(x)
        best = tf.reduce_max(out, axis=1)
    tell("slope", tape.gradient(best, within))


@scene
def jacobians():
    x = tf.constant(table(5)[0])
    model = mlp(layers.BatchNormalization(), layers.Dropout(0.3))

    def of_rows():
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = model(x, training=True)
        return tape.batch_jacobian(out, x) if not tf.executing_eagerly() else tape.jacobian(out, x)

    tell("eager", of_rows())
    tell("graph", tf.function(of_rows)())
    with tf.GradientTape() as tape:
        sums = tf.reduce_sum(model(x), axis=0)
    tell("weights", tape.jacobian(sums, model.trainable_weights[0]))


@scene
def restored_before_built():
    """A checkpoint waits for weights and an optimizer that are not there yet."""
    for _ in range(2):
        model, optimizer = keras.Sequential([layers.Dense(4, "tanh"), layers.Dense(3)]), keras.optimizers.Adam(0.05)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
        manager = tf.train.CheckpointManager(checkpoint, "resumed", max_to_keep=2)
        checkpoint.restore(manager.latest_checkpoint)
        for x, y in batches():
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights, strict=True))
            tell("loss", loss)
        print(manager.save())


@scene
def files_of_images():
    """What reads and decodes is mapped before the batch; how often, stderr is told: each rank has its own number."""
    seen = []

    def noted(i):
        seen.append(i)
        return np.int32(i % 3)

    def load(i, name):
        image = tf.cast(tf.io.decode_png(tf.io.read_file(name), channels=3), tf.float32) / 255
        return tf.image.resize(image, [4, 4]), tf.ensure_shape(tf.numpy_function(noted, [i], tf.int32, False), [])

    rng = np.random.default_rng(2)
    names = [f"images/{i}.png" for i in range(51)]
    tf.io.gfile.makedirs("images")
    for name in names:
        tf.io.write_file(name, tf.io.encode_png(rng.integers(0, 256, (6, 6, 3)).astype("uint8")))
    model = compiled(keras.Sequential([layers.Input((4, 4, 3)), layers.Flatten(), layers.Dense(3)]))
    data = tf.data.Dataset.from_tensor_slices((np.arange(51), names)).shuffle(60, seed=3).map(load, 2).batch(16)
    train(model, data.prefetch(2))
    for x, _ in data:
        tell("mean", tf.reduce_mean(x))
    print("mapped", len(seen), "times", file=sys.stderr)
    with tf.io.TFRecordWriter("images.tfrecord") as writer:
        for i in range(20):
            writer.write(tf.io.serialize_tensor(tf.range(i, i + 3)).numpy())
    records = tf.data.TFRecordDataset(["images.tfrecord"])
    for row in records.map(lambda r: tf.ensure_shape(tf.io.parse_tensor(r, tf.int32), [3])).batch(8):
        tell("records", tf.reduce_sum(row, 1))
    for row in records.cache("images.cache").map(tf.strings.length).batch(20):
        tell("lengths", row)


@scene
def words_and_numbers():
    x, y = table(40)
    words = np.array(["red", "green", "blue", "grey"])[np.arange(40) % 4]
    number, word = layers.Input((6,)), layers.Input((), dtype="string")
    code = layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")(word)
    model = compiled(keras.Model([number, word], layers.Dense(3)(layers.Concatenate()([number, code]))))
    data = tf.data.Dataset.from_tensor_slices(((x, words), y)).batch(8)
    train(model, data)
    text = layers.TextVectorization(10, output_sequence_length=4)
    text.adapt(words)
    lines = tf.data.Dataset.from_tensor_slices((words, y)).batch(8).map(lambda t, y: (text(t), y)).cache().prefetch(2)
    model = keras.Sequential([layers.Embedding(10, 4), layers.GlobalAveragePooling1D(), layers.Dense(3)])
    train(compiled(model), lines)


@scene
def windows_of_a_series():
    series = np.sin(np.arange(80) / 5).astype("float32")[:, None]
    data = keras.utils.timeseries_dataset_from_array(series[:-8], series[8:], 8, batch_size=16, shuffle=True, seed=1)
    train(compiled(keras.Sequential([layers.Input((8, 1)), layers.LSTM(4), layers.Dense(1)]), loss="mse", metrics=[]),
          data)


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
    manager = tf.train.CheckpointManager(checkpoint, "kept", max_to_keep=1)
    for _ in range(3):  # what it deletes, it looks for first
        print(manager.save(), manager.checkpoints)
    for _ in range(3):
        if tf.io.gfile.exists("kept"):
            tf.io.gfile.rmtree("kept")
        tf.io.gfile.makedirs("kept")


@scene
def example_of_a_loop():
    example("digits_loop.py", "--epochs", "2", "--samples", "150")


if __name__ == "__main__":
    play()
