"""The bench's training again, written by hand for DDP over Gloo: what `oars run` is measured against.

    python bench/train_ddp.py -n 2 --net cnn --batch 64 --steps 20

Without RANK in the environment it starts n copies of itself on this host. Each takes its share of every global batch.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-n", type=int, default=2, help="ranks")
parser.add_argument("--net", default="cnn")
parser.add_argument("--batch", type=int, default=64, help="global batch: divided by the ranks")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--warmup", type=int, default=5)


def launch(n):
    """Start n ranks and wait for them; the exit code is the worst of theirs."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **common, "RANK": str(r)}) for r in range(n)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def train(args):
    """One rank's training."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from nets import NETS, data
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Sampler, TensorDataset

    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    if args.batch % n:
        sys.exit(f"a batch of {args.batch} cannot be shared evenly by {n} ranks")

    class Share(Sampler):
        """A common shuffle, of which this rank takes every n-th sample."""

        epoch = 0

        def __iter__(self):
            order = torch.randperm(4 * args.batch, generator=torch.Generator().manual_seed(self.epoch))
            self.epoch += 1
            return iter(order[rank::n].tolist())

        def __len__(self):
            return 4 * args.batch // n

    torch.manual_seed(0)
    model = DistributedDataParallel(NETS[args.net][0]())
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    rows = TensorDataset(*data(args.net, 4 * args.batch))
    loader = DataLoader(rows, batch_size=args.batch // n, sampler=Share())

    def batches():
        while True:
            yield from loader

    times, loss = [], None
    stream = batches()
    for step in range(args.warmup + args.steps):
        began = time.perf_counter()
        x, y = next(stream)
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step >= args.warmup:
            times.append(time.perf_counter() - began)
    if rank == 0:
        times.sort()
        step = times[len(times) // 2] if times else None
        print(json.dumps({"step": step, "loss": loss.item(), "threads": torch.get_num_threads()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        train(arguments)
    else:
        sys.exit(launch(arguments.n))
