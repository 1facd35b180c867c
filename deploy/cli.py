"""The `plait` command. Each command imports what it needs when it runs, so that help is instant."""

import logging
import sys
from typing import Any

import click

from plait.cluster.settings import EngineSettings, ServeSettings, parse_bytes
from plait.deploy.flags import settings_flags, settings_from_flags
from plait.worker.errors import PlaitError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="plait")
def cli() -> None:
    """Serve hybrid language models: attention plaited with recurrent layers."""


@cli.command()
@click.argument("model", required=False)
@settings_flags(ServeSettings, skip=frozenset({"model"}))
def serve(model: str | None, **flags: Any) -> None:  # noqa: ANN401 - checked by the schema
    """Serve MODEL, a checkpoint folder, over an OpenAI-compatible endpoint.

    Without MODEL, the bundled demo model is served.
    """
    from plait.deploy.server import run_server

    settings = settings_from_flags(ServeSettings, {"model": model, **flags})
    run_server(settings)


@cli.command()
@click.argument("model")
@click.option("--tensor-parallel-size", type=click.IntRange(1), default=1, metavar="N")
@click.option("--device-memory", metavar="BYTES", help="memory of one device, e.g. 80GiB")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@settings_flags(
    EngineSettings,
    skip=frozenset(EngineSettings.model_fields)
    - {
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "block_size",
        "kv_cache_dtype",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "cache_memory",
        "gpu_memory_utilization",
        "strict",
    },
)
def plan(
    model: str,
    tensor_parallel_size: int,
    device_memory: str | None,
    as_json: bool,
    **flags: Any,  # noqa: ANN401 - checked by the schema
) -> None:
    """Show the cache plan of MODEL, a checkpoint folder or a config.json.

    Needs no GPU, no weights and no Ray.
    """
    from plait.deploy.plan import plan_text

    settings = settings_from_flags(
        EngineSettings, {"tensor_parallel_size": tensor_parallel_size, **flags}
    )
    memory = None if device_memory is None else parse_bytes(device_memory)
    click.echo(plan_text(model, settings, device_memory=memory, as_json=as_json))


@cli.command()
@click.argument("prompt")
@click.option("--model", metavar="FOLDER", help="checkpoint folder; default: the demo model")
@click.option(
    "--chat/--no-chat", default=True, help="use the model's chat template [default: chat]"
)
@click.option("--max-tokens", type=click.IntRange(1), default=256, metavar="N")
@click.option("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy")
@settings_flags(EngineSettings)
def generate(
    prompt: str,
    model: str | None,
    chat: bool,
    max_tokens: int,
    temperature: float,
    **flags: Any,  # noqa: ANN401 - checked by the schema
) -> None:
    """Answer PROMPT once, without a server."""
    from plait.cluster.llm import LLM, SamplingParams
    from plait.deploy.demo import demo_model_path

    settings = settings_from_flags(EngineSettings, flags)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    options = settings.model_dump(exclude_unset=True)
    with LLM(str(model or demo_model_path()), **options) as llm:
        if chat:
            result = llm.chat([{"role": "user", "content": prompt}], params)
        else:
            result = llm.generate(prompt, params)[0]
    click.echo(result.outputs[0].text)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def models(as_json: bool) -> None:
    """List the architectures that can be served."""
    from plait.deploy.supported_models import supported_models_json, supported_models_table

    click.echo(supported_models_json() if as_json else supported_models_table())


def main() -> None:
    """Entry point: an error that a person can mend is one message, not a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        cli()
    except PlaitError as exc:
        click.echo(f"Error: {exc}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
