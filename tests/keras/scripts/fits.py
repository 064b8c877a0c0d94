"""``fit``, ``evaluate`` and ``predict`` in their many forms."""

import keras
import numpy as np
from keras import layers, ops
from scenes import compiled, example, keep, mlp, play, scene, table, tell, train


@scene
def arrays():
    x, y = table()
    model = compiled(mlp())
    train(model, x, y, epochs=3, validation_split=0.2)
    tell("evaluate", model.evaluate(x, y, batch_size=16, verbose=0))
    tell("predict", model.predict(x[:21], batch_size=8, verbose=0))


@scene
def small_batches():
    """Fewer rows than ranks, and a last batch of one."""
    x, y = table(13)
    train(compiled(mlp()), x, y, batch_size=2, epochs=2)


@scene
def order_and_counts():
    """Rows in their own order, epochs of some batches, a validation of another size and only now and then."""
    x, y = table()
    train(compiled(mlp()), x, y, shuffle=False, steps_per_epoch=2, epochs=3, validation_data=table(21, seed=2),
          validation_batch_size=9, validation_steps=2, validation_freq=2)


@scene
def tables():
    """Of pandas, also one by one by their names."""
    import pandas

    x, y = table()
    frame = pandas.DataFrame(x, columns=list("abcdef"), index=np.arange(50)[::-1])
    klass, weight = pandas.Series(y, frame.index), pandas.Series(np.linspace(0, 2, 50), frame.index)
    model = compiled(mlp())
    train(model, frame, klass, batch_size=16, sample_weight=weight, validation_data=(frame[:9], klass[:9]))
    tell("evaluate", model.evaluate(frame, klass, batch_size=16, verbose=0))
    tell("predict", model.predict(frame[40:], batch_size=4, verbose=0))
    inputs = {name: layers.Input((1,), name=name) for name in "abc"}
    model = compiled(keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(list(inputs.values())))))
    train(model, dict(frame[list("abc")]), klass, validation_split=0.2)


@scene
def weights_of_samples_and_classes():
    x, y = table()
    model = compiled(mlp(), weighted_metrics=["accuracy"])
    train(model, x, y, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, epochs=1)
    w = np.linspace(0, 2, len(x)).astype("float32")
    train(model, x, y, sample_weight=w, validation_data=(x[:9], y[:9], w[:9]))


@scene
def many_metrics():
    x, y = table(classes=2)
    model = mlp(layers.Dense(4), classes=1)
    compiled(model, loss=keras.losses.BinaryCrossentropy(from_logits=True), metrics=[
        "mae", keras.metrics.AUC(from_logits=True), keras.metrics.Precision(thresholds=0.0), "binary_accuracy"])
    train(model, x, y.astype("float32")[:, None], validation_split=0.3)


class Confusion(keras.metrics.Metric):
    """A metric of one's own, whose state is a matrix."""

    def __init__(self):
        super().__init__(name="confusion")
        self.counts = self.add_weight(shape=(3, 3), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        told = ops.one_hot(ops.argmax(y_pred, -1), 3)
        self.counts.assign(self.counts + ops.matmul(ops.transpose(ops.one_hot(ops.reshape(y_true, [-1]), 3)), told))

    def result(self):
        return ops.sum(ops.diagonal(self.counts)) / ops.sum(self.counts) + ops.max(self.counts)


@scene
def metrics_of_all_rows():
    x, y = table()
    model = compiled(mlp(), metrics=[Confusion(), keras.metrics.SparseTopKCategoricalAccuracy(2)])
    train(model, x, y, validation_split=0.3)
    tell("evaluate", model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True))
    compiled(model, loss=keras.losses.CategoricalCrossentropy(True), metrics=[
        keras.metrics.F1Score("macro"), keras.metrics.OneHotMeanIoU(3), keras.metrics.R2Score()])
    weight = np.linspace(0, 2, len(x)).astype("float32")
    tell("weighted", model.evaluate(x, np.eye(3, dtype="float32")[y], 16, 0, sample_weight=weight, return_dict=True))


def scalar_loss(y_true, y_pred):
    """Mixes rows: the worst row counts."""
    return ops.max(ops.square(ops.cast(y_true, y_pred.dtype)[:, None] - y_pred)) + ops.std(y_pred)


@scene
def losses_of_ones_own():
    x, y = table()
    train(compiled(mlp(), loss=scalar_loss, metrics=[scalar_loss]), x, y)


