"""The sign convention of every regulation signal, in its one place.

A regulation signal `r ∈ [-1, 1]` asks for balancing power as a generator would deliver it: `+1` asks for all of the
offered capacity upwards, which a load provides by drawing that much less than its declared base. This is the
sense in which market operators send the signal and score the response.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def target_w(base_w: ArrayLike, capacity_w: ArrayLike, r: ArrayLike) -> NDArray[np.float64]:
    """Power a load should draw: `base_w − capacity_w · r`.

    Args:
        base_w: Declared base power, watts; any shape that broadcasts with the others.
        capacity_w: Offered regulation capacity, watts (symmetric about the base).
        r: Regulation signal, +1 = the grid wants more power, so the load falls.

    Returns:
        Target power in watts, broadcast shape.
    """
    base, capacity, signal = (np.asarray(x, dtype=np.float64) for x in (base_w, capacity_w, r))
    return np.asarray(base - capacity * signal, dtype=np.float64)


def response(base_w: ArrayLike, power_w: ArrayLike, capacity_w: ArrayLike) -> NDArray[np.float64]:
    """What a load delivered, in the signal's sense and units: `(base_w − power_w) / capacity_w`.

    Args:
        base_w: Declared base power, watts; any shape that broadcasts with the others.
        power_w: Metered power, watts.
        capacity_w: Offered regulation capacity, watts.

    Returns:
        Response per unit of capacity, broadcast shape; equals `r` when the load draws its target.
    """
    base, power, capacity = (np.asarray(x, dtype=np.float64) for x in (base_w, power_w, capacity_w))
    return np.asarray((base - power) / capacity, dtype=np.float64)
