"""A loop with accelerate: accumulation, clipping, gathered metrics; datasets and a metric of evaluate."""

import datasets
import evaluate
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader


class Accuracy(evaluate.Metric):
    """evaluate's accuracy comes from the hub; this one does not."""

    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo("share of right answers", "", features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references, strict=True)) / len(references)}


set_seed(3)
x = torch.randn(96, 10)
table = datasets.Dataset.from_dict({"x": x.tolist(), "y": (x.sum(1) > 0).long().tolist()}).with_format("torch")
loader = DataLoader(table, batch_size=16, shuffle=True)
test = DataLoader(table, batch_size=20)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
model, optimizer, loader, test, scheduler = accelerator.prepare(model, optimizer, loader, test, scheduler)
metric = Accuracy(keep_in_memory=True)
for epoch in range(2):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for batch in test:
            guess, truth = accelerator.gather_for_metrics((model(batch["x"]).argmax(1), batch["y"]))
            metric.add_batch(predictions=guess, references=truth)
    accelerator.print(f"epoch {epoch} loss {loss.item():.6f} {metric.compute()}")
torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