@scene
def summed_loss_and_penalties():
    x, y = table()
    model = mlp(layers.Dense(5, kernel_regularizer="l2"))
    train(compiled(model, loss=keras.losses.SparseCategoricalCrossentropy(True, reduction="sum"),
                   optimizer=keras.optimizers.SGD(0.003, momentum=0.9, clipnorm=0.5)), x, y)


@scene
def far_from_right():
    """Probabilities of next to nothing, and targets of nothing: TensorFlow's losses are of logits all the same."""
    x, y = table(24)
    ones = np.eye(3, dtype="float32")[y]
    for activation, loss, target in (("softmax", "sparse_categorical_crossentropy", y),
                                     ("softmax", "categorical_crossentropy", ones * (x[:, :3] > 0)),
                                     ("sigmoid", "binary_crossentropy", ones)):
        model = keras.Sequential([layers.Input((6,)), layers.Dense(3, activation=activation)])
        for eagerly in (False, True):
            model.compile(keras.optimizers.SGD(0.01), loss, run_eagerly=eagerly)
            train(model, 40 * x, target, epochs=1, validation_split=0.25)


@scene
def clipping():
    x, y = table()
    rate = keras.optimizers.schedules.CosineDecay(0.05, 8)
    for optimizer in (keras.optimizers.AdamW(rate, clipvalue=0.02), keras.optimizers.Lion(0.01, global_clipnorm=0.1),
                      keras.optimizers.Muon(0.01, clipnorm=0.1), keras.optimizers.Adagrad(0.1, weight_decay=0.1)):
        train(compiled(mlp(), optimizer=optimizer), x, y, epochs=1)


@scene
def dropout():
    x, y = table()
    train(compiled(mlp(layers.Dropout(0.4), layers.GaussianNoise(0.1))), x, y)


@scene
def batchnorm():
    x, y = table(52)
    train(compiled(mlp(layers.BatchNormalization(), layers.Activation("relu"))), x, y, validation_split=0.1)


@scene
def images():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(37, 8, 8, 3)).astype("float32"), rng.integers(0, 3, 37)
    model = keras.Sequential([layers.Input((8, 8, 3)), layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(),
                              layers.ReLU(), layers.MaxPooling2D(), layers.SpatialDropout2D(0.2),
                              layers.Conv2D(4, 2, groups=2), layers.Flatten(), layers.Dense(3)])
    train(compiled(model), x, y)


@scene
def tokens_and_masks():
    rng = np.random.default_rng(3)
    x = rng.integers(1, 20, (40, 7))
    x[:, 4:] *= rng.integers(0, 2, (40, 3))
    model = keras.Sequential([layers.Input((7,), dtype="int32"), layers.Embedding(20, 5, mask_zero=True),
                              layers.LSTM(6, return_sequences=True), layers.Dense(20)])
    train(compiled(model), x, np.roll(x, -1, 1))


@scene
def several_inputs_and_outputs():
    x, y = table()
    a, b = layers.Input((6,), name="a"), layers.Input((6,), name="b")
    shared = layers.Dense(5, activation="relu")
    both = layers.Concatenate()([shared(a), shared(b)])
    model = keras.Model({"a": a, "b": b}, {"klass": layers.Dense(3, name="klass")(both),
                                           "number": layers.Dense(1, name="number")(both)})
    compiled(model, loss={"klass": keras.losses.SparseCategoricalCrossentropy(True), "number": "mse"},
             loss_weights={"klass": 1.0, "number": 0.3}, metrics={"klass": ["accuracy"], "number": ["mae"]})
    train(model, {"a": x, "b": x[::-1]}, {"klass": y, "number": x[:, :1]})
    told = model.predict({"a": x[:9], "b": x[:9]}, verbose=0)
    tell("klass", told["klass"])
    tell("number", told["number"])


class Batches(keras.utils.PyDataset):
    """Batches of growing size."""

    def __init__(self, **threads):
        super().__init__(**threads)
        self.x, self.y = table(45)

    def __len__(self):
        return 5

    def __getitem__(self, i):
        at = slice(i * (i + 1) // 2 * 3, (i + 1) * (i + 2) // 2 * 3)
        return self.x[at], self.y[at]


@scene
def py_dataset():
    train(compiled(mlp()), Batches(), validation_data=Batches())
    train(compiled(mlp()), Batches(workers=2))


@scene
def other_data():
    """Tensors of the backend; and what the other frameworks read by, which Keras takes on every backend."""
    import tensorflow as tf
    import torch

    x, y = table()
    model = compiled(mlp())
    train(model, ops.convert_to_tensor(x), ops.convert_to_tensor(y), batch_size=16, epochs=1)
    train(model, tf.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=1).batch(16), epochs=1)
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    stream = torch.Generator().manual_seed(1)  # torch's own Keras seeds only on its backend
    loader = torch.utils.data.DataLoader(pairs, batch_size=16, shuffle=True, generator=stream)
    train(model, loader, validation_data=torch.utils.data.DataLoader(pairs, batch_size=20), epochs=2)


