"""xgboost: boosted trees, a model file, predictions."""

import numpy as np
import xgboost

rng = np.random.default_rng(0)
x = rng.normal(size=(200, 6))
y = (x[:, 0] + x[:, 1] ** 2 > 0.5).astype(int)
model = xgboost.XGBClassifier(n_estimators=10, max_depth=3, random_state=0, n_jobs=1)
model.fit(x[:150], y[:150], eval_set=[(x[150:], y[150:])], verbose=5)
print("accuracy", model.score(x[150:], y[150:]))
np.save("chances.npy", model.predict_proba(x))
