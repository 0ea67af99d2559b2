"""What is printed while a run goes on."""

from console import Progress, clock_time


def test_progress_prints_the_first_and_the_last_step_where_there_is_no_terminal(capsys):
    progress = Progress(3, every_s=1000)
    for step in (1, 2, 3):
        progress.show(step, 0.5, 1234.0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "step    1/3  reward 0.500    1,234 tokens/s" in lines[0] and "0:00 left" in lines[1]
    assert (clock_time(59.6), clock_time(3700)) == ("1:00", "1:01:40")
