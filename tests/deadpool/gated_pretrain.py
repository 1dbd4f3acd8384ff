"""pretrain_gpt.py whose iteration I does not begin while the file `holdI` is in the log folder."""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import pretrain_gpt


def train(argv, hooks=None):
    from megatron.training.hooks import Phase

    on_phase = hooks.on_phase

    def wait_at_gate(phase, microbatch=None):
        trainer = hooks._trainer
        if phase is Phase.FORWARD and microbatch == 0:
            gate = f"hold{trainer.state.iteration + 1}"
            path = os.path.join(trainer.args.deadpool_log_dir, gate)
            while os.path.exists(path):
                hooks._link.check_epoch()
                time.sleep(0.02)
        on_phase(phase, microbatch)

    hooks.on_phase = wait_at_gate
    return pretrain_gpt.train(argv, hooks)


if __name__ == "__main__":
    from deadpool import run

    sys.exit(run.main(sys.argv[1:], train=train, check=pretrain_gpt.check))
