"""The Flower engine: rounds over a SuperLink and one SuperNode per site. Needs the extra `wattgym[federated]`.

Importing this package imports no Flower; its modules `records`, `engine`, `client_app` and `server_app` do.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from wattgym.errors import UserError

SUPPORTED = "1.42"
"""Release of Flower that this package is written for and tested with."""


def require_flower() -> None:
    """Checks that the supported Flower is installed, without importing it.

    Raises:
        UserError: It is missing, or another release is there.
    """
    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise UserError("engine 'flower' needs Flower: pip install 'wattgym[federated]'") from None
    if found.rsplit(".", 1)[0] != SUPPORTED:
        raise UserError(
            f"engine 'flower' needs Flower {SUPPORTED}.*, found {found}: pip install --upgrade 'wattgym[federated]'"
        )
