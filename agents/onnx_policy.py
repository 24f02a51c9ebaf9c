"""The network of a policy bundle in ONNX Runtime, and recorded outputs to hold it against."""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from wattgym.agents.onnx_graph import check_graph
from wattgym.config import FrozenModel
from wattgym.errors import UserError

GOLDEN_PAIRS = 256
"""Recorded inputs and outputs in a bundle."""

Float32Array = NDArray[np.float32]
State = tuple[Float32Array, Float32Array]
"""Hidden and cell state of an LSTM, each `(layers, B, size)`."""


class Recurrence(FrozenModel):
    """The memory of a recurrent policy: an LSTM's hidden and cell state, zero at the start of an episode.

    Attributes:
        layers: Layers.
        size: Numbers in each of the two states, per layer.
    """

    layers: int = Field(ge=1)
    size: int = Field(ge=1)


class OnnxPolicy:
    """The network of a bundle in a single-threaded runtime."""

    def __init__(self, model: bytes, features: int | str, outputs: int | str, recurrence: Recurrence | None) -> None:
        """Starts the runtime.

        Args:
            model: Content of an ONNX file.
            features: Length D of the observation vector, or the name of the axis where any length will do.
            outputs: Numbers in an action, or the name of the axis.
            recurrence: Memory that the network must have; None: none.

        Raises:
            UserError: The runtime is not installed.
            ValueError: The network holds what is not allowed, cannot be run, or has other inputs or outputs.
        """
        check_graph(model)
        self._session = _session(model)
        self._recurrence = recurrence
        _check_signature(self._session, features, outputs, recurrence)

    def step(
        self, observation: Float32Array, state: State | None = None, episode_start: Float32Array | None = None
    ) -> tuple[Float32Array, State | None]:
        """The policy's deterministic actions.

        Args:
            observation: Shape `(B, D)`, not normalised.
            state: Memory after the step before; None: an episode begins. Ignored by policies without memory.
            episode_start: 1 where a site's episode begins and its memory is to be forgotten, shape `(B,)`.

        Returns:
            Actions, shape `(B, A)`, and the memory for the next step.

        Raises:
            ValueError: The shapes do not fit.
        """
        inputs = {"observation": observation}
        if self._recurrence is None:
            return self._run(inputs)[0], None
        batch = observation.shape[0]
        if state is None:
            zeros = np.zeros((self._recurrence.layers, batch, self._recurrence.size), np.float32)
            state = (zeros, zeros)
        if episode_start is None:
            episode_start = np.zeros(batch, np.float32)
        inputs.update(hidden=state[0], cell=state[1], episode_start=episode_start)
        action, hidden, cell = self._run(inputs)
        return action, (hidden, cell)

    def _run(self, inputs: dict[str, Float32Array]) -> list[Float32Array]:
        try:
            outputs: list[Float32Array] = self._session.run(None, inputs)
        except Exception as error:  # The runtime has no common base class for what it raises.
            raise ValueError(f"onnxruntime cannot run it: {' '.join(str(error).split())}") from None
        return outputs


@dataclass(frozen=True, eq=False)
class Golden:
    """Inputs and the outputs that the training library gave for them, as `T` steps of `B` episodes side by side.

    Attributes:
        observation: Shape `(T, B, D)`.
        action: Shape `(T, B, A)`.
        episode_start: 1 where an episode begins, shape `(T, B)`.
        state: Memory before the first step; None for policies without.
    """

    observation: Float32Array
    action: Float32Array
    episode_start: Float32Array
    state: State | None = None

    def difference(self, policy: OnnxPolicy) -> float:
        """Largest absolute difference between the recorded actions and a network's own (NaN counts as infinite).

        Raises:
            ValueError: The network cannot be run.
        """
        worst, state = 0.0, self.state
        for observation, action, start in zip(self.observation, self.action, self.episode_start, strict=True):
            given, state = policy.step(observation, state, start)
            worst = max(worst, _largest(given, action))
        return worst

    def arrays(self) -> dict[str, Float32Array]:
        """What is saved, by name."""
        arrays = {"observation": self.observation, "action": self.action, "episode_start": self.episode_start}
        return arrays if self.state is None else arrays | {"hidden": self.state[0], "cell": self.state[1]}


