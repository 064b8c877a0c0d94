"""A script of 2018: layers, batch normalization with its updates, dropout that is switched by what is fed; the same
normalization by hand, with averages in a condition; recurrent cells, in a loop that is written out and in one that is
not."""

import numpy as np
import tensorflow as tf

tf.set_random_seed(3)
rng = np.random.RandomState(0)
data, labels = rng.rand(48, 8, 8, 1).astype("f"), rng.randint(0, 3, 48)


def initial(seed):
    return tf.glorot_uniform_initializer(seed=seed)


x, y = tf.placeholder(tf.float32, [None, 8, 8, 1]), tf.placeholder(tf.int32, [None])
training = tf.placeholder(tf.bool, name="training")
net = tf.layers.conv2d(x, 4, 3, padding="same", activation=tf.nn.relu, kernel_initializer=initial(1))
net = tf.layers.batch_normalization(net, training=training, momentum=0.9)
net = tf.layers.max_pooling2d(net, 2, 2)
net = tf.layers.conv2d_transpose(net, 3, 3, strides=2, padding="same", use_bias=False, kernel_initializer=initial(2))
net = tf.layers.flatten(tf.layers.average_pooling2d(tf.nn.leaky_relu(net), 2, 2))
net = tf.layers.dense(net, 10, use_bias=False, kernel_initializer=initial(3),
                      kernel_regularizer=lambda w: 1e-3 * tf.nn.l2_loss(w))
net = tf.nn.relu(tf.layers.batch_normalization(net, training=training, momentum=0.5, name="normal"))
net = tf.layers.dropout(net, 0.3, seed=4, training=training)
logits = tf.layers.dense(net, 3, name="logits", kernel_initializer=initial(5))
loss = tf.losses.sparse_softmax_cross_entropy(labels=y, logits=logits) + tf.losses.get_regularization_loss()
with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    train = tf.train.AdamOptimizer(0.01).minimize(loss)
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), y), tf.float32))
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for i in range(8):
        at = slice(i % 3 * 16, i % 3 * 16 + 16)
        _, told = session.run([train, loss], {x: data[at], y: labels[at], training: True})
        print(f"loss {told:.5f}")
        if i % 4 == 3:
            told, right = session.run([loss, accuracy], {x: data, y: labels, training: False})
            print(f"evaluated: loss {told:.5f} accuracy {right:.4f}")
    for variable in tf.trainable_variables() + tf.get_collection(tf.GraphKeys.GLOBAL_VARIABLES, ".*moving"):
        print(variable.name, variable.shape, " ".join(f"{v:.5f}" for v in session.run(variable).ravel()[:4]))


def cell(size, keep):
    return tf.nn.rnn_cell.DropoutWrapper(tf.nn.rnn_cell.BasicLSTMCell(size), output_keep_prob=keep, seed=6)


def recurrent(kind):
    tf.set_random_seed(3)
    x, y = tf.placeholder(tf.float32, [None, 8, 8]), tf.placeholder(tf.int32, [None])
    keep, count = tf.placeholder_with_default(1.0, []), tf.placeholder(tf.int32, [])
    cells = tf.nn.rnn_cell.MultiRNNCell([cell(5, keep), tf.nn.rnn_cell.GRUCell(4)])
    with tf.variable_scope("rnn", initializer=initial(7)):
        state = cells.zero_state(count, tf.float32)
        if kind == "static":
            steps, state = tf.nn.static_rnn(cells, tf.unstack(x, 8, 1), state)
        else:
            steps, state = tf.nn.dynamic_rnn(cells, x, initial_state=state)
            steps = tf.unstack(steps, 8, 1)
    logits = tf.layers.dense(tf.concat([steps[-1], state[0].h], 1), 3, kernel_initializer=initial(8))
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    optimizer = tf.train.AdamOptimizer(0.01)
    pairs = optimizer.compute_gradients(loss)
    clipped, norm = tf.clip_by_global_norm([g for g, _ in pairs], 0.5)
    train = optimizer.apply_gradients(zip(clipped, [v for _, v in pairs], strict=True))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for i in range(3):
            feed = {x: data[i * 16 : i * 16 + 16, :, :, 0], y: labels[i * 16 : i * 16 + 16], keep: 0.8, count: 16}
            _, told, size = session.run([train, loss, norm], feed)
            print(kind, f"loss {told:.5f} norm {size:.5f}")
        for variable in tf.trainable_variables():
            print(variable.name, " ".join(f"{v:.5f}" for v in session.run(variable).ravel()[:3]))


for kind in ("static", "dynamic"):
    with tf.Graph().as_default():
        recurrent(kind)


def normalized(x, training):
    mean, variance = tf.nn.moments(x, [0, 1, 2])
    moving = tf.train.ExponentialMovingAverage(0.8)

    def updated():
        with tf.control_dependencies([moving.apply([mean, variance])]):
            return tf.identity(mean), tf.identity(variance)

    mean, variance = tf.cond(training, updated, lambda: (moving.average(mean), moving.average(variance)))
    return tf.nn.batch_normalization(x, mean, variance, tf.Variable(tf.zeros(4)), tf.Variable(tf.ones(4)), 1e-3)


with tf.Graph().as_default(), tf.Session() as session:
    x, y = tf.placeholder(tf.float32, [None, 8, 8, 1]), tf.placeholder(tf.int32, [None])
    training = tf.placeholder("bool")
    net = tf.layers.conv2d(x, 4, 3, activation=tf.nn.relu, kernel_initializer=initial(1))
    net = tf.layers.flatten(normalized(net, training))
    loss = tf.losses.sparse_softmax_cross_entropy(y, tf.layers.dense(net, 3, kernel_initializer=initial(2)))
    train = tf.train.AdamOptimizer(0.01).minimize(loss)
    session.run(tf.global_variables_initializer())
    for i in range(3):
        feed = {x: data[i * 16 : i * 16 + 16], y: labels[i * 16 : i * 16 + 16]}
        _, told = session.run([train, loss], {**feed, training: True})
        print(f"by hand: loss {told:.5f}, then {session.run(loss, {**feed, training: False}):.5f}")
