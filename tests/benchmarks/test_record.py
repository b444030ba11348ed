"""Files of rows: what is read, what is refused, and that results only grow."""

import re

import pytest

from benchmarks.record import COLUMNS, append_rows, begin, main, read_rows, record, results_file

# Written out once more: the order of columns is a promise to those who read the files.
HEADER = (
    "run,date,commit,device,driver,torch,dsl,suite,direction,variant,op,dtype,batch,seqlen_q,seqlen_k,heads_q,heads_kv,"
    "head_dim,head_dim_v,mask,m,n,k,backend,config,ms_p20,ms_p50,ms_p80,tflops,gbps,clock_mhz,cublas_tflops,reason"
)


def row(run="1-grid", device="NVIDIA H200", **changes):
    return {"run": run, "device": device, "backend": "fa4", "config": "a, b", **changes}


def source(folder, *rows, name="new.csv"):
    append_rows(folder / name, rows)
    return folder / name


def test_columns():
    assert ",".join(COLUMNS) == HEADER, "the columns that are published"


def test_rows_come_back_as_they_went(tmp_path):
    path = source(tmp_path, row(reason='said "no", twice', tflops=1.5))
    (got,) = read_rows(path)
    assert path.read_text().splitlines()[0] == HEADER, "a header"
    assert (got["reason"], got["tflops"], got["config"], got["m"]) == ('said "no", twice', "1.5", "a, b", ""), (
        "and cells"
    )
    append_rows(path, [row("2-grid")])
    assert [one["run"] for one in read_rows(path)] == ["1-grid", "2-grid"], "one header, two rows"


def test_unknown_columns_of_a_row_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="colour"):
        append_rows(tmp_path / "x.csv", [row(colour="red")])


@pytest.mark.parametrize(
    "text, message",
    [
        pytest.param(HEADER + ",colour\n", "unknown colour; missing none", id="unknown-column"),
        pytest.param(HEADER.replace("clock_mhz,", "") + "\n", "unknown none; missing clock_mhz", id="missing-column"),
        pytest.param(HEADER.replace("run,date", "date,run") + "\n", "in their order", id="order"),
        pytest.param("", "missing", id="empty"),
        pytest.param(HEADER + "\n" + "," * 31 + "\n", "others in row 1", id="short-row"),
        pytest.param(HEADER + "\n" + "," * 32 + "\n" + "," * 33 + "\n", "others in row 2", id="long-row"),
    ],
)
def test_other_files_are_refused(text, message, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        record(path, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"], "no results were begun"


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ValueError, match="^FILE: expected a file of rows, got .*nothing.csv"):
        read_rows(tmp_path / "nothing.csv")


def test_begin(tmp_path):
    begin(tmp_path / "new.csv")
    assert (tmp_path / "new.csv").read_text() == HEADER + "\n", "a header and no row"
    path = source(tmp_path, row())
    before = path.read_text()
    begin(path)
    assert path.read_text() == before, "a file of rows stays as it is"
    with pytest.raises(ValueError, match="^output: expected a file that can be written"):
        begin(tmp_path / "nowhere" / "new.csv")


@pytest.mark.parametrize(
    "device, name",
    [("NVIDIA H200", "h200.csv"), ("NVIDIA H100 80GB HBM3", "h100_80gb_hbm3.csv"), ("NVIDIA H20-3e", "h20_3e.csv")],
    ids=["h200", "h100", "h20-3e"],
)
def test_file_of_a_device(device, name, tmp_path):
    assert results_file([row(device=device)], tmp_path) == tmp_path / name, "lower case words"


@pytest.mark.parametrize(
    "rows",
    [[row(), row(device="NVIDIA H20")], [row(device="")], []],
    ids=["two-devices", "no-device", "no-rows"],
)
def test_rows_come_from_one_device(rows, tmp_path):
    with pytest.raises(ValueError, match="rows of one device"):
        results_file(rows, tmp_path)


def test_results_only_grow(tmp_path):
    first = record(source(tmp_path, row("1-grid"), row("1-grid", backend="cudnn"), name="a.csv"), tmp_path)
    before = first.read_text()
    again = record(source(tmp_path, row("2-gqa"), name="b.csv"), tmp_path)
    assert first == again == tmp_path / "h200.csv", "one file a device"
    assert again.read_text().startswith(before), "old rows are untouched"
    assert [(one["run"], one["backend"]) for one in read_rows(again)] == [
        ("1-grid", "fa4"),
        ("1-grid", "cudnn"),
        ("2-gqa", "fa4"),
    ], "new rows at the end"


def test_a_run_is_kept_once(tmp_path):
    results = record(source(tmp_path, row("1-grid"), name="a.csv"), tmp_path)
    before = results.read_text()
    with pytest.raises(ValueError, match=re.escape("expected runs that h200.csv does not have, got 1-grid.")):
        record(source(tmp_path, row("2-grid"), row("1-grid"), name="b.csv"), tmp_path)
    assert results.read_text() == before, "not even the new run was added"


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path)
    main([str(source(tmp_path, row(), row(backend="fa2")))])
    assert capsys.readouterr().out == f"2 rows added to {tmp_path / 'h200.csv'}\n", "how many, and where"
