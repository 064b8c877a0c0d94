"""A script of 2016: what it feeds and fetches. A placeholder without a shape, a state of two parts under one key, a
drawn tensor in whose place another is fed, rows and sums fetched in training, runs before there is an optimizer; and a
folder of checkpoints. The tutorial's network. A sparse placeholder."""

import os

import numpy as np
import tensorflow as tf
from tensorflow.examples.tutorials.mnist import mnist

tf.set_random_seed(5)
rng = np.random.RandomState(2)
data, starts = rng.randn(48, 6).astype("f"), rng.randn(48, 4).astype("f")
x, keep, rate = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.float32, name="keep"), tf.placeholder("float")
weight = tf.placeholder("float")
state = (tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None, 4]))
into, out = tf.Variable(tf.truncated_normal([6, 8])), tf.Variable(tf.truncated_normal([4, 6]))
made = tf.matmul(tf.nn.dropout(x, keep), into)
code = made[:, :4] + tf.exp(0.1 * made[:, 4:]) * tf.random_normal(tf.shape(made[:, :4])) + state[0] * state[1]
again = tf.matmul(tf.nn.dropout(tf.tanh(code), keep), out)
loss = tf.reduce_sum(weight * tf.square(again - x))

with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    whole = {x: data, state: (starts, starts), "keep:0": np.array(0.8), weight: 1.0}
    print(f"at first {session.run(loss, whole):.4f} {session.run(loss, whole):.4f}")
    train = tf.train.MomentumOptimizer(rate, 0.9).minimize(loss)
    session.run(tf.variables_initializer(tf.global_variables()[2:]))
    for i in range(9):
        at = slice(i % 3 * 16, i % 3 * 16 + 16)
        feed = {x: data[at], state: (starts[at], starts[at]), keep: np.float32(0.5), rate: np.array(1e-4)}
        feed[weight] = 1 if i < 6 else np.arange(6)  # one number, and then it is many
        told, rows, _ = session.run([loss, {"again": again}, train], feed)
        print(f"loss {told:.4f} {rows['again'].shape} {rows['again'][-1, 0]:.4f}")
        session.run(train, feed)
        if i == 5:
            print("made of ones", " ".join(f"{v:.4f}" for v in session.run(again, {code: np.ones((2, 4)), keep: 1})[0]))
    print(" ".join(f"{v:.5f}" for v in session.run(out)[0]))

    # A folder of the script's own, which every rank makes for itself, and TensorFlow's files in it.
    os.makedirs("kept")
    saver = tf.train.Saver()
    saver.save(session, "kept/model", global_step=9)
    session.run(tf.global_variables_initializer())
    saver.restore(session, tf.train.get_checkpoint_state("kept").model_checkpoint_path)
    print("kept", " ".join(f"{v:.5f}" for v in session.run(out)[0]))

for rows in (None, 24):  # of a placeholder with a fixed number of rows every rank computes all
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(4)
        images, labels = tf.placeholder(tf.float32, [rows, mnist.IMAGE_PIXELS]), tf.placeholder(tf.int32, [rows])
        logits = mnist.inference(images, 12, 8)
        loss, right = mnist.loss(logits, labels), mnist.evaluation(logits, labels)
        train = mnist.training(loss, 0.1)
        session.run(tf.global_variables_initializer())
        feed = {images: rng.rand(24, mnist.IMAGE_PIXELS), labels: np.arange(24) % mnist.NUM_CLASSES}
        for _ in range(20 if rows else 3):
            print(f"tutorial {session.run([train, loss], feed)[1]:.5f}, right {session.run(right, feed)}")

with tf.Graph().as_default(), tf.Session() as session:  # as many entries as rows, but they are none
    words, labels = tf.sparse_placeholder(tf.float32), tf.placeholder(tf.float32, [None, 1])
    weights = tf.Variable(tf.ones([6, 1]))
    loss = tf.reduce_mean(tf.square(tf.sparse_tensor_dense_matmul(words, weights) - labels))
    train = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
    session.run(tf.global_variables_initializer())
    entries = tf.SparseTensorValue([[0, 1], [1, 2], [2, 3], [2, 5]], [1.0, 2.0, 3.0, 4.0], [4, 6])
    for _ in range(3):
        print(f"sparse {session.run([train, loss], {words: entries, labels: starts[:4, :1]})[1]:.5f}")
