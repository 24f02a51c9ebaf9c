"""A policy with one network for every job: what it learns of one job it knows of all.

The same weights serve every job and every place in the observation vector, so each step teaches as many lessons as
there are jobs, and nothing can be learnt that holds for one place only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import gymnasium as gym
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn


class JobNetwork(nn.Module):
    """The site's features and a job's own to an embedding of each job, shape `(B, J, H)`."""

    def __init__(self, site: int, jobs: int, features: int, hidden: Sequence[int], activation: type[nn.Module]) -> None:
        super().__init__()
        self.site_size, self.jobs = site, jobs
        self.site = nn.Linear(site, hidden[0])
        self.own = nn.Linear(features, hidden[0], bias=False)
        layers: list[nn.Module] = [activation()]
        for before, after in pairwise(hidden):
            layers += [nn.Linear(before, after), activation()]
        self.layers = nn.Sequential(*layers)

    def forward(self, observation: Tensor) -> Tensor:
        """Job features lie feature by feature, each for all jobs."""
        site, own = observation[:, : self.site_size], observation[:, self.site_size :]
        own = own.reshape(own.shape[0], -1, self.jobs).transpose(1, 2)
        out: Tensor = self.layers(self.own(own) + self.site(site).unsqueeze(1))
        return out


class PooledJobs(nn.Module):
    """The mean embedding of a site's jobs, shape `(B, H)`."""

    def __init__(self, network: JobNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Tensor) -> Tensor:
        """What a value is made of."""
        return self.network(observation).mean(dim=1)  # type: ignore[no-any-return]


class JobExtractor(nn.Module):
    """Actor's and critic's networks, where stable-baselines3 looks for them."""

    def __init__(self, policy_net: JobNetwork, value_net: PooledJobs, width: int) -> None:
        super().__init__()
        self.policy_net, self.value_net = policy_net, value_net
        self.latent_dim_pi = self.latent_dim_vf = width

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        """Embeddings of the jobs, shape `(B, J, H)`."""
        return self.policy_net(features)  # type: ignore[no-any-return]

    def forward_critic(self, features: Tensor) -> Tensor:
        """Of the site, shape `(B, H)`."""
        return self.value_net(features)  # type: ignore[no-any-return]


class JobHead(nn.Linear):
    """A job's embedding to its actions, one for each knob, laid out knob by knob, each for all jobs."""

    def forward(self, jobs: Tensor) -> Tensor:
        """Means of the actions, shape `(B, A)`, from `(B, J, H)`."""
        return super().forward(jobs).transpose(1, 2).flatten(1)


class JobPolicy(ActorCriticPolicy):
    """Actor and critic with weights shared over jobs, for stable-baselines3's PPO."""

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.spaces.Box[Any],
        lr_schedule: Schedule,
        *,
        jobs: int,
        site: int,
        hidden: Sequence[int] = (64, 64),
        **kwargs: Any,
    ) -> None:
        """Builds the policy.

        Args:
            observation_space: Vectors of `site` features of the site, then those of jobs, each for all jobs.
            action_space: One number for each knob and job, knob by knob.
            lr_schedule: Learning rate.
            jobs: Jobs J.
            site: Features of the site.
            hidden: Sizes of the hidden layers.
            **kwargs: What stable-baselines3 passes on.
        """
        self._jobs, self._site, self._hidden = jobs, site, tuple(hidden)
        super().__init__(observation_space, action_space, lr_schedule, **kwargs)

    def _build_mlp_extractor(self) -> None:
        features = (self.observation_space.shape[0] - self._site) // self._jobs  # type: ignore[index]
        shape = (self._site, self._jobs, features, self._hidden, self.activation_fn)
        self.mlp_extractor = JobExtractor(  # type: ignore[assignment]
            JobNetwork(*shape), PooledJobs(JobNetwork(*shape)), self._hidden[-1]
        )

    def _build(self, lr_schedule: Schedule) -> None:
        super()._build(lr_schedule)
        knobs = self.action_space.shape[0] // self._jobs  # type: ignore[index]
        self.action_net = JobHead(self._hidden[-1], knobs)
        nn.init.orthogonal_(self.action_net.weight, gain=0.01)
        nn.init.zeros_(self.action_net.bias)
        # The head that was built for a flat vector is gone, and with it what the optimiser held of it.
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        data.pop("net_arch", None)
        return data | {"jobs": self._jobs, "site": self._site, "hidden": self._hidden}
