"""An eager loop with tapes of one's own for ranks to die in: two models one behind the other, dropout, batch
normalization, a tape that is asked twice, an optimizer, updates by hand."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from scenes import mlp, table, tell

keras.utils.set_random_seed(7)
x, y = table(64)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model, critic = mlp(layers.Dropout(0.3), layers.BatchNormalization()), mlp(d=3, classes=1)
optimizer, seen = keras.optimizers.Adam(0.01, clipnorm=1.0), keras.metrics.SparseCategoricalAccuracy()
for i in range(10):
    at = slice(i % 4 * 16, i % 4 * 16 + 16)
    with tf.GradientTape(persistent=True) as tape:
        logits = model(x[at], training=True)
        judged = tf.reduce_mean(tf.square(critic(logits) - 1.0))
        loss = loss_of(y[at], logits) + 0.1 * judged
    weights = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    for w, g in zip(critic.weights, tape.gradient(judged, critic.trainable_variables), strict=True):
        w.assign_sub(0.05 * g)
    seen.update_state(y[at], logits)
    tell("loss", [loss, judged])
    if i % 4 == 3:
        tell("accuracy", [seen.result(), np.mean(np.argmax(model(x), 1) == y)])
for part in (model, critic):
    tell("weights", np.concatenate([np.ravel(w) for w in part.get_weights()]))
