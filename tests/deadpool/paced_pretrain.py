"""pretrain_gpt.py in which slot s finds that snapshots should be taken every s + 1 iterations."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import pretrain_gpt


def train(argv, hooks=None):
    from deadpool import pace, parallel_state

    pace.Pace.wanted = lambda self: parallel_state.get_slot() + 1
    return pretrain_gpt.train(argv, hooks)


if __name__ == "__main__":
    from deadpool import run

    sys.exit(run.main(sys.argv[1:], train=train, check=pretrain_gpt.check))
