"""One softmax layer on MNIST, as of 2017: oars run --tf1 -n 2 examples/tf1/softmax.py"""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow.examples.tutorials.mnist import input_data

parser = argparse.ArgumentParser()
parser.add_argument("--solver", default="sgd:0.5", help="sgd, momentum or adam, and its rate")
parser.add_argument("--steps", type=int, default=500)
FLAGS = parser.parse_args()
solver, _, rate = FLAGS.solver.partition(":")
optimizers = {"sgd": tf.train.GradientDescentOptimizer, "adam": tf.train.AdamOptimizer,
              "momentum": lambda rate: tf.train.MomentumOptimizer(rate, 0.9)}

np.random.seed(1)
mnist = input_data.read_data_sets("MNIST_data", one_hot=True)
x = tf.placeholder(tf.float32, [None, 784])
y_ = tf.placeholder(tf.float32, [None, 10])
W = tf.Variable(tf.zeros([784, 10]))
b = tf.Variable(tf.zeros([10]))
y = tf.matmul(x, W) + b
cross_entropy = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=y_, logits=y))
train_step = optimizers[solver](float(rate)).minimize(cross_entropy)
correct = tf.equal(tf.argmax(y, 1), tf.argmax(y_, 1))
accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))

sess = tf.InteractiveSession()
tf.global_variables_initializer().run()
for i in range(1, FLAGS.steps + 1):
    batch_xs, batch_ys = mnist.train.next_batch(100)
    _, loss = sess.run([train_step, cross_entropy], feed_dict={x: batch_xs, y_: batch_ys})
    if i % 25 == 0:
        right = sess.run(accuracy, feed_dict={x: mnist.test.images, y_: mnist.test.labels})
        print("step %d accuracy %.2f loss %.5f" % (i, 100 * right, loss))
