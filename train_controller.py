"""Trains a controller from a configuration file; the same as `wattgym train`."""

import sys

from wattgym.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
