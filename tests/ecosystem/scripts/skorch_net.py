"""skorch: a network as an estimator of scikit-learn, in a pipeline and a grid search."""

import numpy as np
import torch
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(0)
x = rng.normal(size=(120, 8)).astype(np.float32)
y = (x[:, :3].argmax(1)).astype(np.int64)


class Net(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 3))

    def forward(self, rows):
        return self.net(rows)


net = NeuralNetClassifier(Net, criterion=nn.CrossEntropyLoss, max_epochs=4, lr=0.1, batch_size=20, verbose=0,
                          iterator_train__shuffle=True)
pipe = make_pipeline(StandardScaler(), net).fit(x, y)
print("accuracy", pipe.score(x, y), [round(v, 6) for v in pipe[-1].history[:, "train_loss"]])
search = GridSearchCV(net, {"module__hidden": [4, 16]}, cv=3, scoring="accuracy").fit(x, y)
print(search.best_params_, round(search.best_score_, 5))
pipe[-1].save_params(f_params="params.pt")
