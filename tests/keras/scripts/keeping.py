"""Callbacks and files: what steers a training, what it prints, what it leaves behind and begins again from."""

import contextlib
import io
import re
from pathlib import Path

import keras
import numpy as np
from keras import layers
from scenes import compiled, mlp, play, scene, table, tell, train


@scene
def printed():
    x, y = table()
    model = compiled(mlp())
    model.summary()
    model.fit(x, y, batch_size=16, epochs=2, verbose=2, validation_data=table(21, seed=1))


@scene
def progress_bar():
    """How often it is drawn goes by the clock; how it ends does not."""
    x, y = table()
    model, shown = compiled(mlp()), io.StringIO()
    with contextlib.redirect_stdout(shown):
        model.fit(x, y, batch_size=16, epochs=2, validation_split=0.2)
        model.evaluate(x, y)
        model.predict(x)
    for line in re.sub(r"\x1b\[\d*m|\x08", "", shown.getvalue()).split("\n"):
        print(re.sub(r" \d+m?s( \d+[mu]?s/step)?", "", line.rpartition("\r")[2]))


class Watch(keras.callbacks.Callback):
    """Prints what a callback is told."""

    def on_train_batch_end(self, batch, logs=None):
        tell(f"batch {batch}", logs)

    def on_test_batch_end(self, batch, logs=None):
        tell(f"test {batch}", logs)

    def on_predict_batch_end(self, batch, logs=None):
        tell(f"predict {batch}", keras.ops.convert_to_numpy(logs["outputs"]))

    def on_epoch_end(self, epoch, logs=None):
        print("rate", float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)), sorted(logs))


@scene
def callbacks():
    x, y = table()
    model = compiled(mlp())
    steering = [Watch(), keras.callbacks.EarlyStopping("loss", patience=1, min_delta=0.05),
                keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.1),
                keras.callbacks.ModelCheckpoint("best.weights.h5", save_weights_only=True),
                keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
                keras.callbacks.BackupAndRestore("backup"), keras.callbacks.CSVLogger("log.csv")]
    train(model, x, y, epochs=6, callbacks=steering)
    model.load_weights("best.weights.h5")
    tell("loaded", model.get_weights()[0])
    model.evaluate(x, y, batch_size=20, verbose=0, callbacks=[Watch()])
    model.predict(x[:9], batch_size=4, verbose=0, callbacks=[Watch()])


@scene
def best_of_all():
    """The best epoch's weights are taken back, and its files are told by their names."""
    x, y = table()
    model = compiled(mlp(), optimizer=keras.optimizers.SGD(1.5))
    train(model, x, y, epochs=5, validation_split=0.3, callbacks=[
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True, verbose=1),
        keras.callbacks.ModelCheckpoint("best-{epoch}-{val_accuracy:.2f}.keras", "val_loss", save_best_only=True,
                                        verbose=1),
        keras.callbacks.ModelCheckpoint("batch-{batch}.weights.h5", save_weights_only=True, save_freq=7)])
    print(sorted(p.name for p in Path().glob("ba*-*.h5")), sorted(p.name for p in Path().glob("best-*")))
    tell("evaluate", model.evaluate(x, y, verbose=0))


class Interrupted(keras.callbacks.Callback):
    """Something goes wrong in the third epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2:
            raise RuntimeError("interrupted")


@scene
def restored():
    x, y = table()
    data = {"batch_size": 16, "epochs": 5, "verbose": 0, "shuffle": False}
    try:
        compiled(mlp(layers.Dropout(0.2))).fit(x, y, **data, callbacks=[
            keras.callbacks.BackupAndRestore("interrupted"), Interrupted(), keras.callbacks.CSVLogger("restored.csv")])
    except RuntimeError as error:
        print(error)
    train(compiled(mlp(layers.Dropout(0.2))), x, y, **data, callbacks=[
        keras.callbacks.BackupAndRestore("interrupted"), keras.callbacks.CSVLogger("restored.csv", append=True)])


@scene
def tensorboard():
    import tensorflow as tf

    x, y = table()
    train(compiled(mlp()), x, y, validation_split=0.2,
          callbacks=[keras.callbacks.TensorBoard("curves", histogram_freq=1)])
    for part in ("train", "validation"):
        (events,) = Path("curves", part).iterdir()
        for event in tf.compat.v1.train.summary_iterator(str(events)):
            for value in event.summary.value:
                if value.tag.startswith("e"):  # of epochs and evaluations; the others are histograms
                    tell(f"{part} {event.step} {value.tag}", tf.make_ndarray(value.tensor))


@scene
def saved():
    x, y = table()
    model = compiled(mlp(layers.BatchNormalization()))
    train(model, x, y, epochs=1)
    model.save("model.keras")
    model.save_weights("only.weights.h5")
    again = keras.models.load_model("model.keras")
    train(again, x, y, epochs=1)
    again.load_weights("only.weights.h5")
    tell("loaded", again.predict(x[:5], verbose=0))
    like = compiled(keras.models.model_from_json(model.to_json()))
    like.set_weights(model.get_weights())
    tell("alike", like.evaluate(x, y, verbose=0))
    keras.utils.save_img("seen.png", x[:6, :, None] * np.ones(3))
    print(keras.utils.load_img("seen.png").size)


if __name__ == "__main__":
    play()
