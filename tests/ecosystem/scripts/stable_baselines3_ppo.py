"""stable-baselines3: PPO on CartPole, A2C on Pendulum, and how well they do."""

import gymnasium as gym
import torch
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

for kind, name, options in ((PPO, "CartPole-v1", {"n_steps": 64, "batch_size": 32, "n_epochs": 2}),
                            (A2C, "Pendulum-v1", {"n_steps": 32})):
    env = Monitor(gym.make(name))
    model = kind("MlpPolicy", env, seed=3, device="cpu", **options)
    model.learn(128)
    reward, spread = evaluate_policy(model, env, n_eval_episodes=2)
    print(kind.__name__, round(float(reward), 2), round(float(spread), 2))
    torch.save(model.policy.state_dict(), f"{kind.__name__}.pt")
