"""The convolutional network of the 2017 tutorial: oars run --tf1 -n 2 examples/tf1/cnn.py"""

import argparse

import numpy as np
import tensorflow as tf
from tensorflow.examples.tutorials.mnist import input_data

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--order", choices=("file", "shuffled"), default="shuffled", help="of the images in every epoch")
FLAGS = parser.parse_args()

np.random.seed(1)
tf.set_random_seed(1)
mnist = input_data.read_data_sets("MNIST_data", one_hot=True)


def weight_variable(shape):
    return tf.Variable(tf.truncated_normal(shape, stddev=0.1))


def bias_variable(shape):
    return tf.Variable(tf.constant(0.1, shape=shape))


def conv2d(x, W):
    return tf.nn.conv2d(x, W, strides=[1, 1, 1, 1], padding="SAME")


def max_pool_2x2(x):
    return tf.nn.max_pool(x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")


x = tf.placeholder(tf.float32, [None, 784])
y_ = tf.placeholder(tf.float32, [None, 10])
keep_prob = tf.placeholder(tf.float32)
W_conv1, b_conv1 = weight_variable([5, 5, 1, 32]), bias_variable([32])
h_pool1 = max_pool_2x2(tf.nn.relu(conv2d(tf.reshape(x, [-1, 28, 28, 1]), W_conv1) + b_conv1))
W_conv2, b_conv2 = weight_variable([5, 5, 32, 64]), bias_variable([64])
h_pool2 = max_pool_2x2(tf.nn.relu(conv2d(h_pool1, W_conv2) + b_conv2))
W_fc1, b_fc1 = weight_variable([7 * 7 * 64, 1024]), bias_variable([1024])
h_fc1 = tf.nn.relu(tf.matmul(tf.reshape(h_pool2, [-1, 7 * 7 * 64]), W_fc1) + b_fc1)
W_fc2, b_fc2 = weight_variable([1024, 10]), bias_variable([10])
y_conv = tf.matmul(tf.nn.dropout(h_fc1, keep_prob), W_fc2) + b_fc2

cross_entropy = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=y_, logits=y_conv))
train_step = tf.train.AdamOptimizer(1e-4).minimize(cross_entropy)
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(y_conv, 1), tf.argmax(y_, 1)), tf.float32))

with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for i in range(1, FLAGS.steps + 1):
        batch = mnist.train.next_batch(50, shuffle=FLAGS.order == "shuffled")
        _, loss = sess.run([train_step, cross_entropy], feed_dict={x: batch[0], y_: batch[1], keep_prob: 0.5})
        if i % 100 == 0:
            right = accuracy.eval(feed_dict={x: mnist.test.images, y_: mnist.test.labels, keep_prob: 1.0})
            print("step %d accuracy %.2f" % (i, 100 * right))
    print("last loss %.5f" % loss)
