"""Loops written by hand for PyTorch, as in Keras's own guides."""

import fits  # noqa: F401 (these scenes can be played here too)
import keeping  # noqa: F401
import keras
import strange  # noqa: F401
import torch
from keras import layers
from scenes import compiled, keep, mlp, play, scene, table, tell, train, train_rows

loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def batches(n=50, size=16, shuffle=True):
    x, y = table(n)
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long())
    return torch.utils.data.DataLoader(pairs, batch_size=size, shuffle=shuffle)


@scene
def loop_with_an_optimizer_of_torch():
    model = mlp(layers.Dropout(0.3), layers.BatchNormalization())
    optimizer, cross = torch.optim.Adam(model.parameters(), lr=0.01), torch.nn.CrossEntropyLoss()
    for _ in range(2):
        for x, y in batches():
            loss = cross(model(x, training=True), y)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            tell("loss", loss.detach().numpy())
    keep(model)


@scene
def loop_with_an_optimizer_of_keras():
    model, optimizer = mlp(), keras.optimizers.Adam(0.01, clipnorm=0.5)
    seen, checked = keras.metrics.SparseCategoricalAccuracy(), keras.metrics.SparseCategoricalAccuracy()
    for _ in range(2):
        for x, y in batches():
            out = model(x)
            loss = loss_of(y, out)
            model.zero_grad()
            loss.backward()
            weights = list(model.trainable_weights)
            gradients = [w.value.grad for w in weights]
            with torch.no_grad():
                optimizer.apply(gradients, weights)
            seen.update_state(y, out)
            tell("loss", loss.detach())
        for x, y in batches(21, shuffle=False):
            checked.update_state(y, model(x, training=False))
        print(f"accuracy {float(seen.result()):.4f} {float(checked.result()):.4f}")
        seen.reset_state()
    keep(model)


class Steps(keras.Model):
    """A train_step of its own, and metrics of its own."""

    def __init__(self):
        super().__init__()
        self.net = mlp(classes=1)
        self.tracker, self.error = keras.metrics.Mean("loss"), keras.metrics.MeanAbsoluteError()

    def call(self, x, training=False):
        return self.net(x, training=training)

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        out = self(x, training=True)
        loss = torch.mean((out[:, 0] - y) ** 2) + out.std()
        loss.backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        self.tracker.update_state(loss)
        self.error.update_state(y, out[:, 0])
        return {metric.name: metric.result() for metric in self.metrics}

    @property
    def metrics(self):
        return [self.tracker, self.error]


@scene
def train_step():
    model = Steps()
    model.compile(keras.optimizers.SGD(0.05))
    train(model, *table())


class RowLosses(keras.Model):
    """A train_step that tells a loss for each row."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
        loss.sum().backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss.detach()}


@scene
def loss_of_each_row():
    train_rows(RowLosses)


@scene
def gan():
    """Two models, two optimizers; what is generated and what is real in one batch."""
    generator, critic = mlp(d=4, classes=6), mlp(classes=1)
    first, second = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)
    cross = keras.losses.BinaryCrossentropy(from_logits=True)
    for real, _ in batches():
        both = torch.concat([generator(torch.randn(len(real), 4)), real])
        labels = torch.concat([torch.ones((len(real), 1)), torch.zeros((len(real), 1))])
        critic.zero_grad()
        loss = cross(labels + 0.05 * torch.rand(labels.shape), critic(both))
        loss.backward()
        with torch.no_grad():
            first.apply([w.value.grad for w in critic.trainable_weights], critic.trainable_weights)
        generator.zero_grad()
        other = cross(torch.zeros((len(real), 1)), critic(generator(torch.randn(len(real), 4))))
        other.backward()
        with torch.no_grad():
            second.apply([w.value.grad for w in generator.trainable_weights], generator.trainable_weights)
        tell("losses", [loss.detach(), other.detach()])
    keep(generator, critic)


@scene
def loader():
    model = compiled(mlp())
    train(model, batches(), validation_data=batches(21, shuffle=False))
    tell("evaluate", model.evaluate(batches(), verbose=0))


if __name__ == "__main__":
    play()
