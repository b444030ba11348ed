"""Host time on a clock that the test sets: what is inside the timed part, and the row that comes of it."""

from dataclasses import replace

import pytest
import torch

import cute_fa
from benchmarks import host_time
from benchmarks.backends import Entry, make_inputs
from benchmarks.machine import Machine
from benchmarks.record import COLUMNS, read_rows

FACTS = {"device": "NVIDIA Test", "driver": "1.2", "torch": "2.0", "dsl": "4.0"}


class Host:
    """A clock that only calls move: 5 us each. Waiting for the device takes a second, which must not be counted."""

    def __init__(self):
        self.seconds, self.events = 0.0, []

    def setup(self, case, inputs):
        def run(num_calls):
            self.events.append(num_calls)
            self.seconds += 5e-6 * num_calls
            return (torch.ones(1),)

        return Entry(run, config="plan")

    def synchronize(self):
        self.events.append("wait")
        self.seconds += 1.0

    @property
    def machine(self):
        return Machine("cpu", FACTS, None, self.synchronize)


def test_calls_alone_are_timed():
    host = Host()
    (row,) = host_time.measure(host_time.CASE, {"cute_fa": host.setup}, host.machine, lambda: host.seconds)
    assert [row[name] for name in ("ms_p20", "ms_p50", "ms_p80")] == ["0.00500"] * 3, "5 us a call"
    assert host.events[-20:] == ["wait", 200] * 10, "2000 calls in batches of 200, the device idle before each"
    assert "wait" not in host.events[:-20] and sum(host.events[:-20]) > 1, "caches are warm before"
    assert (row["op"], row["backend"], row["config"], row["batch"]) == ("host_time", "cute_fa", "plan", 1), "the row"
    assert (row["seqlen_q"], row["heads_q"], row["head_dim"], row["dtype"]) == (128, 2, 64, "bfloat16"), "its problem"
    assert set(row) <= set(COLUMNS), "only columns of the file"


def test_a_backend_that_cannot_run_has_a_reason():
    (row,) = host_time.measure(host_time.CASE, {"fa4": lambda case, inputs: Entry(None, "not here")}, Host().machine)
    assert row["reason"] == "not here" and "ms_p50" not in row, "a reason and no number"


def test_command(monkeypatch, tmp_path, capsys):
    host, file = Host(), tmp_path / "rows.csv"
    monkeypatch.setitem(host_time.BACKENDS, "cute_fa", host.setup)
    monkeypatch.setitem(host_time.BACKENDS, "fa4", lambda case, inputs: Entry(None, "not here"))
    monkeypatch.setattr(host_time, "cuda_machine", lambda: host.machine)
    monkeypatch.setattr(host_time, "measure", lambda *given: MEASURE(*given, lambda: host.seconds))
    host_time.main(["--backends", "cute_fa", "fa4", "--output", str(file), "--commit", "abc"])
    assert capsys.readouterr().out == "cute_fa default: 5.0 us a call\nfa4 default: not here\n", "microseconds, or the reason"
    first, second = read_rows(file)
    assert (first["ms_p50"], first["commit"], first["device"]) == ("0.00500", "abc", "NVIDIA Test"), "a whole row"
    assert (second["backend"], second["reason"], second["run"]) == ("fa4", "not here", first["run"]), "and another"
    host_time.main([])
    assert len(read_rows(file)) == 2, "without --output nothing is written"


MEASURE = host_time.measure


def test_compiled_rows(monkeypatch, capsys):
    host, modes = Host(), []
    monkeypatch.setattr(host_time, "BACKENDS", {"cute_fa": host.setup})
    monkeypatch.setattr(host_time, "setup_compiled", lambda mode, *given: modes.append(mode) or host.setup(*given))
    monkeypatch.setattr(host_time, "cuda_machine", lambda: host.machine)
    monkeypatch.setattr(host_time, "measure", lambda *given: MEASURE(*given, lambda: host.seconds))
    host_time.main(["--compiled"])
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["cute_fa default", "cute_fa compiled", "cute_fa reduce-overhead"], "a row for each way"
    assert modes == ["default", "reduce-overhead"], "modes of torch.compile"


def test_compiled_calls_are_the_eager_ones():
    inputs = make_inputs(replace(host_time.CASE.problem, seqlen_q=16, seqlen_k=16), "cpu")
    (out,) = host_time.setup_compiled("default", host_time.CASE, inputs).run(2 * host_time.CALLS_A_GRAPH)
    wanted = inputs.q
    for _ in range(host_time.CALLS_A_GRAPH):
        wanted = cute_fa.flash_attn_func(wanted, inputs.k, inputs.v)
    torch.testing.assert_close(out, wanted)


def test_rows_need_a_commit():
    with pytest.raises(ValueError, match="^commit: expected a hash, with --output"):
        host_time.main(["--output", "rows.csv"])