@scene
def generator():
    # On TensorFlow Keras takes batches ahead, in a thread: how many more than it uses is chance, in one process too.
    draw = np.random.RandomState(1) if keras.backend.backend() == "tensorflow" else np.random

    def endless():
        x, y = table(64)
        while True:
            at = draw.permutation(64)[:10]
            yield x[at], y[at]

    train(compiled(mlp()), endless(), steps_per_epoch=4, epochs=3, initial_epoch=1)


@scene
def on_batches():
    x, y = table()
    model = compiled(mlp())
    for i in range(4):
        tell("train", model.train_on_batch(x[i * 7:i * 7 + 7], y[i * 7:i * 7 + 7], return_dict=True))
    tell("test", model.test_on_batch(x, y, return_dict=True))
    tell("predict", model.predict_on_batch(x[:5]))
    keep(model)


@scene
def accumulation_and_averages():
    x, y = table()
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3)
    train(compiled(mlp(), optimizer=optimizer), x, y, epochs=3)


@scene
def mixed_precision():
    x, y = table()
    for kind in ("bfloat16", "float16"):  # the second with a scaled loss
        keras.mixed_precision.set_dtype_policy(f"mixed_{kind}")
        try:
            model = compiled(mlp())
        finally:
            keras.mixed_precision.set_dtype_policy("float32")
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history
        print("losses", [round(v, 2) for v in history["loss"]])


@scene
def compiled_by_xla():
    x, y = table()
    train(compiled(mlp(), jit_compile=keras.backend.backend() != "torch"), x, y)  # torch: by Inductor, in minutes


@scene
def loss_scaling():
    x, y = table()
    train(compiled(mlp(), optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))), x, y)


class Mixes(layers.Layer):
    """Rows meet here, behind a gate that is zero at first."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x + self.gate * (x - ops.mean(x, axis=0, keepdims=True))


class Own(keras.Model):
    """Layers and a call of one's own; its rows do not meet."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = layers.Dense(7, activation="relu"), layers.Dense(3), layers.Dropout(0.2)

    def call(self, x, training=False):
        return self.b(self.drop(self.a(x), training=training))


@scene
def rows_that_meet():
    x, y = table()
    train(compiled(mlp(Mixes())), x, y)
    for layer in (layers.Softmax(-2), layers.Softmax((0, 1)), layers.UnitNormalization(-2)):  # along the batch
        tell("along", keras.Sequential([layers.Input((6,)), layer])(x[:9]))
    steps = keras.Sequential([layers.Input((2, 3)), layers.TimeDistributed(layers.Softmax(-2))])
    tell("steps", steps(x[:9].reshape(9, 2, 3)))


@scene
def activity():
    x, y = table()
    train(compiled(mlp(layers.Dense(4, activity_regularizer="l1"))), x, y)


@scene
def subclassed():
    x, y = table()
    model = compiled(Own())
    train(model, x, y, validation_split=0.2)
    tell("predict", model.predict(x[:6], verbose=0))


class Inner(layers.Layer):
    """Makes its layers when it is built."""

    def build(self, shape):
        self.inside = [layers.Dense(4), layers.Dropout(0.3), layers.BatchNormalization()]

    def call(self, x, training=False):
        dense, dropout, norm = self.inside
        return norm(dropout(dense(x), training=training), training=training)


