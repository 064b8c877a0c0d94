"""Train Inception V3 (or ResNet-50) on images packed by `oars data pack`.

    python examples/imagenet/train.py shards                      # one process
    oars run -n 8 examples/imagenet/train.py shards --bf16        # eight ranks, the same training
    python examples/imagenet/train.py shards --width 0.25 --size 75 --batch 32 --optimizer sgd --lr 0.1

The script is plain PyTorch and knows nothing of ranks. `shards` holds the folders train and val; see README.md.
"""

import argparse
import copy
import math
import os
import time

import torch
from nets import build
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

import oars.data
from oars.data.transforms import flip, random_resized_crop, resized_center_crop


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("data", help="a folder with train and val, as `oars data pack` makes it")
    p.add_argument("--model", choices=("inception_v3", "resnet50"), default="inception_v3")
    p.add_argument("--width", type=float, default=1.0, help="scales the number of channels: 0.25 for a small machine")
    p.add_argument("--size", type=int, default=299, help="side of the images; below 299 the auxiliary head is left out")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--optimizer", choices=("rmsprop", "sgd"), default="rmsprop")
    p.add_argument("--lr", type=float, help="default: 0.045 for rmsprop, 0.1 for sgd, per 256 images")
    p.add_argument("--warmup", type=float, default=2.0, help="epochs over which the learning rate rises")
    p.add_argument("--weight-decay", type=float, default=4e-5)
    p.add_argument("--smoothing", type=float, default=0.1, help="of the labels")
    p.add_argument("--ema", type=float, default=0.9999, help="decay of the averaged weights that are evaluated")
    p.add_argument("--least-area", type=float, default=0.08, help="smallest share of an image that is cut out to train")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--channels-last", action="store_true")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--workers", type=int, default=2, help="processes that decode; 0: this one")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="imagenet-out", help="for checkpoints and TensorBoard")
    p.add_argument("--resume", metavar="FILE", help="go on from a checkpoint")
    return p.parse_args()


def optimizer_of(args, model):
    """Weight decay is for weights, not for biases and BatchNorm."""
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": args.weight_decay},
              {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
    lr = (args.lr or {"rmsprop": 0.045, "sgd": 0.1}[args.optimizer]) * args.batch / 256
    if args.optimizer == "rmsprop":  # as in the paper: a large epsilon, so that early steps stay small
        return torch.optim.RMSprop(groups, lr, alpha=0.9, eps=1.0, momentum=0.9)
    return torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True)


def schedule_of(args, optimizer, steps):
    """A linear rise; then 0.94 every two epochs for rmsprop, as in the paper, or a cosine for sgd."""
    def factor(step):
        epoch = step / steps
        if epoch < args.warmup:
            return (step + 1) / (args.warmup * steps + 1)
        if args.optimizer == "rmsprop":
            return 0.94 ** (epoch // 2)
        return 0.5 * (1 + math.cos(math.pi * (epoch - args.warmup) / max(1e-9, args.epochs - args.warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def follow(average, model, decay, step):
    """Move the averaged weights towards the model's; faster at first, when there is little to average."""
    decay = min(decay, (1 + step) / (10 + step))
    for mean, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.lerp_(new, 1 - decay)
        else:
            mean.copy_(new)


def prepared(images, args, device):
    """A batch on the device, from -1 to 1. Pixels come as bytes, a quarter of the size of floats, colours last."""
    images = images.to(device, non_blocking=True).permute(0, 3, 1, 2).float() / 127.5 - 1
    return images if args.channels_last else images.contiguous()


def loss_of(output, labels, smoothing):
    if isinstance(output, tuple):  # the auxiliary head counts for less
        return F.cross_entropy(output[0], labels, label_smoothing=smoothing) + 0.4 * F.cross_entropy(
            output[1], labels, label_smoothing=smoothing)
    return F.cross_entropy(output, labels, label_smoothing=smoothing)


def train(epoch, model, average, loader, optimizer, schedule, args, device, log):
    model.train()
    total = seen = waited = 0.0
    began = asked = time.perf_counter()
    for images, labels in loader:
        waited += time.perf_counter() - asked
        labels = labels.to(device, non_blocking=True)  # a plain copy would wait here until the GPU is done with forward
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            loss = loss_of(model(prepared(images, args, device)), labels, args.smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        follow(average, model, args.ema, schedule.last_epoch)
        total += loss.item() * len(images)
        seen += len(images)
        log.add_scalar("train/loss", loss.item(), schedule.last_epoch)
        log.add_scalar("train/lr", schedule.get_last_lr()[0], schedule.last_epoch)
        asked = time.perf_counter()
    took = time.perf_counter() - began
    log.add_scalar("train/images per second", seen / took, epoch)
    return total / seen, seen / took, waited / took


@torch.no_grad()
def evaluate(model, loader, args, device):
    """Top-1 and top-5 accuracy."""
    model.eval()
    first = five = count = 0
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            logits = model(prepared(images, args, device))
        right = logits.topk(min(5, logits.shape[1]), 1).indices == labels.to(device)[:, None]
        first += right[:, 0].sum().item()
        five += right.sum().item()
        count += len(images)
    return first / count, five / count


def main():
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    part = random_resized_crop(args.size, (args.least_area, 1.0))  # another one in each epoch
    training = oars.data.open(os.path.join(args.data, "train")).transform(part, flip(), seed=args.seed)
    checking = oars.data.open(os.path.join(args.data, "val")).transform(resized_center_crop(args.size))
    options = {"batch_size": args.batch, "num_workers": args.workers, "pin_memory": device.type == "cuda"}
    loader = DataLoader(training, shuffle=True, drop_last=len(training) > args.batch, **options)
    check = DataLoader(checking, **options)
    classes = len(training.classes)

    model = build(args.model, classes, args.width, args.size).to(device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    average = copy.deepcopy(model)
    optimizer = optimizer_of(args, model)
    schedule = schedule_of(args, optimizer, len(loader))
    first = 0
    if args.resume:
        state = torch.load(args.resume, map_location=device)
        for name, thing in (("model", model), ("average", average), ("optimizer", optimizer), ("schedule", schedule)):
            thing.load_state_dict(state[name])
        first = state["epoch"] + 1
    run, run_average = (torch.compile(m) if args.compile else m for m in (model, average))
    print(f"{args.model}: {sum(p.numel() for p in model.parameters()):,} parameters, {classes} classes, "
          f"{len(training):,} images of {args.size} × {args.size}, {len(loader)} steps an epoch")

    os.makedirs(args.out, exist_ok=True)
    with SummaryWriter(args.out) as log:
        for epoch in range(first, args.epochs):
            training.set_epoch(epoch)
            loss, speed, waited = train(epoch, run, average, loader, optimizer, schedule, args, device, log)
            top1, top5 = evaluate(run_average, check, args, device)
            print(f"epoch {epoch + 1}: loss {loss:.4f}  top-1 {top1:.1%}  top-5 {top5:.1%}")
            print(f"time per step: {1000 * args.batch / speed:.0f} ms, {speed:.0f} images/s, {waited:.0%} of the time "
                  "waiting for data")
            log.add_scalar("val/top-1", top1, epoch)
            log.add_scalar("val/top-5", top5, epoch)
            torch.save({"epoch": epoch, "model": model.state_dict(), "average": average.state_dict(),
                        "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "top1": top1},
                       os.path.join(args.out, "last.pt"))


if __name__ == "__main__":
    main()