def read_arrays(content: bytes) -> dict[str, NDArray[Any]]:
    """Reads an `.npz` file of plain, uncompressed arrays.

    Raises:
        ValueError: The file is damaged, compressed or holds something else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            compressed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        if compressed:
            raise ValueError(f"'{compressed[0]}' is compressed")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, EOFError, MemoryError, OSError, SyntaxError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"not readable as plain arrays: {' '.join(str(error).split())}") from None
    # Members that are no arrays come back as bytes.
    return {name: array for name, array in arrays.items() if isinstance(array, np.ndarray)}


def read_golden(content: bytes, features: int, actions: int, recurrence: Recurrence | None) -> Golden:
    """Reads golden pairs: arrays of numbers only, of exactly the shapes that the policy implies.

    Args:
        content: Content of an `.npz` file.
        features: Length D of the observation vector.
        actions: Numbers A in an action.
        recurrence: The policy's memory; None: none.

    Raises:
        ValueError: The file is damaged, or an array is missing or of another shape or type.
    """
    arrays = read_arrays(content)
    observation = arrays.get("observation")
    if observation is None or observation.ndim != 3 or observation.shape[0] * observation.shape[1] != GOLDEN_PAIRS:
        raise ValueError(f"'observation' does not hold {GOLDEN_PAIRS} observations")
    steps, batch = observation.shape[:2]
    shapes: dict[str, tuple[int, ...]] = {
        "observation": (steps, batch, features),
        "action": (steps, batch, actions),
        "episode_start": (steps, batch),
    }
    if recurrence is not None:
        shapes |= dict.fromkeys(("hidden", "cell"), (recurrence.layers, batch, recurrence.size))
    for name, shape in shapes.items():
        found = arrays.get(name)
        if found is None or found.shape != shape or found.dtype != np.float32:
            shown = "missing" if found is None else f"{found.dtype} of shape {found.shape}"
            raise ValueError(f"'{name}' is {shown}, expected float32 of shape {shape}")
    state = None if recurrence is None else (arrays["hidden"], arrays["cell"])
    return Golden(observation, arrays["action"], arrays["episode_start"], state)


def _session(model: bytes) -> Any:
    try:
        import onnxruntime
    except ImportError:
        raise UserError("running a policy bundle needs onnxruntime: pip install 'wattgym[deploy]'") from None
    options = onnxruntime.SessionOptions()
    # One thread: a network this small gains nothing from more, and the training beside it needs the cores.
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # The runtime has no common base class for what it raises.
        raise ValueError(f"onnxruntime cannot run it: {' '.join(str(error).split())}") from None


def _check_signature(session: Any, features: int | str, width: int | str, recurrence: Recurrence | None) -> None:
    inputs: dict[str, list[Any]] = {"observation": ["batch", features]}
    outputs: dict[str, list[Any]] = {"action": ["batch", width]}
    if recurrence is not None:
        state = [recurrence.layers, "batch", recurrence.size]
        inputs |= {"hidden": state, "cell": state, "episode_start": ["batch"]}
        outputs |= {"next_hidden": state, "next_cell": state}
    for what, expected, found in (
        ("inputs", inputs, session.get_inputs()),
        ("outputs", outputs, session.get_outputs()),
    ):
        shown = {node.name: node.shape for node in found}
        # The runtime returns outputs by position, so their order counts.
        if list(shown.items()) != list(expected.items()):
            raise ValueError(f"its {what} are {shown}, the manifest implies {expected}")
        for node in found:
            if node.type != "tensor(float)":
                raise ValueError(f"'{node.name}' is a {node.type}, expected tensor(float)")


def _largest(mine: Float32Array, theirs: Float32Array) -> float:
    if mine.shape != theirs.shape:
        return float("inf")
    worst = float(np.abs(mine.astype(np.float64) - theirs).max())
    return worst if np.isfinite(worst) else float("inf")
