"""An actor with a critic: it learns to walk to the marked end of a corridor, one step per episode played."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.clients.common import WRAPPED, finish

if WRAPPED:
    import nnlo_torch as nt

LENGTH, LIMIT, EPISODES = 7, 20, 1200


class Corridor:
    """Cells in a row, the actor in the middle; one end is marked, and each step costs a little."""

    def __init__(self, episode: int) -> None:
        self.cell, self.aim = LENGTH // 2, (LENGTH - 1) * (episode % 2)

    def look(self) -> torch.Tensor:
        return torch.tensor([self.cell / LENGTH - 0.5, 2.0 * (self.aim > 0) - 1])

    def move(self, right: int) -> tuple[float, bool]:
        self.cell = min(LENGTH - 1, max(0, self.cell + 2 * right - 1))
        return (1.0, True) if self.cell == self.aim else (-0.05, False)


class ActorCritic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(2, 32)
        self.actor, self.critic = torch.nn.Linear(32, 2), torch.nn.Linear(32, 1)

    def forward(self, seen):
        hidden = self.hidden(seen).relu()
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def play(model: ActorCritic, episode: int, *, best: bool = False):
    """Return logarithms of the moves' probabilities, the critic's values, and the rewards."""
    corridor, logarithms, values, rewards, over = Corridor(episode), [], [], [], False
    while not over and len(rewards) < LIMIT:
        scores, value = model(corridor.look())
        chance = torch.distributions.Categorical(logits=scores)
        move = scores.argmax() if best else chance.sample()
        reward, over = corridor.move(int(move))
        logarithms.append(chance.log_prob(move))
        values.append(value)
        rewards.append(reward)
    return torch.stack(logarithms), torch.stack(values), rewards


def main() -> None:
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    episodes = range(EPISODES)
    if WRAPPED:
        optimizer = nt.Downpour(optimizer)
        episodes = nt.ShardSampler(episodes)

    for episode in episodes:
        logarithms, values, rewards = play(model, episode)
        returns, last = [], 0.0
        for reward in reversed(rewards):
            last = reward + 0.95 * last
            returns.insert(0, last)
        aims = torch.tensor(returns)
        optimizer.zero_grad()
        actor = -(logarithms * (aims - values.detach())).sum()
        (actor + functional.smooth_l1_loss(values, aims, reduction="sum")).backward()
        optimizer.step()

    if WRAPPED:
        optimizer.close()
    with torch.no_grad():
        played = [play(model, episode, best=True)[2] for episode in range(20)]
    finish(optimizer, reward=sum(map(sum, played)) / 20, steps=sum(map(len, played)) / 20)


if __name__ == "__main__":
    main()
