"""A line through four points, as of 2017: oars run --tf1 -n 2 examples/tf1/linear_fit.py"""

import argparse

import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--solver", default="sgd:0.01", help="sgd, adam or adadelta, and its step")
FLAGS = parser.parse_args()
solver, _, rate = FLAGS.solver.partition(":")
optimizers = {"sgd": tf.train.GradientDescentOptimizer, "adam": tf.train.AdamOptimizer,
              "adadelta": tf.train.AdadeltaOptimizer}

W = tf.Variable([0.3], dtype=tf.float32)
b = tf.Variable([-0.3], dtype=tf.float32)
x = tf.placeholder(tf.float32)
y = tf.placeholder(tf.float32)
loss = tf.reduce_sum(tf.square(W * x + b - y))
train = optimizers[solver](float(rate)).minimize(loss)

x_train, y_train = [1, 2, 3, 4], [0, -1, -2, -3]
sess = tf.Session()
sess.run(tf.global_variables_initializer())
for i in range(1000):
    sess.run(train, {x: x_train, y: y_train})
print("W: %s b: %s loss: %s" % tuple(sess.run([W, b, loss], {x: x_train, y: y_train})))
