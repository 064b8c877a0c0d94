"""PPO in one file: eight environments of a pole on a cart, 64 steps each, four epochs of minibatches. A step is one
minibatch."""

import numpy as np
import torch
from stopwatch import tick
from torch import nn
from torch.distributions import Categorical

ENVS, STEPS, MINIBATCH = 8, 64, 128


class Poles:
    """The usual equations, for many carts at once."""

    def __init__(self):
        self.rng = np.random.default_rng(1)
        self.state = self.rng.uniform(-0.05, 0.05, (ENVS, 4))

    def step(self, action):
        x, v, angle, turn = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        push = (force + 0.05 * turn**2 * np.sin(angle)) / 1.1
        bend = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle)**2 / 1.1))
        speed = push - 0.05 * bend * np.cos(angle) / 1.1
        self.state = np.stack([x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * turn, turn + 0.02 * bend], 1)
        done = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > 0.21)
        self.state[done] = self.rng.uniform(-0.05, 0.05, (done.sum(), 4))
        return self.state, np.ones(ENVS), done


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


torch.manual_seed(1)
agent, envs = Agent(), Poles()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
obs, actions = torch.zeros(STEPS, ENVS, 4), torch.zeros(STEPS, ENVS)
logprobs, rewards, dones, values = (torch.zeros(STEPS, ENVS) for _ in range(4))
next_obs, next_done = torch.tensor(envs.state, dtype=torch.float32), torch.zeros(ENVS)

while True:
    for step in range(STEPS):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step], logprobs[step] = action, logprob
        state, reward, done = envs.step(action.numpy())
        rewards[step] = torch.tensor(reward)
        next_obs, next_done = torch.tensor(state, dtype=torch.float32), torch.tensor(done, dtype=torch.float32)
    with torch.no_grad():
        following, advantages, last = agent.critic(next_obs).flatten(), torch.zeros_like(rewards), 0
        for t in reversed(range(STEPS)):
            alive = 1.0 - (next_done if t == STEPS - 1 else dones[t + 1])
            after = following if t == STEPS - 1 else values[t + 1]
            delta = rewards[t] + 0.99 * after * alive - values[t]
            advantages[t] = last = delta + 0.99 * 0.95 * alive * last
        returns = advantages + values
    batch = [t.reshape(-1, *t.shape[2:]) for t in (obs, actions, logprobs, advantages, returns)]
    for _ in range(4):
        order = np.random.permutation(STEPS * ENVS)
        for start in range(0, STEPS * ENVS, MINIBATCH):
            tick()
            b_obs, b_actions, b_logprobs, b_adv, b_returns = (t[order[start:start + MINIBATCH]] for t in batch)
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs, b_actions)
            ratio = (newlogprob - b_logprobs).exp()
            b_adv = (b_adv - b_adv.mean()) / (b_adv.std() + 1e-8)
            pg_loss = torch.max(-b_adv * ratio, -b_adv * torch.clamp(ratio, 0.8, 1.2)).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - b_returns) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
