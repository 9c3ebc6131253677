"""What ``launch.bench`` leaves on disk: two forms, whole or not at all, and how it goes on."""

import csv

import pytest

pytest.importorskip("tyro")

from flce_dist.launch.bench import __main__ as bench
from flce_dist.launch.bench.report import FIELDS
from flce_dist.launch.yaml_config import ConfigError
from tests.bench_run import EAGER, records, run


def test_json_and_csv_hold_the_same(tmp_path):
    assert run(tmp_path) == 0
    with (tmp_path / "out" / "found.v1.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["impl"] for row in rows] == [record.impl for record in records(tmp_path)]
    assert list(rows[0]) == FIELDS
    assert float(rows[-1]["ratio"]) == records(tmp_path)[-1].ratio


def test_an_ended_benchmark_goes_on_after_the_last_whole_shape(tmp_path, monkeypatch, capsys):
    measure, measured = bench._bench_shape, []

    def ends_at_the_second(config, shape, *args):
        measured.append(shape.T)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return measure(config, shape, *args)

    monkeypatch.setattr(bench, "_bench_shape", ends_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path)
    first = records(tmp_path)
    assert {record.T for record in first} == {24}

    assert run(tmp_path) == 0
    assert measured == [24, 12, 12]
    assert "T=24 H=16 V=64 fp32: measured before" in capsys.readouterr().out
    assert records(tmp_path)[: len(first)] == first
    assert {record.T for record in records(tmp_path)} == {24, 12}

    with pytest.raises(ConfigError, match=r"config\.rounds is 2 there and 3 here.*--fresh"):
        run(tmp_path, EAGER, "--rounds", "3")
    about = bench.about
    monkeypatch.setattr(bench, "about", lambda device: {**about(device), "commit": "other"})
    with pytest.raises(ConfigError, match="commit is "):
        run(tmp_path)
    assert run(tmp_path, EAGER, "--rounds", "3", "--fresh") == 0
    assert measured[3:] == [24, 12]


@pytest.mark.parametrize("text", ["{", "[]", '{"about": {}}', '{"about": {}, "records": [{}]}'])
def test_something_else_is_not_overwritten(tmp_path, text):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "found.v1.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="must be a result file of the benchmark"):
        run(tmp_path)
    assert path.read_text() == text
