import csv

from hvd_async.runner.leading import write_leaders


def test_each_group_is_told_once_in_order_of_time(tmp_path):
    first = [(10.0, 0, 1), (10.5, -1, 2), (12.0, 0, 0)]
    second = [(10.01, 0, 1), (10.49, -1, 2), (12.01, 0, 0)]
    third = [(10.2, 1, 2), (10.51, -1, 2)]
    write_leaders(tmp_path / "new" / "leaders.csv", [first, second, third])
    with (tmp_path / "new" / "leaders.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["time_s", "group", "leader"],
        ["0.000000", "0", "1"],
        ["0.200000", "1", "2"],
        ["0.500000", "", "2"],
        ["2.000000", "0", "0"],
    ]


def test_the_centre_and_nothing_at_all(tmp_path):
    write_leaders(tmp_path / "leaders.csv", [[(3.0, -1, -1)], [(3.1, -1, -1)]])
    assert (tmp_path / "leaders.csv").read_bytes() == b"time_s,group,leader\r\n0.000000,,\r\n"
    write_leaders(tmp_path / "leaders.csv", [[], []])
    assert (tmp_path / "leaders.csv").read_bytes() == b"time_s,group,leader\r\n"
