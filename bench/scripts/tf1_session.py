"""TensorFlow 1: a graph, a session, placeholders."""

import numpy as np
import tensorflow.compat.v1 as tf
from stopwatch import tick

tf.disable_v2_behavior()
tf.set_random_seed(0)
rng = np.random.RandomState(0)
images, labels = rng.rand(6000, 784).astype(np.float32), np.eye(10, dtype=np.float32)[rng.randint(0, 10, 6000)]

X, Y = tf.placeholder(tf.float32, [None, 784]), tf.placeholder(tf.float32, [None, 10])
layer, width = X, 784
for units in (256, 256):
    layer = tf.nn.relu(tf.matmul(layer, tf.Variable(tf.random_normal([width, units], stddev=0.05)))
                       + tf.Variable(tf.zeros([units])))
    width = units
logits = tf.matmul(layer, tf.Variable(tf.random_normal([width, 10], stddev=0.05))) + tf.Variable(tf.zeros([10]))
loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits_v2(logits=logits, labels=Y))
train = tf.train.AdamOptimizer(0.001).minimize(loss)

with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    while True:
        order = rng.permutation(len(images))
        for start in range(0, len(order), 128):
            tick()
            rows = order[start:start + 128]
            session.run([train, loss], feed_dict={X: images[rows], Y: labels[rows]})
