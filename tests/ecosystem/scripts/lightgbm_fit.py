"""lightgbm: boosted trees, a model file, predictions."""

import lightgbm
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(200, 6))
y = x[:, 0] * 2 + np.sin(x[:, 1])
model = lightgbm.LGBMRegressor(n_estimators=10, num_leaves=7, random_state=0, n_jobs=1, verbose=-1)
model.fit(x[:150], y[:150], eval_set=[(x[150:], y[150:])])
print("r2", round(model.score(x[150:], y[150:]), 6))
model.booster_.save_model("model.txt")
np.save("values.npy", model.predict(x))
