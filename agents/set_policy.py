"""A policy over a set of sites: one network for every site, whatever their number and order.

DeepSets (arXiv 1703.06114) and set attention (arXiv 1810.00825) as a stable-baselines3 actor-critic policy. Sites
share weights, so permuting sites permutes the actions and leaves the value alone, padding changes nothing, and weights
that were trained with room for 20 sites run with room for 57 (`SetPolicy.for_slots`). Every site is chosen or not on
its own (Bernoulli); where it is not eligible its logit is a constant, so that it is never chosen and adds nothing to
likelihood, entropy or gradient. That is what action masks do in MaskablePPO, with the mask taken from the observation
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.distributions import BernoulliDistribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from wattgym.agents.set_features import DERIVED, SetLayout, Sites, split
from wattgym.envs.observation import BOUND

NEVER = -30.0
"""Logit of a site that cannot be chosen."""

Architecture = Literal["deep_sets", "set_attention"]


def pooled(x: Tensor, exists: Tensor) -> Tensor:
    """Mean and largest value over the sites that exist, shape `(B, 1, 2 H)`, from `(B, N, H)` and `(B, N, 1)`."""
    mean = (x * exists).sum(dim=1, keepdim=True) / exists.sum(dim=1, keepdim=True).clamp(min=1.0)
    # Subtracted rather than replaced, which exports to the simplest operators.
    largest = (x - (1.0 - exists) * 1e6).amax(dim=1, keepdim=True)
    return torch.cat([mean, largest], dim=2)


class DeepSetsLayer(nn.Module):
    """Every site sees itself and the pooled sites."""

    def __init__(self, width: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.own = nn.Linear(width, width)
        self.all = nn.Linear(2 * width, width, bias=False)
        self.activation = activation()

    def forward(self, x: Tensor, exists: Tensor) -> Tensor:
        """New embeddings, shape `(B, N, H)`."""
        out: Tensor = x + self.activation(self.own(x) + self.all(pooled(x, exists)))
        return out


class SetAttentionLayer(nn.Module):
    """Every site looks at the others with several heads, then a feed-forward step; both residual."""

    def __init__(self, width: int, heads: int, activation: type[nn.Module]) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.forth = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), activation(), nn.Linear(width, width))

    def forward(self, x: Tensor, exists: Tensor) -> Tensor:
        """New embeddings, shape `(B, N, H)`."""
        batch, slots, width = x.shape
        parts = self.project(self.norm(x)).reshape(batch, slots, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        affinity = query @ key.transpose(2, 3) * (width // self.heads) ** -0.5
        # Nobody looks at padding.
        affinity = affinity - (1.0 - exists).reshape(batch, 1, 1, slots) * 1e6
        seen = torch.softmax(affinity, dim=3) @ value
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, slots, width))
        out: Tensor = x + self.forth(x)
        return out


class SetNetwork(nn.Module):
    """From observations taken apart to an embedding of each site, shape `(B, N, H)`."""

    def __init__(
        self,
        layout: SetLayout,
        architecture: Architecture,
        hidden: Sequence[int],
        heads: int,
        activation: type[nn.Module],
    ) -> None:
        super().__init__()
        width = hidden[0]
        self.site = nn.Linear(len(layout.site) + len(DERIVED), width)
        self.glob = nn.Linear(len(layout.glob), width, bias=False)
        self.activation = activation()
        self.layers = nn.ModuleList(
            DeepSetsLayer(width, activation)
            if architecture == "deep_sets"
            else SetAttentionLayer(width, heads, activation)
            for _ in hidden
        )

    def forward(self, sites: Sites) -> Tensor:
        """Embeddings."""
        x = self.activation(self.site(sites.site) + self.glob(sites.glob).unsqueeze(1))
        for layer in self.layers:
            x = layer(x, sites.exists)
        out: Tensor = x
        return out


class SetActor(nn.Module):
    """Sites to the logit of choosing each."""

    def __init__(self, network: SetNetwork) -> None:
        super().__init__()
        self.network = network
        self.head = nn.Linear(network.site.out_features, 1)

    def forward(self, sites: Sites) -> Tensor:
        """Logits, shape `(B, N)`; `NEVER` where a site is not eligible."""
        logits = self.head(self.network(sites)).squeeze(2)
        return torch.where(sites.eligible, logits, NEVER)


class SetCritic(nn.Module):
    """Sites to the value of their federation."""

    def __init__(self, network: SetNetwork, activation: type[nn.Module]) -> None:
        super().__init__()
        self.network = network
        width = network.site.out_features
        self.together = nn.Linear(2 * width + network.glob.in_features, width)
        self.activation = activation()
        self.head = nn.Linear(width, 1)

    def forward(self, sites: Sites) -> Tensor:
        """Values, shape `(B, 1)`."""
        together = pooled(self.network(sites), sites.exists).squeeze(1)
        value: Tensor = self.head(self.activation(self.together(torch.cat([together, sites.glob], dim=1))))
        return value


class SetPolicy(ActorCriticPolicy):
    """Actor and critic over sites for stable-baselines3's PPO; actions are bits (`MultiBinary`)."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.spaces.MultiBinary,
        lr_schedule: Schedule,
        *,
        layout: dict[str, Any],
        architecture: Architecture = "deep_sets",
        hidden: Sequence[int] = (64, 64),
        heads: int = 4,
        activation_fn: type[nn.Module] = nn.ReLU,
        **kwargs: Any,
    ) -> None:
        """Builds the policy.

        Args:
            observation_space: Vectors as `layout` describes them.
            action_space: One bit per site slot.
            lr_schedule: Learning rate.
            layout: `SetLayout.plain()` of the environment.
            architecture: How sites see each other.
            hidden: Width of the layers, all the same, one entry for each.
            heads: Heads of set attention.
            activation_fn: Activation.
            **kwargs: What stable-baselines3 passes on.
        """
        self.layout = SetLayout(**layout)
        self._shape = (architecture, tuple(hidden), heads)
        super().__init__(observation_space, action_space, lr_schedule, activation_fn=activation_fn, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        architecture, hidden, heads = self._shape

        def network() -> SetNetwork:
            return SetNetwork(self.layout, architecture, hidden, heads, self.activation_fn)

        self.actor = SetActor(network())
        self.critic = SetCritic(network(), self.activation_fn)
        # First actions are undecided, first values about zero.
        for last in (self.actor.head, self.critic.head):
            nn.init.orthogonal_(last.weight, gain=0.01)
            nn.init.zeros_(last.bias)
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    def sites(self, obs: PyTorchObs) -> Sites:
        """Observations taken apart."""
        assert isinstance(obs, Tensor)
        return split(self.layout, obs.float())

    def choice(self, sites: Sites) -> BernoulliDistribution:
        """Which sites are chosen, and how likely."""
        distribution = BernoulliDistribution(sites.eligible.shape[1])
        return distribution.proba_distribution(self.actor(sites))

    def get_distribution(self, obs: PyTorchObs) -> BernoulliDistribution:
        """Which sites are chosen, and how likely."""
        return self.choice(self.sites(obs))

    def forward(self, obs: Tensor, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Actions, values and the actions' log-likelihoods."""
        sites = self.sites(obs)
        distribution = self.choice(sites)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.critic(sites), distribution.log_prob(actions)

    def evaluate_actions(self, obs: PyTorchObs, actions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, log-likelihoods and entropy of given actions."""
        sites = self.sites(obs)
        distribution = self.choice(sites)
        return self.critic(sites), distribution.log_prob(actions), distribution.entropy()

    def predict_values(self, obs: PyTorchObs) -> Tensor:
        """Values."""
        value: Tensor = self.critic(self.sites(obs))
        return value

    def for_slots(self, slots: int) -> SetPolicy:
        """The same policy, weights copied, for observations and actions with room for another number of sites."""
        data = self._get_constructor_parameters()
        box = gym.spaces.Box(-BOUND, BOUND, (self.layout.size(slots),), np.float32)
        data |= {"observation_space": box, "action_space": gym.spaces.MultiBinary(slots)}
        other = type(self)(**data)
        other.load_state_dict(self.state_dict())
        other.set_training_mode(False)
        return other

    def _get_constructor_parameters(self) -> dict[str, Any]:
        architecture, hidden, heads = self._shape
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "layout": self.layout.plain(),
            "architecture": architecture,
            "hidden": hidden,
            "heads": heads,
            "activation_fn": self.activation_fn,
            "optimizer_class": self.optimizer_class,
            "optimizer_kwargs": self.optimizer_kwargs,
        }
