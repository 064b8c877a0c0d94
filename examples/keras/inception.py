"""Inception V3 of ``keras.applications`` on images packed by `oars data pack`; KERAS_BACKEND chooses what runs it.

    oars data make imagenet-like archive --size 640 --classes 8 --side 110
    oars data pack archive shards
    oars run -n 2 examples/keras/inception.py shards --size 75 --batch 32 --epochs 2

The script knows nothing of ranks; what it takes from oars is the data.
"""

import argparse
import os

import keras
from keras import layers

import oars.data
from oars.data.transforms import flip, random_resized_crop, resized_center_crop

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data", help="a folder with train and val, as `oars data pack` makes it")
parser.add_argument("--size", type=int, default=299, help="side of the images, 75 or more")
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--lr", type=float, default=0.045, help="per 256 images")
parser.add_argument("--steps", type=int, help="at most so many an epoch, and in evaluation")
parser.add_argument("--out", default="inception.keras", help="where the best model goes")
args = parser.parse_args()

keras.utils.set_random_seed(1)
training = oars.data.open(os.path.join(args.data, "train")).transform(random_resized_crop(args.size), flip())
checking = oars.data.open(os.path.join(args.data, "val")).transform(resized_center_crop(args.size))
classes = len(training.classes)
pixels = layers.Input((args.size, args.size, 3), dtype="uint8")
network = keras.applications.InceptionV3(weights=None, input_shape=(args.size, args.size, 3), classes=classes,
                                         classifier_activation=None)
model = keras.Model(pixels, network(layers.Rescaling(1 / 127.5, -1)(pixels)))
print(f"{model.count_params():,} parameters, {classes} classes, {len(training):,} images")

steps = -(-len(training) // args.batch)
rate = keras.optimizers.schedules.ExponentialDecay(args.lr * args.batch / 256, 2 * steps, 0.94, staircase=True)
model.compile(keras.optimizers.RMSprop(rate, rho=0.9, momentum=0.9, epsilon=1.0),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(training.keras(args.batch, shuffle=True), steps_per_epoch=args.steps, epochs=args.epochs,
                    validation_data=checking.keras(args.batch), validation_steps=args.steps, verbose=0,
                    callbacks=[keras.callbacks.ModelCheckpoint(args.out, "val_loss", save_best_only=True)])
for epoch in range(args.epochs):
    print(f"epoch {epoch}: " + ", ".join(f"{name} {values[epoch]:.4f}" for name, values in history.history.items()))
