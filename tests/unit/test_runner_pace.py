import csv

from hvd_async.runner.pace import write_step_times


def test_percentiles_of_each_rank(tmp_path):
    write_step_times(tmp_path / "new" / "step_times.csv", [[0.5], [i / 1000 for i in range(200, -1, -1)], []])
    with (tmp_path / "new" / "step_times.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["percent", "rank0", "rank1", "rank2"]
    assert rows[1] == ["0", "0.500000", "0.000000", ""]
    assert rows[26] == ["25", "0.500000", "0.050000", ""]
    assert rows[101] == ["100", "0.500000", "0.200000", ""]
    assert len(rows) == 102
