"""flax (NNX) and optax: a jitted step over batches from NumPy."""

import jax
import numpy as np
import optax
from flax import nnx

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 8)).astype("float32")
y = x[:, :3].argmax(1)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, rows):
        return self.second(nnx.relu(self.first(rows)))


model = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, rows, labels):
    def loss_of(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(rows), labels).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


for epoch in range(3):
    order = rng.permutation(96)
    for at in range(0, 96, 16):
        loss = step(model, optimizer, x[order[at:at + 16]], y[order[at:at + 16]])
    print(f"epoch {epoch} loss {float(loss):.6f}")
np.savez("weights.npz", *map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.Param))))
