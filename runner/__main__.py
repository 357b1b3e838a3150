"""`python -m runner`: compose and check every job, run them, report, exit.

Exit codes: 0 all jobs ok; 1 a job ended otherwise; 2 the command is wrong and nothing was started
or written, or the single job cannot run on this device; 130 or 143 interrupted.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from runner.contracts import Fault, UserError
from runner.door import CONFIG, help_text, parser, start_hydra

INSPECTIONS = ("help", "hydra_help", "cfg", "info", "shell_completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name); returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_intermixed_args(words)
    launch = Path.cwd()
    try:
        refuse_shadowed_models()
        if any(getattr(args, name) for name in INSPECTIONS):
            return inspect(args)
        # Imported here, so that --help does not wait for what only jobs need.
        from runner.compose import command_of
        from runner.running import run

        return run(command_of(args, launch), launch, ["python", "-m", "runner", *words])
    except BrokenPipeError:
        # The reader of our output, `head` say, has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        # Jobs turn it into a request themselves; here none runs, and nothing can be learnt from
        # where exactly the command was.
        print("interrupted while no job ran", file=sys.stderr)
        return 130
    except UserError as error:
        from runner.terminal import print_faults

        print_faults(sys.stderr, error.faults, "nothing was started or written")
        return 2


def refuse_shadowed_models() -> None:
    """Raise UserError when `models` comes from elsewhere than beside this package."""
    import models

    found = Path(str(models.__file__ or next(iter(models.__path__)))).resolve()
    here = Path(__file__).resolve().parent.parent
    if here not in found.parents:
        raise UserError(
            Fault(
                key="models",
                given=str(found),
                allowed=f"the package beside runner, in {here}",
                next_step="start the command in another folder, or rename that one",
            )
        )


def inspect(args: Namespace) -> int:
    """Hydra's own answers: --help, --cfg, --info, --hydra-help, --shell-completion."""
    hydra = start_hydra(args)
    name = args.config_name or CONFIG
    if args.help:
        print(help_text(hydra, args))
    elif args.hydra_help:
        hydra.hydra_help(config_name=name, args_parser=parser(), args=args)
    elif args.cfg:
        hydra.show_cfg(
            config_name=name,
            overrides=args.overrides,
            cfg_type=args.cfg,
            package=args.package,
            resolve=args.resolve,
        )
    elif args.info:
        hydra.show_info(args.info, config_name=name, overrides=args.overrides)
    else:
        hydra.shell_completion(config_name=name, overrides=args.overrides)
    return 0


if __name__ == "__main__":
    sys.exit(main())