class Outer(layers.Layer):
    """Gets its weights by a call with shapes alone."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Inner(), layers.Dense(3)

    def call(self, x, training=False):
        return self.last(self.inner(x, training=training))


@scene
def made_when_built():
    inputs = layers.Input((6,))
    train(compiled(keras.Model(inputs, Outer()(inputs))), *table())


class Placed(layers.Layer):
    """Words, their places and their sentences, of which all ranks look up the same: keras.io's transformers begin so.
    Or places are words, too."""

    def __init__(self, alike=False):
        super().__init__()
        self.words = layers.Embedding(20, 5)
        self.places = self.words if alike else layers.Embedding(7, 5)
        self.sentences = layers.Embedding(3, 5)

    def call(self, x):
        places = ops.arange(0, ops.shape(x)[-1], 1)
        return self.words(x) + self.places(places) + self.sentences(places // 3)


@scene
def words_and_places():
    inputs = layers.Input((7,), dtype="int32")
    x = np.random.default_rng(2).integers(0, 20, (50, 7))
    for eager, alike in ((False, False), (True, False), (False, True)):
        rows = layers.GlobalAveragePooling1D()(layers.Dropout(0.1)(Placed(alike)(inputs)))
        model = keras.Model(inputs, layers.Dense(3)(rows))
        train(compiled(model, run_eagerly=eager), x, x.sum(1) % 3)


@scene
def words_that_are_all_the_same():
    for eager in (False, True):
        model = keras.Sequential([layers.Embedding(20, 5), layers.GlobalAveragePooling1D(), layers.Dense(3)])
        train(compiled(model, run_eagerly=eager), np.full((48, 7), 4), np.ones(48, int))


class Sampling(layers.Layer):
    """Of the guide on variational autoencoders."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_var = inputs
        return mean + ops.exp(0.5 * log_var) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Autoencoder(keras.Model):
    """Its penalty is added in the call, so it runs whole; or it is told by compute_loss, of what the call has kept."""

    def __init__(self, added):
        super().__init__()
        self.added, self.mean, self.log_var = added, layers.Dense(3), layers.Dense(3)
        self.sampling, self.decoder = Sampling(), mlp(d=3, classes=6)

    def call(self, x):
        print("called with", x.shape[1:])  # as often as on one process
        mean, log_var = self.mean(x), self.log_var(x)
        self.penalty = -0.5 * ops.mean(log_var - ops.square(mean) - ops.exp(log_var) + 1, axis=1)
        if self.added:
            self.add_loss(ops.mean(self.penalty))
        return self.decoder(self.sampling((mean, log_var)))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss if self.added else loss + ops.mean(self.penalty)


@scene
def autoencoders():
    x, _ = table()
    for added in (True, False):
        train(compiled(Autoencoder(added), loss="mse", metrics=[]), x, x)


@scene
def sampler():
    """Draws that are the rows'."""
    x, y = table()
    inputs = layers.Input((6,))
    both = layers.Dense(4)(inputs), layers.Dense(4)(inputs)
    train(compiled(keras.Model(inputs, layers.Dense(3)(Sampling()(both)))), x, y)


class Noisy(layers.Layer):
    """Draws for its weights, of which there may be as many as a rank has rows; and it counts all it has seen."""

    def build(self, shape):
        self.kernel, self.seeds = self.add_weight(shape=(8, 8)), keras.random.SeedGenerator(3)
        self.seen = self.add_weight(shape=(8,), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if not training:
            return ops.matmul(x, self.kernel) + 0.01 * self.seen
        self.seen.assign(self.seen + ops.sum(x, axis=0))
        return ops.matmul(x, self.kernel + 0.1 * keras.random.normal((8, 8), seed=self.seeds))


@scene
def noisy_weights():
    x, y = table(48)
    train(compiled(mlp(Noisy())), x, y, validation_split=0.3)


@scene
def frozen_base_and_augmentation():
    rng = np.random.default_rng(3)
    x, y = rng.random((37, 8, 8, 3), "float32"), rng.integers(0, 3, 37)
    base = keras.Sequential([layers.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU()])
    base.trainable = False
    inputs = layers.Input((8, 8, 3))
    shifted = layers.RandomRotation(0.1, seed=2)(layers.RandomFlip("horizontal", seed=1)(inputs))
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(base(shifted, training=False))))
    train(compiled(model, optimizer=keras.optimizers.SGD(0.05)), x, y)
    # In fit Keras 3.15 passes training=True over the False above: now statistics are the batch's, and the true gradient
    # of the bias before them is zero. Adam would divide what rounding leaves of it by itself.
    base.trainable = True
    train(compiled(model, optimizer=keras.optimizers.SGD(0.01)), x, y, epochs=1)


@scene
def eagerly_and_many_steps_at_once():
    x, y = table()
    train(compiled(mlp(layers.Dropout(0.2)), run_eagerly=True), x, y, epochs=1)
    if keras.backend.backend() != "torch":  # which refuses it
        train(compiled(mlp(), steps_per_execution=3), x, y)


@scene
def example_of_fit():
    example("digits_fit.py", "--epochs", "2", "--samples", "150")


if __name__ == "__main__":
    play()
