"""Losses of training runs: what is read, printed and drawn."""

import pytest

from benchmarks.losses import draw, main, read_runs


def write_log(folder, name, losses, tokens_per_s):
    lines = [f"{step},{loss},{tokens_per_s + step}" for step, loss in enumerate(losses)]
    (folder / name).write_text("\n".join(["step,loss,tokens_per_s", *lines]) + "\n")


@pytest.fixture
def folder(tmp_path):
    for seed in range(3):
        write_log(tmp_path, f"cute_fa-seed{seed}.csv", [5.0] * 50 + [2.0 + seed] * 50, 1000)
        write_log(tmp_path, f"sdpa-seed{seed}.csv", [5.0] * 50 + [2.5] * 50, 500)
    return tmp_path


def test_runs_by_attention_and_seed(folder):
    runs = read_runs(folder)
    assert {name: list(seeds) for name, seeds in runs.items()} == {"cute_fa": ["0", "1", "2"], "sdpa": ["0", "1", "2"]}, "runs"
    losses, tokens_per_s = runs["cute_fa"]["1"]
    assert losses[0] == 5.0 and losses[-1] == 3.0 and len(losses) == 100, "losses in their order"
    assert tokens_per_s == 1049.5, "the median"


def test_summary_and_picture(folder, capsys):
    main([str(folder)])
    said = capsys.readouterr().out
    assert "cute_fa: loss 3.0000 (seeds 2.0000, 3.0000, 4.0000), 1,050 tokens/s" in said, "means of the last 50 steps"
    assert "sdpa: loss 2.5000" in said, "the other attention"
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG"), "a picture"


def test_a_line_for_each_run(folder, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    draw(read_runs(folder), folder / "losses.png")
    (axes,) = drawn[0].axes
    assert len(axes.get_lines()) == 6, "three seeds of two attentions"
    assert len({line.get_color() for line in axes.get_lines()}) == 2, "a colour for each attention"
    assert len(axes.get_legend().get_texts()) == 2, "one entry each"


def test_no_logs(tmp_path):
    with pytest.raises(ValueError, match="^folder: expected logs named"):
        main([str(tmp_path)])
