"""pretrain_gpt.py in which one slot's training has the fault that the file `errors.json` in the log
folder names, as often as it says: {"slot", "iteration", "phase", "times", "fault"}. It raises an
error, or makes megatron-core find a value that is not finite."""

import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import pretrain_gpt


def _raise(model, number):
    raise ValueError(f"a fault on purpose, number {number}")


def _spoil_gradient(model, number):
    next(model.parameters()).main_grad.view(-1)[0] = float("nan")


def _spoil_parameters(model, number):
    """Until they are rebuilt."""
    for parameter in model.parameters():
        parameter.data.fill_(float("inf"))


_FAULTS = {
    "error": _raise,
    "nan gradient": _spoil_gradient,
    "inf parameters": _spoil_parameters,
}


def train(argv, hooks=None):
    from deadpool import parallel_state

    on_phase, raised = hooks.on_phase, []

    def raise_where_told(phase, microbatch=None):
        trainer = hooks._trainer
        path = os.path.join(trainer.args.deadpool_log_dir, "errors.json")
        if os.path.exists(path):
            with open(path) as file:
                told = json.load(file)
            here = [parallel_state.get_slot(), trainer.state.iteration + 1, phase.value]
            due = here == [told["slot"], told["iteration"], told["phase"]]
            if due and len(raised) < told["times"]:
                raised.append(True)
                _FAULTS[told["fault"]](trainer.model[0], len(raised))
        on_phase(phase, microbatch)

    hooks.on_phase = raise_where_told
    return pretrain_gpt.train(argv, hooks)


if __name__ == "__main__":
    from deadpool import run

    sys.exit(run.main(sys.argv[1:], train=train, check=pretrain_gpt.check))
