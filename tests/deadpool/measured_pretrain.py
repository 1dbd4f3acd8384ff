"""pretrain_gpt.py, with each trainer's resources written down after every iteration."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import psutil

import pretrain_gpt


def train(argv, hooks=None):
    import torch.distributed.distributed_c10d as c10d

    from deadpool.injection import append_json_line

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
