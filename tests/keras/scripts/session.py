"""A session of TensorFlow 1 for ranks to die in: dropout, statistics of the batch with a moving average, a counter,
gradients that are added up, a condition; events and checkpoints, which the next rank goes on with."""

import numpy as np
import tensorflow as tf

tf.set_random_seed(3)
rng = np.random.RandomState(0)
data, labels = rng.randn(64, 8, 8, 1).astype("f"), rng.randint(0, 3, 64)
x, y = tf.placeholder(tf.float32, [None, 8, 8, 1]), tf.placeholder(tf.int64, [None])
training, keep = tf.placeholder_with_default(False, []), tf.placeholder(tf.float32)
kernel = tf.Variable(tf.truncated_normal([3, 3, 1, 4], stddev=0.3))
images = tf.nn.conv2d(x, kernel, [1, 1, 1, 1], "SAME")
mean, variance = tf.nn.moments(images, [0, 1, 2])
moving = tf.Variable(tf.zeros([4]), trainable=False)
follow = moving.assign(0.9 * moving + 0.1 * mean)
hidden = tf.nn.max_pool(tf.nn.relu((images - mean) / tf.sqrt(variance + 1e-3)), [1, 2, 2, 1], [1, 2, 2, 1], "SAME")
flat = tf.nn.dropout(tf.reshape(hidden, [-1, 64]), keep)
weights, bias = tf.Variable(tf.truncated_normal([64, 3], stddev=0.2)), tf.Variable(tf.zeros([3]))
logits = tf.matmul(flat, weights) + bias
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
loss += 0.01 * tf.nn.l2_loss(weights)
step = tf.Variable(0, trainable=False)
train = tf.group(tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, global_step=step), follow)
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), y), tf.float32))
summary = tf.summary.scalar("loss", loss)

with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    writer, saver = tf.summary.FileWriter("events"), tf.train.Saver(max_to_keep=2)
    for i in range(12):
        at = slice(i % 4 * 16, i % 4 * 16 + 16)
        feed = {x: data[at], y: labels[at], keep: 0.7}
        told, predicted, event, _ = session.run([loss, logits, summary, train], feed)
        writer.add_summary(event, i)
        print(f"loss {told:.5f} first {predicted[0, 0]:.4f}")
        if i % 4 == 3:
            saver.save(session, "saved/model", i)
            print(f"accuracy {session.run(accuracy, {x: data, y: labels, keep: 1.0}):.4f}")
    print("step", session.run(step), "moving", " ".join(f"{v:.5f}" for v in session.run(moving)))
    print("weights", " ".join(f"{v:.5f}" for v in session.run(weights)[0]))

    writer.close()
    for file in tf.gfile.Glob("events/*"):
        print("events", [event.step for event in tf.train.summary_iterator(file)])
    print("saved", *tf.train.get_checkpoint_state("saved").all_model_checkpoint_paths)

    # Gradients that are added up, and applied in a run that is fed nothing.
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    pairs = optimizer.compute_gradients(loss, [weights, bias])
    sums = [tf.Variable(tf.zeros(v.shape), trainable=False) for _, v in pairs]
    add = [kept.assign_add(g) for kept, (g, _) in zip(sums, pairs, strict=True)]
    apply = optimizer.apply_gradients([(kept, v) for kept, (_, v) in zip(sums, pairs, strict=True)])
    session.run(tf.variables_initializer(sums))
    for _ in range(2):
        session.run(add, feed)
    session.run(apply)
    print("weights", " ".join(f"{v:.5f}" for v in session.run(weights)[0]))

    # A condition, which cannot be cut, in a part of the graph that is made after others have run.
    flag, scale = tf.placeholder(tf.bool, []), tf.Variable(1.0)
    train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.nn.l2_loss(tf.cond(flag, lambda: x * scale, lambda: x)))
    session.run(scale.initializer)
    session.run(train, {x: data[:8], flag: True})
    print("scale", f"{session.run(scale):.4f}")
