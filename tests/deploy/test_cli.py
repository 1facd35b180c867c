"""The command line: flags come from the settings, mistakes get one clear message."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from plait.cluster.settings import EngineSettings, ServeSettings, engine_settings, parse_bytes
from plait.deploy.cli import cli
from plait.deploy.demo import demo_model_path
from plait.deploy.flags import settings_from_flags

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "plait.deploy.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_unknown_flag_names_the_nearest_one():
    result = CliRunner().invoke(cli, ["serve", "--tensor-paralel-size", "2"])
    assert result.exit_code == 2
    assert "--tensor-parallel-size" in result.output


def test_value_out_of_range_names_the_flag():
    result = CliRunner().invoke(cli, ["serve", "--max-num-seqs", "0"])
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.output
    assert "greater than or equal to 1" in result.output


def test_every_setting_has_a_flag_and_keeps_its_value():
    given = {
        "tensor_parallel_size": 4,
        "cache_memory": "2GiB",
        "mamba_ssm_cache_dtype": "float16",
        "strict": True,
        "api_key": "k",
    }
    settings = settings_from_flags(ServeSettings, given)
    assert settings.cache_memory == 2 << 30
    assert settings.mamba_ssm_cache_dtype == "float16"
    assert settings.strict
    names = {parameter.name for parameter in cli.commands["serve"].params}
    assert names == set(ServeSettings.model_fields)


def test_keyword_that_is_no_option_names_the_nearest_one():
    with pytest.raises(Exception, match=r"did you mean max_num_seqs\?"):
        engine_settings({"max_num_seq": 3})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GiB", 80 << 30), ("512 MiB", 512 << 20), ("2GB", 2_000_000_000), ("1.5k", 1500), (7, 7)],
)
def test_sizes_in_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 PiB", "ten", "1e9"])
def test_text_that_is_no_size(text):
    with pytest.raises(Exception, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_plan_of_a_bare_config(config):
    done = run("plan", str(config), "--device-memory", "80GiB", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["num_pages"] > 1
    assert {"page_bytes", "kinds", "capacity", "decode", "weight_bytes"} <= report.keys()


def test_plan_answers_at_once():
    start = time.monotonic()
    done = run("plan", str(CONFIGS / "bamba-9b.json"), "--tensor-parallel-size", "4")
    assert done.returncode == 0
    assert "padded rule" in done.stdout
    assert time.monotonic() - start < 20  # takes 0.3 s; a loose bound that a torch import breaks


def test_plan_refuses_a_size_that_cannot_work():
    done = run("plan", str(CONFIGS / "falcon-h1-7b.json"), "--tensor-parallel-size", "8")
    assert done.returncode == 1
    assert "1, 2, 3, 4, 6, 12" in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_strict_refuses_what_does_not_fit():
    arguments = ("plan", str(CONFIGS / "bamba-9b.json"), "--cache-memory", "2GiB")
    assert run(*arguments).returncode == 0
    done = run(*arguments, "--strict")
    assert done.returncode == 1
    assert "may not be reduced" in done.stderr


def test_plan_of_nothing_says_what_to_give(tmp_path):
    done = run("plan", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert "checkpoint folder" in done.stderr


def test_generate_answers_from_the_demo_model():
    done = run("generate", "What is the capital of France?", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."


def test_models_lists_the_registry():
    listed = json.loads(CliRunner().invoke(cli, ["models", "--json"]).output)
    assert {entry["architecture"] for entry in listed} >= {"BambaForCausalLM", "Mamba2ForCausalLM"}


def test_demo_model_is_in_the_package():
    assert (demo_model_path() / "model.safetensors").stat().st_size > 2_000_000


def test_settings_are_frozen():
    with pytest.raises(Exception, match="frozen"):
        EngineSettings().block_size = 32  # type: ignore[misc]
