"""Ratios, shares and the tables made of them."""

import pytest
from plait_bench.cases import Case
from plait_bench.report import document, model_text, table
from plait_bench.results import CaseResult, Measurement, ModelResult, Report, agreement
from plait_bench.roofline import Limits

CASE = Case(name="decode-8", batch=8, prompt_tokens=64, num_steps=10)
LIMITS = Limits(
    read_bytes=100.0, copy_bytes=50.0, vector_flops=1e9, gemm_flops={"float32": {8: 2e9}}
)


def case_result(**seconds: tuple[float, ...]) -> CaseResult:
    return CaseResult(
        case=CASE,
        roofline_s=1.0,
        strict_roofline_s=0.5,
        weights_read=30.0,
        measurements={name: Measurement(seconds=values) for name, values in seconds.items()},
    )


def test_rates_count_the_tokens_of_the_timed_part():
    measured = Measurement(seconds=(2.0, 4.0, 1.0))
    assert measured.rates(CASE) == [40.0, 20.0, 80.0]
    assert measured.rate(CASE) == 40.0
    prefill = Case(name="prefill-512", batch=1, prompt_tokens=512)
    assert Measurement(seconds=(2.0,)).rate(prefill) == 256.0


def test_the_ratio_is_to_the_peer_with_the_best_median_round_by_round():
    result = case_result(plait=(1.0, 2.0, 1.0), one=(0.1, 9.0, 9.0), two=(3.0, 3.0, 4.0))
    ratio = result.ratio("plait", ["one", "two"])
    assert ratio is not None
    assert (ratio.peer, ratio.median, ratio.low, ratio.high) == ("two", 3.0, 1.5, 4.0)


def test_no_ratio_without_both_sides():
    assert case_result(plait=(1.0,)).ratio("plait", ["one"]) is None
    assert case_result(one=(1.0,)).ratio("plait", ["one"]) is None


def test_shares_of_the_limits():
    result = case_result(plait=(4.0, 2.0, 9.0))
    assert result.roofline_share("plait") == 0.25
    assert result.roofline_share("plait", is_strict=True) == 0.125
    assert result.bandwidth_share("plait", LIMITS) == pytest.approx(30.0 / 0.4 / 100.0)
    assert result.bandwidth_share("plait", LIMITS, element_bytes=1) == pytest.approx(0.375)
    assert result.roofline_share("one") is None


def test_agreement_counts_from_the_start():
    assert agreement([1, 2, 3], [1, 2, 3]) == "3 of 3"
    assert agreement([1, 2, 3], [1, 9, 3]) == "1 of 3"


def test_a_table_is_aligned_markdown():
    assert table(["", "rate"], [["one", "1"], ["three", "22222"]]) == [
        "|       |  rate |",
        "| ----- | ----: |",
        "| one   |     1 |",
        "| three | 22222 |",
    ]


def model_result() -> ModelResult:
    case = case_result(plait=(1.0, 2.0, 1.0), transformers=(3.0, 3.0, 4.0))
    case.measurements["vllm"] = Measurement(error="RuntimeError: no such operator")
    return ModelResult(
        name="granite-h",
        num_parameters=122_000_000,
        limits=LIMITS,
        cases=[case],
        versions={"plait": {"plait": "1.2.3"}},
        failures={"llama.cpp": "InstallError: no compiler"},
        greedy={"plait": "16 of 16"},
    )


def test_the_text_of_a_model_has_numbers_and_every_failure():
    text = model_text(model_result())
    assert "80.0 (40.0-80.0)" in text
    assert "3.00 (1.50-4.00)" in text
    assert "100 %" in text
    assert "plait 16 of 16" in text
    assert "- llama.cpp: InstallError: no compiler" in text
    assert "- vllm, decode-8: RuntimeError: no such operator" in text
    lines = [line for line in text.splitlines() if "failed" in line]
    assert [line.split()[1] for line in lines] == ["vllm", "llama.cpp"]


def test_weights_of_8_bits_have_a_ratio_but_no_roofline():
    case = case_result(**{"plait-int8": (1.0,), "llama.cpp-q8_0": (2.0,), "llama.cpp": (0.1,)})
    model = ModelResult(name="m", num_parameters=1, limits=LIMITS, cases=[case])
    (line,) = (line for line in model_text(model).splitlines() if "plait-int8, " in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:] == ["2.00 (2.00-2.00)", "llama.cpp-q8_0", "-", "-", "-"]


def test_the_document_says_how_it_was_measured():
    report = Report(
        machine={"processor": "A CPU", "features": ["avx2"]},
        settings={"threads": 1, "rounds": 3, "steps": 10},
        models=[model_result()],
    )
    text = document(report)
    assert "A CPU, instruction sets avx2; 1 thread(s), 3 rounds" in text
    assert "Versions: plait 1.2.3." in text
    assert report.to_json()["models"][0]["cases"][0]["measurements"]["plait"]["seconds"] == (
        1.0,
        2.0,
        1.0,
    )
