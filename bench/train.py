"""The bench's training, written for one process; it knows nothing of ranks.

    python bench/train.py --net cnn --batch 64 --steps 20

Prints one line of JSON: the median time of a step over the timed steps, in seconds, the last loss, the threads.
"""

import argparse
import json
import time

import torch
import torch.nn.functional as F
from nets import NETS, data
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--net", choices=NETS, default="cnn")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--steps", type=int, default=20, help="timed steps")
parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts")
parser.add_argument("--samples", type=int, help="in an epoch (default: four batches)")
parser.add_argument("--device", default="cpu")
parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--channels-last", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
layout = torch.channels_last if args.channels_last else torch.contiguous_format
model = NETS[args.net][0]().to(args.device, memory_format=layout)
run = torch.compile(model) if args.compile else model
opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
samples = data(args.net, args.samples or 4 * args.batch)
samples = [d.to(args.device) for d in samples]  # there, so that the step is timed, not a copy
loader = DataLoader(TensorDataset(*samples), batch_size=args.batch, shuffle=True)


def batches():
    """Epoch after epoch."""
    while True:
        yield from loader


times, loss = [], None
stream = batches()
for step in range(args.warmup + args.steps):
    began = time.perf_counter()
    x, y = next(stream)
    if args.channels_last:
        x = x.contiguous(memory_format=layout)
    with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
        loss = F.cross_entropy(run(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if args.device == "cuda":
        torch.cuda.synchronize()
    if step >= args.warmup:
        times.append(time.perf_counter() - began)

times.sort()
print(
    json.dumps(
        {
            "step": times[len(times) // 2] if times else None,
            "loss": loss.item() if loss is not None else None,
            "threads": torch.get_num_threads(),
            "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        }
    )
)
