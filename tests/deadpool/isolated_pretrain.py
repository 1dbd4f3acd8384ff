"""gated_pretrain.py with every node in a network namespace of its own; see test_network.py."""

import ctypes
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import gated_pretrain

import pretrain_gpt

CLONE_NEWNET = 0x40000000


def enter_namespace():
    """Before anything listens: what is opened from here on belongs to the node's network."""
    node = os.environ["DEADPOOL_NODE"]
    path = f"/run/netns/{os.environ['TEST_NETWORK_PREFIX']}{node}"
    with open(path) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {path}")
    os.environ["DEADPOOL_HOST"] = os.environ["TEST_NETWORK_HOST"] + node


if __name__ == "__main__":
    from deadpool import run

    if os.environ.get("DEADPOOL_NODE"):  # Not the launcher's check of the flags.
        enter_namespace()
    sys.exit(run.main(sys.argv[1:], train=gated_pretrain.train, check=pretrain_gpt.check))
