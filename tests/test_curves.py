"""The curves of what a rollout costs: measured, drawn and written into the page between their marks."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import curves
from benchmarks._curve_plot import draw, measured

ROOT = Path(__file__).parent.parent
PAGE = f"# Scaling\n\nabove\n\n{curves.BEGIN}\nold\n{curves.END}\n\nbelow\n"


def test_tables_and_pictures_take_the_place_of_those_before(tmp_path: Path) -> None:
    """The buffer's curve, measured small; what stands around the marks stays, also the second time."""
    (tmp_path / "scaling.md").write_text(PAGE)
    [curve] = [curve for curve in curves.CURVES if curve.name == "queued"]
    found = curves.measure(curve, quick=True)
    assert [at for at, _ in found] == [100.0, 1000.0]
    assert all(cost > 0 for _, cost in found)
    for _ in range(2):
        curves.write(tmp_path, [(curve, found)], "Measured on a day at abc: a machine.")
        text = (tmp_path / "scaling.md").read_text()
        assert text.startswith("# Scaling\n\nabove\n\n")
        assert text.endswith(f"{curves.END}\n\nbelow\n")
        assert "old" not in text
        assert text.count(f"Measured on a day at abc: a machine.\n{curves.END}") == 1
        assert text.count("(curves/queued.svg)") == text.count(curve.says) == 1
        assert f"| {measured(found[0][1])} | {measured(found[1][1])} |" in text
    picture = ElementTree.parse(tmp_path / "curves" / "queued.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}circle")) == 2


def test_a_page_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    """And the message says what it lacks."""
    (tmp_path / "scaling.md").write_text(f"# Scaling\n{curves.END}\n{curves.BEGIN}\n")
    with pytest.raises(SystemExit, match="lacks the line"):
        curves.write(tmp_path, [], "")
    assert not (tmp_path / "curves").exists()


def test_larger_costs_are_drawn_higher_and_larger_numbers_further_right() -> None:
    """Positions on the picture follow the points."""
    root = ElementTree.fromstring(draw("a < b", "groups", "µs", [(1, 5.0), (10, 5.0), (100, 10.0)]))
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    x, y = ([float(circle.attrib[name]) for circle in circles] for name in ("cx", "cy"))
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2)
    assert x[0] < x[1]
    assert y[0] == y[1] > y[2]


def test_the_shipped_page_has_its_marks_and_pictures() -> None:
    """`make bench-plots` finds its place, and every picture that the page shows is there."""
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert text.index(curves.BEGIN) < text.index(curves.END)
    for curve in curves.CURVES:
        assert f"(curves/{curve.name}.svg)" in text
        assert (ROOT / "docs" / "curves" / f"{curve.name}.svg").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_curve_can_be_measured(tmp_path: Path) -> None:
    """The whole command, with two small points of each curve."""
    (tmp_path / "scaling.md").write_text(PAGE)
    command = [sys.executable, "-m", "benchmarks.curves", "--quick", "--docs", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert {path.stem for path in (tmp_path / "curves").iterdir()} == {curve.name for curve in curves.CURVES}
