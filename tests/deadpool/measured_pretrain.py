"""pretrain_gpt.py that writes down each trainer's resources after every iteration, and kills the
node that holds slots 2 and 3 in every second iteration up to 40, whichever node that is."""

import os
import signal
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import psutil

import pretrain_gpt


def train(argv, hooks=None):
    import torch.distributed.distributed_c10d as c10d

    from deadpool.injection import append_json_line
    from megatron.training.hooks import Phase

    on_phase = hooks.on_phase

    def strike(phase, microbatch=None):
        on_phase(phase, microbatch)
        trainer, struck = hooks._trainer, [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
        iteration = trainer.state.iteration + 1
        if trainer.args.rank < 2 or iteration % 2 or iteration > 40:
            return
        if phase is struck[iteration // 2 % 3]:
            marker = os.path.join(trainer.args.deadpool_log_dir, f"struck{iteration}")
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return  # It struck when this iteration ran first.
            os.killpg(os.getpgrp(), signal.SIGKILL)

    hooks.on_phase = strike
    after_step = hooks.after_step

    def measure(trainer, losses):
        after_step(trainer, losses)
        process = psutil.Process()
        append_json_line(
            os.path.join(trainer.args.deadpool_log_dir, "resources.jsonl"),
            {
                "iteration": trainer.state.iteration,
                "pid": process.pid,
                "slot": trainer.args.rank,
                "threads": process.num_threads(),
                "descriptors": process.num_fds(),
                "rss_bytes": process.memory_info().rss,
                "groups": len(c10d._world.pg_map),
            },
        )

    hooks.after_step = measure
    return pretrain_gpt.train(argv, hooks)


if __name__ == "__main__":
    from deadpool import run

    sys.exit(run.main(sys.argv[1:], train=train, check=pretrain_gpt.check))
