"""The accuracy of trained weights on the validation images, once more and by themselves.

    oars run -n 4 examples/imagenet/evaluate.py shards imagenet-out/last.pt
"""

import os
import sys

import torch
from nets import build
from torch.utils.data import DataLoader
from train import arguments, evaluate

import oars.data
from oars.data.transforms import resized_center_crop

weights = sys.argv.pop(2)
args = arguments()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
images = oars.data.open(os.path.join(args.data, "val")).transform(resized_center_crop(args.size))
loader = DataLoader(images, batch_size=args.batch, num_workers=args.workers)
model = build(args.model, len(images.classes), args.width, args.size).to(device)
model.load_state_dict(torch.load(weights, map_location=device)["average"])
top1, top5 = evaluate(model, loader, args, device)
line = f"{len(images):,} images: top-1 {top1:.1%}  top-5 {top5:.1%}"
print(line)
with open(os.path.join(os.path.dirname(weights), "accuracy.txt"), "w") as file:
    file.write(line + "\n")
