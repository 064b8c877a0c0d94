"""The bench's training once more, written by hand for torchrun elastic: what a recovery is measured against.

    torchrun --standalone --nproc-per-node 3 --max-restarts 100 bench/train_elastic.py --net cnn --batch 48 --steps 80

DDP over Gloo, with a checkpoint every 20 steps, from which it goes on when torchrun starts it again. Each rank adds a
line to ``steps-<rank>.txt`` for every step it has done: how often it was started again, the step, the time, its pid.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from nets import NETS, data
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--net", choices=NETS, default="cnn")
parser.add_argument("--batch", type=int, default=48, help="global batch: divided by the ranks")
parser.add_argument("--steps", type=int, default=80)
parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
args = parser.parse_args()
CHECKPOINT = Path("checkpoint.pt")


class Share(Sampler):
    """From step ``start`` on: this rank's share of every global batch, each epoch in an order common to all."""

    def __init__(self, start, rank, n):
        self.start, self.rank, self.n = start, rank, n

    def __iter__(self):
        for step in range(self.start, args.steps):
            epoch, i = divmod(step, 4)
            order = torch.randperm(4 * args.batch, generator=torch.Generator().manual_seed(epoch))
            yield order[i * args.batch : (i + 1) * args.batch][self.rank :: self.n].tolist()


def save(step, model, opt):
    """Write a checkpoint that is there whole or not at all."""
    part = CHECKPOINT.with_suffix(".part")
    torch.save({"step": step, "model": model.module.state_dict(), "opt": opt.state_dict()}, part)
    part.replace(CHECKPOINT)


dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
if args.batch % n:
    sys.exit(f"a batch of {args.batch} cannot be shared evenly by {n} ranks")
torch.manual_seed(0)
net = NETS[args.net][0]()
saved = torch.load(CHECKPOINT) if CHECKPOINT.exists() else None
if saved:
    net.load_state_dict(saved["model"])
model = DistributedDataParallel(net)
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
if saved:
    opt.load_state_dict(saved["opt"])
start = saved["step"] if saved else 0
loader = DataLoader(TensorDataset(*data(args.net, 4 * args.batch)), batch_sampler=Share(start, rank, n))
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]

with open(f"steps-{rank}.txt", "a", buffering=1) as steps:
    for step, (x, y) in enumerate(loader, start + 1):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        steps.write(f"{restarts} {step} {time.time():.6f} {os.getpid()}\n")
        if rank == 0 and step % args.every == 0:
            save(step, model, opt)
dist.destroy_process_group()
