"""Command line: `python -m plait.deploy.make_demo_model --out DIR`."""

from pathlib import Path

import click


@click.command()
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder for the checkpoint."
)
@click.option("--steps-phase1", type=click.IntRange(min=1), help="Steps of phase 1.")
@click.option("--steps-phase2", type=click.IntRange(min=1), help="Steps of phase 2.")
@click.option("--smoke", is_flag=True, help="A run of seconds, for a model that cannot talk.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Threads of torch.",
)
def main(
    out: Path, steps_phase1: int | None, steps_phase2: int | None, smoke: bool, threads: int
) -> None:
    """Train the demo model and write it as a checkpoint folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise click.UsageError(f"--out {out} exists and is not an empty folder: name a new one")

    # Only here, so that --help and a refused folder do not wait for torch.
    import torch

    from plait.deploy.make_demo_model.train import full_recipe, smoke_recipe, train

    torch.set_num_threads(threads)
    steps = {}
    if steps_phase1 is not None:
        steps["num_steps_phase1"] = steps_phase1
    if steps_phase2 is not None:
        steps["num_steps_phase2"] = steps_phase2
    recipe = smoke_recipe(**steps) if smoke else full_recipe(**steps)
    train(recipe, out, report=click.echo)
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main(prog_name="python -m plait.deploy.make_demo_model")
