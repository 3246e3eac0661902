"""What a run's logs hold as CSV."""

import csv

from hvd_async.runner.logs import write_leaders, write_step_times


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_percentiles_of_each_ranks_steps(tmp_path):
    path = tmp_path / "new" / "step_times.csv"
    write_step_times(path, [[0.5], [i / 1000 for i in range(200, -1, -1)], []])
    rows = rows_of(path)
    assert rows[0] == ["percent", "rank0", "rank1", "rank2"]
    assert rows[1] == ["0", "0.500000", "0.000000", ""]
    assert rows[26] == ["25", "0.500000", "0.050000", ""]
    assert rows[101] == ["100", "0.500000", "0.200000", ""]
    assert len(rows) == 102


def test_each_groups_leaders_are_written_once_in_order_of_time(tmp_path):
    first = [(10.0, 0, 1), (10.5, -1, 2), (12.0, 0, 0)]
    second = [(10.01, 0, 1), (10.49, -1, 2), (12.01, 0, 0)]
    third = [(10.2, 1, 2), (10.51, -1, 2)]
    write_leaders(tmp_path / "new" / "leaders.csv", [first, second, third])
    assert rows_of(tmp_path / "new" / "leaders.csv") == [
        ["time_s", "group", "leader"],
        ["0.000000", "0", "1"],
        ["0.200000", "1", "2"],
        ["0.500000", "", "2"],
        ["2.000000", "0", "0"],
    ]


def test_pulls_to_the_centre_and_no_pulls(tmp_path):
    write_leaders(tmp_path / "leaders.csv", [[(3.0, -1, -1)], [(3.1, -1, -1)]])
    assert (tmp_path / "leaders.csv").read_bytes() == b"time_s,group,leader\r\n0.000000,,\r\n"
    write_leaders(tmp_path / "leaders.csv", [[], []])
    assert (tmp_path / "leaders.csv").read_bytes() == b"time_s,group,leader\r\n"
