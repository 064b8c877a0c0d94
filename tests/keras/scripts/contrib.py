"""What there is of tf.contrib, against the same by tf.layers: losses, names of variables, sequences, texts. And names
of before TensorFlow 1.0."""

import numpy as np
import tensorflow as tf
import tensorflow.contrib.slim as slim
from tensorflow.contrib import learn, legacy_seq2seq, rnn

rng = np.random.RandomState(0)
kinds = (np.float, np.int, np.bool, np.object, np.complex, np.str, np.float_)  # NumPy's names of 2017
assert "".join(np.array([1], kind).dtype.kind for kind in kinds) == "fibOcUf"
assert np.NaN != np.NaN and np.product([2, np.asscalar(np.array(3))]) == 6
data, labels = rng.rand(24, 8, 8, 1).astype("f"), rng.randint(0, 3, 24)


def initial(seed):
    return tf.glorot_uniform_initializer(seed=seed)


def by_contrib(x, training):
    normal = {"is_training": training, "decay": 0.9, "updates_collections": None}
    with slim.arg_scope([slim.conv2d, slim.conv2d_transpose], normalizer_fn=slim.batch_norm, normalizer_params=normal):
        net = slim.conv2d(x, 4, [3, 3], weights_initializer=initial(1))
        net = slim.conv2d_transpose(net, 3, 3, 2, weights_initializer=initial(2), scope="up")
    net = slim.dropout(slim.flatten(slim.max_pool2d(net, [2, 2])), 0.8, is_training=training, seed=4)
    return slim.fully_connected(net, 3, None, None, None, initial(3), slim.l2_regularizer(0.01), scope="out")


def by_layers(x, training):
    net = x
    for seed, layer, size in ((1, tf.layers.conv2d, (4, 3)), (2, tf.layers.conv2d_transpose, (3, 3, 2))):
        net = layer(net, *size, padding="same", use_bias=False, kernel_initializer=initial(seed))
        net = tf.nn.relu(tf.layers.batch_normalization(net, training=training, momentum=0.9, scale=False))
    net = tf.layers.dropout(tf.layers.flatten(tf.layers.max_pooling2d(net, 2, 2)), 0.2, seed=4, training=training)
    regular = tf.contrib.layers.l2_regularizer(0.01)
    return tf.layers.dense(net, 3, kernel_initializer=initial(3), kernel_regularizer=regular)


def trained(network):
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(1)
        x, y = tf.placeholder("float", [None, 8, 8, 1]), tf.placeholder(tf.int32, [None])
        training = tf.placeholder_with_default(True, [])
        logits = network(x, training)
        loss = tf.losses.sparse_softmax_cross_entropy(y, logits) + tf.losses.get_regularization_loss()
        with tf.control_dependencies([] if network is by_contrib else tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
            train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        session.run(tf.global_variables_initializer())
        told = [session.run([loss, train], {x: data, y: labels})[0] for _ in range(3)]
        told.append(session.run(loss, {x: data, y: labels, training: False}))
        return told, [v.name for v in tf.global_variables()]


told, names = trained(by_contrib)
np.testing.assert_allclose(told, trained(by_layers)[0], 1e-5)
print(*(f"{value:.4f}" for value in told))
print(*names)

texts = learn.preprocessing.VocabularyProcessor(4)
rows = np.array(list(texts.fit_transform(["a cat sat", "no HTMLPage, no cat", "it's a well-known cat"])))
print(rows.tolist(), len(texts.vocabulary_), np.array(list(texts.transform(["no dog"]))).tolist())

x = tf.placeholder(tf.int32, [None, 4])
steps, words = tf.unpack(tf.contrib.layers.embed_sequence(x, 20, 5), axis=1), tf.unstack(x, axis=1)
cell = rnn.OutputProjectionWrapper(rnn.BasicRNNCell(6), 20)
outputs, _ = legacy_seq2seq.rnn_decoder(steps, cell.zero_state(tf.shape(x)[0], tf.float32), cell)
by_place = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.concat(0, outputs), tf.concat(0, tf.split(1, 4, x))[:, 0])
losses = [legacy_seq2seq.sequence_loss(outputs, words, [tf.ones_like(word, tf.float32) for word in words]),
          tf.contrib.seq2seq.sequence_loss(tf.pack(outputs, axis=1), x, tf.ones_like(x, tf.float32)),
          tf.reduce_mean(by_place)]
train = tf.train.GradientDescentOptimizer(0.5).minimize(tf.add_n(losses))
with tf.Session() as session:
    session.run(tf.initialize_all_variables())
    for _ in range(3):
        told, _ = session.run([losses, train], {x: rows})
        np.testing.assert_allclose(told, told[0], 1e-5)
